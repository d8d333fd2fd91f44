"""Group linear transforms (Mehta et al., 2018, "Pyramidal Recurrent Unit for Language Modeling", https://arxiv.org/abs/1808.09029):
a linear whose matrix is block-diagonal, and the two ways in which Mehta et al. (2020, https://arxiv.org/abs/1911.12385 and
https://arxiv.org/abs/2008.00623) let the groups of one see what another made.

Shapes: I inputs, O outputs, g groups.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization


class GroupLinear(nn.Module):
    """y = x diag(W_1, ..., W_g) + b, with `weight` (g, I/g, O/g) and `bias` (O,), zero at first.

    Raises ValueError where `groups` does not divide inputs and outputs.
    """

    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, groups: int, bias: bool = True, **new: Any) -> None:
        super().__init__()
        for what, value in (("inputs", inputs), ("outputs", outputs)):
            if value % groups:
                raise ValueError(f"GroupLinear({what}={value}, groups={groups}): must be a multiple of the groups")
        self.groups, self.in_features, self.out_features = groups, inputs, outputs
        self.weight = nn.Parameter(torch.empty(groups, inputs // groups, outputs // groups, **new))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs, **new)) if bias else None)
        self.initialize_parameters()

    @property
    def bound(self) -> float:
        """Of the uniform distribution of a block (Glorot & Bengio, 2010, eq. 16)."""
        return (6 / sum(self.weight.shape[1:])) ** 0.5

    def initialize_parameters(self) -> None:
        initialization.uniform_(self.weight, -self.bound, self.bound)
        if self.bias is not None:
            initialization.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        if self.groups == 1:
            return functional.linear(
                x, self.weight.squeeze(0).T, self.bias
            )  # of an index, the gradient fills zeros first
        blocks = x.reshape(-1, self.groups, self.weight.shape[1]).transpose(0, 1)
        if self.bias is None:
            made = torch.bmm(blocks, self.weight)
        else:
            made = torch.baddbmm(self.bias.view(self.groups, 1, -1), blocks, self.weight)
        return made.transpose(0, 1).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, groups={self.groups}, "
            f"bias={self.bias is not None}"
        )


def shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(..., n) -> (..., n): the first of each of the groups, then the second of each, and so on."""
    return x.unflatten(-1, (groups, -1)).transpose(-1, -2).flatten(-2)


def mix(x: torch.Tensor, y: torch.Tensor, groups: int) -> torch.Tensor:
    """(..., n), (..., m) -> (..., n + m): each group has a piece of `x`, then one of `y`."""
    return torch.cat([each.unflatten(-1, (groups, -1)) for each in (x, y)], dim=-1).flatten(-2)
