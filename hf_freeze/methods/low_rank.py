"""Linears of low rank, by singular value decomposition or from scratch (Khakhulin et al., "Compressed Transformer")."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.layers import LowRankLinear
from hf_freeze.layers.derived import features
from hf_freeze.layers.low_rank import SOLVERS
from hf_freeze.methods.checks import check_positive
from hf_freeze.methods.linear import FactorizedMethod, factors, glorot_std
from hf_freeze.methods.registry import register_method
from hf_freeze.solvers.low_rank import low_rank
from hf_freeze.solvers.moments import Moments


@register_method("low_rank", example={"rank": 4}, facts=factors("rank"))
@dataclass(frozen=True, kw_only=True)
class LowRank(FactorizedMethod):
    """Replace each weight W by a product up · down with an inner size of `rank`. It is smaller than W if
    rank < I O / (I + O), for I inputs and O outputs.

    From trained weights: the nearest matrix of this rank, as U √S and √S Vᵀ; with a calibration, that whose
    outputs are nearest on what the linear sees, and its bias. Fresh: the variance of the dense initialisation.
    `rank` may be a dict from the name of a linear to its rank (`analysis.choose_ranks`); linears outside the dict stay dense.
    `components`, `layers`: which linears. `execution`: how inference computes (`hf_freeze.layers.factorized`). `solver`: "exact",
    in fp64, or "randomized", in fp32, which is many times faster for wide layers and small ranks, and whose error is that of the
    nearest matrix to a few % where the singular values fall (`benchmarks/low_rank_solvers.py`).

    Factors may get a smaller rank, heads and neurons of them may be pruned, and Quantize may follow.

    Raises ValueError for a rank below 1, above min(I, O) or above that of factors, an unknown linear, component, layer, execution
    or solver, or a linear that another method has changed.
    """

    replaces: ClassVar[tuple[type[nn.Module], ...]] = (LowRankLinear,)
    rank: int | dict[str, int]
    solver: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver not in SOLVERS:
            raise ValueError(f"LowRank(solver={self.solver!r}): choose from {list(SOLVERS)}")
        if isinstance(self.rank, dict):
            for name, rank in self.rank.items():
                check_positive(rank, "LowRank", f"rank[{name!r}]")
            if not self.rank:
                raise ValueError("LowRank(rank={}) names no linear")
        else:
            check_positive(self.rank, "LowRank", "rank")

    def named_linears(self) -> Iterable[str] | None:
        return self.rank if isinstance(self.rank, dict) else None

    def fit(self, module: Any, weight: torch.Tensor, bias: torch.Tensor | None, moments: Moments) -> None:
        up, down, new_bias = low_rank(weight, bias, moments).factors(min(module.rank, *weight.shape))
        module.set_factors(up, down)
        if new_bias is not None:
            surgery.set_values(module.bias, new_bias)

    def make(self, linear: Any, name: str, model: Any) -> nn.Module:
        rank = self.rank[name] if isinstance(self.rank, dict) else self.rank
        if isinstance(linear, LowRankLinear) and rank > linear.rank:
            raise ValueError(f"rank={rank}: must be in 1..{linear.rank}, the rank that it has already")
        return LowRankLinear(
            linear, rank, std=_dense_std(linear, name, model), execution=self.execution, solver=self.solver
        )


def _dense_std(linear: Any, name: str, model: Any) -> float:
    """Standard deviation of a fresh dense weight.

    Marian's initialisation: Glorot's, with each fused projection as a matrix of its own. Otherwise that of the weight that the
    backbone has just drawn, because some backbones scale it by depth. If no weight has been drawn (on meta, or before trained
    weights are loaded), the value does not matter, and Glorot's serves.
    """
    if isinstance(linear, LowRankLinear):
        return linear.std
    if model is not None and getattr(model.config, "init", None) == "marian":
        inputs, outputs = features(linear)
        return (2 / (inputs + outputs // architecture_for(model).parts(f"{name}.weight"))) ** 0.5
    drawn = 0.0 if linear.weight.is_meta else float(linear.weight.detach().float().std())
    return drawn if 0 < drawn < 1 else glorot_std(linear)
