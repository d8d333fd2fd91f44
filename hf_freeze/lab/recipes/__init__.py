"""Recipes: which data, backbone, rows and seeds a grid runs."""
