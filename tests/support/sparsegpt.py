"""SparseGPT, by which the solver of zeros is measured."""

import torch

from hf_freeze.solvers.moments import FEW_TOKENS_RIDGE, cholesky, inverse, problem


def sparsegpt(weight, bias, moments, share, *, block=128):
    """W (O, I) and b (O,) or None -> W' of which a share is not zero, and its bias, by SparseGPT (Frantar and Alistarh, 2023,
    https://arxiv.org/abs/2301.00774, algorithm 1), unstructured.

    Columns are handled in their order, and those that follow make up for each that is set to zero. In every `block` columns, the
    entries with the least w² / U_jj² go, where H⁻¹ = UᵀU with U upper triangular.
    """
    solved = problem(weight, bias, moments, FEW_TOKENS_RIDGE)
    w, u = solved.target.clone(), cholesky(inverse(solved.gram)).T
    for first in range(0, w.shape[1], block):
        last = min(first + block, w.shape[1])
        part, rows = w[:, first:last], u[first:last, first:last]
        scores = (part / rows.diagonal()).square().flatten()
        gone = scores.new_zeros(len(scores), dtype=torch.bool)
        gone[scores.topk(len(scores) - round(share * len(scores)), largest=False, sorted=False).indices] = True
        gone = gone.view_as(part)
        errors = torch.zeros_like(part)
        for j in range(last - first):
            errors[:, j] = torch.where(gone[:, j], part[:, j] / rows[j, j], 0)
            part[:, j:].addmm_(errors[:, j : j + 1], rows[j : j + 1, j:], alpha=-1)
        part.masked_fill_(gone, 0)
        w[:, last:].addmm_(errors, u[first:last, last:], alpha=-1)
    return solved.result(w)
