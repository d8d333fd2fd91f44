"""Time and memory of the solvers of calibration against the width of a linear, on a picture with two logarithmic axes.

    python benchmarks/solvers.py --picture solvers.png              # widths 128 to 2048: some minutes
    python benchmarks/solvers.py --widths 16 32

Claim: from a width of 512 on, time grows at most as I^3.3 and memory at most as I^2.3, and the elimination of 2,048 neurons takes
at most 10 seconds.

A linear of I inputs and I / 4 outputs, as the second matrix of an FFN, in fp32 with statistics in fp64; one thread, one new
process for each solver. Time is the fastest of up to three runs. Memory is what the peak of the process rises by.
Limits: each solver inverts or decomposes a matrix (I, I), I³ multiply-adds, slope 3; it holds a few such matrices, slope 2.
Below some hundreds of inputs, starting an operation takes longer than computing it, and slopes are smaller.
"""

import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import _shared
import torch
from matplotlib.figure import Figure
from torch import Tensor

from hf_freeze.layers.tensor_train import merge, tt_svd
from hf_freeze.solvers.columns import eliminate, refit
from hf_freeze.solvers.low_rank import low_rank
from hf_freeze.solvers.moments import Moments
from hf_freeze.solvers.rounding import Symmetric, gptq
from hf_freeze.solvers.sparse import gradual
from hf_freeze.solvers.tensors import alternate

Solver = Callable[[Tensor, Moments], object]


def tensor_train(weight: Tensor, moments: Moments) -> object:
    modes = [(2 ** math.ceil(math.log2(n) / 2), 2 ** (math.log2(n) // 2)) for n in reversed(weight.shape)]
    (n1, n2), (m1, m2) = ((int(a), int(b)) for a, b in modes)
    cores = tt_svd(weight.T, (n1, n2), (m1, m2), [1, min(16, n1 * m1, n2 * m2), 1])
    return alternate(weight, None, moments, cores, lambda cores: merge(cores)[0, :, :, 0].T)


SOLVERS: dict[str, Solver] = {
    "eliminate columns": lambda weight, moments: eliminate(weight, None, moments),
    "refit half of the columns": lambda weight, moments: refit(weight, None, moments, range(0, weight.shape[1], 2)),
    "low rank": lambda weight, moments: low_rank(weight, None, moments),
    "GPTQ, int4 in groups of 64": lambda weight, moments: gptq(weight, None, moments, Symmetric(7), group=64),
    "gradual zeros": lambda weight, moments: gradual(weight, None, moments, 0.3),
    "tensor train of rank 16": tensor_train,
}


def measure(name: str, widths: list[int]) -> list[tuple[float, float]]:
    """(seconds, MB) of each width."""
    torch.set_num_threads(1)
    SOLVERS[name](torch.ones(8, 8), Moments(torch.eye(8), torch.zeros(8), 8))  # libraries are loaded
    return [measure_one(name, width) for width in widths]


def measure_one(name: str, width: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * width, width, generator=generator) * torch.arange(1, width + 1) ** -0.5
    inputs = inputs @ torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    moments = Moments((inputs.T @ inputs / len(inputs)).double(), inputs.mean(0).double(), len(inputs))
    weight = torch.randn(width // 4, width, generator=generator)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, start, best = _shared.resident("VmRSS"), time.perf_counter(), math.inf
    for _ in range(3):
        if time.perf_counter() - start < 5:
            best = min(best, _shared.seconds(lambda: SOLVERS[name](weight, moments)))
    return best, max(_shared.resident("VmHWM") - before, 1 << 12) / 1e6


def slope(values: dict[int, float]) -> float:
    """The mean slope of the logarithms between neighbours from a width of 512 on, or between the last two."""
    points = [(width, value) for width, value in values.items() if width >= 512]
    points = points if len(points) > 1 else list(values.items())[-2:]
    slopes = [math.log(b[1] / a[1]) / math.log(b[0] / a[0]) for a, b in pairwise(points)]
    return sum(slopes) / len(slopes)


def draw(seconds: dict[str, dict[int, float]], megabytes: dict[str, dict[int, float]]) -> Figure:
    figure = Figure(figsize=(11, 4.5))
    for index, (values, unit, power) in enumerate(((seconds, "time, s", 3), (megabytes, "peak memory, MB", 2))):
        axes = figure.add_subplot(1, 2, index + 1)
        for name, points in values.items():
            axes.loglog(list(points), list(points.values()), marker="o", markersize=3, label=name)
        widths = list(next(iter(values.values())))
        last = max(points[widths[-1]] for points in values.values())
        limit = [2 * last * (width / widths[-1]) ** power for width in widths]
        axes.loglog(widths, limit, "k--", label=f"slope {power}")
        axes.set(xlabel="inputs of the linear", ylabel=unit)
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.set_xticks([], minor=True)
        axes.legend(fontsize=7)
    return figure


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--picture", type=Path, help="file of the picture")
    options = parser.parse_args()
    seconds: dict[str, dict[int, float]] = {name: {} for name in SOLVERS}
    megabytes: dict[str, dict[int, float]] = {name: {} for name in SOLVERS}
    for name in SOLVERS:
        measured = _shared.in_new_process(measure, name, options.widths, OMP_NUM_THREADS="1")
        for width, (took, memory) in zip(options.widths, measured, strict=True):
            seconds[name][width], megabytes[name][width] = took, memory
    if options.picture:
        draw(seconds, megabytes).savefig(options.picture, dpi=150, bbox_inches="tight")
    header = ["solver", *(f"{width}: s" for width in options.widths), "slope"]
    header += [*(f"{width}: MB" for width in options.widths), "slope"]
    lines, time_slopes, memory_slopes = [], [], []
    for name in SOLVERS:
        slopes = [slope(values[name]) for values in (seconds, megabytes)]
        time_slopes.append((slopes[0], name))
        memory_slopes.append((slopes[1], name))
        times, sizes = ([f"{value:.3g}" for value in values[name].values()] for values in (seconds, megabytes))
        lines.append([name, *times, f"{slopes[0]:.2f}", *sizes, f"{slopes[1]:.2f}"])
    neurons = [(took, f"{width} wide") for width, took in seconds["eliminate columns"].items() if width == 2048]
    summary = (
        f"time at most I^3.3: {_shared.verdict(time_slopes, lambda x: x <= 3.3)}; "
        f"memory at most I^2.3: {_shared.verdict(memory_slopes, lambda x: x <= 2.3)}; "
        f"2,048 neurons in at most 10 s: {_shared.verdict(neurons, lambda x: x <= 10)}"
    )
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
