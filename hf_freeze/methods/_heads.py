"""What the methods share that work on attention heads."""

from typing import Any

from hf_freeze.architectures.base import Architecture, Attention, in_layers


def check_heads_type(heads: Any, what: str) -> None:
    """Raise ValueError unless `heads` is attention -> different heads, in ascending order."""
    if not isinstance(heads, dict) or not heads:
        raise ValueError(f"{what}(heads={heads!r}): must be a dict such as {{'encoder.0.self': [1, 3]}}")
    for name, numbers in heads.items():
        listed = isinstance(numbers, list) and numbers and all(type(head) is int and head >= 0 for head in numbers)
        if not listed or numbers != sorted(set(numbers)):
            raise ValueError(
                f"{what}(heads={{{name!r}: {numbers!r}}}): must be a list of different heads, in ascending order"
            )


def check_attentions(heads: dict[str, list[int]] | None, what: str, architecture: Architecture, config: Any) -> None:
    """Raise ValueError where `heads` names an attention that the backbone does not have."""
    attentions = architecture.attentions(config)
    for name in heads or ():
        if name not in attentions:
            raise ValueError(
                f"{what}: no attention {name!r} in {architecture.model_type}; choose from {list(attentions)}"
            )


def check_number(name: str, head: int, heads: int, what: str) -> None:
    """Raise ValueError for a head that the attention `name`, which has so many `heads`, does not have."""
    if head >= heads:
        raise ValueError(f"{what}: head {head} of {name!r}: must be in 0..{heads - 1}")


def chosen_attentions(
    heads: dict[str, list[int]] | None, layers: dict[str, list[int]] | None, architecture: Architecture, config: Any
) -> dict[str, Attention]:
    """Those that `heads` names, or all in `layers` (None: all)."""
    found = architecture.attentions(config)
    if heads is not None:
        return {name: found[name] for name in heads}
    return in_layers(found, layers)
