"""The nearest weight of each rank in the norm of what a linear sees and of what its outputs do.

The error tr(A (T - W') H (T - W')ᵀ), with the Gram H of the inputs and the curvature A = M Mᵀ of the outputs (the identity
where it is not known), is ‖Mᵀ (T - W') L‖² with H = L Lᵀ. So the best W' of rank r cuts the singular value decomposition
Mᵀ T L = U S Vᵀ, and loses Σ_{k>r} σ_k² (SVD-LLM, Wang et al., 2024, https://arxiv.org/abs/2403.07378). Only the vectors of the
shorter side are needed: W' = M⁻ᵀ U_r U_rᵀ Mᵀ T, or W' = T L V_r V_rᵀ L⁻¹.

Shapes: O outputs, I inputs, R rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_freeze.solvers.moments import RIDGE, Moments, Problem, cholesky, descending, problem, tails


@dataclass(frozen=True)
class LowRank:
    """The best factors of all ranks up to min(O, I)."""

    problem: Problem
    left: Tensor  # (O, min(O, I)): the first R columns are `up` for rank R
    right: Tensor  # (min(O, I), I): the first R rows are `down`
    losses: (
        Tensor  # (min(O, I) + 1,): error tr(A (T - W') H (T - W')ᵀ) for each rank; that of rank 0 is that of no input
    )

    def factors(self, rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """up (O, R), down (R, I) and the bias (O,) or None. Component by component, both factors have the same norm.

        Raises ValueError for a rank outside 1..min(O, I).
        """
        if not 1 <= rank <= len(self.right):
            raise ValueError(f"rank={rank}: must be in 1..{len(self.right)}")
        up, down = self.left[:, :rank], self.right[:rank]
        bias = self.problem.bias(up @ down)
        return up.to(self.problem.dtype).contiguous(), down.to(self.problem.dtype).contiguous(), bias


def low_rank(weight: Tensor, bias: Tensor | None, moments: Moments, *, ridge: float = RIDGE) -> LowRank:
    """Decompose W (O, I), with b (O,) or None, for all ranks at once; two-sided if the moments have a curvature."""
    solved = problem(weight, bias, moments, ridge)
    target = solved.target
    m = None if solved.curvature is None else cholesky(solved.curvature)
    whitened = target if m is None else m.T @ target  # Mᵀ T
    if weight.shape[0] <= weight.shape[1]:
        energies, u = descending(whitened @ solved.gram @ whitened.T)
        left, right = u, u.T @ whitened
        if m is not None:
            left = torch.linalg.solve_triangular(m.T, left, upper=True)
    else:
        factor = cholesky(solved.gram)
        product = whitened @ factor
        energies, v = descending(product.T @ product)
        left, right = target @ (factor @ v), torch.linalg.solve_triangular(factor.T, v, upper=True).T
    return LowRank(solved, *_balanced(left, right), tails(energies))


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same products, with columns of `left` and rows of `right` of equal norm."""
    ups, downs = left.norm(dim=0), right.norm(dim=1)
    scale = torch.where((ups > 0) & (downs > 0), (downs / ups).sqrt(), 1)
    return left * scale, right / scale[:, None]
