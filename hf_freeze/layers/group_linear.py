"""Group linear layers (Mehta et al., 2018, "Pyramidal Recurrent Unit for Language Modeling", https://arxiv.org/abs/1808.09029): a
linear with a block-diagonal matrix, and the two ways in which Mehta et al. (2020, https://arxiv.org/abs/1911.12385 and
https://arxiv.org/abs/2008.00623) exchange features between groups: `shuffle` and `mix`.

Shapes: I inputs, O outputs, g groups.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization


class GroupLinear(nn.Module):
    """y = x diag(W_1, ..., W_g) + b, with `weight` (g, I/g, O/g) and `bias` (O,), initially zero.

    Raises ValueError unless `groups` divides inputs and outputs.
    """

    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, groups: int, bias: bool = True, **new: Any) -> None:
        super().__init__()
        for name, size in (("inputs", inputs), ("outputs", outputs)):
            if size % groups:
                raise ValueError(f"GroupLinear({name}={size}, groups={groups}): {name} must be a multiple of groups")
        self.groups, self.in_features, self.out_features = groups, inputs, outputs
        self.weight = nn.Parameter(torch.empty(groups, inputs // groups, outputs // groups, **new))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs, **new)) if bias else None)
        self.initialize_parameters()

    @property
    def bound(self) -> float:
        """The bound of the uniform distribution from which a block is drawn (Glorot & Bengio, 2010, eq. 16)."""
        return (6 / sum(self.weight.shape[1:])) ** 0.5

    def initialize_parameters(self) -> None:
        initialization.uniform_(self.weight, -self.bound, self.bound)
        if self.bias is not None:
            initialization.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        if self.groups == 1:
            # squeeze(0), not [0]: the gradient of an index first fills a tensor with zeros.
            return functional.linear(x, self.weight.squeeze(0).T, self.bias)
        blocks = x.reshape(-1, self.groups, self.weight.shape[1]).transpose(0, 1)
        if self.bias is None:
            y = torch.bmm(blocks, self.weight)
        else:
            y = torch.baddbmm(self.bias.view(self.groups, 1, -1), blocks, self.weight)
        return y.transpose(0, 1).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, groups={self.groups}, "
            f"bias={self.bias is not None}"
        )


def shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(..., n) -> (..., n): the first feature of every group, then the second of every group, and so on."""
    return x.unflatten(-1, (groups, -1)).transpose(-1, -2).flatten(-2)


def mix(x: torch.Tensor, y: torch.Tensor, groups: int) -> torch.Tensor:
    """(..., n), (..., m) -> (..., n + m): each group consists of its share of `x`, then its share of `y`."""
    return torch.cat([features.unflatten(-1, (groups, -1)) for features in (x, y)], dim=-1).flatten(-2)
