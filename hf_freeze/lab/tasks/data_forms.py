"""The forms that the `data` section of a recipe may have."""

from typing import Any

SPLITS = ("train", "dev", "test")


def data_form(data: dict[str, Any]) -> str | None:
    """The forms of `data`, which exclude each other: the built-in corpus, a data set of the Hub, or files."""
    return next(
        (form for form, mark in (("builtin", "builtin"), ("hub", "hub"), ("files", "train")) if mark in data), None
    )
