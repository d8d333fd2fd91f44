"""Grids of runs: processes, Ray, Slurm, checkpoints and records."""
