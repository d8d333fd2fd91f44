"""Experts of a mixture whose matrices are stored as integers and steps, in place of the native three-dimensional parameters: each
is one weight of E · O rows, which have steps of their own.

Shapes: E experts, O outputs, I inputs of a matrix.
"""

import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_freeze.layers.derived import is_compiled, is_traced
from hf_freeze.layers.grids import Grid
from hf_freeze.layers.quantized_factors import QuantizedFactor

_HELD = "held_"  # before the name of the native parameter
_DENSE = "_dense"  # attribute with the dense matrices, while a forward runs


@functools.cache
def _holding(native: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A class that computes as `native`, whose parameters `names` are properties."""

    def read(module: Any, *, name: str) -> torch.Tensor:
        dense = vars(module).get(_DENSE)
        return module.get_submodule(_HELD + name).part() if dense is None else dense[name]

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        forward_natively: Any = native.forward
        if is_traced() or is_compiled():
            return forward_natively(module, *args, **kwargs)
        vars(module)[_DENSE] = {name: getattr(module, name) for name in names}  # read for each expert
        try:
            return forward_natively(module, *args, **kwargs)
        finally:
            del vars(module)[_DENSE]

    def reduce(module: Any) -> Any:  # no file has this class: it is made again
        return _empty, (native, names), vars(module)

    properties = {name: property(functools.partial(read, name=name)) for name in names}
    own = {"native_class": native, "held": names, "forward": forward, "__reduce__": reduce}
    return type(native.__name__, (native,), own | properties)


def _empty(native: type[nn.Module], names: tuple[str, ...]) -> Any:
    holding = _holding(native, names)
    return holding.__new__(holding)


def _copied(experts: Any) -> Any:
    """A module with the same tensors, whose tensors and modules can be replaced."""
    new = copy.copy(experts)
    new.__dict__.update({name: copy.copy(vars(experts)[name]) for name in ("_parameters", "_buffers", "_modules")})
    return new


def with_integers(experts: Any, grid: Grid) -> Any:
    """A copy of the native `experts` with fresh integers for their matrices."""
    new = _copied(experts)
    names = tuple(experts._parameters)
    for name in names:
        new.add_module(_HELD + name, QuantizedFactor(new._parameters.pop(name), grid, axes=2))
    new.__class__ = _holding(type(experts), names)
    return new


def held_matrices(experts: Any) -> Iterable[tuple[str, QuantizedFactor]]:
    """(name of the native parameter, its matrices) of experts made by `with_integers`."""
    for name in experts.held:
        yield name, experts.get_submodule(_HELD + name)


def native_experts(experts: Any) -> Any:
    """The native module with the weights that experts made by `with_integers` compute with."""
    new = _copied(experts)
    new.__class__ = experts.native_class
    for name, matrices in held_matrices(experts):
        del new._modules[_HELD + name]
        new.register_parameter(name, nn.Parameter(matrices.part().detach().clone()))
    return new
