"""Round a weight to few bits so that its outputs change least: GPTQ (Frantar et al., 2022, https://arxiv.org/abs/2210.17323).

Columns are rounded one after another, and the error of each is made up for by the columns that follow. With H the Gram,
P = H⁻¹ = UᵀU and U upper triangular, rounding column j to q changes the later columns by -(w - q) / U_jj · U_j, and costs
((w - q) / U_jj)², exactly.

- Order: columns with much input first, since those after them make up for their errors. Neighbours that share a step stay
  together, so that the result is stored as any other.
- Steps: of some shares of the largest value, the one with the least Σ_j (w - q)² / U_jj², which is the cost above.
- Afterwards, sweeps of coordinate descent: each step becomes the best for its numbers, and each number the best for all others.
- A row that plain rounding with the steps of the grid gives less error keeps that.

Shapes: O outputs, I inputs, B columns that share a step, G steps of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_freeze.solvers.moments import Moments, cholesky, inverse, problem
from hf_freeze.solvers.threads import one_thread

_BLOCK = 128  # columns between two updates of all later ones
_PART = 16  # columns of a block between two updates of the rest of the block


class Grid(Protocol):
    """Values that a column can take: a number times the step of its row."""

    def steps(self, block: Tensor, costs: Tensor) -> Tensor:
        """(O, B), (B,) -> (O,): the step of each row, for errors whose squares cost `costs`."""
        ...

    def numbers(self, values: Tensor, steps: Tensor) -> Tensor:
        """(O, B), (O, 1) -> (O, B): the number nearest to each value, 0 where the step is 0."""
        ...


@dataclass(frozen=True)
class Symmetric:
    """The integers -Q..Q. `shares` of the largest value are tried as that of the number Q."""

    levels: int  # Q
    shares: tuple[float, ...] = tuple(1 - i / 40 for i in range(25))

    def steps(self, block: Tensor, costs: Tensor) -> Tensor:
        largest = block.abs().amax(1)
        best, least = largest / self.levels, torch.full_like(largest, float("inf"))
        for share in self.shares:
            steps = largest * (share / self.levels)
            error = (block - self.numbers(block, steps[:, None]) * steps[:, None]).square() @ costs
            best, least = torch.where(error < least, steps, best), torch.minimum(error, least)
        return best

    def numbers(self, values: Tensor, steps: Tensor) -> Tensor:
        return (values / torch.where(steps > 0, steps, 1)).round().clamp(-self.levels, self.levels)


@dataclass(frozen=True)
class Rounded:
    """A weight on a grid, and its bias."""

    numbers: Tensor  # (O, I), fp64 or fp32
    steps: Tensor  # (O, G) fp32
    group: int  # neighbouring columns that share a step
    bias: Tensor | None  # (O,)

    def weight(self) -> Tensor:
        """(O, I) fp32"""
        return self.numbers.float() * _spread(self.steps, self.group, self.numbers.shape[1])


def gptq(
    weight: Tensor,
    bias: Tensor | None,
    moments: Moments,
    grid: Grid,
    *,
    group: int | None = None,
    sweeps: int = 2,
) -> Rounded:
    """Round W (O, I), with b (O,) or None, to a grid whose steps belong to `group` neighbouring columns of a row (the last may be
    fewer), or to whole rows. `sweeps`: of coordinate descent, each as long as GPTQ itself.

    Raises ValueError for a group below 1.
    """
    inputs = weight.shape[1]
    size = inputs if group is None else group
    if size < 1:
        raise ValueError(f"group={group}: must be at least 1")
    solved = problem(weight, bias, moments)
    target, gram = solved.target, solved.gram
    spans = _ordered(gram.diagonal(), size)
    order = torch.cat(spans)
    factor = cholesky(inverse(gram)[order][:, order]).T
    with one_thread():
        numbers, steps = _in_order(target[:, order], factor, spans, grid, size)
        numbers = numbers[:, order.argsort()]
        for _ in range(sweeps):
            _descend(target, gram, numbers, steps, grid, size)
        plain = _plain(target, gram.diagonal(), grid, size)
    errors = []
    for candidate, its_steps in ((numbers, steps), plain):
        difference = candidate * _spread(its_steps, size, inputs) - target
        errors.append((difference @ gram * difference).sum(1, keepdim=True))
    better = errors[1] < errors[0]
    numbers, steps = torch.where(better, plain[0], numbers), torch.where(better, plain[1], steps)
    return Rounded(numbers, steps.float(), size, solved.bias(numbers * _spread(steps, size, inputs)))


def _spread(steps: Tensor, size: int, inputs: int) -> Tensor:
    """(O, G) -> (O, I)"""
    return steps.repeat_interleave(size, 1)[:, :inputs]


def _plain(target: Tensor, diagonal: Tensor, grid: Grid, size: int) -> tuple[Tensor, Tensor]:
    """Each value to its nearest: numbers (O, I), steps (O, G)."""
    blocks = target.split(size, 1)
    steps = [_stored(grid.steps(block, costs)) for block, costs in zip(blocks, diagonal.split(size), strict=True)]
    numbers = [grid.numbers(block, step[:, None]) for block, step in zip(blocks, steps, strict=True)]
    return torch.cat(numbers, 1), torch.stack(steps, 1)


def _stored(steps: Tensor) -> Tensor:
    """As fp32, in which steps are stored."""
    return steps.float().to(steps.dtype)


def _in_order(w: Tensor, u: Tensor, spans: list[Tensor], grid: Grid, size: int) -> tuple[Tensor, Tensor]:
    """GPTQ of the columns in their order, w (O, I), in place, with U (I, I) and the columns of each group: numbers (O, I) in this
    order, steps (O, G)."""
    numbers, steps, start = torch.empty_like(w), w.new_empty(len(w), len(spans)), 0
    for span in spans:
        stop = start + len(span)
        step = _stored(grid.steps(w[:, start:stop], u.diagonal()[start:stop] ** -2))[:, None]
        steps[:, int(span.min()) // size] = step[:, 0]
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            block, errors = w[:, first:last], w.new_empty(len(w), last - first)
            for begin, end in _parts(last - first):
                for j in range(begin, end):
                    column, row = block[:, j : j + 1], u[first + j : first + j + 1, first + j : first + end]
                    number = grid.numbers(column, step)
                    numbers[:, first + j] = number[:, 0]
                    errors[:, j : j + 1] = (column - number * step) / row[:, :1]
                    block[:, j:end].addmm_(errors[:, j : j + 1], row, alpha=-1)
                block[:, end:].addmm_(
                    errors[:, begin:end], u[first + begin : first + end, first + end : last], alpha=-1
                )
            w[:, last:].addmm_(errors, u[first:last, last:], alpha=-1)
        start = stop
    return numbers, steps


def _parts(columns: int) -> Iterator[tuple[int, int]]:
    """(first, after the last) of the parts of a block."""
    for begin in range(0, columns, _PART):
        yield begin, min(begin + _PART, columns)


def _ordered(diagonal: Tensor, size: int) -> list[Tensor]:
    """The columns of each group in the order of rounding: by descending mean square of the input, as the groups."""
    spans = torch.arange(len(diagonal), device=diagonal.device).split(size)
    spans = [span[diagonal[span].argsort(descending=True, stable=True)] for span in spans]
    return sorted(spans, key=lambda span: -float(diagonal[span].mean()))


def _descend(target: Tensor, gram: Tensor, numbers: Tensor, steps: Tensor, grid: Grid, size: int) -> None:
    """A sweep of coordinate descent on numbers (O, I) and steps (O, G), in place: the error never grows.

    `slope` is (W' - T) H: half the derivative of the error. Column j alone is best at w' - slope_j / H_jj.
    """
    inputs = target.shape[1]
    slope = (numbers * _spread(steps, size, inputs) - target) @ gram
    for index, start in enumerate(range(0, inputs, size)):
        at = slice(start, min(start + size, inputs))
        group, step = numbers[:, at], steps[:, index]
        curvature = (group @ gram[at, at] * group).sum(1)
        best = _stored(step - (slope[:, at] * group).sum(1) / torch.where(curvature > 0, curvature, 1))
        best = torch.where(best > 0, best, step)
        slope.addmm_((best - step)[:, None] * group, gram[at])
        steps[:, index] = best
    for first in range(0, inputs, _BLOCK):
        block = slice(first, min(first + _BLOCK, inputs))
        here, local = slope[:, block].clone(), gram[block, block]
        changes = torch.zeros_like(here)
        for begin, end in _parts(here.shape[1]):
            for j in range(begin, end):
                column = slice(first + j, first + j + 1)
                step = steps[:, [(first + j) // size]]
                value = numbers[:, column] * step
                number = grid.numbers(value - here[:, j : j + 1] / local[j, j], step)
                changes[:, j : j + 1] = number * step - value
                numbers[:, column] = number
                here[:, j:end].addmm_(changes[:, j : j + 1], local[j : j + 1, j:end])
            here[:, end:].addmm_(changes[:, begin:end], local[begin:end, end:])
        slope.addmm_(changes, gram[block])
