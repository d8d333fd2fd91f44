"""Grids of runs: a recipe names rows and seeds; each run gets a folder, and a report compares them."""
