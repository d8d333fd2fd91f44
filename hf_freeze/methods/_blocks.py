"""Shared by the methods that replace every block of a backbone by another design."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hf_freeze.architectures.base import Architecture, Attention


def check_blocks(architecture: Architecture, config: Any, owner: str) -> None:
    """Raise ValueError for a decoder with cross-attentions, such as GPT-2 with `add_cross_attention`."""
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"{owner}: this {architecture.model_type} has cross-attentions; set add_cross_attention=False")


def with_blocks(
    architecture: Architecture, describe_attention: Callable[[str, Attention], Attention], **changes: Any
) -> Architecture:
    """`architecture` with the fields in `changes` and new attentions.

    `describe_attention(kind, attention)` returns the new description of an attention; `kind` is "self" or "cross".
    """
    stacks = {
        name: replace(
            stack,
            attentions={kind: describe_attention(kind, attention) for kind, attention in stack.attentions.items()},
        )
        for name, stack in architecture.stacks.items()
    }
    return replace(architecture, stacks=stacks, **changes)
