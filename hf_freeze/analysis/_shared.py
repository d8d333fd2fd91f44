"""Checks and progress, for everything here."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from hf_freeze.architectures.base import Architecture
from hf_freeze.registry import architecture_of

T = TypeVar("T")


def check_model(model: Any) -> Architecture:
    """The architecture. Raises ValueError for what is no model, for one on meta and for an unknown architecture."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"needs a model with trained weights, not a {type(model).__name__}")
    architecture = architecture_of(model.config.model_type)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"this {type(model).__name__} is on meta and has no values: load it with its weights")
    return architecture


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Seen on a terminal only, and gone when all is done."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar."""
    with progress_bar() as progress:
        yield from progress.track(items, description=description, total=total)
