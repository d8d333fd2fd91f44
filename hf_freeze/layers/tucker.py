"""A weight as a Tucker decomposition of the tensor that its dimensions are factorised into.

The I inputs are (n_1, ..., n_d), the O outputs (m_1, ..., m_e). Input mode k has a factor U_k (n_k, R_k), output mode k a factor
V_k (m_k, S_k), and the core is (R_1, ..., R_d, S_1, ..., S_e), held as a matrix (ΠR, ΠS):
    Wᵀ = (U_1 ⊗ ... ⊗ U_d) · core · (V_1 ⊗ ... ⊗ V_e)ᵀ.

So it is a weight of rank min(ΠR, ΠS) whose two outer factors are Kronecker products, and a product with it is two matrix
products: the core is multiplied to one of them beforehand.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.layers.cost import costs_of, product
from hf_freeze.layers.factorized import FactorizedLinear


class TuckerLinear(FactorizedLinear):
    """`core`, and `factor_0` ... for the modes of the inputs, then of the outputs; `ranks` in that order.

    Raises ValueError for ranks of the wrong number or outside 1..mode.
    """

    def __init__(
        self,
        linear: Any,
        in_modes: Sequence[int],
        out_modes: Sequence[int],
        ranks: Sequence[int],
        *,
        std: float,
        execution: str = "auto",
    ) -> None:
        super().__init__(linear, execution)
        check_ranks(in_modes, out_modes, ranks)
        self.in_modes, self.out_modes, self.ranks = tuple(in_modes), tuple(out_modes), tuple(ranks)
        self.std = std
        self.inner = math.prod(ranks[: len(in_modes)])
        self.outer = math.prod(ranks[len(in_modes) :])
        new = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.core = nn.Parameter(torch.empty(self.inner, self.outer, **new))
        for k, (mode, rank) in enumerate(zip((*in_modes, *out_modes), ranks, strict=True)):
            self.register_parameter(f"factor_{k}", nn.Parameter(torch.empty(mode, rank, **new)))
        self.initialize_parameters()

    @property
    def factors(self) -> list[nn.Parameter]:
        """Of the modes of the inputs, then of the outputs."""
        return [getattr(self, f"factor_{k}") for k in range(len(self.ranks))]

    def initialize_parameters(self) -> None:
        """Var(W) is the product of all ranks and of the variances of core and factors: equal for all, so that it is std²."""
        variance = (self.std**2 / math.prod(self.ranks)) ** (1 / (len(self.ranks) + 1))
        for tensor in (self.core, *self.factors):
            initialization.normal_(tensor, std=variance**0.5)
        if self.bias is not None:
            initialization.zeros_(self.bias)

    def _outer_factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(I, ΠR) and (O, ΠS)"""
        factors = self.factors
        return kronecker(factors[: len(self.in_modes)]), kronecker(factors[len(self.in_modes) :])

    def _two_factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """down (R, I) and up (O, R) of the same weight, R = min(ΠR, ΠS)."""
        inputs, outputs = self._outer_factors()
        if self.inner <= self.outer:
            return inputs.T, outputs @ self.core.T
        return (inputs @ self.core).T, outputs

    def dense_weight(self) -> torch.Tensor:
        down, up = self._two_factors()
        return up @ down

    def fill(self, weight: torch.Tensor) -> None:
        """From a dense weight (O, I), by HOSVD and sweeps of HOOI at these ranks."""
        core, factors = tucker(weight.T.reshape(*self.in_modes, *self.out_modes), self.ranks)
        with torch.no_grad():
            self.core.copy_(core.reshape(self.inner, self.outer))
            for factor, value in zip(self.factors, factors, strict=True):
                factor.copy_(value)

    def factor_cost(self, tokens: int, device_type: str, *, training: bool) -> float:
        costs, rank = costs_of(device_type), min(self.inner, self.outer)
        cost = product(costs, 1, tokens, self.in_features, rank) + product(costs, 1, tokens, rank, self.out_features)
        return cost + self._two_factors_cost(device_type) if training else cost

    def _two_factors_cost(self, device_type: str) -> float:
        costs, rank = costs_of(device_type), min(self.inner, self.outer)
        long = self.out_features if self.inner <= self.outer else self.in_features
        kroneckers = costs.write * (self.in_features * self.inner + self.out_features * self.outer)
        return len(self.ranks) * costs.start + kroneckers + product(costs, 1, long, max(self.inner, self.outer), rank)

    def dense_cost(self, device_type: str) -> float:
        rank = min(self.inner, self.outer)
        return self._two_factors_cost(device_type) + product(
            costs_of(device_type), 1, self.out_features, rank, self.in_features
        )

    def ready_factors(self, tokens: int, device_type: str) -> tuple[Any, Any]:
        return "factors", self._two_factors

    def multiply(self, x: torch.Tensor, ready: Any) -> torch.Tensor:
        down, up = ready
        return functional.linear(functional.linear(x, down), up)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.in_modes} x {self.out_modes}, ranks={self.ranks}, execution={self.execution!r}"


def check_ranks(in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise ValueError unless the ranks fit the modes."""
    modes = (*in_modes, *out_modes)
    if len(ranks) != len(modes):
        raise ValueError(f"ranks={list(ranks)}: there are {len(modes)} modes, {list(modes)}, each with a rank")
    for k, (rank, mode) in enumerate(zip(ranks, modes, strict=True)):
        if not 1 <= rank <= mode:
            raise ValueError(f"ranks={list(ranks)}: number {k} is {rank}, but must be in 1..{mode}, its mode")


def kronecker(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(n_1, r_1), (n_2, r_2), ... -> (Πn, Πr)"""
    return functools.reduce(torch.kron, factors)


def tucker(
    tensor: torch.Tensor, ranks: Sequence[int] | None = None, *, loss: float = 0.0, sweeps: int = 3
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(core, factors) of a tensor by HOSVD and `sweeps` of HOOI (De Lathauwer et al., 2000), in fp64.

    At given `ranks`, or at the smallest of each mode that together lose at most the share `loss` of the squared norm in HOSVD
    (its squared error is at most the sum of what the modes leave out). Each factor (mode, rank) has orthonormal columns.
    """
    tensor = tensor.double()
    factors = []
    allowed = loss * tensor.square().sum() / tensor.ndim
    for mode in range(tensor.ndim):
        energies, vectors = _mode_vectors(tensor, mode)
        if ranks is not None:
            rank = ranks[mode]
        else:
            lost = energies.clamp_min(0).flip(0).cumsum(0).flip(0)
            rank = max(int((lost > allowed).sum()), 1)
        factors.append(vectors[:, :rank])
    for _ in range(sweeps if any(f.shape[1] < f.shape[0] for f in factors) else 0):
        for mode in range(tensor.ndim):
            projected = _project(tensor, factors, leave_out=mode)
            factors[mode] = _mode_vectors(projected, mode)[1][:, : factors[mode].shape[1]]
    return _project(tensor, factors), factors


def _mode_vectors(tensor: torch.Tensor, mode: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared singular values, descending, and left singular vectors of the unfolding along `mode`, which has few rows."""
    unfolded = tensor.movedim(mode, 0).reshape(tensor.shape[mode], -1)
    energies, vectors = torch.linalg.eigh(unfolded @ unfolded.T)
    return energies.flip(0), vectors.flip(1)


def _project(tensor: torch.Tensor, factors: Sequence[torch.Tensor], leave_out: int | None = None) -> torch.Tensor:
    for mode, factor in enumerate(factors):
        if mode != leave_out:
            tensor = (tensor.movedim(mode, -1) @ factor).movedim(-1, mode)
    return tensor
