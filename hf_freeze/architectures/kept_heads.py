"""Attentions that get something for all heads, of which a pruned one needs its own part.

Three kinds occur in transformers: a bias on the scores with an entry for each head, computed outside the attention (BLOOM's
ALiBi, MPNet) or in the first layer for all others (T5); a norm over all heads' queries or keys together (OLMo 2); and numbers of
heads that the attention reads from the shared config (Phi-3).

Shapes: B batch, N heads of the native attention, K kept heads, Q and T tokens.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.base import Attention
from hf_freeze.architectures.roles import has_module

BIASES = ("position_bias", "alibi")
COMPUTED = "compute_bias"  # T5's method


def biases_of(attention: nn.Module) -> tuple[str, ...]:
    """Where an attention gets a bias with an entry for each head from: arguments of its forward, a method that computes it."""
    arguments = [name for name in inspect.signature(type(attention).forward).parameters if name in BIASES]
    return tuple(arguments + [COMPUTED] * hasattr(attention, COMPUTED))


def prune_companions(
    layer: Any, attention: Attention, config: Any, kept: Sequence[int], heads: int, group: int | None = None
) -> list[Any]:
    """Have `attention`, which holds the heads `kept` out of `heads`, take its own part of what is there for all heads. `group`
    heads (None: as natively) share keys and values.

    `layer`: the module that the names in `attention` are below. Returns handles that undo it.
    """
    owner = layer.get_submodule(attention.module)
    group = group or attention.group_size(config)
    index = {"q": kept, "k": list(dict.fromkeys(head // group for head in kept))}
    size = attention.head_size(config)
    norms = {
        layer.get_submodule(name): [head * size + position for head in index[role] for position in range(size)]
        for name, role in attention.norms.items()
        if has_module(layer, name)
    }
    handles = _give_own_part(owner, kept, heads, attention.biases, norms)
    if attention.reads_config and hasattr(owner, "config"):
        shared = owner.config
        owner.config = OwnHeads(shared, len(kept), len(index["k"]))
    return handles


def _give_own_part(
    attention: nn.Module, kept: Sequence[int], heads: int, biases: Sequence[str], norms: dict[Any, list[int]]
) -> list[Any]:
    """Have an attention that holds the heads `kept`, out of `heads`, take its own part of `biases` and normalise in `norms`
    (norm -> the positions that it still gets) as if the removed heads were zero. Returns handles that undo it."""
    handles: list[Any] = []
    if biases:
        own = _OwnBias(attention, kept, heads, tuple(name for name in biases if name != COMPUTED))
        handles.append(attention.register_forward_pre_hook(own.before, with_kwargs=True))
        if COMPUTED in biases:
            vars(attention)[COMPUTED] = own.computed
            handles.append(_Attribute(attention, COMPUTED))
        if len(biases) > 1:
            handles.append(attention.register_forward_hook(own.after))
    for norm, index in norms.items():
        spread = _Spread(index, norm.weight.shape[0])
        handles.append(norm.register_forward_pre_hook(spread.before))
        handles.append(norm.register_forward_hook(spread.after))
    return handles


class _Attribute:
    """Undoes setting an attribute of an instance that hides one of its class."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def remove(self) -> None:
        vars(self.owner).pop(self.name, None)


class _OwnBias:
    """Cuts the kept heads out of a bias. T5's attentions also return their bias, for all heads, to the next layer."""

    def __init__(self, attention: nn.Module, kept: Sequence[int], heads: int, names: tuple[str, ...]) -> None:
        self.kept, self.heads, self.names = list(kept), heads, names
        self.whole: torch.Tensor | None = None
        self.attention = attention  # a copy of the model calls with its own
        self.attention_class: Any = type(attention)

    def before(self, attention: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        parameters = list(inspect.signature(self.attention_class.forward).parameters)[1:]
        args, kwargs, self.whole = list(args), dict(kwargs), None
        self.attention = attention
        for name in self.names:
            place = parameters.index(name)
            holder: Any = args if place < len(args) else kwargs
            key: Any = place if place < len(args) else name
            bias = args[place] if place < len(args) else kwargs.get(name)
            if bias is not None:
                self.whole = bias
                holder[key] = self.part(bias)
        return tuple(args), kwargs

    def part(self, bias: torch.Tensor) -> torch.Tensor:
        """(1 or B, N, Q, T) -> (1 or B, K, Q, T), or (B N, Q, T) -> (B K, Q, T)"""
        index = torch.tensor(self.kept, device=bias.device)
        if bias.ndim == 4:
            return bias if bias.shape[1] == 1 else bias.index_select(1, index)
        return bias.unflatten(0, (-1, self.heads)).index_select(1, index).flatten(0, 1)

    def computed(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The bias that the first layer computes; later layers get the whole."""
        whole = self.attention_class.compute_bias(self.attention, *args, **kwargs)
        self.whole = whole
        return self.part(whole)

    def after(self, attention: nn.Module, args: Any, outputs: Any) -> Any:
        """(hidden states, bias, ...), with the bias for all heads"""
        if not isinstance(outputs, tuple) or len(outputs) < 2 or not torch.is_tensor(outputs[1]):
            return outputs
        whole = self.whole
        if whole is None:  # zeros, of an attention without a table
            zeros = outputs[1]
            whole = zeros[:, :1].expand(-1, self.heads, *zeros.shape[2:])
        return (outputs[0], whole, *outputs[2:])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "attention"} | {"whole": None}


class _Spread:
    """A norm over all heads: removed ones count as zeros. (..., kept) -> (..., kept)"""

    def __init__(self, index: list[int], size: int) -> None:
        self.index, self.size = index, size

    def before(self, norm: nn.Module, args: Any) -> Any:
        kept = args[0]
        whole = kept.new_zeros(*kept.shape[:-1], self.size)
        return (whole.index_copy(-1, torch.tensor(self.index, device=kept.device), kept), *args[1:])

    def after(self, norm: nn.Module, args: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.index_select(-1, torch.tensor(self.index, device=outputs.device))


class OwnHeads:
    """A config that says another number of heads, and otherwise what the shared one says."""

    def __init__(self, config: Any, heads: int, groups: int) -> None:
        self.shared_config = config
        self.num_attention_heads, self.num_key_value_heads = heads, groups

    def __getattr__(self, name: str) -> Any:
        if name == "shared_config" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.shared_config, name)
