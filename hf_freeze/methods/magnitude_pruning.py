"""Set the smallest weights to zero, at once or little by little (Zhu & Gupta, 2017, https://arxiv.org/abs/1710.01878)."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.masked import Masked, prune_smallest
from hf_freeze.methods._linear import check_share
from hf_freeze.methods._ramps import in_stages, ramp
from hf_freeze.methods._sparse import SparseMethod
from hf_freeze.methods.base import Model
from hf_freeze.methods.parts import Part, Schedule
from hf_freeze.methods.registry import register_method

_SCOPES = ("global", "layer")


@register_method("magnitude_pruning", example={"sparsity": 0.5}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class MagnitudePruning(SparseMethod):
    """Zero the share `sparsity` of the weights, the smallest of all chosen linears together (`scope="global"`) or of each
    (`"layer"`). The mask acts in the forward, so it holds after every step of every optimiser. Biases stay.

    With neither `begin` nor `end` it happens in `make_variant`. Else the sparsity rises as 1 - (1 - t)³ of its final value
    between these shares of training (None: 0 and 1), in a hundred steps of equal length; what is pruned stays pruned. That
    needs `VariantCallback` or `model.advance`. `finalize()` prunes to the full sparsity and stores what is left sparse.

    Raises ValueError for a sparsity outside [0, 1), an unknown scope, component or layer, a begin or end outside 0..1 or in the
    wrong order, or a linear that another method has changed.
    """

    sparsity: float
    scope: str = "global"
    begin: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.sparsity, "MagnitudePruning: sparsity", below_one=True)
        if self.scope not in _SCOPES:
            raise ValueError(f"MagnitudePruning(scope={self.scope!r}): choose from {list(_SCOPES)}")
        for name in ("begin", "end"):
            if getattr(self, name) is not None:
                check_share(getattr(self, name), f"MagnitudePruning: {name}")
        begin, end = self.span
        if begin >= end:
            raise ValueError(
                f"MagnitudePruning(begin={self.begin!r}, end={self.end!r}): begin must be below end (None: 0 and 1)"
            )

    @property
    def span(self) -> tuple[float, float]:
        """(begin, end) as shares of training."""
        return self.begin or 0.0, 1.0 if self.end is None else self.end

    @property
    def parts(self) -> tuple[Part, ...]:
        gradual = self.finalizable and (self.begin, self.end) != (None, None)
        return (_RisingSparsity(self),) if gradual else ()

    def unfinished(self, linear: Any, name: str) -> nn.Module:
        return Masked.from_linear(linear)

    def prepare(self, model: Model, architecture: Architecture) -> None:
        super().prepare(model, architecture)
        if not self.parts:
            self.prune(model, architecture, self.sparsity)

    def finalize(self, model: Model, architecture: Architecture) -> "MagnitudePruning":
        self.prune(model, architecture, self.sparsity)
        return super().finalize(model, architecture)

    def prune(self, model: Model, architecture: Architecture, sparsity: float) -> None:
        """Mask the smallest weights, so that this share of them is zero."""
        prune_smallest([module for _, module in self.modules(model, architecture)], sparsity, self.scope)


class _RisingSparsity(Schedule):
    """Zhu & Gupta (2017), equation 1, in a hundred stages."""

    def __init__(self, method: MagnitudePruning) -> None:
        self.method = method

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        begin, end = self.method.span
        share = ramp("cubic", in_stages((step / total_steps - begin) / (end - begin)))
        return {"sparsity": self.method.sparsity * share}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        self.method.prune(model, architecture, self.values(step, total_steps)["sparsity"])
