"""Attention heads: count, select, copy, resize and pad them, or give them fixed patterns."""

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace as replace_fields
from typing import Any

import torch

from hf_freeze.architectures.base import Architecture, Attention
from hf_freeze.architectures.kept_heads import prune_companions
from hf_freeze.architectures.roles import has_module, set_heads
from hf_freeze.compat.transformers import record_weights
from hf_freeze.layers.derived import features, linear_like
from hf_freeze.layers.fixed_heads import FixedHeads, Words
from hf_freeze.layers.no_attention import NoAttention, NoHeads
from hf_freeze.seeded import Origin
from hf_freeze.surgery.replacing import (
    dense_module,
    effective_weight,
    feature_origins,
    finished,
    is_dense,
    modules,
    replace,
    select_features,
    selectable_module,
    spread_features,
    weight_axis,
)


def count_heads(model: Any, attention: Attention, method: str) -> int:
    """The number of heads of `attention` (with names below the base model). Raises ValueError if a method has replaced one of
    its linears by a layer that cannot lose heads."""
    linears = {name: selectable_module(model, name, method) for name in attention.linears}
    heads = features(linears[attention.o])[0] // attention.head_size(model.config)
    group = group_size(model.base_model, attention, model.config, heads)
    expected = attention.features(model.config, attention.q, range(heads), heads, group)
    if features(linears[attention.q])[1] != len(expected):
        raise ValueError(
            f"method {method!r}: {attention.module!r} has fixed heads, without queries and keys; put {method!r} before that "
            "method, or leave one of the two out"
        )
    return heads


def group_size(root: Any, attention: Attention, config: Any, heads: int) -> int:
    """The number of heads, out of the `heads` of `attention`, that share keys and values now. `root`: the base model or layer
    that the names in `attention` are below."""
    roles = attention.roles(attention.v)
    blocks = features(root.get_submodule(attention.v))[1] // attention.head_size(config)
    return heads * len(set(roles) - {"q"}) // (blocks - heads * ("q" in roles))


def head_origins(
    model: Any, attention: Attention, kept: Sequence[int], heads: int, only: Collection[str] = ()
) -> dict[str, Origin]:
    """The origins of the parameters of `attention` when it keeps the heads `kept` out of `heads`. `only`: the linears to name, if
    not all."""
    origins: dict[str, Origin] = {}
    group = group_size(model.base_model, attention, model.config, heads)
    for name, linear in modules(model, only or attention.linears):
        index = attention.features(model.config, name, kept, heads, group)
        new = feature_origins(name, linear, index, outputs=name != attention.o)
        if attention.linears.get(name, 0) > 1:  # projections may lose different shares of their outputs
            fused, weight = _fused(model, attention, name), f"{name}.weight"
            new[weight] = replace_fields(new[weight], parts=fused["parts"], interleaved=fused["interleaved"])
        origins |= new
    return origins


