"""Variants: how one is built from a config, given its weights, resized, trained, saved, loaded and merged."""
