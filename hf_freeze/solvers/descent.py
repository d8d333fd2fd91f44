"""Fit parameters that enter an error in other ways than linearly, such as those of all matrices of an FFN, by L-BFGS (Liu &
Nocedal, 1989, https://doi.org/10.1007/BF01589116)."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 15


def descend(
    parameters: Sequence[nn.Parameter], errors: Callable[[], Iterable[Tensor]], steps: int = STEPS
) -> tuple[float, float]:
    """Lower the sum of `errors()`, scalars that depend on `parameters`, by at most `steps` steps. Returns the error before and
    after; where it is not lower, or not finite, the parameters are as before.

    The parameters get memory of their own. Deterministic: no draws, and the error is that of all data at each step.
    """
    start = [each.data for each in parameters]
    for each in parameters:
        each.data = each.data.clone()
    options: dict[str, Any] = {"history_size": steps, "tolerance_grad": 0, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe", **options)
    found: list[float] = []

    def closure() -> float:
        optimizer.zero_grad()
        found.append(0.0)
        with torch.enable_grad():
            for error in errors():
                error.backward()
                found[-1] += float(error.detach())
        return found[-1]

    optimizer.step(closure)  # type: ignore[arg-type]
    before, after = found[0], closure()
    for each, values in zip(parameters, start, strict=True):
        each.grad = None
        if not after < before:
            each.data = values
    return before, after
