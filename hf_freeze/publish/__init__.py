"""Publishes models: model cards, pushes to the Hub, and exports to other engines."""
