"""Time and error of the two solvers of `LowRank`, exact and randomized, on wide matrices.

    python benchmarks/low_rank_solvers.py                           # 1024 to 4096 wide: some minutes
    python benchmarks/low_rank_solvers.py --sizes 256x512x16

Claim: the randomized solver loses at most 1.02 times as much as the exact one, in the Frobenius norm, and from a width of 2048 on
it is at least 4 times faster.

Two spectra: singular values that fall as 1/√k, as those of trained weights roughly do, and those of noise, which has no low rank
and is the hardest case. One thread. Limit: the exact solver's error is the least that any matrix of this rank can have.
"""

import argparse

import _shared
import torch
from torch import nn

from hf_freeze.layers import LowRankLinear

SIZES = ["1024x1024x64", "2048x2048x256", "2048x5632x64", "4096x4096x256"]


def matrix(outputs: int, inputs: int, spectrum: str) -> torch.Tensor:
    """(O, I), fp32, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(outputs, inputs, generator=generator)
    if spectrum == "noise":
        return noise
    rank = min(outputs, inputs)
    left = torch.linalg.qr(torch.randn(outputs, rank, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(inputs, rank, generator=generator)).Q
    return (left * torch.arange(1, rank + 1) ** -0.5) @ right.T


def solved(weight: torch.Tensor, rank: int, solver: str) -> tuple[float, float]:
    """(seconds, norm of the error relative to that of the weight)."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    low_rank = LowRankLinear(linear, rank, std=0.02, solver=solver)
    seconds = _shared.seconds(lambda: low_rank.fill(weight))
    return seconds, float((low_rank.dense_weight().detach() - weight).norm() / weight.norm())


def _size(text: str) -> tuple[int, int, int]:
    try:
        outputs, inputs, rank = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: OUTPUTSxINPUTSxRANK, such as {SIZES[0]}") from None
    return outputs, inputs, rank


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--sizes", nargs="+", type=_size, default=[_size(size) for size in SIZES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines, errors, times = [], [], []
    for outputs, inputs, rank in options.sizes:
        for spectrum in ("1/√k", "noise"):
            weight = matrix(outputs, inputs, spectrum)
            (exact, least), (fast, error) = (solved(weight, rank, solver) for solver in ("exact", "randomized"))
            case = f"{outputs} x {inputs}, rank {rank}, {spectrum}"
            lines.append([case, f"{exact:.2f}", f"{fast:.2f}", f"{exact / fast:.1f}", f"{least:.4f}", f"{error:.4f}"])
            errors.append((error / least, case))
            times += [(exact / fast, case)] if min(outputs, inputs) >= 2048 else []
    header = ["matrix", "exact s", "randomized s", "faster", "exact error", "randomized error"]
    summary = (
        f"error at most 1.02 times the least: {_shared.verdict(errors, lambda x: x <= 1.02)}; "
        f"at least 4 times faster: {_shared.verdict(times, lambda x: x >= 4)}"
    )
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
