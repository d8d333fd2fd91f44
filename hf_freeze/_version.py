"""The version, on its own so that every module may import it."""

__version__ = "0.1.0"
