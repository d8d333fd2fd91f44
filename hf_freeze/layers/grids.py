"""Symmetric grids of integers, on which quantised weights and activations lie; rounding to them with gradients; exact integer
products. `layers.schemes` has the grids of bitsandbytes, with the same members from `dtype` to `read`.

A value v is stored as the integer q = clamp(round(v / s), -Q, Q) and stands for q · s, with Q = 127 (int8) or 7 (int4). The
lowest number of the width, -128 or -8, is not used: the grid is symmetric, so that a product needs no correction. A step s
belongs to an output of the weight ("channel") or to 64 neighbouring inputs of an output ("group-64"; the last group may
be shorter).

Gradients are straight through (Bengio et al., 2013, https://arxiv.org/abs/1308.3432): those of q · s count as those of v where
v is inside the range. Steps are the largest |v| / Q, or are learnt (Esser et al., 2020, "Learned Step Size Quantization",
https://arxiv.org/abs/1902.08153, equation 3).

Shapes: O outputs, I inputs, G groups, N tokens.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hf_freeze.layers.derived import is_compiled, is_traced

WIDTHS = {"int8": 127, "int4": 7}  # name -> largest number Q
GRANULARITIES = ("channel", "group-64")
GROUP = 64
WEIGHT_RANGES = ("max", "learnt")
ACTIVATION_RANGES = ("token", "max", "moving", "learnt")
LEVELS = WIDTHS["int8"]  # of activations
_BLOCK = 1024  # inputs that are summed in fp32 at once
_CACHED = 2**18  # weights that are computed at once: in fp32 they fit into a cache


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How a weight is quantised, and its inputs: `weights` is a key of WIDTHS; `activations` None (inputs are not rounded) or
    "int8". `activation_ranges`: "token" takes the largest |x| of each token when it computes; the others have one step for all
    tokens, which training has fixed."""

    weights: str
    granularity: str = "channel"
    activations: str | None = None
    weight_ranges: str = "max"
    activation_ranges: str = "token"

    @property
    def levels(self) -> int:
        """The largest number Q."""
        return WIDTHS[self.weights]

    @property
    def is_static(self) -> bool:
        """Whether inputs have a step that training fixes."""
        return self.activations is not None and self.activation_ranges != "token"

    @property
    def dtype(self) -> torch.dtype:
        """That of what is stored."""
        return torch.int8 if self.weights == "int8" else torch.uint8

    @property
    def selectable(self) -> bool:
        """Whether inputs and outputs can be removed: not if a step is for several inputs but not for all."""
        return self.granularity == "channel"

    def has_whole_rows(self, columns: int) -> bool:
        """Whether no step is for weights of two rows."""
        return True

    def packed_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape in which numbers are stored."""
        return rows, packed_columns(columns, self.weights)

    def step_count(self, rows: int, columns: int) -> int:
        """The number of steps of a weight."""
        return rows * self.groups(columns)

    def quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(O, I) -> (numbers (O, I), steps (O, G)), each value to its nearest; on the CPU, as for every device."""
        weight = weight.detach().to("cpu", torch.float32)
        steps = self.steps(weight)
        return rounded(weight, self.spread(steps, weight.shape[1]), self.levels, clips=False), steps

    def packed(self, numbers: torch.Tensor) -> torch.Tensor:
        """As they are stored."""
        return pack(numbers, self.weights)

    def read(
        self, packed: torch.Tensor, steps: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The values, in `shape`, of stored rows, and those of int8 numbers whatever the width."""
        columns = shape[1]
        steps = steps.view(-1, self.groups(columns))
        if is_traced() or is_compiled() or packed.device.type != "cpu":
            return (unpack(packed, columns).float() * self.spread(steps, columns)).to(dtype)
        values = torch.empty(shape, dtype=dtype)
        rows = max(_CACHED // max(columns, 1), 1)
        for part, numbers, some in zip(values.split(rows), packed.split(rows), steps.split(rows), strict=True):
            part.copy_(unpack(numbers, columns).float().mul_(self.spread(some, columns)))
        return values

    def groups(self, columns: int) -> int:
        """The number G of steps of a row."""
        return 1 if self.granularity == "channel" else -(-columns // GROUP)

    def largest(self, weight: torch.Tensor) -> torch.Tensor:
        """(O, I) -> (O, G): the largest absolute value that shares each step, fp32."""
        sizes = self._grouped(weight)
        return sizes.amax(-1) if weight.shape[1] else sizes.sum(-1)

    def first_steps(self, weight: torch.Tensor) -> torch.Tensor:
        """(O, I) -> (O, G): steps to start learning from (`first_steps`)."""
        counts = self._grouped(torch.ones_like(weight[:1])).sum(-1).clamp_min(1)
        return first_steps(self._grouped(weight).sum(-1) / counts, self.largest(weight), self.levels)

    def _grouped(self, weight: torch.Tensor) -> torch.Tensor:
        """(O, I) -> (O, G, I or 64): the absolute values that share each step, padded with zeros, fp32."""
        sizes, groups = weight.detach().float().abs(), self.groups(weight.shape[1])
        if self.granularity == "channel":
            return sizes[:, None]
        return functional.pad(sizes, (0, groups * GROUP - weight.shape[1])).view(-1, groups, GROUP)

    def steps(self, weight: torch.Tensor) -> torch.Tensor:
        """(O, I) -> (O, G): the steps with which nothing is cut off. That of zeros alone is 0."""
        return self.largest(weight) / self.levels

    def spread(self, steps: torch.Tensor, columns: int) -> torch.Tensor:
        """(O, G) -> (O, I), or (O, 1) where that is enough."""
        return steps if steps.shape[1] == 1 else steps.repeat_interleave(GROUP, 1)[:, :columns]

    def numbers(self, weight: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """The numbers (O, I) of a weight, fp32, with gradients: to the steps too if they are learnt, and then straight through
        only inside their range."""
        return rounded(weight, self.spread(steps, weight.shape[1]), self.levels, clips=self.weight_ranges == "learnt")


def rounded(values: torch.Tensor, steps: torch.Tensor, levels: int, *, clips: bool) -> torch.Tensor:
    """clamp(round(v / s), -Q, Q) as fp32, 0 where the step is 0. Times `steps`, it has the gradients of LSQ's equation 3.

    `clips`: whether values may lie outside the range, where the gradient to the values is zero. Otherwise it is that of v / s
    everywhere: a range that follows the largest value has no outside, whatever a division rounds.
    """
    return _Rounded.apply(values.float(), steps, levels, clips)  # type: ignore[return-value]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, steps: torch.Tensor, levels: int, clips: bool) -> torch.Tensor:
        divisors = torch.where(steps > 0, steps, 1)
        ratios = values / divisors
        ctx.save_for_backward(ratios if clips or ctx.needs_input_grad[1] else None, divisors)
        ctx.levels, ctx.clips = levels, clips
        return ratios.round().clamp(-levels, levels)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ratios, divisors = ctx.saved_tensors
        inner = gradients[0] / divisors  # q = round(v / s): dq/dv = 1 / s, dq/ds = -v / s², inside the range
        if ctx.clips:
            inner = torch.where(ratios.abs() < ctx.levels, inner, 0)
        grad_steps = None
        if ctx.needs_input_grad[1]:
            grad_steps = (-inner * ratios).sum_to_size(divisors.shape)
        return inner if ctx.needs_input_grad[0] else None, grad_steps, None, None


def scaled_gradient(steps: torch.Tensor, count: int, levels: int) -> torch.Tensor:
    """`steps`, whose gradient is multiplied by 1 / √(count · Q), as LSQ (section 2.2) does; `count`: values that share a step."""
    return _ScaledGradient.apply(steps, (count * levels) ** -0.5)  # type: ignore[return-value]


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return steps.view_as(steps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0] * ctx.factor, None


def first_steps(means: torch.Tensor, largest: torch.Tensor, levels: int) -> torch.Tensor:
    """Steps to start learning from: LSQ's 2 · mean |v| / √Q, but none above the largest |v| / Q, beyond which nothing lies."""
    return torch.minimum(2 * means / levels**0.5, largest / levels)


def rounded_in_graph(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """As `rounded` of inputs, by operations that engines have."""
    return (x / torch.where(steps > 0, steps, 1.0)).round().clamp(-LEVELS, LEVELS)


def check_finite(weight: torch.Tensor) -> None:
    """Raise ValueError for a weight with values that are not finite."""
    if not weight.isfinite().all():
        raise ValueError(f"cannot quantise a weight of shape {tuple(weight.shape)}: it has values that are not finite")


# -- packing -----------------------------------------------------------------------------------------------------------------


def packed_columns(columns: int, width: str) -> int:
    """Bytes of a row of `columns` numbers."""
    return columns if width == "int8" else -(-columns // 2)


def pack(numbers: torch.Tensor, width: str) -> torch.Tensor:
    """int8 (O, I) -> int8 (O, I), or of 4 bits uint8 (O, ⌈I / 2⌉): two numbers + 8 in a byte, the first in its higher bits."""
    if width == "int8":
        return numbers.to(torch.int8)
    shifted = functional.pad(numbers.to(torch.int8) + 8, (0, numbers.shape[1] % 2)).to(torch.uint8)
    return shifted[:, ::2] * 16 + shifted[:, 1::2]


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """int8 (O, I) of what `pack` has made"""
    if packed.dtype == torch.int8:
        return packed
    halves = packed.to(torch.int32) if is_traced() else packed  # engines lack operations on bytes
    pairs = torch.stack([halves // 16, halves % 16], dim=-1).flatten(-2)
    return (pairs.to(torch.int8) - 8)[:, :columns]


# -- products ----------------------------------------------------------------------------------------------------------------


def integer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 (N, I), int8 (O, I) -> int32 (N, O): x Wᵀ, exactly, for numbers in -127..127.

    On a CPU by torch's product of integers. On other devices, and where that is not exact, by fp32 products of blocks of
    columns so short that fp32 holds every sum. A traced graph holds torch's product of several columns; what it becomes is for
    the format to say.
    """
    several = x.shape[1] > 1  # of a single column, torch 2.13 returns memory that nothing has written
    if several and (is_traced() or (x.device.type == "cpu" and x.numel() and weight.numel() and integers_are_exact())):
        return torch._int_mm(x, weight.T)
    return blockwise_product(x, weight)


def blockwise_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `integer_product`, by products in fp32."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for left, right in zip(x.split(_BLOCK, 1), weight.split(_BLOCK, 1), strict=True):
        total = total + functional.linear(left.float(), right.float()).to(torch.int32)
    return total


@functools.cache
def _are_integers_exact() -> bool:
    """Whether torch's product of integers is there and exact for the largest numbers: on processors without instructions for
    signed bytes, a library might add pairs of products in 16 bits. Not found out on import: a process that has computed with
    threads cannot be forked, since its copies wait for them for ever."""
    x = torch.full((17, 1100), 127, dtype=torch.int8, device="cpu")
    x[::2, ::3] = -127
    try:
        return torch.equal(torch._int_mm(x, x.T), blockwise_product(x, x))
    except (AttributeError, RuntimeError):
        return False


@torch.compiler.assume_constant_result  # torch.compile would look into what is cached
def integers_are_exact() -> bool:
    """Whether torch's product of integers is exact on this CPU."""
    return _are_integers_exact()


def token_steps(x: torch.Tensor) -> torch.Tensor:
    """(..., I) -> (..., 1), fp32: the step of each token, its largest |x| / 127."""
    return x.detach().float().abs().amax(-1, keepdim=True) / LEVELS


def product_on_grid(
    x: torch.Tensor, x_steps: torch.Tensor, numbers: torch.Tensor, steps: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x Wᵀ + b in integers, without gradients: (..., I) -> (..., O), fp32.

    `x_steps`: (..., 1), or () for all tokens; `numbers`: int8 (O, I) of the weight, with `steps` (O, G).
    """
    inputs = rounded(x, x_steps, LEVELS, clips=True).to(torch.int8)
    rows = inputs.reshape(-1, x.shape[-1])
    if steps.shape[1] == 1:
        sums = integer_product(rows, numbers).float().view(*x.shape[:-1], len(numbers))
        y = sums * (x_steps * steps[:, 0])
    else:
        y = torch.zeros(len(rows), len(numbers), device=x.device)
        parts = zip(rows.split(GROUP, 1), numbers.split(GROUP, 1), steps.unbind(1), strict=True)
        for left, right, step in parts:
            y = y + integer_product(left.contiguous(), right.contiguous()).float() * step
        y = y.view(*x.shape[:-1], len(numbers)) * x_steps
    return y if bias is None else y + bias.float()
