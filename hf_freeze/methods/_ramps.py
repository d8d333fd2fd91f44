"""Curves by which scheduled values rise during training."""

import math

RAMPS = ("linear", "cosine", "cubic")
_STAGES = 100  # ranking all weights in every step would cost more than the step itself


def ramp(shape: str, progress: float) -> float:
    """A value that rises from 0 to 1 as `progress` t (clipped to 0..1) does: "linear" t, "cosine" (1 - cos πt) / 2 or
    "cubic" 1 - (1 - t)³.

    The cubic one rises fast at first (Zhu & Gupta, 2017, https://arxiv.org/abs/1710.01878, equation 1). Raises ValueError for
    another shape.
    """
    progress = min(max(progress, 0.0), 1.0)
    if shape == "linear":
        return progress
    if shape == "cosine":
        return (1 - math.cos(math.pi * progress)) / 2
    if shape == "cubic":
        return 1 - (1 - progress) ** 3
    raise ValueError(f"unknown ramp {shape!r}; choose from {list(RAMPS)}")


def in_stages(progress: float) -> float:
    """`progress` (clipped to 0..1) rounded up to a multiple of 1/100, so that the last step reaches 1.

    A value that exceeds a multiple only by a rounding error counts as that multiple.
    """
    return math.ceil(min(max(progress, 0.0), 1.0) * _STAGES - 1e-9) / _STAGES
