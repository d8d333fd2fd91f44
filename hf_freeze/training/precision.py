"""Whether to train in bf16: its products take half the time of fp32 where the hardware has it, ten times as long elsewhere."""

import functools
import time

import torch

AUTO = "auto"
_SIZE, _PRODUCTS = 256, 3  # two products of 256 x 256 x 256 in bf16 take 0.4 ms natively and 70 ms emulated by AVX2


def uses_bf16(setting: bool | str) -> bool:
    """`training.bf16` of a recipe as a yes or no: `"auto"` asks the machine."""
    return has_native_bf16() if setting == AUTO else bool(setting)


@functools.cache
def has_native_bf16() -> bool:
    """Whether the device that trains multiplies in bf16 at least as fast as in fp32: the first GPU, else the CPU.

    A CPU is measured once a process, in some milliseconds: torch says whether bf16 works there, not whether it is emulated.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return _seconds_of_product(torch.bfloat16) <= _seconds_of_product(torch.float32)


def _seconds_of_product(dtype: torch.dtype) -> float:
    """Of the fastest of a few products, as other work on the machine only adds to the time; the first one sets up kernels."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    times = []
    for _ in range(1 + _PRODUCTS):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - start)
    return min(times[1:])
