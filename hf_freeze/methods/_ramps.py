"""How what is scheduled rises in training: the curves that all methods share."""

import math

RAMPS = ("linear", "cosine", "cubic")
_STAGES = 100  # of a ramp in stages: ranking all weights in every step would cost more than the step


def ramp(shape: str, done: float) -> float:
    """From 0 to 1, when the share `done` (clipped to 0..1) of the ramp is over: t, (1 - cos πt) / 2, or 1 - (1 - t)³.

    The cubic one is that of Zhu & Gupta (2017, https://arxiv.org/abs/1710.01878, equation 1): fast at first. Raises ValueError
    for another shape.
    """
    done = min(max(done, 0.0), 1.0)
    if shape == "linear":
        return done
    if shape == "cosine":
        return (1 - math.cos(math.pi * done)) / 2
    if shape == "cubic":
        return 1 - (1 - done) ** 3
    raise ValueError(f"unknown ramp {shape!r}; choose from {list(RAMPS)}")


def in_stages(done: float) -> float:
    """The share `done` (clipped to 0..1) rounded to a hundred stages: upwards, so that the last step reaches the end; a share
    just above a stage by rounding is at that stage."""
    return math.ceil(min(max(done, 0.0), 1.0) * _STAGES - 1e-9) / _STAGES
