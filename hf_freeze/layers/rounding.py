"""What a layer that trains for few bits keeps for each weight: learnt steps, and the range of the inputs.

Shapes: O outputs, I inputs, G steps of a row.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers import grids
from hf_freeze.layers.derived import Derived, autocast_dtype, taken
from hf_freeze.layers.grids import Grid

_MOMENTUM = 0.99  # of a moving average of ranges, for each optimiser step
_USUAL = 0.1  # the largest weight of an output, before `start` knows it
_LEAST = 1e-12  # the logarithm of a step of zeros alone is that of this number
_LARGEST = torch.finfo(torch.float32).max


class Rounding(Derived):
    """The grid of one weight, and of the inputs that it is multiplied with, in training.

    Learnt steps are parameters, as logarithms: `log_steps` (O · G,), and `input_log_step` (1,). So a step stays positive, and an
    optimiser of Adam's kind changes it by the same share whatever its size. `input_range` (1,) holds the tracked largest |x| of
    inputs that have one step for all tokens, 0 before the first step of training; `track` updates it between optimiser steps, so
    that accumulated batches and recomputed forwards see one range.
    """

    log_steps: nn.Parameter
    input_log_step: nn.Parameter
    input_range: torch.Tensor
    active = True
    _seen: torch.Tensor | None = None  # of the inputs since the last `track`: (largest |x|, sum of |x|, how many)

    def __init__(self, shape: Sequence[int], grid: Grid, **new: Any) -> None:
        super().__init__()
        rows, columns = shape
        self.grid, self.shape = grid, (rows, columns)
        if grid.weight_ranges == "learnt":
            usual = math.log(_USUAL / grid.levels)
            self.log_steps = nn.Parameter(torch.full((rows * grid.groups(columns),), usual, **new))
        if grid.is_static:
            self.register_buffer("input_range", torch.zeros(1, **new))
            if grid.activation_ranges == "learnt":
                self.input_log_step = nn.Parameter(torch.zeros(1, **new))

    # -- the weight ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, weight: torch.Tensor) -> None:
        """Set learnt steps from a weight (O, I)."""
        if self.grid.weight_ranges != "learnt" or weight.is_meta:
            return
        self.log_steps.copy_(self.grid.first_steps(weight).clamp_min(_LEAST).log().flatten())

    def steps(self, weight: torch.Tensor) -> torch.Tensor:
        """(O, I) -> (O, G), fp32, with gradients where they are learnt."""
        if self.grid.weight_ranges != "learnt":
            return self.grid.steps(weight)
        steps = self.log_steps.float().exp().view(self.shape[0], -1)
        return grids.scaled_gradient(steps, self.shape[1] // steps.shape[1], self.grid.levels)

    def numbers(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(O, I) -> (numbers (O, I) as fp32, steps (O, G))."""
        steps = self.steps(weight)
        return self.grid.numbers(weight, steps), steps

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight (O, I) rounded to its grid."""
        numbers, steps = self.numbers(weight)
        return (numbers * self.grid.spread(steps, weight.shape[1])).to(weight.dtype)

    def select(self, kept: Sequence[int], *, outputs: bool) -> None:
        """Reduce it to the outputs `kept` of the weight, or the inputs; of grids with one step for each output."""
        rows, columns = self.shape
        self.shape = (len(kept), columns) if outputs else (rows, len(kept))
        if outputs and self.grid.weight_ranges == "learnt":
            self.log_steps = nn.Parameter(taken(self.log_steps, 0, kept))

    # -- inputs ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, x: torch.Tensor) -> None:
        """Take note of inputs in training. Raises ValueError on a CPU if they are not finite; elsewhere `fixed()` does, since to
        look would stop the device in each forward."""
        if not self.grid.is_static:
            return
        sizes = x.detach().float().abs()
        now = torch.stack([sizes.amax() if x.numel() else sizes.sum(), sizes.sum(), sizes.new_tensor(x.numel())])
        if x.device.type == "cpu" and not x.is_meta and not float(now[1]) <= _LARGEST:
            raise ValueError(
                f"quantisation tracks the range of the {self.shape[1]} inputs of a linear, and one of them is not finite; look "
                "for the step at which the loss stops being finite, or lower the learning rate"
            )
        self._seen = (
            now if self._seen is None else torch.cat([torch.maximum(self._seen, now)[:1], (self._seen + now)[1:]])
        )

    @torch.no_grad()
    def track(self) -> None:
        """Update the range by the inputs since the last call."""
        if self._seen is None:
            return
        (largest, total, count), first = self._seen, not bool(self.input_range)
        self._seen = None
        kind = self.grid.activation_ranges
        if kind == "learnt":
            if first and bool(largest):  # afterwards training moves the step
                step = grids.first_steps(total / count, largest, grids.LEVELS).clamp_min(_LEAST)
                self.input_log_step.copy_(step.log())
                self.input_range.copy_(largest)
        elif kind == "max":
            self.input_range.copy_(torch.maximum(self.input_range[0], largest))
        else:
            self.input_range.copy_(largest if first else _MOMENTUM * self.input_range + (1 - _MOMENTUM) * largest)

    def input_steps(self, x: torch.Tensor) -> torch.Tensor:
        """The steps of inputs (..., I): (..., 1), or () for all tokens. 0 where no range is known yet."""
        if not self.grid.is_static:
            return grids.token_steps(x)
        if self.grid.activation_ranges != "learnt":
            return self.input_range[0].float() / grids.LEVELS
        step = grids.scaled_gradient(self.input_log_step.float().exp()[0], self.shape[1], grids.LEVELS)
        return torch.where(self.input_range[0] > 0, step, 0 * step)  # a gradient of zero before

    # -- products --------------------------------------------------------------------------------------------------------

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sources: Iterable[Any]
    ) -> torch.Tensor:
        """x Wᵀ + b: (..., I) -> (..., O), in the dtype of autocast or of x. `sources`: the parameters that the weight is computed
        from."""
        if self.training:
            self.observe(x)
            if not self.active:
                return functional.linear(x, weight, bias)
        infers = not self.training and not torch.is_grad_enabled() and not x.is_meta
        sources = [*sources, *self._parameters.values()]
        if self.grid.activations is None:
            dense = (
                self.cached("weight", lambda: self.weight(weight).contiguous(), sources)
                if infers
                else self.weight(weight)
            )
            return functional.linear(x, dense, bias)
        if not infers or (self.grid.is_static and not bool(self.input_range)):
            y = self._fake_product(x, weight, bias)
        else:
            numbers, steps = self.cached("numbers", lambda: self._integers(weight), sources)
            y = grids.product_on_grid(x, self.input_steps(x), numbers, steps, bias)
        return y.to(autocast_dtype(x.device.type) or x.dtype)

    def _integers(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, steps = self.numbers(weight)
        return numbers.to(torch.int8).contiguous(), steps

    def _fake_product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """With gradients. The product is one of integers in fp32 and is scaled afterwards: for one step per output and at most
        1,040 inputs it is exact, so that it equals the integer product to the last bit. bf16 holds these integers too."""
        x_steps = self.input_steps(x)
        inputs = grids.rounded(x, x_steps, grids.LEVELS, clips=self.grid.is_static)
        if self.grid.is_static:  # no range yet: as they are
            inputs, x_steps = torch.where(x_steps > 0, inputs, x.float()), torch.where(x_steps > 0, x_steps, 1)
        numbers, steps = self.numbers(weight)
        if steps.shape[1] == 1:
            y = functional.linear(inputs, numbers) * (x_steps * steps[:, 0])
        else:
            y = functional.linear(inputs, numbers * self.grid.spread(steps, weight.shape[1])) * x_steps
        return y if bias is None else y + bias.float()

    # -- the end of training ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fix(self, weight: torch.Tensor, fixed: Any) -> Any:
        """Fill `fixed`, a holder (`layers.quantized`), with the numbers of a weight (O, I), and the step of inputs.

        Raises ValueError for ranges that are not finite, and for inputs that training has never seen.
        """
        grids.check_finite(weight)
        numbers, steps = self.numbers(weight)
        if not steps.isfinite().all():
            raise ValueError(f"the learnt steps of a weight of shape {tuple(weight.shape)} are not all finite")
        fixed.set_grid(numbers, steps)
        if self.grid.is_static:
            self.track()
            step = float(self.input_steps(weight))
            if not 0 < step <= _LARGEST:
                raise ValueError(
                    f"the range of the {self.shape[1]} inputs of a linear is {step * grids.LEVELS:g}: training has seen none, or "
                    "they were zero or not finite; train first, leave that linear out, or use activation_ranges='token'"
                )
            fixed.set_input_step(step)
        return fixed

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, {self.grid}"
