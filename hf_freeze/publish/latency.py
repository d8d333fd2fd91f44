"""How fast folders answer as users feel it: saved models and exported folders of any format, side by side.

Every folder has a process of its own (`latency_worker`), which opens it and answers texts with tokenizer and search as
usual: in PyTorch, or folders in ONNX and OpenVINO by `hf_freeze.runtime`, without it. The processes take turns, so that other
load on the machine hits all of them alike, and a ratio of two folders is one of neighbouring measurements.

    results = measure(["runs/theseus/row-0-seed-1/model", "model-onnx-int8"], texts)
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.io import write_whole
from hf_freeze.publish.latency_worker import GENERATING
from hf_freeze.publish.markdown import markdown_table
from hf_freeze.runtime.folders import MODEL_FILES

BATCHES = (1, 32)
_ALONE, _TOGETHER = 16, 128  # texts of a round in batches of one, and in the others
FILES = ("latency.json", "latency.md", "latency.png")


@dataclass
class Latency:
    """What was measured of a folder.

    `megabytes`: of the model's files. `cold_start`: seconds from the start of the process to its first answer. `memory`: the
    largest resident set of the process, in MB. `first`: ms to the first token of one text alone, one entry for each (empty for
    models that do not generate). `batches`: batch size -> ms of each batch; `sizes`: batch size -> (texts, new tokens) of each
    batch.
    """

    folder: str
    engine: str
    task: str
    megabytes: float
    cold_start: float
    memory: float = 0.0
    first: list[float] = field(default_factory=list)
    batches: dict[int, list[float]] = field(default_factory=dict)
    sizes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, batch: int, texts: Sequence[str], answer: dict[str, Any]) -> None:
        """What the process has measured of a batch."""
        self.batches.setdefault(batch, []).append(answer["ms"])
        self.sizes.setdefault(batch, []).append((len(texts), answer["tokens"]))
        if "first" in answer:
            self.first.append(answer["first"])

    def per_text(self, batch: int) -> float:
        """ms a text, in batches of this size."""
        return sum(self.batches[batch]) / sum(texts for texts, _ in self.sizes[batch])

    def tokens_per_second(self, batch: int) -> float:
        """New tokens a second; 0 for models that do not generate."""
        return 1000 * sum(tokens for _, tokens in self.sizes[batch]) / sum(self.batches[batch])

    def percentile(self, batch: int, percent: float) -> float:
        """ms of a batch of this size."""
        return float(np.percentile(self.batches[batch], percent))

    def ratio_to(self, other: "Latency", batch: int) -> tuple[float, float, float]:
        """(median, quartiles) of this folder's time divided by the other's, over batches of the same texts."""
        ratios = np.array(self.batches[batch]) / np.array(other.batches[batch])
        quartile, middle, upper = np.percentile(ratios, (25, 50, 75))
        return float(middle), float(quartile), float(upper)


def megabytes(folder: Path) -> float:
    """MB of the model's files, without tokenizer and config."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in MODEL_FILES) / 1e6


def measure(
    folders: Sequence[str | os.PathLike[str]],
    texts: Iterable[str],
    *,
    batches: Sequence[int] = BATCHES,
    new_tokens: int = 64,
    exactly: bool = False,
    rounds: int = 3,
    threads: int = 1,
    say: Callable[[str], Any] = lambda text: None,
    worker: "Worker | None" = None,
) -> list[Latency]:
    """Measure each folder on the same texts; greedy search of at most `new_tokens` tokens, or `exactly` so many.

    A round has 16 texts one by one, first for one token and then for all, and up to 128 texts in each other batch size. Each
    process has `threads` threads. `say` is called with a line before each slow step. `worker`: the process for all folders, of as
    many threads; cold starts and memory are then not those of each folder alone.

    Raises ValueError for no folder or no text, a number below 1, and a folder that cannot be opened or answers with an error.
    """
    lines = [text for text in texts if text.strip()][:_TOGETHER]
    if not folders:
        raise ValueError("no folder to measure; name at least one")
    if not lines:
        raise ValueError("the texts are empty; give a file with a text on each line")
    for name, value in [
        ("new_tokens", new_tokens),
        ("rounds", rounds),
        ("threads", threads),
        *(("batch", b) for b in batches),
    ]:
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    settings = {"new_tokens": new_tokens, "exactly": exactly, "threads": threads}
    if busy := _busy():
        say(f"this machine is busy ({busy}): times will be too long")
    results, asks = [], []
    with contextlib.ExitStack() as stack:
        for number, folder in enumerate(map(str, folders), start=1):
            say(f"opening {folder} ({number} of {len(folders)})")
            begin = time.time()
            process = worker or stack.enter_context(contextlib.closing(Worker(threads)))
            asks.append(functools.partial(process.ask, folder, settings))
            opened = asks[-1](lines[:1], 0)
            size, seconds = megabytes(Path(folder)), time.time() - begin
            results.append(Latency(folder, opened["engine"], opened["task"], size, seconds))
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            for batch in batches:
                chosen = lines[:_ALONE] if batch == 1 else lines
                for start in range(0, len(chosen), batch):
                    for ask, result in zip(asks, results, strict=True):
                        result.add(batch, chosen[start : start + batch], ask(chosen[start : start + batch], batch))
        for ask, result in zip(asks, results, strict=True):
            result.memory = ask([], 0, last=True)["memory"]
    return results


