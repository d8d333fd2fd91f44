"""Shared by the methods that change attention heads: checks of settings that name them, and which heads can go together."""

from collections.abc import Sequence
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention, in_layers
from hf_freeze.layers.derived import features
from hf_freeze.methods.checks import check_numbers_by_name


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


def kept_count(share: float, heads: int, group: int) -> int:
    """The number of heads that `share` keeps of `heads`: whole groups of `group` heads, at least one."""
    return max(round(share * heads / group), 1) * group


def removed_together(model: Any, attention: Attention) -> int:
    """The least number of heads that can be removed of an attention, which may have lost some, on their own."""
    heads = features(model.base_model.get_submodule(attention.o))[0] // attention.head_size(model.config)
    group = surgery.group_size(model.base_model, attention, model.config, heads)
    return 1 if attention.thins and group == heads else group


def inputs_of(model: Any, attention: Attention, heads: Sequence[int]) -> list[int]:
    """The inputs of the output projection that come from these heads."""
    size = attention.head_size(model.config)
    return [head * size + position for head in heads for position in range(size)]


def has_more_than_linears(model: Any, attention: Attention) -> bool:
    """Whether an attention has something that would be lost together with its last head."""
    prefix = f"{attention.module}."
    linears = tuple(f"{name.removeprefix(prefix)}." for name in attention.linears)
    parameters = model.base_model.get_submodule(attention.module).named_parameters()
    return attention.knows_heads or any(not name.startswith(linears) for name, _ in parameters)
