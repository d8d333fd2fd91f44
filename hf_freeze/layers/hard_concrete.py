"""An output projection of attention whose heads have hard concrete gates (Louizos et al., 2018, https://arxiv.org/abs/1712.01312;
Voita et al., 2019, https://arxiv.org/abs/1905.09418, equations 5 to 8).

Shapes: I inputs, O outputs, N gates. Each gate multiplies an equal part of the input: the contexts of the heads that share keys
and values.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers.derived import DerivedWeight, linear_like

_TEMPERATURE, _LOW, _HIGH = 0.33, -0.1, 1.1  # as in the code of Voita et al.
_SMALLEST = 1e-6  # of the uniform noise, and of its distance from 1
_START = 2.5  # above log 11, where a gate begins to be exactly 1 in eval mode


class HardConcrete(DerivedWeight):
    """A mixin for nn.Linear or Conv1D. `log_alpha` (N,): the larger, the more often a gate is open, that is above 0."""

    learnt_gates = ("log_alpha",)
    until_finalize = True
    weight: nn.Parameter
    log_alpha: nn.Parameter

    @classmethod
    def from_linear(cls, linear: Any, gates: int) -> "HardConcrete":
        """A fresh layer with the shapes of `linear`, whose gates are 1 in eval mode."""
        gated: Any = linear_like(linear, classes=(HardConcreteLinear, HardConcreteConv1D))
        gated.log_alpha = nn.Parameter(torch.full_like(linear.weight[0, :1], _START).repeat(gates).detach())
        return gated

    def initialize_parameters(self) -> None:
        initialization.constant_(self.log_alpha, _START)

    def gates(self) -> torch.Tensor:
        """(N,): the gates of eval mode, without noise."""
        return _stretched(self.log_alpha)

    def drawn_gates(self) -> torch.Tensor:
        """(N,): gates in 0..1, drawn for one forward of training."""
        uniform = torch.special.ndtr(torch.randn_like(self.log_alpha.float())).clamp(_SMALLEST, 1 - _SMALLEST)
        return _stretched((uniform.logit() + self.log_alpha) / _TEMPERATURE)

    def open_probabilities(self) -> torch.Tensor:
        """(N,): the probability that a drawn gate is not 0."""
        return torch.sigmoid(self.log_alpha.float() - _TEMPERATURE * math.log(-_LOW / _HIGH))

    def kept(self) -> list[int]:
        """The numbers of the gates that are not 0 in eval mode."""
        return self.gates().nonzero()[:, 0].tolist()

    def largest(self) -> int:
        """The number of the gate that is open most often."""
        return int(self.log_alpha.argmax())

    def dense_weight(self) -> torch.Tensor:
        return self.of_heads(self.gates())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        if not self.training:
            return super().forward(x)
        return functional.linear(x, self.of_heads(self.drawn_gates()), self.bias)


class HardConcreteLinear(HardConcrete, nn.Linear):
    """An nn.Linear with hard concrete gates."""


class HardConcreteConv1D(HardConcrete, Conv1D):
    """A Conv1D with hard concrete gates."""


def _stretched(x: torch.Tensor) -> torch.Tensor:
    """sigmoid(x), stretched from 0..1 to -0.1..1.1 and clipped to 0..1."""
    return (torch.sigmoid(x.float()) * (_HIGH - _LOW) + _LOW).clamp(0, 1)