def _busy() -> str:
    """How many processes want the cores, where there are more of them than cores; "" where the system does not tell."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"{load:.1f} processes for {cores} cores" if load > cores else ""


class Worker:
    """A process that opens folders and answers texts. Starting one takes longer than a few measurements of small models: give
    one to several calls of `measure`, and `close` it. It ends with the process that started it."""

    def __init__(self, threads: int = 1) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hf_freeze.publish.latency_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, folder: str, settings: dict[str, Any], texts: list[str], batch: int, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"folder": folder, "settings": settings, "texts": texts, "batch": batch} | more
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: its process ended with code {self.process.wait()}") from error
        if "error" in answer:
            raise ValueError(f"{folder}: {answer['error']}")
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


# -- table and picture ---------------------------------------------------------------------------------------------------------


def table(results: Sequence[Latency]) -> list[dict[str, str]]:
    """A row for each folder: heading -> text. Times are medians, with the 95th percentile after them; "32: ms" is that of a batch
    of 32."""
    rows = []
    for one in results:
        row = {"folder": _name(one), "engine": one.engine, "files, MB": f"{one.megabytes:.2f}"}
        row["cold start, s"] = f"{one.cold_start:.1f}"
        if one.first:
            first, late = np.percentile(one.first, (50, 95))
            row["first token, ms"] = f"{first:.1f} ({late:.1f})"
        for batch in one.batches:
            middle, late = (one.percentile(batch, percent) for percent in (50, 95))
            row[f"{batch}: ms"] = f"{middle:.1f} ({late:.1f})"
            if one.task in GENERATING:
                row[f"{batch}: tokens/s"] = f"{one.tokens_per_second(batch):,.0f}"
            else:
                row[f"{batch}: texts/s"] = f"{1000 / one.per_text(batch):,.0f}"
        row["memory, MB"] = f"{one.memory:,.0f}"
        rows.append(row)
    return rows


def _name(one: Latency) -> str:
    """The name of the folder; of a run's `model`, that of the run."""
    path = Path(one.folder).resolve()
    return path.parent.name if path.name == "model" else path.name


def write(results: Sequence[Latency], out: Path) -> None:
    """Write `FILES` to the folder `out`: what was measured, the table and the picture."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / FILES[0], json.dumps([asdict(one) for one in results], indent=1) + "\n")
    rows = table(results)
    lines = markdown_table(list(rows[0]), [list(row.values()) for row in rows], left=2)
    write_whole(out / FILES[1], "\n".join(lines) + "\n")
    draw(results, out / FILES[2])


def draw(results: Sequence[Latency], path: Path) -> None:
    """Bars: time a text in each batch size, with 5th and 95th percentile, and MB. The names of the folders are the labels."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    batches = list(results[0].batches)
    names = [f"{_name(one)}\n{one.engine}" for one in results]
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}):
        figure = Figure(figsize=(4 + 3.2 * len(batches), 1.4 + 0.55 * len(results)), layout="constrained")
        axes = figure.subplots(1, len(batches) + 1, sharey=True, squeeze=False)[0]
        for axis, batch in zip(axes, batches, strict=False):
            texts = np.array([[max(1, size) for size, _ in one.sizes[batch]] for one in results])
            times = np.array([one.batches[batch] for one in results]) / texts
            low, middle, high = np.percentile(times, (5, 50, 95), axis=1)
            whiskers = {"xerr": [middle - low, high - middle], "error_kw": {"linewidth": 0.8, "capsize": 2}}
            axis.barh(names, middle, color="#4477aa", **whiskers)
            axis.set_xlabel(f"ms a text, in batches of {batch}" if batch > 1 else "ms a text, one by one")
        axes[-1].barh(names, [one.megabytes for one in results], color="#bbbbbb")
        axes[-1].set_xlabel("model files, MB")
        axes[0].invert_yaxis()
        for axis in axes:
            axis.set_xlim(left=0)
            axis.grid(axis="x", alpha=0.2)
        figure.savefig(path, dpi=130, facecolor="white")
