"""A native model without its heads and neurons that are zero, which `merge()` puts where a method had removed some."""

from typing import Any

import torch
from torch import Tensor

from hf_freeze import methods
from hf_freeze.architectures.base import Architecture, Attention
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.model.make import make_variant
from hf_freeze.surgery import Kept, count_heads, effective_weight, group_size, is_removed


def without_zeros(model: Any, *, uneven: bool, heads: bool) -> Any:
    """The native `model` without the heads that its output projections multiply by zero, and without such neurons. It computes
    the same, in modules of the native names. `uneven`: every layer may keep another number; otherwise all keep as many as the
    one that needs most. `heads`: whether heads may go. Itself if nothing goes, or if the family cannot lose any."""
    architecture = architecture_of(model.config)
    cuts: list[Any] = []
    if heads and (removed := _zero_heads(model, architecture, uneven)):
        cuts.append(methods.HeadPruning(heads=removed))
    if kept := _used_neurons(model, architecture, uneven):
        cuts.append(methods.FFNPruning(keep=kept))
    cuts = [method for method in cuts if type(method).refusal(architecture) is None]
    return make_variant(model, cuts).eval() if cuts else model


def _zero_columns(model: Any, linear: str) -> Tensor:
    """bool (inputs,): those that the linear multiplies by zero."""
    return effective_weight(model.base_model.get_submodule(linear)).eq(0).all(0)


def _zero_heads(model: Any, architecture: Architecture, uneven: bool) -> dict[str, list[int]]:
    """Attention -> the heads that go, all zero. Heads that share keys and values stay in groups of one size."""
    zero = {}
    for name, attention in architecture.attentions(model.config).items():
        if is_removed(model, attention.o):
            continue
        heads = count_heads(model, attention, "export")
        columns = _zero_columns(model, attention.o).view(heads, -1).all(1)
        zero[name] = columns.view(-1, group_size(model.base_model, attention, model.config, heads))
    each = {name: _in_a_group(architecture.attentions(model.config)[name], groups) for name, groups in zero.items()}
    if not uneven:
        each = dict.fromkeys(each, max(each.values(), default=0))
    least = 1 if uneven else max((int((~groups.all(1)).sum()) for groups in zero.values()), default=1)
    removed = {name: _removed(groups, each[name], max(least, 1)) for name, groups in zero.items()}
    return {name: heads for name, heads in removed.items() if heads}


def _in_a_group(attention: Attention, zero: Tensor) -> int:
    """How many heads each group must keep; `zero`: bool (groups, heads in a group)."""
    return max(1, int((~zero).sum(1).max())) if attention.thins else zero.shape[1]


def _removed(zero: Tensor, each: int, least: int) -> list[int]:
    """The heads that go when `least` groups or more stay, with `each` heads."""
    groups = _first(~zero.all(1), least)
    kept = {number * zero.shape[1] + head for number in groups for head in _first(~zero[number], each)}
    return [head for head in range(zero.numel()) if head not in kept]


def _first(used: Tensor, count: int) -> list[int]:
    """The positions that are used, and if these are fewer than `count`, the first others."""
    order = torch.argsort(~used, stable=True).tolist()
    return sorted(order[: max(count, int(used.sum()))])


def _used_neurons(model: Any, architecture: Architecture, uneven: bool) -> dict[str, Kept]:
    """FFN -> the neurons that stay, where some go."""
    outputs = {name: linears[-1] for name, linears in architecture.ffns(model.config).items()}
    used = {name: ~_zero_columns(model, linear) for name, linear in outputs.items()}
    counts = [max(1, int(one.sum())) for one in used.values()]
    kept: dict[str, Any] = {name: _first(one, 1 if uneven else max(counts)) for name, one in used.items()}
    return {name: neurons for name, neurons in kept.items() if len(neurons) < len(used[name])}
