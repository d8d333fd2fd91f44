"""Sublayers of a layer: its attentions and its FFNs, each known by the linear that it ends with."""

from typing import Any

from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.derived import features
from hf_freeze.layers.no_attention import NoHeads

ATTENTION, FFN = "attention", "ffn"


def kinds_of(architecture: Architecture, config: Any, stacks: list[str]) -> list[str]:
    """The kinds of attentions in these stacks: "self", "cross"."""
    return list(dict.fromkeys(kind for stack in stacks for kind in architecture.stacks[stack].attentions_in(config)))


def last_linears(architecture: Architecture, config: Any, stack: str, number: int) -> dict[str, str]:
    """Sublayer of layer `number`, "self", "cross", "ffn" or a further FFN, "ffn_2" -> the name, below the layer, of the linear
    whose output it adds to the hidden states."""
    description = architecture.stacks[stack]
    attentions = {
        kind: attention.o
        for kind, attention in description.attentions_in(config).items()
        if description.has(kind, number)
    }
    ffns = {
        FFN if position == 1 else f"{FFN}_{position}": linears[-1]
        for position, linears in enumerate(description.ffns_in(number), 1)
    }
    return attentions | ffns


def is_part_of(sublayer: str, unit: str) -> bool:
    """Whether `unit` ("attention", "ffn" or a kind of attention) names this sublayer."""
    is_ffn = sublayer == FFN or sublayer.startswith(f"{FFN}_")
    return is_ffn if unit == FFN else sublayer == unit or (unit == ATTENTION and not is_ffn)


def check_sublayers(unit: str, architecture: Architecture, config: Any, stacks: list[str], owner: str) -> None:
    """Raise ValueError unless each of `stacks` that has sublayers of this kind has them proved, and one of them has some."""
    if unit == FFN:
        reason = architecture.refusals.get("neurons")
        if any(architecture.stacks[stack].experts for stack in stacks):
            reason = "its FFNs have experts"
        found = any(architecture.stacks[stack].ffn for stack in stacks)
    else:
        reason = architecture.refusals.get("heads")
        kinds = kinds_of(architecture, config, stacks)
        found = bool(kinds) if unit == ATTENTION else unit in kinds
    if reason is not None or not found:
        raise ValueError(
            f"{owner}: {unit!r} of this {architecture.model_type} cannot be left out: "
            + (reason or f"the stacks {stacks} have none")
        )


def head_count(layer: Any, architecture: Architecture, config: Any, stack: str, kind: str) -> int:
    """The number of heads of an attention of `layer`; 0 if all have been removed."""
    attention = architecture.stacks[stack].attentions[kind]
    output = layer.get_submodule(attention.o)
    return 0 if isinstance(output, NoHeads) else features(output)[0] // attention.head_size(config)
