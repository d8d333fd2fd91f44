"""A weight as a tensor train of cores (Novikov et al., 2015, https://arxiv.org/abs/1509.06569), a TT-matrix.

The I inputs are (n_1, ..., n_d), the O outputs (m_1, ..., m_d), and core k is (r_{k-1}, n_k, m_k, r_k) with r_0 = r_d = 1:
    Wᵀ[(i_1, ..., i_d), (j_1, ..., j_d)] = Σ_r Π_k G_k[r_{k-1}, i_k, j_k, r_k].

The product x Wᵀ takes one core after the other from either end, and none needs a transposition. With the state
(B, r_{k-1} n_k, rest), where B stands for tokens and outputs done and `rest` for inputs to come, it is a matrix
(m_k r_k, r_{k-1} n_k) times the state; the result (B, m_k, r_k rest) is the next state with B m_k in front; from the right end
it is the mirror image. Neighbouring cores are multiplied beforehand where that makes it cheaper: with two groups, a product
is two large matrix products, however many cores there are.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.layers.cost import Costs, costs_of, product
from hf_freeze.layers.factorized import TensorLinear, left_vectors

_FEW_CORES = 8  # there are 2^d orders of d cores


class TensorTrainLinear(TensorLinear):
    """`core_0` ... `core_{d-1}`. `ranks` is (1, r_1, ..., r_{d-1}, 1).

    Raises ValueError for modes of unequal number, and for ranks of the wrong number, outside 1..full rank, or of more than the
    rank before and the modes allow.
    """

    def make_parameters(self, **new: Any) -> None:
        in_modes, out_modes, ranks = self.in_modes, self.out_modes, self.ranks
        check_ranks(in_modes, out_modes, ranks)
        for k, (n, m) in enumerate(zip(in_modes, out_modes, strict=True)):
            self.register_parameter(f"core_{k}", nn.Parameter(torch.empty(ranks[k], n, m, ranks[k + 1], **new)))

    @property
    def cores(self) -> list[nn.Parameter]:
        """In order."""
        return [getattr(self, f"core_{k}") for k in range(len(self.in_modes))]

    def initialize_parameters(self) -> None:
        """Var(W) is the product of all ranks and of all cores' variances: equal for all cores, so that it is std²."""
        variance = (self.std**2 / math.prod(self.ranks)) ** (1 / len(self.in_modes))
        for core in self.cores:
            initialization.normal_(core, std=variance**0.5)
        if self.bias is not None:
            initialization.zeros_(self.bias)

    def dense_weight(self) -> torch.Tensor:
        return merge(self.cores)[0, :, :, 0].T

    def fill(self, weight: torch.Tensor) -> None:
        """From a dense weight (O, I), by TT-SVD at these ranks."""
        with torch.no_grad():
            for core, value in zip(
                self.cores, tt_svd(weight.T, self.in_modes, self.out_modes, self.ranks), strict=True
            ):
                core.copy_(value)

    def factor_cost(self, tokens: int, device_type: str, *, training: bool) -> float:
        return self._plan(tokens, device_type, training).cost

    def dense_cost(self, device_type: str) -> float:
        return merge_cost(costs_of(device_type), self.in_modes, self.out_modes, self.ranks)

    def _plan(self, tokens: int, device_type: str, training: bool) -> "Plan":
        return best_plan(self.in_modes, self.out_modes, self.ranks, tokens, device_type, training)

    def ready_factors(self, tokens: int, device_type: str) -> tuple[Any, Any]:
        plan = self._plan(tokens, device_type, self.needs_gradient())
        return plan.key, lambda: (plan, plan.matrices(self.cores))

    def multiply(self, x: torch.Tensor, ready: Any) -> torch.Tensor:
        plan, matrices = ready
        return plan.multiply(x, matrices)


def full_ranks(in_modes: Sequence[int], out_modes: Sequence[int]) -> list[int]:
    """(1, ..., 1): what each rank need not exceed, the smaller side of the matrix that it cuts the tensor into."""
    sizes = [n * m for n, m in zip(in_modes, out_modes, strict=True)]
    return [min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(len(sizes) + 1)]


