"""Attention heads: count them, take some, give them another size or fixed patterns."""

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.base import Attention
from hf_freeze.layers.derived import features, linear_like
from hf_freeze.layers.fixed_heads import FixedHeads, Words
from hf_freeze.layers.no_attention import NoAttention, NoHeads
from hf_freeze.seeded import Origin
from hf_freeze.surgery.replacing import (
    DENSE,
    dense_module,
    effective_weight,
    feature_origins,
    modules,
    replace,
    select_features,
)


def count_heads(model: Any, attention: Attention, method: str) -> int:
    """The heads that `attention` (with names below the base model) has. Raises ValueError where a method has replaced one of its
    linears before."""
    linears = {name: dense_module(model, name, method) for name in attention.linears}
    outputs = features(linears[attention.q])[1] // attention.linears[attention.q]
    if outputs != features(linears[attention.o])[0]:
        raise ValueError(
            f"method {method!r}: {attention.module!r} has fixed heads, without queries and keys; put {method!r} before that "
            "method, or leave one of the two out"
        )
    return outputs // attention.head_size(model.config)


def _features_of_heads(config: Any, attention: Attention, name: str, kept: Sequence[int], heads: int) -> list[int]:
    """Places of the heads `kept`, of so many, along the inputs of the output projection or the outputs of another linear."""
    size, group = attention.head_size(config), attention.group_size(config)
    if name not in (attention.q, attention.o):
        kept, heads = [head // group for head in kept[::group]], heads // group
    return [
        (part * heads + head) * size + place
        for part in range(attention.linears[name])
        for head in kept
        for place in range(size)
    ]


def head_origins(
    model: Any, attention: Attention, kept: Sequence[int], heads: int, only: Collection[str] = ()
) -> dict[str, Origin]:
    """Where the parameters of `attention` come from when it keeps the heads `kept`, of so many; or `only` of these linears."""
    found: dict[str, Origin] = {}
    for name, linear in modules(model, only or attention.linears):
        index = _features_of_heads(model.config, attention, name, kept, heads)
        found |= feature_origins(name, linear, index, outputs=name != attention.o)
    return found


def take_heads(model: Any, attention: Attention, count: int, heads: int) -> None:
    """Give `attention`, which has so many `heads`, the shape of one with `count` heads."""
    module = model.base_model.get_submodule(attention.module)
    linears = dict(modules(model, attention.linears))
    if not count:
        within = f"{attention.module}."
        inside = attention.o.startswith(within)
        removed = {name: copy.deepcopy(linear).to("meta") for name, linear in linears.items()}
        made = NoAttention(module, removed, attention.o.removeprefix(within) if inside else None)
        replace(model, attention.module, made)
        left = NoHeads(linears[attention.o], features(linears[attention.o])[1])
        if inside:
            made.add_module(attention.o.removeprefix(within), left)
        else:
            replace(model, attention.o, left)
        return
    for name, linear in linears.items():
        features_kept = len(_features_of_heads(model.config, attention, name, range(count), heads))
        replace(model, name, select_features(linear, features_kept, outputs=name != attention.o))
    _set_heads(module, count, attention.head_size(model.config))


def _set_heads(module: Any, heads: int, size: int) -> None:
    """What the module that computes the heads knows of their number and size."""
    values = dict.fromkeys(("num_heads", "num_attention_heads"), heads)
    values |= dict.fromkeys(("head_dim", "attention_head_size"), size)
    values |= dict.fromkeys(("all_head_size", "split_size"), heads * size)
    for field in values.keys() & vars(module).keys():
        setattr(module, field, values[field])


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
    """Give `attention` so many heads of another size, fresh, which scale their scores accordingly, and as many inputs and outputs
    as before or as these.

    Raises ValueError where a method has replaced one of its linears before.
    """
    module: Any = model.base_model.get_submodule(attention.module)
    for name, number in attention.linears.items():
        linear = dense_module(model, name, method)
        sizes = (heads * size, outputs) if name == attention.o else (inputs, number * heads * size)
        replace(model, name, linear_like(linear, *sizes))
    if getattr(module, "scale_attn_weights", True):  # GPT-2's may have no scale
        module.scaling *= (attention.head_size(model.config) / size) ** 0.5
    _set_heads(module, heads, size)


def fix_heads(
    model: Any, attention: Attention, patterns: Sequence[int], empty_rows: str, words: Words | None, heads: int
) -> None:
    """Have the first of the so many `heads` of `attention`, one for each of `patterns`, attend by position alone."""
    module = model.base_model.get_submodule(attention.module)
    linears = dict(modules(model, attention.linears))
    within = f"{attention.module}."
    roles = {role: getattr(attention, role) for role in ("q", "k", "v", "o")}
    inside = {role: name.removeprefix(within) for role, name in roles.items() if name.startswith(within)}
    learnt = heads - len(patterns)
    if not learnt:
        inside = {role: name for role, name in inside.items() if role not in ("q", "k")}
    made = FixedHeads(module, patterns, empty_rows, words, attention.head_size(model.config), inside)
    for role, name in inside.items():
        linear = linears[roles[role]]
        if role in ("q", "k"):
            linear = select_features(linear, learnt * attention.head_size(model.config), outputs=True)
        made.add_module(name, linear)
    replace(model, attention.module, made)


@torch.no_grad()
def copy_heads(
    old: Any, new: Any, attention: Attention, kept: Sequence[int], heads: int, only: Collection[str] = ()
) -> None:
    """Fill the attention of `new`, which has as many heads as `kept` says, with these of the so many of `old`; or `only` these of
    its linears."""
    for name, linear in modules(old, only or attention.linears):
        outputs = name != attention.o
        if kept:
            index = _features_of_heads(old.config, attention, name, kept, heads)
            new.base_model.get_submodule(name).load_state_dict(
                select_features(linear, index, outputs=outputs).state_dict()
            )
        elif not outputs and linear.bias is not None:
            new.base_model.get_submodule(name).bias.copy_(linear.bias)


@torch.no_grad()
def match_scales(old: Any, new: Any, attentions: Iterable[Attention]) -> None:
    """Have the `attentions` of `new`, with the weights of those of `old`, give the same scores, though a native class may scale
    them by the number of their layer (GPT-2's `scale_attn_by_inverse_layer_idx`): the queries take over the difference.

    `old`, `new`: base models or layers, whichever the names of the attentions are below. Raises ValueError where a method has
    replaced the queries' linear in `new`.
    """
    for attention in attentions:
        former, module = old.get_submodule(attention.module), new.get_submodule(attention.module)
        if isinstance(former, NoAttention):  # no scores
            continue
        ratio = getattr(former, "scaling", 1.0) / getattr(module, "scaling", 1.0)
        if ratio == 1:
            continue
        linear = new.get_submodule(attention.q)
        if type(linear) not in DENSE:
            raise ValueError(
                f"{attention.q!r} is a {type(linear).__name__} and cannot take over the scale of another layer's scores"
            )
        queries = features(linear)[1] // attention.linears[attention.q]
        weight = linear.weight[:, :queries] if isinstance(linear, Conv1D) else linear.weight[:queries]
        weight *= ratio
        if linear.bias is not None:
            linear.bias[:queries] *= ratio


@torch.no_grad()
def pad_heads(model: Any, attention: Attention) -> None:
    """Give `attention` all the heads that its config names: those that it lacks come last and are zero."""
    module = model.base_model.get_submodule(attention.module)
    gone, heads = isinstance(module, NoAttention), attention.head_count(model.config)
    count = 0 if gone else count_heads(model, attention, "head_pruning")
    for name in attention.linears:
        outputs = name != attention.o
        wanted = _features_of_heads(model.config, attention, name, range(heads), heads)
        index = torch.tensor(_features_of_heads(model.config, attention, name, range(count), heads), dtype=torch.long)
        old = module.removed[name] if gone else model.base_model.get_submodule(name)
        made = linear_like(old, *((None, len(wanted)) if outputs else (len(wanted), None)), device=model.device)
        made.weight.zero_()
        if made.bias is not None:
            made.bias.zero_()
        if count:
            axis = int(outputs) if isinstance(made, Conv1D) else int(not outputs)
            made.weight.index_copy_(axis, index.to(model.device), old.weight)
        if made.bias is not None and not outputs:
            made.bias.copy_(model.base_model.get_submodule(name).bias)
        elif made.bias is not None and count:
            made.bias.index_copy_(0, index.to(model.device), old.bias)
        path, _, leaf = name.rpartition(".")
        model.base_model.get_submodule(path).add_module(leaf, made)


@torch.no_grad()
def head_magnitudes(model: Any, attention: Attention, heads: int) -> torch.Tensor:
    """fp32 (heads,): the product of the norms of each head's value weights and of its output weights."""
    size, group = attention.head_size(model.config), attention.group_size(model.config)
    value, output = (
        effective_weight(model.base_model.get_submodule(name)).float() for name in (attention.v, attention.o)
    )
    value = value[-heads // group * size :]  # the last part, where queries, keys and values are one
    values = value.unflatten(0, (-1, size)).flatten(1).norm(dim=1).repeat_interleave(group)
    return values * output.unflatten(1, (-1, size)).transpose(0, 1).flatten(1).norm(dim=1)
