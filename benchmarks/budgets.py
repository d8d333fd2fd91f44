"""Whether `hf_freeze.compress` keeps what it promises: many random budgets, each compression from the start.

    python benchmarks/budgets.py --trials 40 --seed 0 --mnist MNIST --keep runs/budgets --out budgets.md
    python benchmarks/budgets.py --trials 2 --tasks tags --steps 30

Claims: every budget is met by the folder that is served, or refused with the nearest that is possible; measuring in the engine
takes at most 2 % of the time.

The models are small, of six tasks, and trained here for some minutes each (`_small_models.py`). They take turns. A budget of
bytes is drawn log-uniformly from 0.15 to 1.05 of what the whole model takes in the engine in int8. Half of those of models that
read texts also limit the time of a text alone, to 30 % to 99 % of the whole model's. Each compression is from inputs without
labels, and not healed. "Nearest" is what a refusal names. It is tried as a budget of its own: bytes by 0.1 % more, since they are
rounded, within the same time; time by 5 % more, since it is measured anew. Columns:

- made: the bytes of the folder that is served, counted here;
- time, again: its share of the whole model's time when it was made, and at the end, when the whole model and all folders with a
  limit of time take turns once more; load on the machine may put the second above the limit;
- loss: points of fidelity to the model's answers, on inputs that took no part;
- seconds: of the compression; in the engine: the share of them for exports and times, and for comparing the answers;
- kept: whether the budget was met, or the nearest was met where it was refused.
"""

import argparse
import json
import math
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import _shared
import torch
from _small_models import Taught, add_options, trained
from rich.console import Console

from hf_freeze.compression import Budget, Compressed, compress
from hf_freeze.compression.budget import in_bytes, read_bytes
from hf_freeze.compression.engine import Stopwatch, engine_for, new_tokens_of, serve
from hf_freeze.compression.inputs import Inputs
from hf_freeze.compression.phases import FILE
from hf_freeze.io import bytes_of
from hf_freeze.publish.export.served import answers, opened

_SHARES, _PERCENT = (0.15, 1.05), (30, 99)  # of the whole model's bytes and time
_NEAREST = re.compile(r"needs about ([\d.,]+) (ms|[kM]?B)")
_TIMED = ("made-", "probes")  # the phases in which folders are exported and timed
_COMPARED = ("dev-", "test-")
_MOST_MEASURING = 0.02


@dataclass
class Trial:
    """`percent`: of the whole model's time. `seconds`: of each phase."""

    max_bytes: int | None
    percent: float | None = None
    result: Compressed | None = None
    refused: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    whole_ms: float | None = None

    @property
    def budget(self) -> Budget:
        return Budget(max_bytes=self.max_bytes, max_ms=None if self.percent is None else f"{self.percent:g}%")

    @property
    def bytes(self) -> int:
        return 0 if self.result is None else bytes_of(self.result.after.folder)

    @property
    def time(self) -> float | None:
        """A share of the whole model's."""
        if self.result is None or self.result.after.ms is None or self.result.whole.ms is None:
            return None
        return self.result.after.ms / self.result.whole.ms

    @property
    def met(self) -> bool:
        if self.result is None or (self.max_bytes is not None and self.bytes > self.max_bytes):
            return False
        return self.percent is None or (self.time is not None and 100 * self.time <= self.percent + 1e-9)

    def took(self, phases: tuple[str, ...] = ("",)) -> float:
        """The seconds of the phases whose names begin so."""
        return sum(seconds for name, seconds in self.seconds.items() if name.startswith(phases))

    def nearest(self) -> "Trial | None":
        """The one of the budget that its refusal names."""
        named = _NEAREST.search(self.refused)
        if named is None:
            return None
        number = named[1].replace(",", "")
        if named[2] != "ms":
            return Trial(round(1.001 * read_bytes(number + named[2])), self.percent)
        assert self.whole_ms is not None
        return Trial(None, min(round(105 * float(number) / self.whole_ms, 2), 99.9))


def kept(trial: Trial, nearest: Trial | None) -> bool:
    """Whether the trial ended as promised. `nearest`: the trial of the budget that a refusal named."""
    return trial.met if trial.result is not None else nearest is not None and nearest.met


class Subject:
    """A model whose compressions are tried. Each is in a folder of its own in `folder`, and a stopped one goes on."""

    def __init__(self, task: str, options: argparse.Namespace, folder: Path) -> None:
        self.folder, self.source = folder, folder / "model"
        self.taught: Taught = trained(task, options, self.source)
        self.served = opened(self.source)
        self.reads_texts = self.served.extractor is None
        engine = engine_for(None, self.served.task, self.served.model.config.model_type)
        self.whole = serve(self.source, engine.format, engine.quantization, folder / "whole")

    def run(self, name: str, trial: Trial) -> Trial:
        out = self.folder / name
        try:
            trial.result = compress(
                self.source, texts=self.taught.inputs, budget=trial.budget, out=out, heal=0, console=Console(quiet=True)
            )
        except ValueError as error:
            trial.refused = str(error)
        state = json.loads((out / FILE).read_text(encoding="utf-8"))
        trial.seconds, trial.whole_ms = state["seconds"], state["results"]["made-whole"]["ms"]
        return trial

    def times(self, trials: list[Trial]) -> dict[Path, float]:
        """The shares of the whole model's time that the folders of these trials take now."""
        folders = {str(trial.result.after.folder): trial.result.after.folder for trial in trials if trial.result}
        if not folders:
            return {}
        items = self.taught.inputs[:256]
        written = [each["text"] for each in answers(self.served, items).items if "text" in each]
        count = new_tokens_of(self.whole, self.served.task, written)
        stopwatch = Stopwatch(self.whole, [" ".join(Inputs.words(item)) for item in items], count)
        try:
            found = stopwatch.milliseconds(folders, unit=1.0)
        finally:
            stopwatch.close()
        return {folders[name]: share for name, share in found.items()}