def check_ranks(in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise ValueError unless the ranks fit the modes."""
    if len(in_modes) != len(out_modes):
        raise ValueError(
            f"a tensor train needs as many factors of the inputs as of the outputs, not {list(in_modes)} and {list(out_modes)}"
        )
    if len(ranks) != len(in_modes) + 1:
        raise ValueError(
            f"ranks={list(ranks)}: {len(in_modes)} cores have {len(in_modes) + 1} ranks, the first and last 1"
        )
    for k, (rank, full) in enumerate(zip(ranks, full_ranks(in_modes, out_modes), strict=True)):
        if not 1 <= rank <= full:
            raise ValueError(f"ranks={list(ranks)}: number {k} is {rank}, but must be in 1..{full}, its full rank")
        if k > 0 and rank > (most := ranks[k - 1] * in_modes[k - 1] * out_modes[k - 1]):
            raise ValueError(
                f"ranks={list(ranks)}: number {k} is {rank}, but after rank {ranks[k - 1]} the core's modes {in_modes[k - 1]} "
                f"and {out_modes[k - 1]} allow at most {most}"
            )


def tt_svd(
    matrix: torch.Tensor,
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    ranks: Sequence[int] | None = None,
    *,
    loss: float = 0.0,
) -> list[torch.Tensor]:
    """Cores of a matrix (I, O) by truncated singular value decompositions, one after the other (Oseledets, 2011, algorithm 1).

    At given `ranks`, or at the smallest that lose at most the share `loss` of the squared Frobenius norm; fp64. The squared
    error is the sum of the squares of all singular values left out.
    """
    d = len(in_modes)
    tensor = matrix.double().reshape(*in_modes, *out_modes)
    tensor = tensor.permute(*(axis for k in range(d) for axis in (k, d + k)))
    allowed = loss * tensor.square().sum() / max(d - 1, 1)
    cores, rank, rest = [], 1, tensor
    for k in range(d - 1):
        u, projected = left_vectors(rest.reshape(rank * in_modes[k] * out_modes[k], -1))
        if ranks is not None:
            following = ranks[k + 1]
        else:
            lost = projected.square().sum(1).flip(0).cumsum(0).flip(0)  # if this one and all after it are left out
            following = max(int((lost > allowed).sum()), 1)
        cores.append(u[:, :following].reshape(rank, in_modes[k], out_modes[k], following))
        rest, rank = projected[:following], following
    return [*cores, rest.reshape(rank, in_modes[-1], out_modes[-1], 1)]


def merge(cores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbouring cores as one (r, Πn, Πm, r')."""
    merged = cores[0]
    for core in cores[1:]:
        (first, n, m, _), (_, n2, m2, last) = merged.shape, core.shape
        joined = torch.tensordot(merged, core, dims=1)  # (r, n, m, n2, m2, r')
        merged = joined.transpose(2, 3).reshape(first, n * n2, m * m2, last)
    return merged


def merge_cost(costs: Costs, in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]) -> float:
    """Of `merge`, given the modes and the ranks around each."""
    total, size = 0.0, in_modes[0] * out_modes[0]
    for k in range(1, len(in_modes)):
        following = in_modes[k] * out_modes[k] * ranks[k + 1]
        total += product(costs, 1, ranks[0] * size, ranks[k], following)
        total += costs.start + costs.write * ranks[0] * size * following
        size *= in_modes[k] * out_modes[k]
    return total


class Plan:
    """An order of contraction: which neighbouring cores are multiplied beforehand, and from which end the product starts."""

    def __init__(self, in_modes: Any, out_modes: Any, ranks: Any, cuts: tuple[int, ...], from_left: bool) -> None:
        self.spans = list(zip((0, *cuts), (*cuts, len(in_modes)), strict=True))
        self.from_left = from_left
        self.key = (cuts, from_left)
        self.inputs = [math.prod(in_modes[a:b]) for a, b in self.spans]
        self.outputs = [math.prod(out_modes[a:b]) for a, b in self.spans]
        self.ranks = [ranks[a] for a, _ in self.spans] + [1]
        self.cost = 0.0

    def steps(self) -> list[tuple[int, int, int, int]]:
        """(batch per token, rows, inner, columns) of each product, in order."""
        order = range(len(self.spans)) if self.from_left else reversed(range(len(self.spans)))
        found = []
        for k in order:
            before, after = (self.outputs, self.inputs) if self.from_left else (self.inputs, self.outputs)
            rank_in, rank_out = (self.ranks[k], self.ranks[k + 1])[:: 1 if self.from_left else -1]
            found.append(
                (math.prod(before[:k]), self.outputs[k] * rank_out, self.inputs[k] * rank_in, math.prod(after[k + 1 :]))
            )
        return found

    def matrices(self, cores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """(rows, inner) of each step."""
        made = []
        for a, b in self.spans if self.from_left else self.spans[::-1]:
            core = merge(cores[a:b])  # (r, n, m, r')
            if self.from_left:
                made.append(core.permute(2, 3, 0, 1).reshape(core.shape[2] * core.shape[3], -1))
            else:
                made.append(core.permute(0, 2, 1, 3).reshape(core.shape[0] * core.shape[2], -1))
        return made

    def multiply(self, x: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """(N, I) -> (N, O)"""
        tokens = x.shape[0]
        for matrix, (batch, _, inner, columns) in zip(matrices, self.steps(), strict=True):
            if columns == 1:
                x = functional.linear(x.reshape(tokens * batch, inner), matrix)
            else:
                x = torch.matmul(matrix, x.reshape(tokens * batch, inner, columns))
        return x.reshape(tokens, math.prod(self.outputs))


@functools.lru_cache(maxsize=4096)
def best_plan(
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
    ranks: tuple[int, ...],
    tokens: int,
    device_type: str,
    training: bool,
) -> Plan:
    """The cheapest of all orders with at least two groups, of many cores at most three; while training with the cost of
    multiplying beforehand."""
    costs, best, d = costs_of(device_type), None, len(in_modes)
    for number in range(1, d if d <= _FEW_CORES else 3):
        for cuts, from_left in itertools.product(itertools.combinations(range(1, d), number), (False, True)):
            plan = Plan(in_modes, out_modes, ranks, cuts, from_left)
            plan.cost = sum(product(costs, tokens * batch, *sizes) for batch, *sizes in plan.steps())
            if training:
                plan.cost += sum(
                    merge_cost(costs, in_modes[a:b], out_modes[a:b], ranks[a : b + 1])
                    for a, b in plan.spans
                    if b - a > 1
                )
            if best is None or plan.cost < best.cost:
                best = plan
    assert best is not None  # there are at least two cores
    return best
