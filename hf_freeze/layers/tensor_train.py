"""A weight as a tensor train of cores, a TT-matrix (Novikov et al., 2015, https://arxiv.org/abs/1509.06569).

The I inputs have modes (n_1, ..., n_d), the O outputs (m_1, ..., m_d). Core k is (r_{k-1}, n_k, m_k, r_k) with r_0 = r_d = 1:
    Wᵀ[(i_1, ..., i_d), (j_1, ..., j_d)] = Σ_r Π_k G_k[r_{k-1}, i_k, j_k, r_k].

The product x Wᵀ contracts one core after another, from the left or the right end, without a transposition. From the left, the
state is (B, r_{k-1} n_k, rest): B combines the tokens and the finished outputs, `rest` the remaining inputs. A step multiplies
a matrix (m_k r_k, r_{k-1} n_k) by the state; the result (B, m_k, r_k rest) is the next state with B m_k in front. From the right
end, everything is mirrored. Groups of neighbouring cores are merged beforehand where this is cheaper: with two groups, the
product is two large matrix products, however many cores there are.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers.cost import Costs, costs_of, product
from hf_freeze.layers.derived import traceable
from hf_freeze.layers.factorized import TensorLinear, equal_columns, left_vectors

_FEW_CORES = 8  # up to this number d of cores, all plans are compared, about 2^d


class TensorTrainLinear(TensorLinear):
    """Parameters `core_0` ... `core_{d-1}`. `ranks` is (1, r_1, ..., r_{d-1}, 1).

    Raises ValueError if inputs and outputs have different numbers of modes, and for ranks of the wrong number, outside
    1..full rank, or above the previous rank times the modes of its core.
    """

    def make_parameters(self, **new: Any) -> None:
        in_modes, out_modes, ranks = self.in_modes, self.out_modes, self.ranks
        check_ranks(in_modes, out_modes, ranks)
        for k, (n, m) in enumerate(zip(in_modes, out_modes, strict=True)):
            self.register_parameter(f"core_{k}", nn.Parameter(torch.empty(ranks[k], n, m, ranks[k + 1], **new)))

    @property
    def part_names(self) -> list[str]:  # type: ignore[override]
        return [f"core_{k}" for k in range(len(self.in_modes))]

    @property
    def cores(self) -> list[nn.Parameter]:
        """The cores in order."""
        return [getattr(self, name) for name in self.part_names]

    def product(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return merge(parts)[0, :, :, 0].T

    def fill(self, weight: torch.Tensor) -> None:
        """Set the cores from a dense weight (O, I) by TT-SVD at these ranks."""
        self.set_parts(tt_svd(weight.T, self.in_modes, self.out_modes, self.ranks))

    def balanced(self) -> list[torch.Tensor]:
        core, *others = [part.float() for part in self.parts()]
        result = []
        for following in others:
            equal, ratios = equal_columns(core.flatten(0, 2))
            result.append(equal.view_as(core))
            core = following * ratios[:, None, None, None]
        return [*result, core]

    def dense_cost(self, device_type: str) -> float:
        return merge_cost(costs_of(device_type), self.in_modes, self.out_modes, self.ranks)

    def _plan(self, tokens: int, device_type: str, training: bool) -> "ContractionPlan":
        return traceable(best_plan)(self.in_modes, self.out_modes, self.ranks, tokens, device_type, training)

    def matrices(self, plan: "ContractionPlan") -> list[torch.Tensor]:
        return plan.matrices(self.used_parts())


def full_ranks(in_modes: Sequence[int], out_modes: Sequence[int]) -> list[int]:
    """(1, ..., 1): the largest useful value of each rank, the smaller side of the matrix unfolded at this position."""
    sizes = [n * m for n, m in zip(in_modes, out_modes, strict=True)]
    return [min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(len(sizes) + 1)]


def check_ranks(in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise ValueError unless the ranks fit the modes."""
    if len(in_modes) != len(out_modes):
        raise ValueError(
            f"a tensor train needs equally many modes of inputs and outputs, not {list(in_modes)} and {list(out_modes)}"
        )
    if len(ranks) != len(in_modes) + 1:
        raise ValueError(
            f"ranks={list(ranks)}: {len(in_modes)} cores need {len(in_modes) + 1} ranks, the first and last 1"
        )
    for k, (rank, full) in enumerate(zip(ranks, full_ranks(in_modes, out_modes), strict=True)):
        if not 1 <= rank <= full:
            raise ValueError(f"ranks={list(ranks)}: rank {k} is {rank}, but must be in 1..{full}, its full rank")
        if k > 0 and rank > (limit := ranks[k - 1] * in_modes[k - 1] * out_modes[k - 1]):
            raise ValueError(
                f"ranks={list(ranks)}: rank {k} is {rank}, but must be at most {limit}: the previous rank {ranks[k - 1]} times "
                f"the modes {in_modes[k - 1]} and {out_modes[k - 1]}"
            )


