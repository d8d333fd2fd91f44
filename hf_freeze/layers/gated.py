"""An output projection of attention with a gate g_n for each head n: y = Σ_n g_n W_n c_n + b, c_n the context of head n."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers.derived import DerivedWeight, features, linear_like, taken


class Gated(DerivedWeight):
    """A mixin for nn.Linear or Conv1D with `gates` (heads,), initially 1, or 0 for the heads in `masked`."""

    learnt_gates = ("gates",)
    weight: nn.Parameter
    gates: nn.Parameter
    masked: Sequence[int]

    @classmethod
    def from_linear(cls, linear: Any, heads: int, masked: Sequence[int]) -> "Gated":
        """A fresh gated linear with the shapes of `linear`."""
        gated: Any = linear_like(linear, classes=(GatedLinear, GatedConv1D))
        gated.gates = nn.Parameter(torch.ones(heads, device=linear.weight.device, dtype=linear.weight.dtype))
        gated.masked = masked
        return gated

    def initialize_parameters(self) -> None:
        initialization.ones_(self.gates)

    @torch.no_grad()
    def reset(self) -> None:
        """Give the gates their initial values."""
        self.gates.fill_(1)
        self.gates[list(self.masked)] = 0

    def dense_weight(self) -> torch.Tensor:
        return self.of_heads(self.gates)

    @property
    def selectable(self) -> bool:
        """Whether `selected` can remove inputs and outputs."""
        return True

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        """A copy with only the outputs `kept`, or the inputs, those of whole heads."""
        if outputs:
            new = copy.deepcopy(self)
            new.weight = nn.Parameter(taken(self.weight, 1 if isinstance(self, Conv1D) else 0, kept))
            if self.bias is not None:
                new.bias = nn.Parameter(taken(self.bias, 0, kept))
            setattr(new, "nf" if isinstance(self, Conv1D) else "out_features", len(kept))
            return new
        size = features(self)[0] // self.gates.numel()
        new = linear_like(self, inputs=len(kept), classes=(GatedLinear, GatedConv1D))
        new.weight = nn.Parameter(taken(self.weight, 0 if isinstance(self, Conv1D) else 1, kept))
        heads = [position // size for position in kept[::size]]
        new.gates = nn.Parameter(taken(self.gates, 0, heads))
        new.masked = [position for position, head in enumerate(heads) if head in self.masked]
        if self.bias is not None:
            new.bias = nn.Parameter(self.bias.detach().clone())
        return new

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.gates.numel()}"


class GatedLinear(Gated, nn.Linear):
    """An nn.Linear with gates."""


class GatedConv1D(Gated, Conv1D):
    """A Conv1D with gates."""
