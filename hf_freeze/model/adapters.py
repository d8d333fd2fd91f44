"""Adapters of PEFT in a variant: an adapter that cannot be merged raises an error when that is tried."""

import functools
from collections import Counter
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.compat.peft import mergeable_layers, trained_rows
from hf_freeze.layers.derived import Computed, Derived
from hf_freeze.layers.gated import Gated


def check_adapters(model: Any) -> None:
    """Make `merge` of every PEFT layer in `model` raise ValueError if its weight cannot take the adapter's in.

    Raises ValueError for trainable tokens of a table that is no longer one matrix.
    """
    users = Counter(id(weight) for module in model.modules() if (weight := _held_weight(module)) is not None)
    layers = list(mergeable_layers(model))
    for name, layer in layers:
        base, rows, alike = layer.get_base_layer(), trained_rows(layer), 1
        if rows is not None:
            if isinstance(base, Derived) and not isinstance(base, Computed):
                raise ValueError(
                    f"trainable tokens of {name!r}: a {type(base).__name__} is no matrix with a row for each token; merge() the "
                    "variant first, or train the table whole"
                )
            held = [_held_weight(other.get_base_layer()) for _, other in layers if trained_rows(other) is rows]
            alike = sum(weight is _held_weight(base) for weight in held)  # tied tables, all of which get these rows
        reason = _why_not(base, users, alike)
        if reason is not None:
            vars(layer)["merge"] = functools.partial(_refuse, name, reason)


def _held_weight(module: nn.Module) -> Any:
    """The tensor that another module may share."""
    return module._parameters.get("weight", module._buffers.get("packed"))


def _why_not(base: Any, users: Counter[int], alike: int) -> str | None:
    """Why an adapter cannot be merged into `base`; None if it can. `alike`: the modules with its weight that have it."""
    if isinstance(base, Computed) and type(base).take_weight is Computed.take_weight:
        return f"{type(base).__name__} computes its weight from other parameters"
    if isinstance(base, Derived | Gated) and not isinstance(base, Computed):
        return f"{type(base).__name__} masks its weight, and would mask the adapter's too"
    if isinstance(base, nn.Linear | nn.Embedding | Conv1D) and users[id(_held_weight(base))] > alike:
        return "other modules share its weight, and have other adapters or none"
    return None


def _refuse(name: str, reason: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"cannot merge the adapter of {name!r}: {reason}; merge() the variant without it, load it on what that gives, and merge "
        "there"
    )
