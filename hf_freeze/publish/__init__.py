"""Publishes models: model cards, pushes to the Hub, code for repositories, and exports to other engines."""
