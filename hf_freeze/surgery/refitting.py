"""Refit a linear that has lost inputs, by least squares on what it sees."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_freeze.solvers.columns import refit
from hf_freeze.solvers.moments import Moments, loss
from hf_freeze.surgery.replacing import effective_weight, is_dense, linear_at, set_linear


@torch.no_grad()
def refit_inputs(
    old: Any,
    new: Any,
    name: str,
    moments: Moments,
    kept: Sequence[int],
    plain: Sequence[int],
    record: Callable[[str, float, float], None],
) -> None:
    """Refit the linear `name` (below the base model) of `new`, which has kept the inputs `kept` of that of `old`.

    `plain`: the inputs that would stay without statistics; `record(name, error, error)` is told of the relative error of the
    outputs with these, as they are, and of that with the ones kept, refitted. A layer of another method stays as it is.
    """
    linear, target = linear_at(old, name), linear_at(new, name)
    weight, bias = effective_weight(linear), linear.bias
    before = loss(weight, _spread(weight[:, plain], plain, weight), moments, bias, bias)
    new_weight, new_bias = (
        refit(weight, bias, moments, kept) if is_dense(target) else (effective_weight(target), target.bias)
    )
    record(name, before, loss(weight, _spread(new_weight, kept, weight), moments, bias, new_bias))
    if is_dense(target):
        set_linear(target, new_weight, new_bias)


def _spread(columns: torch.Tensor, places: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """(O, I) with these columns in their places, and zeros elsewhere."""
    wide = torch.zeros_like(like)
    wide[:, torch.as_tensor(places, device=like.device)] = columns
    return wide
