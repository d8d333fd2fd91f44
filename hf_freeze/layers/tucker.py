"""A weight as a Tucker decomposition of a tensor.

The I inputs have modes (n_1, ..., n_d), the O outputs (m_1, ..., m_e). Input mode k has a factor U_k (n_k, R_k), output mode k a
factor V_k (m_k, S_k). The core is (R_1, ..., R_d, S_1, ..., S_e), stored as a matrix (ΠR, ΠS):
    Wᵀ = (U_1 ⊗ ... ⊗ U_d) · core · (V_1 ⊗ ... ⊗ V_e)ᵀ.

The product x Wᵀ applies the factors of the inputs, then the core, then the factors of the outputs. Neighbouring factors, and
the core with the factors of one side, are merged beforehand where this is cheaper. Fully merged, the product is two matrix
products, as for a weight of rank min(ΠR, ΠS).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers.cost import Costs, costs_of, product
from hf_freeze.layers.derived import traceable
from hf_freeze.layers.factorized import TensorLinear, equal_columns
from hf_freeze.layers.tensor_train import ContractionPlan, best_plan, merge_cost


class TuckerLinear(TensorLinear):
    """Parameters `core`, and `factor_0` ... for the modes of the inputs, then of the outputs; `ranks` in the same order.

    Raises ValueError for ranks of the wrong number or outside 1..mode.
    """

    def make_parameters(self, **new: Any) -> None:
        in_modes, out_modes, ranks = self.in_modes, self.out_modes, self.ranks
        check_ranks(in_modes, out_modes, ranks)
        self.inner = math.prod(ranks[: len(in_modes)])
        self.outer = math.prod(ranks[len(in_modes) :])
        self.core = nn.Parameter(torch.empty(self.inner, self.outer, **new))
        for k, (mode, rank) in enumerate(zip((*in_modes, *out_modes), ranks, strict=True)):
            self.register_parameter(f"factor_{k}", nn.Parameter(torch.empty(mode, rank, **new)))

    @property
    def part_names(self) -> list[str]:  # type: ignore[override]
        return ["core", *(f"factor_{k}" for k in range(len(self.ranks)))]

    @property
    def factors(self) -> list[nn.Parameter]:
        """The factors of the input modes, then of the output modes."""
        return [getattr(self, name) for name in self.part_names[1:]]

    def balanced(self) -> list[torch.Tensor]:
        core, *factors = self.parts()
        pairs = [equal_columns(factor) for factor in factors]
        ratios = [ratio for _, ratio in pairs]
        inputs, outputs = kronecker(ratios[: len(self.in_modes)]), kronecker(ratios[len(self.in_modes) :])
        return [core.float() * inputs[:, None] * outputs, *(factor for factor, _ in pairs)]

    def product(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        core, *factors = parts
        inputs, outputs = kronecker(factors[: len(self.in_modes)]), kronecker(factors[len(self.in_modes) :])
        # Two matrices with min(ΠR, ΠS) columns.
        return (outputs @ core.T) @ inputs.T if self.inner <= self.outer else outputs @ (inputs @ core).T

    def fill(self, weight: torch.Tensor) -> None:
        """Set core and factors from a dense weight (O, I), by HOSVD and sweeps of HOOI at these ranks."""
        core, factors = tucker(weight.T.reshape(*self.in_modes, *self.out_modes), self.ranks)
        self.set_parts([core.reshape(self.inner, self.outer), *factors])

    def _plan(self, tokens: int, device_type: str, training: bool) -> "TuckerPlan":
        return traceable(best_tucker_plan)(self.in_modes, self.out_modes, self.ranks, tokens, device_type, training)

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

    def matrices(self, plan: "TuckerPlan") -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        """The matrices of the input factors, of the core with the factors merged into it, and of the output factors."""
        core, *factors = self.used_parts()
        ins, outs = factors[: len(self.in_modes)], factors[len(self.in_modes) :]
        middle = core.T
        if plan.inputs is None:
            middle = middle @ kronecker(ins).T
        if plan.outputs is None:
            middle = kronecker(outs) @ middle
        return (
            plan.inputs.matrices([factor[None, :, :, None] for factor in ins]) if plan.inputs else [],
            middle.contiguous(),
            plan.outputs.matrices([factor.T[None, :, :, None] for factor in outs]) if plan.outputs else [],
        )


@dataclass(frozen=True)
class TuckerPlan:
    """The contraction plan of each side's factors; None: they are merged into the core beforehand."""

    inputs: ContractionPlan | None
    outputs: ContractionPlan | None
    cost: float

    @property
    def key(self) -> Any:
        return tuple(None if plan is None else plan.key for plan in (self.inputs, self.outputs))

    def multiply(self, x: torch.Tensor, matrices: Any) -> torch.Tensor:
        """(N, I) -> (N, O)"""
        inputs, middle, outputs = matrices
        if self.inputs is not None:
            x = self.inputs.multiply(x, inputs)
        x = functional.linear(x, middle)
        return x if self.outputs is None else self.outputs.multiply(x, outputs)


