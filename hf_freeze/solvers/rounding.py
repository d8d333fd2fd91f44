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
        """The number nearest to each value, 0 where the step is 0; of one shape, or of shapes that broadcast."""
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
    numbers, steps = _in_order(target[:, order], factor, spans, grid, size)
    numbers = numbers[:, order.argsort()]
    difference = numbers * _spread(steps, size, inputs) - target
    slope = difference @ gram  # half the derivative of the error
    for _ in range(sweeps):
        _descend(slope, gram, numbers, steps, grid, size)
    difference = numbers * _spread(steps, size, inputs) - target
    error = (slope * difference).sum(1, keepdim=True)
    plain, plain_steps = _plain(target, gram.diagonal(), grid, size)
    difference = plain * _spread(plain_steps, size, inputs) - target
    better = (difference @ gram * difference).sum(1, keepdim=True) < error
    numbers, steps = torch.where(better, plain, numbers), torch.where(better, plain_steps, steps)
    return Rounded(numbers, steps.float(), size, solved.bias(numbers * _spread(steps, size, inputs)))


def _spread(steps: Tensor, size: int, inputs: int) -> Tensor:
    """(O, G) -> (O, I)"""
    return steps.repeat_interleave(size, 1)[:, :inputs]


def _plain(target: Tensor, diagonal: Tensor, grid: Grid, size: int) -> tuple[Tensor, Tensor]:
    """Each value to its nearest: numbers (O, I), steps (O, G)."""
    blocks = target.split(size, 1)
    with one_thread():
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
        with one_thread():
            step = _stored(grid.steps(w[:, start:stop], u.diagonal()[start:stop] ** -2))
        steps[:, int(span.min()) // size] = step
        for first in range(start, stop, _BLOCK):
            at = slice(first, min(first + _BLOCK, stop))
            numbers[:, at], errors = _round_block(w[:, at], u[at, at], step, grid)
            w[:, at.stop :].addmm_(errors, u[at, at.stop :], alpha=-1)
        start = stop
    return numbers, steps


def _round_block(w: Tensor, u: Tensor, step: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """GPTQ of the columns w (O, B), with U (B, B) and the step of each row (O,): their numbers and errors, (O, B) twice."""
    columns = _columns(w)
    numbers, errors = torch.empty_like(columns), torch.empty_like(columns)
    with one_thread():
        for begin, end in _parts(len(columns)):
            for j in range(begin, end):
                numbers[j] = grid.numbers(columns[j], step)
                errors[j] = (columns[j] - numbers[j] * step) / u[j, j]
                columns[j:end].addmm_(u[j : j + 1, j:end].T, errors[j : j + 1], alpha=-1)
            columns[end:].addmm_(u[begin:end, end:].T, errors[begin:end], alpha=-1)
    return numbers.T, errors.T


def _columns(block: Tensor) -> Tensor:
    """(O, B) -> (B, O), a copy whose columns lie together in memory: loops that go through columns take half of the time."""
    return block.T.clone(memory_format=torch.contiguous_format)


def _parts(columns: int) -> Iterator[tuple[int, int]]:
    """(first, after the last) of the parts of a block."""
    for begin in range(0, columns, _PART):
        yield begin, min(begin + _PART, columns)


def _ordered(diagonal: Tensor, size: int) -> list[Tensor]:
    """The columns of each group in the order of rounding: by descending mean square of the input, as the groups."""
    spans = torch.arange(len(diagonal), device=diagonal.device).split(size)
    spans = [span[diagonal[span].argsort(descending=True, stable=True)] for span in spans]
    return sorted(spans, key=lambda span: -float(diagonal[span].mean()))


def _descend(slope: Tensor, gram: Tensor, numbers: Tensor, steps: Tensor, grid: Grid, size: int) -> None:
    """A sweep of coordinate descent on numbers (O, I) and steps (O, G), in place: the error never grows.

    `slope` (O, I), kept up to date, is (W' - T) H. Column j alone is best at w' - slope_j / H_jj.
    """
    inputs = slope.shape[1]
    for index, start in enumerate(range(0, inputs, size)):
        at = slice(start, min(start + size, inputs))
        group, step = numbers[:, at], steps[:, index]
        with one_thread():
            curvature = (group @ gram[at, at] * group).sum(1)
            best = _stored(step - (slope[:, at] * group).sum(1) / torch.where(curvature > 0, curvature, 1))
            best = torch.where(best > 0, best, step)
            change = (best - step)[:, None] * group
        slope.addmm_(change, gram[at])
        steps[:, index] = best
    for first in range(0, inputs, _BLOCK):
        at = slice(first, min(first + _BLOCK, inputs))
        of_columns = [index // size for index in range(at.start, at.stop)]
        numbers[:, at], changes = _descend_block(numbers[:, at], steps[:, of_columns], slope[:, at], gram[at, at], grid)
        slope.addmm_(changes, gram[at])


def _descend_block(numbers: Tensor, steps: Tensor, slope: Tensor, gram: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Coordinate descent on numbers with their steps and slopes, (O, B) each, and H (B, B): new numbers, and the changes of the
    weight, (O, B) twice."""
    numbers, steps, slope = _columns(numbers), _columns(steps), _columns(slope)
    changes = torch.empty_like(numbers)
    with one_thread():
        for begin, end in _parts(len(numbers)):
            for j in range(begin, end):
                value = numbers[j] * steps[j]
                numbers[j] = grid.numbers(value - slope[j] / gram[j, j], steps[j])
                changes[j] = numbers[j] * steps[j] - value
                slope[j:end].addmm_(gram[j:end, j : j + 1], changes[j : j + 1])
            slope[end:].addmm_(gram[end:, begin:end], changes[begin:end])
    return numbers.T, changes.T
