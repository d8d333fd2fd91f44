"""An output projection of attention with a gate g_n for each head n: y = Σ_n g_n W_n c_n + b, c_n the context of head n."""

from typing import Any

import torch
from torch import nn
from transformers import initialization
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers.derived import DerivedWeight, linear_like


class Gated(DerivedWeight):
    """A mixin for nn.Linear or Conv1D with `gates` (heads,), initially 1."""

    weight: nn.Parameter
    gates: nn.Parameter

    @classmethod
    def from_linear(cls, linear: Any, heads: int) -> "Gated":
        """A fresh gated linear with the shapes of `linear`."""
        gated: Any = linear_like(linear, classes=(GatedLinear, GatedConv1D))
        gated.gates = nn.Parameter(torch.ones(heads, device=linear.weight.device, dtype=linear.weight.dtype))
        return gated

    def initialize_parameters(self) -> None:
        initialization.ones_(self.gates)

    def dense_weight(self) -> torch.Tensor:
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight
        return weight * self.gates.repeat_interleave(weight.shape[1] // self.gates.numel())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.gates.numel()}"


class GatedLinear(Gated, nn.Linear):
    """An nn.Linear with gates."""


class GatedConv1D(Gated, Conv1D):
    """A Conv1D with gates."""
