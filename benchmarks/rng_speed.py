"""Speed of regenerating a seeded tensor, against torch's uniform generator.

    python benchmarks/rng_speed.py

Claim: at least half the speed of `torch.empty(n).uniform_()`. Both generate a new tensor of 2^24 fp32 values, in turns and
`--rounds` times in one process; the best time of each counts, since noise only adds time. `uniform_` always runs on one thread;
ours shares its blocks among `torch.get_num_threads()` threads. New memory costs both the same, so the ratio to `uniform_` in
memory that was written before is reported too; it is lower. The amount of work is printed beside it: for 4 values,
Philox-4x32-10 needs 20 multiplications (32 to 64 bits) and 40 exclusive ors of 32-bit words, so 15 operations per value, each a
pass through the cache.
"""

import argparse
import time
from collections.abc import Callable

import torch

from hf_freeze.lab.runs.environment import environment
from hf_freeze.seeded import tensor as rng

SIZE = 1 << 24


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    written = torch.zeros(SIZE)
    works = {
        "ours": lambda: rng.uniform(0, "x", (4096, SIZE // 4096), 0.1),
        "uniform_": lambda: torch.empty(SIZE).uniform_(-0.1, 0.1),
        "uniform_ in place": lambda: written.uniform_(-0.1, 0.1),
    }
    times = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, work in works.items():
            times[name].append(seconds(work))
    best = {name: min(rounds) for name, rounds in times.items()}
    for name, time_taken in best.items():
        print(f"{name:<17} {SIZE / time_taken / 1e6:5.0f} million values a second")
    print(f"ours: {torch.get_num_threads()} threads, {15 * SIZE / best['ours'] / 1e9:.1f} billion operations a second")
    print(f"ratio {best['uniform_'] / best['ours']:.2f} (claim: at least 0.5), in place "
          f"{best['uniform_ in place'] / best['ours']:.2f}; {environment()}")  # fmt: skip


if __name__ == "__main__":
    main()
