"""What the benchmarks share: models of the freeze ablation, measuring in turns, rates of this machine, the report."""

import argparse
import functools
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

from hf_freeze.experiments.recipes.expand import expand
from hf_freeze.experiments.recipes.load import load_recipe
from hf_freeze.experiments.runs.environment import environment
from hf_freeze.training.precision import uses_bf16

RECIPE = Path(__file__).parents[1] / "recipes" / "freeze_ablation" / "recipe.yaml"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parser(docstring: str | None, *, presets: bool = True) -> argparse.ArgumentParser:
    """With `--out`, and with `presets` what chooses the models of the freeze ablation."""
    made = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    if presets:
        made.add_argument(
            "--preset", default="tiny", help="of the recipe of the freeze ablation: demo, tiny, base, big ..."
        )
        made.add_argument("--set", action="append", default=[], help="backbone.config.encoder_layers=2 and the like")
    made.add_argument("--out", type=Path, help="a Markdown file for the table")
    return made


def rows(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """row -> its run, as the recipe says with `--preset` and `--set`."""
    runs = expand(load_recipe(RECIPE, [f"preset={options.preset}", *options.set]))
    for run in runs:
        run["training"]["bf16"] = uses_bf16(run["training"]["bf16"])
    return {run["row"]: run for run in runs}


def config(run: dict[str, Any], vocabulary: int) -> Any:
    """The run's backbone for a vocabulary without a tokenizer."""
    return transformers.AutoConfig.for_model(
        run["backbone"]["model_type"],
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=1,
        **run["backbone"]["config"],
    )


def seconds(work: Callable[[], object], calls: int = 1) -> float:
    """Of one call, the mean of `calls`."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return (time.perf_counter() - start) / calls


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Pair:
    """Times of two works, a mean per round, and their ratio: the median over the rounds' own ratios."""

    one: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [one / other for one, other in zip(self.one, self.other, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({quartiles(self.ratios)})"


def quartiles(values: list[float], digits: int = 3) -> str:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{low:.{digits}f} to {high:.{digits}f}"


def in_turns(one: Callable[[], object], other: Callable[[], object], rounds: int, *, at_least: float = 0.0) -> Pair:
    """Rounds of one, other, other, one, after an uncounted call of each: drift and warm caches favour neither.

    A work is called so often in its turn that the turn takes `at_least` so many seconds.
    """
    one(), other()
    often = {work: _calls(work, at_least) for work in (one, other)}
    pair = Pair()
    for _ in range(rounds):
        first, second, third, fourth = (seconds(work, often[work]) for work in (one, other, other, one))
        pair.one.append((first + fourth) / 2)
        pair.other.append((second + third) / 2)
    return pair


def _calls(work: Callable[[], object], at_least: float) -> int:
    """How many take `at_least` so many seconds."""
    return max(1, math.ceil(at_least / best(work, 3))) if at_least else 1


def best(work: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of a few calls: noise only adds."""
    return min(seconds(work) for _ in range(times))


def resident(field: str) -> int:
    """Bytes of this process, on Linux: resident now (VmRSS) or at most (VmHWM; getrusage would count the parent's too)."""
    return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def in_new_process(work: Callable[..., Any], *arguments: Any, **variables: str) -> Any:
    """`work(*arguments)` in a process of its own, started with these environment variables."""
    with patch.dict(os.environ, variables), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def copy_rate(size: int = 1 << 28) -> float:
    """Bytes read or written a second, by copies between two tensors of `size` bytes."""
    source, target = torch.ones(size // 4, device=DEVICE), torch.ones(size // 4, device=DEVICE)
    return 2 * size / best(lambda: target.copy_(source))


@functools.cache
def read_rate(size: int) -> float:
    """Bytes read a second from one tensor of `size` bytes, again and again: from a cache where it fits into one."""
    values = torch.ones(size // 4, device=DEVICE)
    calls = max(1, (1 << 24) // size)
    return size * calls / best(lambda: [torch.dot(values, values) for _ in range(calls)])


def product_rate(size: int = 1024) -> float:
    """Multiply-adds a second of an fp32 product of two square matrices."""
    left, right = torch.ones(size, size, device=DEVICE), torch.ones(size, size, device=DEVICE)
    return size**3 / best(
        lambda: left @ right, 50
    )  # over seconds: a limit that something else slowed down would be none


def verdict(found: list[tuple[float, str]], holds: Callable[[float], bool]) -> str:
    """Of a bar: whether all measured values hold, and each place where one does not."""
    wrong = [f"{where} ({value:.2f})" for value, where in found if not holds(value)]
    if not found:
        return "not measured"
    return f"missed in {len(wrong)} of {len(found)}: {'; '.join(wrong)}" if wrong else f"passed in all {len(found)}"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def report(options: argparse.Namespace, table: str, summary: str) -> None:
    """Print the table and the line with the ratios; with `--out` write them down with the command and the machine."""
    print(f"{table}\n\n{summary}; {environment()}")
    if options.out is not None:
        where = ", ".join(f"{key} {value}" for key, value in environment().items())
        command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        options.out.write_text(f"`{command}`\n\n{where}\n\n{table}\n\n{summary}\n", encoding="utf-8")
