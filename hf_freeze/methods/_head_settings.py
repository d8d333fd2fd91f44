"""Settings that name attention heads: their checks, and the attentions that they choose."""

from typing import Any

from hf_freeze.architectures.base import Architecture, Attention, in_layers
from hf_freeze.methods._checks import check_numbers_by_name


def check_heads_type(heads: Any, owner: str) -> None:
    """Raise ValueError unless `heads` is a dict of attentions and lists of different heads, in ascending order."""
    check_numbers_by_name(heads, owner, "heads", items="heads", example="{'encoder.0.self': [1, 3]}")


def check_attentions(heads: dict[str, list[int]] | None, owner: str, architecture: Architecture, config: Any) -> None:
    """Raise ValueError if `heads` names an attention that the backbone does not have."""
    attentions = architecture.attentions(config)
    for name in heads or ():
        if name not in attentions:
            raise ValueError(
                f"{owner}: no attention {name!r} in {architecture.model_type}; choose from {list(attentions)}"
            )


def check_head(head: int, count: int, name: str, owner: str) -> None:
    """Raise ValueError unless `head` is below `count`, the number of heads of the attention `name`."""
    if head >= count:
        raise ValueError(f"{owner}: head {head} of {name!r}: must be in 0..{count - 1}")


def chosen_attentions(
    heads: dict[str, list[int]] | None, layers: dict[str, list[int]] | None, architecture: Architecture, config: Any
) -> dict[str, Attention]:
    """Name -> attention: those that `heads` names or, if that is None, those in `layers` (None: all)."""
    attentions = architecture.attentions(config)
    if heads is not None:
        return {name: attentions[name] for name in heads}
    return in_layers(attentions, layers)
