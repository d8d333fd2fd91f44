"""What the methods share that give layers new numbers."""

from typing import Any

from hf_freeze.methods.base import Method
from hf_freeze.methods.registry import methods_before


def check_renumbering(method: Method, config: Any) -> None:
    """Raise ValueError where a method before `method` holds numbers or names of layers, which would be others."""
    own = type(method).__name__
    for earlier in methods_before(config):
        if earlier.names_layers:
            raise ValueError(
                f"{own} after {earlier.name!r}, which names layers by number: the layers get new numbers; put {own} first"
            )


def evenly_spaced(depth: int, count: int) -> list[int]:
    """Which `count` of so many layers to keep, as LayerDrop prunes (Fan et al., 2020, https://arxiv.org/abs/1909.11556, "every
    other"): every ⌊depth / removed⌋-th goes; where that would remove another number of them, those stay that lie at even
    distances from the first to the last."""
    removed = depth - count
    gone = set(range(every := depth // removed, depth + 1, every)) if removed else set()
    if len(gone) == removed:
        return [number for number in range(depth) if number + 1 not in gone]
    return [(2 * number * (depth - 1) + count - 1) // (2 * max(count - 1, 1)) for number in range(count)]  # rounded
