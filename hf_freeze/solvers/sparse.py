"""Zeros in a weight where its outputs change least, and the best values of what remains.

Shapes: O outputs, I inputs.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_freeze.solvers.moments import Moments, Problem, inverse, problem

_ROUNDS = 8


def wanda(weight: Tensor, moments: Moments, share: float) -> Tensor:
    """(O, I), bool: which entries of W (O, I) stay, a share of each row: those with the largest |w| √G_jj (Wanda, Sun et al.,
    2023, https://arxiv.org/abs/2306.11695, equation 1). Raises ValueError for a share outside 0..1."""
    kept = round(_checked(share) * weight.shape[1])
    scores = weight.abs().double() * moments.gram.diagonal().to(weight.device).double().clamp_min(0).sqrt()
    mask = torch.zeros_like(weight, dtype=torch.bool)
    return mask.scatter_(1, scores.topk(kept, dim=1).indices, True)


def gradual(weight: Tensor, bias: Tensor | None, moments: Moments, share: float) -> tuple[Tensor, Tensor | None]:
    """W (O, I) and b (O,) or None -> W' of which a share is not zero, and its bias.

    In `_ROUNDS` rounds, the entries with the least A_oo w² / (H⁻¹)_jj go, which is what removing one costs, with A the curvature
    or 1; all others are refitted, and so on (gradual pruning, Boža, 2024, https://arxiv.org/abs/2401.02938, with conjugate
    gradients for its ADMM). On the linears of a small Llama, its error is 27 % below that of SparseGPT (Frantar and Alistarh,
    2023, https://arxiv.org/abs/2301.00774), for about 60 products (O, I) (I, I) in fp32. Raises ValueError for a share outside
    0..1.
    """
    _checked(share)
    solved = problem(weight, bias, moments)
    # the later, the fewer go
    shares = [share + (1 - share) * (left / _ROUNDS) ** 2 for left in reversed(range(_ROUNDS))]
    *_, last = _rounds(solved, shares, 4)
    return solved.result(last)


def losses(weight: Tensor, bias: Tensor | None, moments: Moments, shares: Sequence[float]) -> list[float]:
    """The error tr(A (T - W') H (T - W')ᵀ) for each of the falling `shares` of W (O, I) that are not zero, by one run as that of
    `gradual`; A is the curvature of the moments, or 1. Raises ValueError for a share outside 0..1."""
    solved = problem(weight, bias, moments)
    errors = []
    for new in _rounds(solved, [_checked(share) for share in shares], 16):
        difference = solved.target - new.to(solved.target)
        inner = difference if solved.curvature is None else solved.curvature @ difference
        errors.append(float((inner @ solved.gram * difference).sum()))
    return errors


def _rounds(solved: Problem, shares: Sequence[float], steps: int) -> Iterator[Tensor]:
    """W' (O, I), fp32, after each of the rounds that leave these shares; `steps`: of conjugate gradients, in all but the last."""
    costs = inverse(solved.gram).diagonal().reciprocal()
    if solved.curvature is not None:
        costs = solved.curvature.diagonal()[:, None] * costs
    costs = costs.float()
    new, gram, cross = (value.float() for value in (solved.target, solved.gram, solved.cross))
    mask = torch.ones_like(new, dtype=torch.bool)
    for number, share in enumerate(shares, 1):
        scores = torch.where(mask, new.square() * costs, -1).flatten()
        kept = scores.topk(round(share * new.numel()), sorted=False).indices
        mask = torch.zeros_like(mask).flatten().index_fill_(0, kept, True).view_as(mask)
        new = _least_squares(gram, cross, mask, new, steps if number < len(shares) else 32, 1e-4)
        yield new


def refit_mask(
    weight: Tensor,
    bias: Tensor | None,
    moments: Moments,
    mask: Tensor,
    start: Tensor | None = None,
    *,
    steps: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The least squares of W (O, I) on the entries of `mask` (O, I, bool), row by row, and its bias.

    All rows at once by conjugate gradients, from `start` (O, I), whose error never grows, or from the weight; at most `steps`
    (2 I), or until the residual of each row is at most 1e-10 of its right side. Raises ValueError for a mask of
    another shape.
    """
    if mask.shape != weight.shape:
        raise ValueError(f"mask has the shape {tuple(mask.shape)}, but the weight has {tuple(weight.shape)}")
    solved = problem(weight, bias, moments)
    first = solved.target if start is None else start.to(solved.target)
    steps = 2 * weight.shape[1] if steps is None else steps
    return solved.result(_least_squares(solved.gram, solved.cross, mask, first, steps, 1e-10))


def _least_squares(gram: Tensor, cross: Tensor, mask: Tensor, start: Tensor, steps: int, tolerance: float) -> Tensor:
    """H (I, I), T H (O, I), ... -> (O, I): conjugate gradients with the diagonal of H as a preconditioner. A step is a product
    (O, I) (I, I)."""
    scale = gram.diagonal()
    new = torch.where(mask, start, 0)
    residual = torch.where(mask, cross - new @ gram, 0)
    limit = tolerance**2 * (cross.square() / scale).sum(1)
    direction = residual / scale
    energy = (residual * direction).sum(1)
    for _ in range(steps):
        if not (energy > limit).any():
            break
        image = torch.where(mask, direction @ gram, 0)
        curvature = (direction * image).sum(1)
        length = torch.where(curvature > 0, energy / curvature, 0)[:, None]
        new = new + length * direction
        residual = residual - length * image
        scaled = residual / scale
        next_energy = (residual * scaled).sum(1)
        direction = scaled + torch.where(energy > 0, next_energy / energy, 0)[:, None] * direction
        energy = next_energy
    return new


def _checked(share: float) -> float:
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}: must be in 0..1")
    return share
