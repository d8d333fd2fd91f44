"""Shared by the benchmarks: models of the freeze ablation, alternating measurements, rates of this machine, the report."""

import argparse
import functools
import math
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.runs.environment import environment
from hf_freeze.lab.runs.launcher import leave_processes
from hf_freeze.lab.training.precision import uses_bf16

RECIPE = Path(__file__).parents[1] / "recipes" / "freeze_ablation" / "recipe.yaml"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parser(docstring: str | None, *, presets: bool = True) -> argparse.ArgumentParser:
    """A parser with `--out`, and with `presets` also `--preset` and `--set`, which choose models of the freeze ablation."""
    new_parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    if presets:
        new_parser.add_argument(
            "--preset", default="tiny", help="a preset of the freeze ablation recipe: demo, tiny, base, big ..."
        )
        new_parser.add_argument(
            "--set", action="append", default=[], help="override a setting, such as backbone.config.encoder_layers=2"
        )
    new_parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    return new_parser


def rows(options: argparse.Namespace) -> dict[str, Run]:
    """{row: its run} of the freeze ablation recipe with `--preset` and `--set`."""
    runs = expand(load_recipe(RECIPE, [f"preset={options.preset}", *options.set]))
    for run in runs:
        run.training.bf16 = uses_bf16(run.training.bf16)
    return {run.row: run for run in runs}


def config(model_type: str, fields: dict[str, Any], vocabulary: int) -> Any:
    """A backbone for a vocabulary without a tokenizer."""
    return transformers.AutoConfig.for_model(
        model_type,
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=1,
        **fields,
    )


def config_of(run: Run, vocabulary: int) -> Any:
    """The run's backbone for a vocabulary without a tokenizer."""
    return config(run.backbone.model_type, run.backbone.config, vocabulary)


def seconds(work: Callable[[], object], calls: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Mean seconds of a call, over `calls` calls."""
    synchronize()
    start = clock()
    for _ in range(calls):
        work()
    synchronize()
    return (clock() - start) / calls


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Pair:
    """Times of two functions in each round, and their ratio: the median of the ratios of the rounds."""

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


def in_turns(
    one: Callable[[], object],
    other: Callable[[], object],
    rounds: int,
    *,
    at_least: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Pair:
    """Time two functions in rounds of four turns (one, other, other, one), so that drift and warm caches favour neither.

    Each function is first called once without timing. In a turn, it is repeated for at least `at_least` seconds.
    `clock`: such as `time.process_time` for work on one thread while other processes run.
    """
    one(), other()
    calls = {work: _calls(work, at_least) for work in (one, other)}
    pair = Pair()
    for _ in range(rounds):
        first, second, third, fourth = (seconds(work, calls[work], clock) for work in (one, other, other, one))
        pair.one.append((first + fourth) / 2)
        pair.other.append((second + third) / 2)
    return pair


def _calls(work: Callable[[], object], at_least: float) -> int:
    """The number of calls that take at least `at_least` seconds."""
    return max(1, math.ceil(at_least / best(work, 3))) if at_least else 1


def best(work: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of a few calls, since noise only adds time."""
    return min(seconds(work) for _ in range(times))


def resident(field: str) -> int:
    """Resident bytes of this process, on Linux: `field` is VmRSS (now) or VmHWM (peak).

    getrusage is no alternative: its peak includes the parent's.
    """
    return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def in_new_process(work: Callable[..., Any], *arguments: Any, **variables: str) -> Any:
    """The result of `work(*arguments)` in a new process with these environment variables."""
    spawn = multiprocessing.get_context("spawn")
    with (
        patch.dict(os.environ, variables),
        ProcessPoolExecutor(1, spawn) as pool,
    ):  # one that may have processes of its own
        return pool.submit(work, *arguments).result()


def in_new_group(work: Callable[..., Any], count: int, *arguments: Any, **variables: str) -> list[Any]:
    """The results of `work(*arguments)` in each of `count` new processes, a group of torch.distributed on the CPU."""
    spawn = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, variables), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, spawn)) for _ in range(count)]
        futures = [
            pool.submit(_in_group, f"file://{folder}/store", rank, count, work, arguments)
            for rank, pool in enumerate(pools)
        ]
        return [future.result() for future in futures]


def _in_group(store: str, rank: int, count: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    try:
        return work(*arguments)
    finally:
        leave_processes()


def copy_rate(size: int = 1 << 28) -> float:
    """Bytes read plus written per second in copies between two tensors of `size` bytes."""
    source, target = torch.ones(size // 4, device=DEVICE), torch.ones(size // 4, device=DEVICE)
    return 2 * size / best(lambda: target.copy_(source))


@functools.cache
def read_rate(size: int) -> float:
    """Bytes per second when one tensor of `size` bytes is read repeatedly; a tensor that fits is read from a cache."""
    values = torch.ones(size // 4, device=DEVICE)
    calls = max(1, (1 << 24) // size)
    return size * calls / best(lambda: [torch.dot(values, values) for _ in range(calls)])


def product_rate(size: int = 1024) -> float:
    """Multiply-adds per second of an fp32 product of two square matrices."""
    left, right = torch.ones(size, size, device=DEVICE), torch.ones(size, size, device=DEVICE)
    # Many calls: a rate lowered by other load would be no limit.
    return size**3 / best(lambda: left @ right, 50)


def verdict(measurements: list[tuple[float, str]], holds: Callable[[float], bool]) -> str:
    """Whether all measured values satisfy the claim `holds`, and the cases in which they do not; (value, case)."""
    missed = [f"{case} ({value:.2f})" for value, case in measurements if not holds(value)]
    if not measurements:
        return "not measured"
    if not missed:
        return f"passed in all {len(measurements)}"
    return f"missed in {len(missed)} of {len(measurements)}: {'; '.join(missed)}"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def report(options: argparse.Namespace, table: str, summary: str) -> None:
    """Print the table and the summary; with `--out`, also write them to a file with the command and the machine."""
    print(f"{table}\n\n{summary}; {environment()}")
    if options.out is not None:
        machine = ", ".join(f"{key} {value}" for key, value in environment().items())
        command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        options.out.write_text(f"`{command}`\n\n{machine}\n\n{table}\n\n{summary}\n", encoding="utf-8")
