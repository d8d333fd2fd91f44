"""Shared by the methods that end training with a fixed mask on the weights of linears."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.sparse import SparseLinear
from hf_freeze.methods.base import Facts, Model
from hf_freeze.methods.checks import wrong
from hf_freeze.methods.linear import LINEARS, LinearMethod

M = TypeVar("M", bound="SparseMethod")

# The keys of `nonzeros` contain layer numbers, at the latest after `finalize`.
SPARSE = replace(LINEARS, shrinks=True, by_layer=("nonzeros",), refers_to={"layers"}, holds={"masks"})


@dataclass(frozen=True, kw_only=True)
class SparseMethod(LinearMethod):
    """`nonzeros`: linear -> number of its remaining weights. It is None until `finalize()` fills it in."""

    skips_removed: ClassVar[bool] = False  # `nonzeros` has all linears
    nonzeros: dict[str, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.nonzeros.values() if isinstance(self.nonzeros, dict) else [None] * (self.nonzeros is not None)
        if any(type(count) is not int or count < 0 for count in counts):
            raise wrong(self, "must be None, or a dict from linears to numbers; finalize() fills it in", "nonzeros")

    def check(self, architecture: Architecture, config: Any) -> None:
        super().check(architecture, config)
        if self.nonzeros is not None:
            names = self.linear_names(architecture, config)
            if differ := sorted(set(names) ^ set(self.nonzeros)):
                raise ValueError(
                    f"{type(self).__name__}: nonzeros must name the linears {names}; {differ[0]!r} does not match"
                )

    @property
    def facts(self) -> Facts:
        return replace(super().facts, finalizable=self.nonzeros is None)

    def prepare(self, model: Model, architecture: Architecture) -> None:
        if self.nonzeros is not None:
            raise ValueError(
                f"{type(self).__name__}(nonzeros=...): only the checkpoint of the finalized model knows which weights remain; "
                "load that checkpoint, or leave nonzeros out"
            )

    def training_module(self, linear: Any) -> nn.Module:
        """The module that replaces `linear` before `finalize()`. Its `sparse()` returns the `SparseLinear` for afterwards."""
        raise NotImplementedError

    def make(self, linear: Any, name: str, model: Any) -> nn.Module:
        return self.training_module(linear) if self.nonzeros is None else SparseLinear(linear, self.nonzeros[name])

    def finalize(self: M, model: Model, architecture: Architecture) -> M:
        nonzeros = {}
        for name, module in self.modules(model, architecture):
            sparse = module.sparse()
            surgery.replace(model, name, sparse)
            nonzeros[name] = sparse.nonzeros
        return replace(self, nonzeros=nonzeros)