def tt_svd(
    matrix: torch.Tensor,
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    ranks: Sequence[int] | None = None,
    *,
    loss: float = 0.0,
) -> list[torch.Tensor]:
    """Cores of a matrix (I, O), fp64, by successive truncated singular value decompositions (Oseledets, 2011, algorithm 1).

    Ranks are `ranks`, or else the smallest that lose at most the share `loss` of the squared Frobenius norm. The squared error
    is the sum of the squared singular values that were cut off.
    """
    d = len(in_modes)
    tensor = matrix.double().reshape(*in_modes, *out_modes)
    tensor = tensor.permute(*(axis for k in range(d) for axis in (k, d + k)))
    allowed = loss * tensor.square().sum() / max(d - 1, 1)
    cores, rank, rest = [], 1, tensor
    for k in range(d - 1):
        u, projected = left_vectors(rest.reshape(rank * in_modes[k] * out_modes[k], -1))
        if ranks is not None:
            next_rank = ranks[k + 1]
        else:
            lost = (
                projected.square().sum(1).flip(0).cumsum(0).flip(0)
            )  # entry i: the loss if i and all later ones are cut off
            next_rank = max(int((lost > allowed).sum()), 1)
        cores.append(u[:, :next_rank].reshape(rank, in_modes[k], out_modes[k], next_rank))
        rest, rank = projected[:next_rank], next_rank
    return [*cores, rest.reshape(rank, in_modes[-1], out_modes[-1], 1)]


def merge(cores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Merges neighbouring cores into one (r, Πn, Πm, r')."""
    merged = cores[0]
    for core in cores[1:]:
        (first, n, m, _), (_, n2, m2, last) = merged.shape, core.shape
        joined = torch.tensordot(merged, core, dims=1)  # (r, n, m, n2, m2, r')
        merged = joined.transpose(2, 3).reshape(first, n * n2, m * m2, last)
    return merged


def merge_cost(costs: Costs, in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]) -> float:
    """The cost of `merge` for cores with these modes and ranks."""
    total, size = 0.0, in_modes[0] * out_modes[0]
    for k in range(1, len(in_modes)):
        next_size = in_modes[k] * out_modes[k] * ranks[k + 1]
        total += product(costs, 1, ranks[0] * size, ranks[k], next_size)
        total += costs.start + costs.write * ranks[0] * size * next_size
        size *= in_modes[k] * out_modes[k]
    return total


class ContractionPlan:
    """An order of contraction: the groups of neighbouring cores to merge beforehand, and the end where the product starts."""

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
        steps = []
        for k in order:
            before, after = (self.outputs, self.inputs) if self.from_left else (self.inputs, self.outputs)
            rank_in, rank_out = (self.ranks[k], self.ranks[k + 1])[:: 1 if self.from_left else -1]
            steps.append(
                (math.prod(before[:k]), self.outputs[k] * rank_out, self.inputs[k] * rank_in, math.prod(after[k + 1 :]))
            )
        return steps

    def matrices(self, cores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The matrix (rows, inner) of each step."""
        matrices = []
        for a, b in self.spans if self.from_left else self.spans[::-1]:
            core = merge(cores[a:b])  # (r, n, m, r')
            if self.from_left:
                matrices.append(core.permute(2, 3, 0, 1).reshape(core.shape[2] * core.shape[3], -1))
            else:
                matrices.append(core.permute(0, 2, 1, 3).reshape(core.shape[0] * core.shape[2], -1))
        return matrices

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
) -> ContractionPlan:
    """The cheapest plan with at least two groups; with many cores, at most three groups. In training, the cost of merging
    counts too."""
    costs, best, d = costs_of(device_type), None, len(in_modes)
    for number in range(1, d if d <= _FEW_CORES else 3):
        for cuts, from_left in itertools.product(itertools.combinations(range(1, d), number), (False, True)):
            plan = ContractionPlan(in_modes, out_modes, ranks, cuts, from_left)
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
