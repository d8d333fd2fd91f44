"""Decides whether to train in bf16: its products take from half the time of fp32 to ten times as long, depending on the CPU."""

import functools
import time

import torch

from hf_freeze.lab.recipes.settings import AUTO

_TRIES = 3  # on a loaded machine, one may come out wrong
_SIZE, _PRODUCTS = 256, 3  # two products of 256 x 256 x 256 in bf16 take 0.4 ms natively and 70 ms emulated by AVX2


def uses_bf16(setting: bool | str) -> bool:
    """The setting `training.bf16` of a recipe as a bool; `"auto"` chooses by `has_native_bf16`."""
    return has_native_bf16() if setting == AUTO else bool(setting)


@functools.cache
def has_native_bf16() -> bool:
    """Whether the training device, the first GPU or else the CPU, multiplies in bf16 at least as fast as in fp32.

    The CPU is measured once per process, in milliseconds (half a second where bf16 is emulated), because torch reports whether
    bf16 works on it, but not whether it is emulated.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(_seconds_of_product(torch.bfloat16) <= _seconds_of_product(torch.float32) for _ in range(_TRIES))


def _seconds_of_product(dtype: torch.dtype) -> float:
    """The time of the fastest of a few products on one thread, since other load only adds time, the more so to threads that wait
    for each other. The first product, which sets up kernels, is not counted."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    times, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(1 + _PRODUCTS):
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(times[1:])