def take_heads(model: Any, attention: Attention, kept: Sequence[int], heads: int, *, with_values: bool = False) -> None:
    """Reduce `attention` from `heads` heads to those in `kept`, with arbitrary values, or with their own. Without heads, only the
    output's bias remains."""
    module = model.base_model.get_submodule(attention.module)
    linears = dict(modules(model, attention.linears))
    count = len(kept)
    if not count:
        prefix = f"{attention.module}."
        inside = attention.o.startswith(prefix)
        removed = {name: copy.deepcopy(linear).to("meta") for name, linear in linears.items()}
        no_attention = NoAttention(module, removed, attention.o.removeprefix(prefix) if inside else None)
        record_weights(model, attention.module, no_attention)
        replace(model, attention.module, no_attention)
        output_bias = NoHeads(linears[attention.o], features(linears[attention.o])[1])
        if with_values and output_bias.bias is not None:
            output_bias.bias.data.copy_(linears[attention.o].bias)
        if inside:
            no_attention.add_module(attention.o.removeprefix(prefix), output_bias)
        else:
            replace(model, attention.o, output_bias)
        return
    group = group_size(model.base_model, attention, model.config, heads)
    for name, linear in linears.items():
        index = attention.features(model.config, name, kept, heads, group)
        replace(model, name, select_features(linear, index if with_values else len(index), outputs=name != attention.o))
    groups = len({head // group for head in kept})
    set_heads(module, count, attention.head_size(model.config), groups, attention.resizes)
    prune_companions(model.base_model, attention, model.config, kept, heads, group)


def resize_attention(
    model: Any,
    attention: Attention,
    heads: int,
    size: int,
    method: str,
    *,
    inputs: int | None = None,
    outputs: int | None = None,
) -> None:
    """Give `attention` fresh linears for `heads` heads of `size` numbers, and scale the scores by the new size. `inputs`,
    `outputs`: the new numbers of inputs and outputs of the attention; None keeps them.

    Raises ValueError if a method has replaced one of its linears.
    """
    module: Any = model.base_model.get_submodule(attention.module)
    for name, number in attention.linears.items():
        linear = dense_module(model, name, method, advice=f"put {method!r} first")
        sizes = (heads * size, outputs) if name == attention.o else (inputs, number * heads * size)
        replace(model, name, linear_like(linear, *sizes))
    if getattr(module, "scale_attn_weights", True):  # GPT-2 can switch the scale off
        module.scaling *= (attention.head_size(model.config) / size) ** 0.5
    set_heads(module, heads, size, heads)


def fix_heads(
    model: Any, attention: Attention, patterns: Sequence[int], empty_rows: str, words: Words | None, heads: int
) -> None:
    """Give each of the first heads of `attention`, which has `heads` heads, one of `patterns`: these heads attend by position
    alone. The other heads keep queries and keys, with arbitrary values."""
    module = model.base_model.get_submodule(attention.module)
    linears = dict(modules(model, attention.linears))
    prefix = f"{attention.module}."
    roles = {role: getattr(attention, role) for role in ("q", "k", "v", "o")}
    inside = {role: name.removeprefix(prefix) for role, name in roles.items() if name.startswith(prefix)}
    learnt = heads - len(patterns)
    if not learnt:
        inside = {role: name for role, name in inside.items() if role not in ("q", "k")}
    fixed_heads = FixedHeads(module, patterns, empty_rows, words, attention.head_size(model.config), inside)
    for role, name in inside.items():
        linear = linears[roles[role]]
        if role in ("q", "k"):
            linear = select_features(linear, learnt * attention.head_size(model.config), outputs=True)
        fixed_heads.add_module(name, linear)
    record_weights(model, attention.module, fixed_heads)
    replace(model, attention.module, fixed_heads)


@torch.no_grad()
def copy_heads(
    old: Any, new: Any, attention: Attention, kept: Sequence[int], heads: int, only: Collection[str] = ()
) -> None:
    """Copy the heads `kept` of `old`, which has `heads` heads, to the attention of `new`, which has `len(kept)`. `only`: the
    linears to copy, if not all."""
    group = group_size(old.base_model, attention, old.config, heads) if kept else None
    for name, linear in modules(old, only or attention.linears):
        outputs = name != attention.o
        if kept:
            index = attention.features(old.config, name, kept, heads, group)
            new.base_model.get_submodule(name).load_state_dict(
                select_features(linear, index, outputs=outputs).state_dict()
            )
        elif not outputs and linear.bias is not None:
            new.base_model.get_submodule(name).bias.copy_(linear.bias)


@torch.no_grad()
def match_scales(old: Any, new: Any, attentions: Iterable[Attention], config: Any) -> None:
    """Make the `attentions` of `new`, which have the weights of `old`, compute the same scores as in `old`. Native classes may
    scale scores by layer number (GPT-2's `scale_attn_by_inverse_layer_idx`); the queries absorb the difference.

    `old`, `new`: base models or layers, whichever the names of the attentions are below. Raises ValueError if a method has
    replaced the queries' linear in `new`.
    """
    for attention in attentions:
        if not all(has_module(module, attention.q) for module in (old, new)):  # of another kind, or without scores
            continue
        old_module, new_module = old.get_submodule(attention.module), new.get_submodule(attention.module)
        ratio = getattr(old_module, "scaling", 1.0) / getattr(new_module, "scaling", 1.0)
        if ratio == 1:
            continue
        linear = new.get_submodule(attention.q)
        if not is_dense(linear):
            raise ValueError(
                f"{attention.q!r} is a {type(linear).__name__} and cannot adopt the scale of another layer's scores"
            )
        heads = features(new.get_submodule(attention.o))[0] // attention.head_size(config)
        group = group_size(new, attention, config, heads)
        queries = torch.tensor(attention.outputs_of(config, "q", heads, group), device=linear.weight.device)
        for parameter, axis in ((linear.weight, weight_axis(linear, outputs=True)), (linear.bias, 0)):
            if parameter is not None:  # not in place: `old` may have the same memory
                scaled = parameter.detach().index_select(axis, queries) * ratio
                parameter.data = parameter.detach().index_copy(axis, queries, scaled)


@torch.no_grad()
def pad_heads(model: Any, attention: Attention, kept: Sequence[int] | None = None) -> None:
    """Give `attention` as many heads as its config says. The heads that it has are put at the places `kept` (None: the first
    ones, in the first groups); the others are zero."""
    module = model.base_model.get_submodule(attention.module)
    headless, heads = isinstance(module, NoAttention), attention.head_count(model.config)
    count = 0 if headless else count_heads(model, attention, "head_pruning")
    group, whole = (
        group_size(model.base_model, attention, model.config, count) if count else 1,
        attention.group_size(model.config),
    )
    first = [number * whole + head for number in range(count // group) for head in range(group)]
    for name in attention.linears:
        outputs = name != attention.o
        size = len(attention.features(model.config, name, range(heads), heads))
        if headless:
            padded = linear_like(
                module.removed[name], *((None, size) if outputs else (size, None)), device=model.device
            )
            padded.weight.zero_()
            if padded.bias is not None:
                padded.bias.zero_()
                if not outputs:
                    padded.bias.copy_(model.base_model.get_submodule(name).bias)
        else:
            index = attention.features(model.config, name, first if kept is None else kept, heads)
            padded = spread_features(model.base_model.get_submodule(name), index, size, outputs=outputs)
        path, _, leaf = name.rpartition(".")
        model.base_model.get_submodule(path).add_module(leaf, padded)
        finished(model, padded)


@torch.no_grad()
def head_magnitudes(model: Any, attention: Attention, heads: int) -> torch.Tensor:
    """fp32 (heads,): for each head, the product of the norm of its value weights and the norm of its output weights."""
    size, group = attention.head_size(model.config), group_size(model.base_model, attention, model.config, heads)
    value, output = (
        effective_weight(model.base_model.get_submodule(name)).float() for name in (attention.v, attention.o)
    )
    value = value[attention.outputs_of(model.config, "v", heads, group)]
    values = value.unflatten(0, (-1, size)).flatten(1).norm(dim=1).repeat_interleave(group)
    return values * output.unflatten(1, (-1, size)).transpose(0, 1).flatten(1).norm(dim=1)


def fused_projections(model: Any, architecture: Architecture, weight: str) -> dict[str, Any] | None:
    """The fields of a SeededTensor for a weight (by its name below the base model) that holds several projections; None for
    another. The scheme applies to each projection."""
    name = weight.removesuffix(".weight")
    if architecture.parts(weight) < 2:
        return None
    return _fused(
        model, next(a for a in architecture.attentions(model.config).values() if a.linears.get(name, 0) > 1), name
    )


def _fused(model: Any, attention: Attention, name: str) -> dict[str, Any]:
    """`fused_projections` of the weight of the linear `name`, which holds several projections of `attention`."""
    size = attention.head_size(model.config)
    heads = features(model.base_model.get_submodule(attention.o))[0] // size
    group, roles = group_size(model.base_model, attention, model.config, heads), attention.roles(name)
    mixed = {"heads": (size,) * len(roles), "groups": (group * size, *(size,) * (len(roles) - 1))}
    return {
        "parts": tuple(len(attention.outputs_of(model.config, role, heads, group)) for role in roles),
        "dimension": weight_axis(model.base_model.get_submodule(name), outputs=True),
        "interleaved": mixed.get(attention.layout, ()),
    }
