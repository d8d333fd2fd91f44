"""DExTra, the deep and light transformation (Mehta et al., 2021, "DeLighT: Deep and Light-weight Transformer",
https://arxiv.org/abs/2008.00623, §3.1): group linear transforms that first widen, then narrow, and that see their input again
and again.

Shapes: I inputs, O outputs, p what the input is projected to, N group layers, g groups, T tokens.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers.derived import Fresh
from hf_freeze.layers.group_linear import GroupLinear, mix, shuffle
from hf_freeze.layers.made_embedding import MadeEmbedding

SPECS = ("released", "paper")
STEP = 8  # released: widths are multiples of it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of a unit. `projected`: the p of "released"; the "paper" has no dense layer before or after the group layers."""

    inputs: int
    outputs: int
    projected: int | None
    groups: tuple[int, ...]  # of each group layer, as all below
    taken: tuple[int, ...]  # inputs, those mixed in among them
    widths: tuple[int, ...]  # outputs


def plan(inputs: int, outputs: int, *, depth: int, multiplier: float, groups: int, spec: str, projected: int) -> Plan:
    """Of a unit with N = `depth` group layers, the widest of `multiplier` · I outputs, at most so many `groups`.

    "released", as the authors' code has it: 2^l groups in layer l, up to `groups`, in the first ⌈N/2⌉ layers, and the same
    backwards in the others; widths on the line from p to the widest (the `multiplier` to three decimals), and backwards, rounded
    down to integers and then up to a multiple of 8 and of the groups on both sides; p numbers mixed in from the second layer on;
    a dense layer before (I → p) and one after (O + p → O).

    "paper" (§3.1, eq. 1): 2^(l-1) groups; widths on the line from I to the widest and from there to O; the I inputs themselves
    mixed in; no dense layers, so that p is ignored.
    """
    half = -(-depth // 2)
    released = spec == "released"
    rising = [min(2 ** (layer + released), groups) for layer in range(half)]
    counts = rising + rising[: depth // 2][::-1]
    start, widest = projected if released else inputs, Fraction(str(round(multiplier, 3))) * inputs
    if released:
        line = [start + (widest - start) * Fraction(layer, max(half - 1, 1)) for layer in range(half)]
        line += line[: depth // 2][::-1]
    else:
        line = [start + (widest - start) * Fraction(layer, half) for layer in range(1, half + 1)]
        line += [widest + (outputs - widest) * Fraction(layer, depth - half) for layer in range(1, depth - half + 1)]
    line[-1] = Fraction(outputs)
    widths = []
    for layer, exact in enumerate(line):
        after = counts[layer + 1] if layer + 1 < depth else 1
        step = max(counts[layer], after, STEP) if released else math.lcm(counts[layer], after)
        exact = math.floor(exact) if released else exact
        widths.append(outputs if layer + 1 == depth else step * math.ceil(exact / step))
    return Plan(
        inputs=inputs,
        outputs=outputs,
        projected=projected if released else None,
        groups=tuple(counts),
        taken=(start, *(width + start for width in widths[:-1])),
        widths=tuple(widths),
    )


class DExTraLayer(nn.Module):
    """Group linear, shuffle, one norm for all groups, swish, dropout."""

    def __init__(self, inputs: int, outputs: int, groups: int, **new: Any) -> None:
        super().__init__()
        self.linear = GroupLinear(inputs, outputs, groups, **new)
        self.norm = nn.LayerNorm(outputs // groups, **new)

    def forward(self, x: torch.Tensor, dropout: float) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        groups = self.linear.groups
        # The copy that a shuffle in one with the linear's would save, the gradient of such a one makes several times.
        made = shuffle(self.linear(x), groups).unflatten(-1, (groups, -1))
        made = functional.silu(self.norm(made)).flatten(-2)
        return functional.dropout(made, dropout) if dropout else made


class DExTraUnit(Fresh):
    """The transformation that a `plan` gives the sizes of."""

    def __init__(self, sizes: Plan, dropout: float, **new: Any) -> None:
        super().__init__()
        self.dropout, self.dense = dropout, sizes.projected is not None
        layers = [DExTraLayer(*each, **new) for each in zip(sizes.taken, sizes.widths, sizes.groups, strict=True)]
        if sizes.projected is not None:
            first = DExTraLayer(sizes.inputs, sizes.projected, 1, **new)
            layers = [first, *layers, DExTraLayer(sizes.outputs + sizes.projected, sizes.outputs, 1, **new)]
        self.layers: Any = nn.ModuleList(layers)

    def initialize_parameters(self) -> None:
        """The blocks; the norms are native."""
        for layer in self.layers:
            layer.linear.initialize_parameters()

    def forward(self, x: torch.Tensor, dropout: float | None = None) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        if dropout is None:
            dropout = self.dropout if self.training else 0.0
        made, mixed = x, x
        for number, layer in enumerate(self.layers):
            if number > self.dense:
                made = mix(mixed, made, layer.linear.groups)
            made = layer(made, dropout)
            if self.dense and not number:
                mixed = made
        return made


class DExTraEmbedding(MadeEmbedding):
    """√n times the row of the table, made into one of H numbers by a unit, and divided by what the backbone multiplies its
    embeddings with, `scale`."""

    def __init__(self, table: nn.Embedding, sizes: Plan, *, dropout: float, scale: float) -> None:
        super().__init__(table, sizes.inputs, dropout=dropout)
        self.scale, self.hidden = scale, sizes.outputs
        self.unit = DExTraUnit(sizes, dropout, device=table.weight.device, dtype=table.weight.dtype)

    def expand(self, rows: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """(T, n) rows of the table -> (T, H), in the precision of the table under autocast too."""
        return (self.unit(rows * self.embedding_dim**0.5, dropout) / self.scale).to(rows.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden={self.hidden}, dropout={self.dropout}"


class DExTraAttention(nn.Module):
    """Takes the place of a self-attention: the `attention`, which is narrower, attends to what a `dextra` unit makes of the
    hidden states."""

    def __init__(self, attention: Any, sizes: Plan, dropout: float, **new: Any) -> None:
        super().__init__()
        self.dextra = DExTraUnit(sizes, dropout, **new)
        self.attention = attention

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, H) -> (B, T, H), attentions"""
        return self.attention(self.dextra(hidden_states), *args, **kwargs)
