"""A weight of low rank: W = up · down (Khakhulin et al., "Compressed Transformer", its SVD layer).

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.layers.cost import costs_of, product
from hf_freeze.layers.derived import taken
from hf_freeze.layers.factorized import FactorizedLinear, equal_columns, left_vectors

SOLVERS = ("exact", "randomized")
_OVERSAMPLING, _POWER_ITERATIONS = 16, 4


class LowRankLinear(FactorizedLinear):
    """W = up · down with `down` (R, I) and `up` (O, R). `std`: initial standard deviation of an entry of W. `solver`: how `fill`
    decomposes a weight.

    Raises ValueError for a rank outside 1..min(I, O).
    """

    prepares = False  # the factors are the parameters
    part_names = ("down", "up")

    def __init__(self, linear: Any, rank: int, *, std: float, execution: str = "auto", solver: str = "exact") -> None:
        super().__init__(linear, execution)
        full = min(self.in_features, self.out_features)
        if not 1 <= rank <= full:
            raise ValueError(
                f"rank={rank}: must be in 1..{full} for {self.in_features} inputs and {self.out_features} outputs"
            )
        self.rank = rank
        self.std = std
        self.solver = solver
        new = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.down = nn.Parameter(torch.empty(rank, self.in_features, **new))
        self.up = nn.Parameter(torch.empty(self.out_features, rank, **new))
        self.initialize_parameters()

    def initialize_parameters(self) -> None:
        """Draw both factors with standard deviation σ such that R σ⁴ = std²: an entry of W sums R products of two normals."""
        for factor in (self.down, self.up):
            initialization.normal_(factor, std=self.std**0.5 / self.rank**0.25)
        if self.bias is not None:
            initialization.zeros_(self.bias)

    def product(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        down, up = parts
        return up @ down

    def shape_like(self, linear: Any) -> None:
        settings = {"std": linear.std, "solver": linear.solver, "execution": linear.execution}
        LowRankLinear.__init__(self, linear, linear.rank, **settings)

    def fill(self, weight: torch.Tensor) -> None:
        """Set the best approximation of `weight` (O, I) in the Frobenius norm: U √S and √S Vᵀ of its singular value
        decomposition; with the randomized solver, one close to the best.

        The factors get memory of their own, since the old one may belong to the model that is converted. Pruning may have left
        a rank above that of any `weight`; the rest of the factors is zero then.
        """
        rank = min(self.rank, *weight.shape)
        self.set_factors(
            *(_randomized_factors if self.solver == "randomized" else _exact_factors)(weight.detach(), rank)
        )

    def set_factors(self, up: torch.Tensor, down: torch.Tensor) -> None:
        """Set up (O, R') and down (R', I), R' <= R; the rest of the factors is zero."""
        missing = self.rank - up.shape[1]
        self.set_parts([functional.pad(down, (0, 0, 0, missing)), functional.pad(up, (0, missing))])

    def balanced(self) -> list[torch.Tensor]:
        up, ratios = equal_columns(self.up)
        return [self.down * ratios[:, None], up]

    @property
    def selectable(self) -> bool:
        return True

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        new = super().selected(kept, outputs=outputs)
        name, axis = ("up", 0) if outputs else ("down", 1)
        setattr(new, name, nn.Parameter(taken(getattr(self, name), axis, kept)))
        return new

    def factor_cost(self, tokens: int, device_type: str, *, training: bool) -> float:
        costs = costs_of(device_type)
        return product(costs, 1, tokens, self.in_features, self.rank) + product(
            costs, 1, tokens, self.rank, self.out_features
        )

    def traced_as_factors(self) -> bool:
        return traced_as_factors(self.in_features, self.out_features, self.rank)

    def dense_cost(self, device_type: str) -> float:
        return product(costs_of(device_type), 1, self.out_features, self.rank, self.in_features)

    def prepared_factors(self, tokens: int, device_type: str) -> tuple[Any, Any]:
        return "factors", lambda: (self.down, self.up)

    def multiply(self, x: torch.Tensor, factors: Any) -> torch.Tensor:
        down, up = factors
        return functional.linear(functional.linear(x, down), up)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, execution={self.execution!r}"


def traced_as_factors(inputs: int, outputs: int, rank: int) -> bool:
    """Whether an exported product is computed by factors of this rank: if they have at most half the multiply-adds. Engines start
    a second product much faster than PyTorch does."""
    return 2 * rank * (inputs + outputs) <= inputs * outputs


def _exact_factors(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """U √S (O, R) and √S Vᵀ (R, I), fp64, of the singular value decomposition."""
    weight = weight.double()
    tall = weight.shape[0] > weight.shape[1]
    u, projected = left_vectors(weight.T if tall else weight)
    u, projected = u[:, :rank], projected[:rank]  # projected = S Vᵀ
    root = projected.norm(dim=1).sqrt()
    down = projected / root.clamp_min(torch.finfo(root.dtype).tiny)[:, None]
    return (down.T, (u * root).T) if tall else (u * root, down)


def _randomized_factors(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """U √S (O, R) and √S Vᵀ (R, I), fp32, of a randomized singular value decomposition (Halko, Martinsson and Tropp, 2011,
    https://doi.org/10.1137/090771806, algorithm 5.1 with power iterations). It draws from a seed of its own."""
    weight = weight.float()
    size = min(rank + _OVERSAMPLING, *weight.shape)
    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(weight, q=size, niter=_POWER_ITERATIONS)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, (v[:, :rank] * root).T
