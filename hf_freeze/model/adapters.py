"""Adapters of PEFT in a variant: an adapter that cannot be merged raises an error when that is tried."""

import functools
from collections import Counter
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.compat.peft import mergeable_layers
from hf_freeze.layers.derived import Computed, Derived
from hf_freeze.layers.gated import Gated


def refuse_wrong_merges(model: Any) -> None:
    """Make `merge` of every PEFT layer in `model` raise ValueError if its weight cannot take the adapter's in."""
    users = Counter(id(weight) for module in model.modules() if (weight := _held_weight(module)) is not None)
    for name, layer in mergeable_layers(model):
        reason = _why_not(layer.get_base_layer(), users)
        if reason is not None:
            vars(layer)["merge"] = functools.partial(_refuse, name, reason)


def _held_weight(module: nn.Module) -> Any:
    """The tensor that another module may share."""
    return module._parameters.get("weight", module._buffers.get("packed"))


def _why_not(base: Any, users: Counter[int]) -> str | None:
    """Why an adapter cannot be merged into `base`; None if it can."""
    if isinstance(base, Computed) and type(base).take_weight is Computed.take_weight:
        return f"{type(base).__name__} computes its weight from other parameters"
    if isinstance(base, Derived | Gated) and not isinstance(base, Computed):
        return f"{type(base).__name__} masks its weight, and would mask the adapter's too"
    if isinstance(base, nn.Linear | Conv1D) and users[id(_held_weight(base))] > 1:
        return "other modules share its weight, and have other adapters or none"
    return None


def _refuse(name: str, reason: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"cannot merge the adapter of {name!r}: {reason}; merge() the variant without it, load it on what that gives, and merge "
        "there"
    )