def drawn(options: argparse.Namespace, subjects: dict[str, Subject]) -> Iterator[tuple[str, Trial]]:
    """(task, its trial). The draws are the same ones whatever the models are."""
    draw = random.Random(options.seed)
    for number in range(options.trials):
        task = options.tasks[number % len(options.tasks)]
        share = math.exp(draw.uniform(*map(math.log, _SHARES)))
        percent = draw.randint(*_PERCENT) if draw.random() < 0.5 else None
        subject = subjects[task]
        yield task, Trial(round(share * bytes_of(subject.whole)), percent if subject.reads_texts else None)


def main() -> None:
    parser: argparse.ArgumentParser = _shared.parser(__doc__, presets=False)
    add_options(parser)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the budgets")
    parser.add_argument(
        "--keep", type=Path, help="folder for models and compressions; a run that was stopped goes on there"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        report(options, options.keep or Path(temporary))


def report(options: argparse.Namespace, out: Path) -> None:
    subjects = {task: Subject(task, options, out / task) for task in options.tasks}
    found: list[tuple[str, Trial, Trial | None]] = []
    for number, (task, trial) in enumerate(drawn(options, subjects)):
        name = f"seed-{options.seed}-trial-{number}"
        subjects[task].run(name, trial)
        nearest = trial.nearest()
        if nearest is not None:
            subjects[task].run(f"{name}-nearest", nearest)
        found.append((task, trial, nearest))
        print(" | ".join([str(number), *cells(task, trial, nearest, {})]), flush=True)
    again: dict[Path, float] = {}
    for task, subject in subjects.items():
        again |= subject.times([trial for name, trial, _ in found if name == task and trial.percent is not None])
    header = ["model", "budget", "made", "time", "again", "loss", "seconds", "in the engine", "kept"]
    lines = [cells(*each, again) for each in found]
    sizes = ", ".join(f"{task} {in_bytes(bytes_of(subject.whole))}" for task, subject in subjects.items())
    text = f"The whole models in the engine: {sizes}.\n\n{_shared.markdown(header, lines)}"
    _shared.report(options, text, summary(found, again))


def cells(task: str, trial: Trial, nearest: Trial | None, again: dict[Path, float]) -> list[str]:
    words = [task, trial.budget.words().replace(" of the model's time a text", " of the time")]
    word = "yes" if kept(trial, nearest) else "no"
    took = trial.took()
    took_words = [f"{took:.0f}", f"{trial.took(_TIMED) / took:.1%} + {trial.took(_COMPARED) / took:.1%}"]
    if trial.result is None:
        word += f": {trial.refused}"
        if nearest is not None:
            ended = in_bytes(nearest.bytes) if nearest.met else nearest.refused or "more than that"
            word += f"; tried as {nearest.budget.words()}: {ended}"
        return [*words, "refused", "", "", "", *took_words, word]
    times = [trial.time, again.get(trial.result.after.folder)]
    shares = ["" if share is None else f"{share:.1%}" for share in times]
    return [*words, in_bytes(trial.bytes), *shares, f"{trial.result.loss:.2f}", *took_words, word]


def summary(found: list[tuple[str, Trial, Trial | None]], again: dict[Path, float]) -> str:
    made = [trial for _, trial, _ in found if trial.result is not None]
    late = [trial for trial in made if trial.percent and 100 * again[_folder(trial)] > trial.percent]
    timed = sum(trial.percent is not None for trial in made)
    every = [*(trial for _, trial, _ in found), *(nearest for *_, nearest in found if nearest is not None)]
    seconds = sum(trial.took() for trial in every)
    timing, comparing = (sum(trial.took(phases) for trial in every) / seconds for phases in (_TIMED, _COMPARED))
    verdict = "passed" if timing + comparing <= _MOST_MEASURING else "missed"
    met = sum(kept(trial, nearest) for _, trial, nearest in found)
    return (
        f"{met} of {len(found)} budgets kept: {len(made)} made, {len(found) - len(made)} refused; timed again, {len(late)} of "
        f"{timed} are above their limit; in the engine: {timing:.1%} of the seconds for exports and times, {comparing:.1%} for "
        f"comparing the answers: {verdict}"
    )


def _folder(trial: Trial) -> Path:
    assert trial.result is not None
    return trial.result.after.folder


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
