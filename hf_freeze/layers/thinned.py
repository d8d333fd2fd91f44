"""Leaves parts of a layer out in training: sublayers, heads, groups of neurons."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Thinned:
    """What is left out of `layer`, which has it as its attribute `thinned`. Names are those of linears, or of what stands for
    them, below the layer.

    `silent`: linears whose outputs are zero, so that their sublayer adds nothing to the hidden states, and its parameters get no
    gradient. `kept`: linear -> for each of the groups that its inputs form (heads, or neurons of an FFN), whether it is kept;
    the inputs of the others are zero.

    Hooks do this, on the linears themselves: gradient checkpointing runs the class's own forward of the layer again. They act in
    training mode only.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.handles: list[RemovableHandle] = []
        self.set(set(), {})
        layer.thinned = self

    def set(self, silent: set[str], kept: dict[str, list[bool]]) -> None:
        """Leave out these parts instead of the previous ones."""
        self.silent, self.kept = silent, kept
        for handle in self.handles:
            handle.remove()
        self.handles = [
            self.layer.get_submodule(name).register_forward_pre_hook(partial(_keep_groups, groups))
            for name, groups in kept.items()
            if not all(groups)
        ]
        self.handles += [self.layer.get_submodule(name).register_forward_hook(_silence) for name in silent]


def _keep_groups(groups: list[bool], module: nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
    """(..., I) -> (..., I), whose I inputs are divided into groups of equal size, up to a difference of 1"""
    if not module.training:
        return None
    (x,) = arguments
    width = x.shape[-1]
    mask = [float(groups[position * len(groups) // width]) for position in range(width)]
    return (x * x.new_tensor(mask),)


def _silence(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor | None:
    return torch.zeros_like(output) if module.training else None
