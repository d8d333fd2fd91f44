"""`hf-freeze search`: rows drawn from a space, trained as runs of a grid, and the best of them at each cost."""
