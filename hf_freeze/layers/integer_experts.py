"""Experts of a mixture with weights on a symmetric grid of integers (`layers.integer_weights`)."""

import copy
from typing import Any

import torch
from torch import nn

from hf_freeze.layers.grids import Grid
from hf_freeze.layers.integer_weights import IntegerLinear


class IntegerExperts(nn.Module):
    """Takes the place of a module of E experts. Each of its parameters (E, O, I), such as `down_proj`, becomes an IntegerLinear
    of that name, of the matrix (E O, I) of all experts one below the other.

    The native forward computes with the dense weights, which exist while it runs, so every implementation of experts can be set.
    No weight is trained.
    """

    native: Any  # the module, without its parameters; no submodule, as the native initialisation would look for them

    def __init__(self, experts: Any, grid: Grid) -> None:
        super().__init__()
        self.sizes = {name: tuple(parameter.shape) for name, parameter in experts.named_parameters()}
        for name, (count, outputs, inputs) in self.sizes.items():
            linear = nn.Linear(inputs, count * outputs, bias=False, device="meta")
            linear.weight = nn.Parameter(experts.get_parameter(name).detach().flatten(0, 1))
            self.add_module(name, IntegerLinear(linear, grid))
        self.__dict__["native"] = copy.copy(experts)
        self.native._parameters = {}

    def dense(self, name: str) -> torch.Tensor:
        """(E, O, I)"""
        weight: Any = self.get_submodule(name)
        return weight.dense_weight().view(self.sizes[name])

    def with_parameters(self) -> Any:
        """The native module with the weights that this one computes with."""
        native = copy.copy(self.native)
        native._parameters = {name: nn.Parameter(self.dense(name).clone()) for name in self.sizes}
        return native

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the native module: (T, H) states, (T, k) experts, (T, k) factors -> (T, H)"""
        self.native.training = self.training
        try:
            for name in self.sizes:
                setattr(self.native, name, self.dense(name))
            return self.native(*args, **kwargs)
        finally:
            for name in self.sizes:
                self.native.__dict__.pop(name, None)
