"""Remove groups of columns of a weight, the inputs of a linear: FFN neurons through the second matrix, heads through the output
projection.

Backward elimination: the group whose removal costs least goes, after all others have been refitted, and so on. With H the Gram
and P = H⁻¹ among the remaining columns, removing group g costs tr(W_g (P_gg)⁻¹ W_gᵀ), exactly; then
    W ← W - W_g (P_gg)⁻¹ P_g,    P ← P - P_gᵀ (P_gg)⁻¹ P_g
(optimal brain surgeon for groups: ZipLM, Kurtic et al., 2023, https://arxiv.org/abs/2302.04089). Costs need only P
and S = WᵀW, or WᵀAW with the curvature A of the outputs. Both are updated once for each block of removals, as in a pivoted
Cholesky factorisation, so that nearly all work is products of large matrices; the result is that of one removal at a time.

Shapes: O outputs, I inputs, N groups, s columns of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_freeze.solvers.moments import RIDGE, Moments, inverse, problem, solve
from hf_freeze.solvers.threads import one_thread

_BLOCK = 64  # columns that are removed between two updates of the whole matrices
_DEAD = 0.15  # share of removed columns in the matrices from which on they are made smaller

Groups = int | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Elimination:
    """The order in which groups go, and the error after each removal."""

    order: Tensor  # (N,) groups, int64 on the CPU, the first to go first
    losses: Tensor  # (N + 1,) fp64 on the CPU: error tr(A (T - W') H (T - W')ᵀ) after k removals; the last is that of no input

    def kept(self, number: int) -> list[int]:
        """The `number` groups that stay, ascending."""
        if not 0 <= number <= len(self.order):
            raise ValueError(f"cannot keep {number} groups: there are {len(self.order)}")
        return sorted(self.order[len(self.order) - number :].tolist())


def eliminate(
    weight: Tensor, bias: Tensor | None, moments: Moments, groups: Groups = 1, *, ridge: float = RIDGE
) -> Elimination:
    """Remove all groups of columns of W (O, I), one after another; b (O,) or None.

    `groups`: the number of neighbouring columns in each group, or the columns of each group. Columns in no group stay.
    O(I³): seconds for 2,048 columns on one core. Raises ValueError for groups that do not fit.
    """
    columns = group_columns(groups, weight.shape[1])
    p, s, size = _inverse_and_costs(weight, bias, moments, columns, ridge)
    numbers = torch.arange(len(columns))
    gone = torch.zeros(len(columns), dtype=torch.bool, device=p.device)
    order, costs = [], []
    while len(order) < len(columns):
        removed, block_costs = _remove_block(p, s, size, gone)
        order += numbers[removed].tolist()
        costs += block_costs
        if float(gone.float().mean()) > _DEAD:
            left = (~gone).repeat_interleave(size).nonzero().flatten()
            p, s = _compacted(p, left), _compacted(s, left)
            numbers, gone = numbers[(~gone).cpu()], gone[~gone]
    losses = torch.tensor([0.0, *costs], dtype=torch.float64).clamp_min(0).cumsum(0)
    return Elimination(torch.tensor(order, dtype=torch.int64), losses)


def refit(
    weight: Tensor, bias: Tensor | None, moments: Moments, kept: Sequence[int], *, ridge: float = RIDGE
) -> tuple[Tensor, Tensor | None]:
    """The least squares on the columns `kept` of W (O, I): W'_K = (T H)_K (H_KK)⁻¹, (O, K) in the order of `kept`, and its bias;
    b (O,) or None."""
    solved = problem(weight, bias, moments, ridge)
    at = torch.as_tensor(kept, dtype=torch.int64, device=weight.device)
    new = solve(solved.gram[at][:, at], solved.cross[:, at]).to(weight.dtype)
    return new.contiguous(), solved.bias(new, at)


def group_columns(groups: Groups, inputs: int) -> list[list[int]]:
    """The columns of each group. Raises ValueError for columns that are missing, or in two groups, and for empty groups."""
    if isinstance(groups, int):
        if groups < 1 or inputs % groups:
            raise ValueError(f"groups={groups}: must divide the number of inputs, {inputs}")
        return [list(range(start, start + groups)) for start in range(0, inputs, groups)]
    columns = [list(group) for group in groups]
    flat = [column for group in columns for column in group]
    if not all(columns) or len(set(flat)) < len(flat):
        raise ValueError("groups must have at least one column each, and no column twice")
    if flat and not (min(flat) >= 0 and max(flat) < inputs):
        raise ValueError(
            f"groups have columns {min(flat)} to {max(flat)}, but the weight has columns 0 to {inputs - 1}"
        )
    return columns


def _inverse_and_costs(
    weight: Tensor, bias: Tensor | None, moments: Moments, columns: list[list[int]], ridge: float
) -> tuple[Tensor, Tensor, int]:
    """P and S of the columns in the order of the groups, (N s, N s), and s. Smaller groups are filled up with columns that cost
    nothing."""
    solved = problem(weight, bias, moments, ridge)
    target, curvature = solved.target, solved.curvature
    p = inverse(solved.gram)
    del solved  # of wide layers, each such matrix takes half a gigabyte
    s = target.T @ (target if curvature is None else curvature @ target)
    size = max(map(len, columns), default=1)
    flat = torch.tensor([column for group in columns for column in group], dtype=torch.int64, device=p.device)
    if len(flat) < len(p) or (flat[1:] < flat[:-1]).any():
        p, s = p[flat][:, flat], s[flat][:, flat]
    if len(flat) == size * len(columns):
        return p, s, size
    at = torch.tensor([i * size + j for i, group in enumerate(columns) for j in range(len(group))], device=p.device)
    filled_p = torch.eye(size * len(columns), dtype=p.dtype, device=p.device)
    filled_s = torch.zeros_like(filled_p)
    filled_p[at[:, None], at], filled_s[at[:, None], at] = p, s
    return filled_p, filled_s, size


def _blocks(matrix: Tensor, size: int) -> Tensor:
    """(N s, N s) -> (N, s, s): the diagonal blocks, a view."""
    n = len(matrix) // size
    return matrix.view(n, size, n, size).diagonal(0, 0, 2).permute(2, 0, 1)


def _costs(blocks_p: Tensor, blocks_s: Tensor) -> Tensor:
    """(N, s, s) twice -> (N,): tr((P_gg)⁻¹ S_gg), what the removal of each group costs."""
    if blocks_p.shape[1] == 1:
        return (blocks_s / blocks_p).flatten()
    return torch.linalg.solve(blocks_p, blocks_s).diagonal(0, 1, 2).sum(-1)


def _remove_block(p: Tensor, s: Tensor, size: int, gone: Tensor) -> tuple[list[int], list[float]]:
    """Remove about `_BLOCK` columns of those that are not `gone` (N,): their groups in order, and the cost of each. P, S and
    `gone` are updated in place; what stands in rows and columns of removed groups means nothing.

    Within the block, P is p - RᵀM and S is s - MᵀK - KᵀM, where each removal adds the rows R = P_g, M = (P_gg)⁻¹ P_g and
    K = S_g - S_gg M / 2. Each removal updates only the diagonal blocks of the groups, (N, s, s).
    """
    n = len(p) // size
    steps = min(int((~gone).sum()), max(1, _BLOCK // size))
    r, m, k = (p.new_empty(steps * size, len(p)) for _ in range(3))
    blocks_p, blocks_s = _blocks(p, size).clone(), _blocks(s, size).clone()
    eye = torch.eye(size, dtype=p.dtype, device=p.device)
    blocks_p[gone] = eye
    removed, costs = [], []
    with one_thread():
        for step in range(steps):
            value, group = _costs(blocks_p, blocks_s).masked_fill_(gone, float("inf")).min(0)
            g = int(group)
            removed.append(g)
            costs.append(value)
            at, old, new = slice(g * size, (g + 1) * size), slice(step * size), slice(step * size, (step + 1) * size)
            r[new] = p[at] - m[old, at].T @ r[old]
            q = s[at] - m[old, at].T @ k[old] - k[old, at].T @ m[old]
            m[new] = torch.linalg.solve(r[new, at], r[new])
            k[new] = q - q[:, at] @ m[new] / 2
            rows = (value[new].view(size, n, size) for value in (r, m, k))
            r_g, m_g, k_g = (row.permute(1, 2, 0) for row in rows)  # (N, s, s)
            cross = m_g @ k_g.mT
            blocks_p -= r_g @ m_g.mT
            blocks_s -= cross + cross.mT
            gone[g] = True
            blocks_p[g] = eye
    p.addmm_(r.T, m, alpha=-1)
    s.addmm_(m.T, k, alpha=-1).addmm_(k.T, m, alpha=-1)
    return removed, torch.stack(costs).tolist()


def _compacted(matrix: Tensor, left: Tensor) -> Tensor:
    """(n, n) -> (K, K), the rows and columns `left` (K,), ascending, in the memory of the matrix."""
    count = len(left)
    flat = matrix.view(-1)
    for new, old in enumerate(left.tolist()):  # no row that is still needed lies before its new place
        flat[new * count : (new + 1) * count] = matrix[old].index_select(0, left)
    return flat[: count * count].view(count, count)
