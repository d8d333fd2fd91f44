"""What the methods share that replace every block of a backbone by another design."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hf_freeze.architectures.base import Architecture, Attention


def check_blocks(architecture: Architecture, config: Any, what: str) -> None:
    """Raise ValueError for a GPT-2 with cross-attentions, and where another method has put in blocks before, or holds on to the
    old ones while it trains."""
    if getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{what}: this {architecture.model_type} has cross-attentions beside; set add_cross_attention=False"
        )


def with_blocks(
    architecture: Architecture, attention: Callable[[str, Attention], Attention], **changes: Any
) -> Architecture:
    """The architecture with what `attention` makes of each kind, such as "self", and of what it was."""
    stacks = {
        name: replace(stack, attentions={kind: attention(kind, former) for kind, former in stack.attentions.items()})
        for name, stack in architecture.stacks.items()
    }
    return replace(architecture, stacks=stacks, **changes)
