"""Fit parameters that enter an error in other ways than linearly, such as those of all matrices of an FFN: L-BFGS (Liu & Nocedal,
1989, https://doi.org/10.1007/BF01589116), in coordinates in which each direction changes the outputs about as much as any other
(Martens & Grosse, 2015, https://arxiv.org/abs/1503.05671), so that few steps go far."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 10
# Times the mean of a diagonal. With less, few texts are learnt by heart; with more, many need more steps.
_DAMPING = 0.3


@dataclass(frozen=True)
class Coordinates:
    """z of a parameter, in which its change is left⁻ᵀ z right⁻¹ / scale. `left` (O, O) and `right` (I, I) are lower triangular,
    None for the identity; z of a vector (O,) is one column."""

    left: Tensor | None = None
    right: Tensor | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor | None = None) -> "Coordinates":
        """`rows` (O, O), `columns` (I, I): Gram matrices of what the rows of a matrix change in the outputs, and of what its
        columns read. With both, all z of the same length change the outputs about alike."""
        return cls(_factor(rows), None if columns is None else _factor(columns))

    def change(self, z: Tensor) -> Tensor:
        """Of the parameter, (O, I) or (O,)."""
        return self._solved(z, transposed=True)

    def gradient(self, gradient: Tensor) -> Tensor:
        """By z, of that by the parameter."""
        return self._solved(gradient, transposed=False)

    def _solved(self, values: Tensor, *, transposed: bool) -> Tensor:
        result = values.reshape(len(values), -1) if values.dim() == 1 else values
        if self.left is not None:
            left = self.left.T if transposed else self.left
            result = torch.linalg.solve_triangular(left, result, upper=transposed)
        if self.right is not None:
            right = self.right if transposed else self.right.T
            result = torch.linalg.solve_triangular(right, result, upper=not transposed, left=False)
        return (result / self.scale).reshape(values.shape)


def descend(
    parameters: Sequence[nn.Parameter],
    errors: Callable[[], Iterable[Tensor]],
    coordinates: Sequence[Coordinates] | None = None,
    steps: int = STEPS,
) -> tuple[float, float]:
    """Lower the sum of `errors()`, scalars that depend on `parameters`, by at most `steps` steps. Returns the error before and
    after; where it is not lower, or not finite, the parameters are as before.

    The parameters get memory of their own. Deterministic: no draws, and the error is that of all data at each step.
    """
    coordinates = [Coordinates()] * len(parameters) if coordinates is None else coordinates
    start = [each.data for each in parameters]
    changes = [nn.Parameter(torch.zeros_like(each)) for each in parameters]
    for each in parameters:
        each.data = each.data.clone()
    options: dict[str, Any] = {"history_size": steps, "tolerance_grad": 0, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS(changes, max_iter=steps, line_search_fn="strong_wolfe", **options)
    found: list[float] = []

    @torch.no_grad()
    def closure() -> float:
        for each, before, z, of in zip(parameters, start, changes, coordinates, strict=True):
            each.data.copy_(before + of.change(z))
            each.grad = None
        found.append(0.0)
        with torch.enable_grad():
            for error in errors():
                error.backward()
                found[-1] += float(error.detach())
        for each, z, of in zip(parameters, changes, coordinates, strict=True):
            z.grad = torch.zeros_like(z) if each.grad is None else of.gradient(each.grad).contiguous()
        return found[-1]

    optimizer.step(closure)  # type: ignore[arg-type]
    before, after = found[0], closure()
    for each, values in zip(parameters, start, strict=True):
        each.grad = None
        if not after < before:
            each.data = values
    return before, after


def _factor(gram: Tensor) -> Tensor:
    """The Cholesky factor of a Gram matrix, damped so that it has one; not finite if the matrix is not: `descend` changes nothing
    then."""
    exact = gram if gram.device.type == "mps" else gram.double()
    damping = _DAMPING * exact.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    identity = torch.eye(len(gram), dtype=exact.dtype, device=gram.device)
    return torch.linalg.cholesky_ex(exact + damping * identity).L.to(gram)
