"""Closed forms on matrices: weights and statistics in, weights out. No model, no module: this room imports no other."""