@functools.lru_cache(maxsize=4096)
def best_tucker_plan(
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
    ranks: tuple[int, ...],
    tokens: int,
    device_type: str,
    training: bool,
) -> TuckerPlan:
    """The cheapest plan. In training, the cost of merging counts too."""
    costs = costs_of(device_type)
    inner, outer = ranks[: len(in_modes)], ranks[len(in_modes) :]
    first = _side_plan(in_modes, inner, tokens, device_type, training)
    last = _side_plan(outer, out_modes, tokens, device_type, training)
    plans = []
    for left, right in ((first, last), (None, last), (first, None)):
        inputs = math.prod(inner if left else in_modes)
        outputs = math.prod(outer if right else out_modes)
        cost = product(costs, 1, tokens, inputs, outputs) + sum(plan.cost for plan in (left, right) if plan)
        if training and left is None:
            cost += _kronecker_cost(costs, in_modes, inner) + product(costs, 1, outputs, math.prod(inner), inputs)
        if training and right is None:
            cost += _kronecker_cost(costs, outer, out_modes) + product(costs, 1, outputs, math.prod(outer), inputs)
        plans.append(TuckerPlan(left, right, cost))
    return _cheapest(plans)


def _side_plan(
    sizes: tuple[int, ...], results: tuple[int, ...], tokens: int, device_type: str, training: bool
) -> ContractionPlan:
    """The cheapest plan of a product with the factors of one side: a Kronecker product is a tensor train with all ranks 1. The
    candidates include a single group of all factors."""
    costs, ranks = costs_of(device_type), (1,) * (len(sizes) + 1)
    one_group = ContractionPlan(sizes, results, ranks, (), False)
    one_group.cost = product(costs, tokens, math.prod(results), math.prod(sizes), 1)
    if training:
        one_group.cost += _kronecker_cost(costs, sizes, results)
    if len(sizes) == 1:
        return one_group
    return _cheapest([one_group, traceable(best_plan)(sizes, results, ranks, tokens, device_type, training)])


def _cheapest(plans: list[Any]) -> Any:
    best = plans[0]  # min(key=) cannot be traced by torch.compile
    for plan in plans[1:]:
        if plan.cost < best.cost:
            best = plan
    return best


def _kronecker_cost(costs: Costs, sizes: tuple[int, ...], results: tuple[int, ...]) -> float:
    return merge_cost(costs, sizes, results, (1,) * (len(sizes) + 1))


def check_ranks(in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise ValueError unless the ranks fit the modes."""
    modes = (*in_modes, *out_modes)
    if len(ranks) != len(modes):
        raise ValueError(f"ranks={list(ranks)}: the {len(modes)} modes {list(modes)} need one rank each")
    for k, (rank, mode) in enumerate(zip(ranks, modes, strict=True)):
        if not 1 <= rank <= mode:
            raise ValueError(f"ranks={list(ranks)}: rank {k} is {rank}, but must be in 1..{mode}, its mode")


def kronecker(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(n_1, r_1), (n_2, r_2), ... -> (Πn, Πr)"""
    return functools.reduce(torch.kron, factors)


def tucker(
    tensor: torch.Tensor, ranks: Sequence[int] | None = None, *, loss: float = 0.0, sweeps: int = 3
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(core, factors) of a tensor by HOSVD and `sweeps` of HOOI (De Lathauwer et al., 2000), in fp64.

    Ranks are `ranks`, or else the smallest for which HOSVD loses at most the share `loss` of the squared norm; each mode may
    lose an equal part of it, since the squared error is at most the sum of the losses of the modes. Each factor (mode, rank)
    has orthonormal columns.
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
        partial = tensor  # projected on the new factors of this sweep, so that it shrinks from mode to mode
        for mode in range(tensor.ndim):
            projected = _project(partial, factors, range(mode + 1, tensor.ndim))
            factors[mode] = _mode_vectors(projected, mode)[1][:, : factors[mode].shape[1]]
            partial = _project(partial, factors, (mode,))
    return _project(tensor, factors, range(tensor.ndim)), factors


def _mode_vectors(tensor: torch.Tensor, mode: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared singular values, descending, and left singular vectors of the unfolding along `mode`."""
    unfolded = tensor.movedim(mode, 0).reshape(tensor.shape[mode], -1)
    energies, vectors = torch.linalg.eigh(unfolded @ unfolded.T)
    return energies.flip(0), vectors.flip(1)


def _project(tensor: torch.Tensor, factors: Sequence[torch.Tensor], modes: Iterable[int]) -> torch.Tensor:
    for mode in modes:
        tensor = (tensor.movedim(mode, -1) @ factors[mode]).movedim(-1, mode)
    return tensor
