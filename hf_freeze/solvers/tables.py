"""Tables of token vectors of low rank: nearest for the tokens that texts have, and for the outputs that a tied table computes.

A row e_v is replaced by e'_v. The error is Σ_v c_v (e_v - e'_v) M (e_v - e'_v)ᵀ, where c_v is how often a token occurs, and M the
identity for the lookup, plus the Gram G of the hidden states h that a tied output multiplies: then
(e_v - e'_v) G (e_v - e'_v)ᵀ is the mean square error of a token's logit, which also counts as often as the token is likely. With
M = L Lᵀ, the best rank-E table cuts the singular value decomposition of D^½ E L, D = diag(c): weighted low rank (Hsu et al.,
2022, "Language model compression with weighted low-rank factorization", https://arxiv.org/abs/2207.00112, section 3, whose
weights of rows are Fisher information).

Shapes: V rows of the vocabulary, H hidden size, E rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_freeze.solvers.moments import RIDGE, add_ridge, cholesky, descending, tails, working_dtype


@dataclass(frozen=True)
class Table:
    """The best factors of all ranks up to H."""

    rows: Tensor  # (V, H): the first E columns are the table of rank E
    projection: Tensor  # (H, H): its first E rows are the projection
    losses: Tensor  # (H + 1,): the error of each rank; that of rank 0 is that of no table
    dtype: torch.dtype

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """table (V, E) and projection (E, H). Raises ValueError for a rank outside 1..H."""
        if not 1 <= rank <= len(self.projection):
            raise ValueError(f"rank={rank}: must be in 1..{len(self.projection)}")
        return self.rows[:, :rank].to(self.dtype).contiguous(), self.projection[:rank].to(self.dtype).contiguous()


def weighted_table(
    table: Tensor, counts: Tensor, *, smoothing: float = 1.0, output_gram: Tensor | None = None, ridge: float = RIDGE
) -> Table:
    """Decompose a table (V, H) for all ranks at once.

    `counts` (V,): tokens in texts; every row gets `smoothing` times their mean on top, since other texts have other tokens.
    `output_gram` (H, H): the mean of h hᵀ over the inputs of the output that is tied to the table; lookup and output then count
    alike. Tables that share their rows can be given side by side, and their projections split.

    Raises ValueError for shapes that do not fit, values that are not finite, negative counts, and no tokens without smoothing.
    """
    rows, hidden = table.shape
    for name, value, shape in (("counts", counts, (rows,)), ("output_gram", output_gram, (hidden, hidden))):
        if value is None:
            continue
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, but must have {shape}")
        if not value.isfinite().all():
            raise ValueError(f"{name} has values that are not finite")
    if not table.isfinite().all():
        raise ValueError(f"the table of shape {tuple(table.shape)} has values that are not finite")
    values = table.to(working_dtype(table))
    weights = counts.to(values)
    if (weights < 0).any() or smoothing < 0:
        raise ValueError(f"counts and smoothing={smoothing} must not be negative")
    weights = weights + smoothing * (weights.mean() if weights.any() else 1.0)
    if not weights.any():
        raise ValueError("no token of the table occurs in the texts: give a smoothing above 0")
    metric = torch.eye(hidden, dtype=values.dtype, device=values.device)
    if output_gram is not None:
        gram = output_gram.to(values)
        gram = (gram + gram.T) / 2
        add_ridge(gram, ridge)
        metric += gram / gram.diagonal().mean()
    factor = cholesky(metric)
    used = values.T @ (values * (weights / weights.mean())[:, None])
    energies, axes = descending(factor.T @ used @ factor)
    projection = torch.linalg.solve_triangular(factor.T, axes, upper=True).T
    return Table(values @ (factor @ axes), projection, tails(energies), table.dtype)
