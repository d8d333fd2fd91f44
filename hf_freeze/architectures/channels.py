"""Hidden channels: which dimensions of which parameters are the residual stream, and how a native module loses some.

`channel_search.py` finds them on a small model.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.roles import EXPERT_OUTPUT, are_experts, parts_of_layer

MATRICES = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)


class NotFound(ValueError):
    """A model whose hidden channels are not understood; the message says why."""


@dataclass(frozen=True)
class ChannelMap:
    """Where the hidden channels lie. Names are patterns, with `*` for a number in a list of modules.

    `axes`: every parameter and buffer -> its axes along the channels, most of them none. `reads`: those of `axes` that are
    summed over, as the inputs of a linear; the others write to the stream, or scale it. `norms`: a module that reads -> the norm
    whose outputs it gets, if it gets those of one. `sizes`: (module, attribute) that hold their number, of modules that have no
    channels of their own.
    """

    axes: dict[str, tuple[int, ...]]
    reads: frozenset[tuple[str, int]]
    norms: dict[str, str] = field(default_factory=dict)
    sizes: frozenset[tuple[str, str]] = frozenset()


def reads(module: nn.Module, name: str, axis: int) -> bool | None:
    """Whether a module sums over the channels along this axis; None if its class does not tell."""
    if isinstance(module, MATRICES):
        weight: Any = getattr(module, name)
        return weight.ndim > 1 and axis == (0 if isinstance(module, Conv1D) else 1)
    if are_experts(module):
        return name != EXPERT_OUTPUT
    tensor: Any = getattr(module, name)
    if isinstance(module, nn.Embedding) or tensor.ndim == 1 or tensor.numel() == tensor.shape[axis]:
        return False
    return None


def pattern_of(model: nn.Module, name: str) -> str:
    """The name of a module or parameter with `*` for its numbers in lists: layers and experts are alike."""
    parts, module = [], model
    for part in name.split("."):
        numbered = isinstance(module, nn.ModuleList | nn.ModuleDict)
        parts.append(re.sub(r"\d+", "*", part) if numbered else part)
        module = module._modules.get(part) or nn.Module()
    return ".".join(parts)


@torch.no_grad()
def thin(module: nn.Module, axes: Mapping[str, Sequence[int]], index: Sequence[int]) -> None:
    """Leave a native module the channels `index` along these axes of its parameters and buffers."""
    size = 0
    for name, places in axes.items():
        own: Any = module._parameters if name in module._parameters else module._buffers
        value: Any = own[name]
        for axis in places:
            size = value.shape[axis]
            value = value.index_select(axis, torch.tensor(index, dtype=torch.long, device=value.device))
        own[name] = nn.Parameter(value.detach(), own[name].requires_grad) if own is module._parameters else value
    set_sizes(module, axes, size, len(index))


def sizes_outside_attention(model: Any, channels: ChannelMap, size: int) -> frozenset[tuple[str, str]]:
    """The attributes that may be `ChannelMap.sizes`: those of this value outside attention, where it may be that of all heads."""
    own = {name.rpartition(".")[0] for name, axes in channels.axes.items() if axes}
    attentions = tuple(f"{name}." for name in parts_of_layer(model).attentions)
    return frozenset(
        (pattern, attribute)
        for name, module in model.named_modules()
        if type(module).__module__.startswith("transformers.") and not f"{name}.".startswith(attentions)
        for attribute, value in vars(module).items()
        if type(value) is int and value == size and (pattern := pattern_of(model, name)) not in own
    )


def set_sizes_around(model: Any, channels: ChannelMap, before: int, after: int) -> None:
    """Set `ChannelMap.sizes` of a model."""
    for name, module in model.named_modules() if channels.sizes else ():
        pattern = pattern_of(model, name)
        for attribute in [attribute for place, attribute in channels.sizes if place == pattern]:
            if getattr(module, attribute, None) == before:
                setattr(module, attribute, after)


def set_sizes(module: Any, axes: Mapping[str, Sequence[int]], before: int, after: int) -> None:
    """Set the attributes of a native module that hold the number of channels along these axes."""
    if isinstance(module, nn.Embedding):
        module.embedding_dim = after
    elif isinstance(module, MATRICES):
        sides = {reads(module, name, axis) for name, places in axes.items() for axis in places}
        if isinstance(module, nn.Linear):
            names = {True: "in_features", False: "out_features"}
        elif isinstance(module, Conv1D):
            names = {True: "nx", False: "nf"}
        else:
            names = {True: "in_channels", False: "out_channels"}
            if module.groups == before:
                module.groups = module.in_channels = after
        for side in sides:
            setattr(module, names[bool(side)], after)
    else:
        for name, value in vars(module).items():
            if type(value) is int and value == before:
                setattr(module, name, after)
            elif isinstance(value, tuple) and value == (before,):
                setattr(module, name, type(value)([after]))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
