"""Models that were quantised before their export: their integers and steps go on into the file, where it has a place for them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_freeze.layers.quantized import Quantized
from hf_freeze.methods.quantize import Quantize


def _holders(model: Any) -> list[Quantized]:
    return [module for module in model.modules() if isinstance(module, Quantized)]


def rounds_inputs(model: Any) -> bool:
    """Whether the inputs of linears are rounded."""
    return any(holder.grid.activations is not None for holder in _holders(model))


def check_static(model: Any, format: str, say: Callable[[str], Any]) -> None:
    """Say it if inputs have ranges that the format has no place for."""
    if any(holder.grid.is_static for holder in _holders(model)):
        say(f"{format} finds the range of the inputs of each token itself; those of the training are left out")


def leave_inputs(model: Any) -> None:
    """Have the variant merge as if its inputs were not rounded: for an engine that rounds them itself."""
    now = model.methods_now
    model.methods_now = [
        replace(method, activations=None) if isinstance(method, Quantize) else method for method in now
    ]


@torch.no_grad()
def steps_of_rows(model: Any) -> dict[bytes, float]:
    """The bytes of a row of a dense weight, fp32 -> its step, for the weights with one step for each output."""
    steps: dict[bytes, float] = {}
    for holder in _holders(model):
        if holder.grid.granularity == "channel" and not holder.is_factor:
            rows = holder.dequantized(torch.float32).numpy()
            steps |= zip((row.tobytes() for row in rows), holder.steps()[:, 0].tolist(), strict=True)
    return steps


def on_grid(weight: np.ndarray, steps: dict[bytes, float]) -> tuple[np.ndarray, np.ndarray] | None:
    """The numbers, int8 (O, I), and steps, fp32 (O,), of a weight whose rows all have a step; None for another one."""
    rows = np.ascontiguousarray(weight, np.float32)
    found = [steps.get(row.tobytes()) for row in rows] if rows.ndim == 2 else [None]
    if None in found:
        return None
    values = np.array(found, np.float32)
    divisors = np.where(values > 0, values, np.float32(1))
    return np.rint(rows / divisors[:, None]).astype(np.int8), divisors
