"""DExTra, the deep and light transformation (Mehta et al., 2021, "DeLighT: Deep and Light-weight Transformer",
https://arxiv.org/abs/2008.00623, §3.1): group linear layers that first widen, then narrow; the input is mixed into each of
them.

Shapes: I inputs, O outputs, p width of the projected input, N group layers, g groups, T tokens.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers.derived import SelfInitialized
from hf_freeze.layers.expanded_embedding import ExpandedEmbedding
from hf_freeze.layers.group_linear import GroupLinear, mix, shuffle

SPECS = ("released", "paper")
STEP = 8  # "released" rounds widths up to a multiple of it


@dataclass(frozen=True, kw_only=True)
class DExTraSizes:
    """Sizes of a unit. `projected`: p of "released"; None for "paper", which has no dense layer before or after the group
    layers."""

    inputs: int
    outputs: int
    projected: int | None
    groups: tuple[int, ...]  # of each group layer
    input_widths: tuple[int, ...]  # of each group layer, including the mixed-in inputs
    widths: tuple[int, ...]  # outputs of each group layer

    def check(self, method: str) -> None:
        """Raise ValueError, in the name of `method`, unless the groups of each layer divide what it takes and computes."""
        mixed = self.inputs if self.projected is None else self.projected
        for groups, inputs, width in zip(self.groups, self.input_widths, self.widths, strict=True):
            for verb, value in (("mixes in", mixed), ("takes", inputs), ("computes", width)):
                if value % groups:
                    raise ValueError(
                        f"{method}: a layer of {groups} groups {verb} {value} numbers, in a unit from {self.inputs} to "
                        f"{self.outputs}: the groups must divide them; choose another hidden size, map_dim or groups"
                    )


def dextra_sizes(
    inputs: int, outputs: int, *, depth: int, multiplier: float, groups: int, spec: str, projected: int
) -> DExTraSizes:
    """Sizes of a unit with N = `depth` group layers, a largest width of `multiplier` · I, and at most `groups` groups.

    "released" follows the authors' code. The first ⌈N/2⌉ layers have 2^l groups in layer l, up to `groups`; the others mirror
    them. Widths grow linearly from p to the largest (`multiplier` rounded to three decimals), then mirror; each is rounded down
    to an integer and then up to a multiple of 8 and of the group counts on both sides. From the second layer on, p numbers are
    mixed in. A dense layer comes before (I → p) and after (O + p → O) the group layers.

    "paper" (§3.1, eq. 1): 2^(l-1) groups; widths grow linearly from I to the largest, then fall to O; the I inputs themselves
    are mixed in; there are no dense layers, so p is ignored.
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
        next_groups = counts[layer + 1] if layer + 1 < depth else 1
        step = max(counts[layer], next_groups, STEP) if released else math.lcm(counts[layer], next_groups)
        exact = math.floor(exact) if released else exact
        widths.append(outputs if layer + 1 == depth else step * math.ceil(exact / step))
    return DExTraSizes(
        inputs=inputs,
        outputs=outputs,
        projected=projected if released else None,
        groups=tuple(counts),
        input_widths=(start, *(width + start for width in widths[:-1])),
        widths=tuple(widths),
    )


class DExTraLayer(nn.Module):
    """Group linear, shuffle, one norm shared by all groups, swish, dropout."""

    def __init__(self, inputs: int, outputs: int, groups: int, **new: Any) -> None:
        super().__init__()
        self.linear = GroupLinear(inputs, outputs, groups, **new)
        self.norm = nn.LayerNorm(outputs // groups, **new)

    def forward(self, x: torch.Tensor, dropout: float) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        groups = self.linear.groups
        # Fusing the shuffle into the linear would save one copy in the forward but cost several in the backward.
        y = shuffle(self.linear(x), groups).unflatten(-1, (groups, -1))
        y = functional.silu(self.norm(y)).flatten(-2)
        return functional.dropout(y, dropout) if dropout else y


class DExTraUnit(SelfInitialized):
    """A DExTra transformation of the given `sizes`."""

    def __init__(self, sizes: DExTraSizes, dropout: float, **new: Any) -> None:
        super().__init__()
        self.dropout, self.dense = dropout, sizes.projected is not None
        layer_sizes = zip(sizes.input_widths, sizes.widths, sizes.groups, strict=True)
        layers = [DExTraLayer(*in_out_groups, **new) for in_out_groups in layer_sizes]
        if sizes.projected is not None:
            first = DExTraLayer(sizes.inputs, sizes.projected, 1, **new)
            layers = [first, *layers, DExTraLayer(sizes.outputs + sizes.projected, sizes.outputs, 1, **new)]
        self.layers: Any = nn.ModuleList(layers)

    def initialize_parameters(self) -> None:
        """Draw the blocks. The native initialisation draws the norms."""
        for layer in self.layers:
            layer.linear.initialize_parameters()

    def forward(self, x: torch.Tensor, dropout: float | None = None) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        if dropout is None:
            dropout = self.dropout if self.training else 0.0
        skip, y = x, x
        for number, layer in enumerate(self.layers):
            if number > self.dense:
                y = mix(skip, y, layer.linear.groups)
            y = layer(y, dropout)
            if self.dense and not number:
                skip = y
        return y


class DExTraEmbedding(ExpandedEmbedding):
    """A unit maps √n times the row of the table to H numbers, which are divided by `scale`: the factor by which the backbone
    multiplies its embeddings. `first`: as for ExpandedEmbedding."""

    def __init__(
        self,
        table: nn.Embedding,
        sizes: DExTraSizes,
        *,
        dropout: float,
        scale: float,
        first: ExpandedEmbedding | None = None,
    ) -> None:
        super().__init__(table, sizes.inputs, dropout=dropout, first=first)
        self.scale, self.hidden = scale, sizes.outputs
        self.unit = DExTraUnit(sizes, dropout, device=table.weight.device, dtype=table.weight.dtype)

    def expand(self, rows: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """(T, n) rows of the table -> (T, H), in the dtype of the table, under autocast too."""
        return (self.unit(rows * self.embedding_dim**0.5, dropout) / self.scale).to(rows.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden={self.hidden}, dropout={self.dropout}"


class DExTraAttention(nn.Module):
    """Replaces a self-attention: a DExTra unit narrows the hidden states, then a narrower `attention` attends to them."""

    def __init__(self, attention: Any, sizes: DExTraSizes, dropout: float, **new: Any) -> None:
        super().__init__()
        self.dextra = DExTraUnit(sizes, dropout, **new)
        self.attention = attention

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, H) -> (B, T, H), attentions"""
        return self.attention(self.dextra(hidden_states), *args, **kwargs)
