"""Whether `hf-freeze compress` keeps what it promises: many budgets, each compression from the start.

    hf-freeze run recipes/served/recipe.yaml --set 'only=["0"]' --out runs/served
    python benchmarks/budgets.py runs/served/row-0-seed-1/model --data recipes/served/recipe.yaml --out budgets.md

Claim: every budget is met by the folder that is served, or refused with the nearest that is possible.

The budgets of bytes go in equal steps from `--least` to 1.05 of what the model takes in the engine; those in even places limit
the time of a text alone too, to as large a share and a quarter more. Bytes are counted here, and where time is limited, all
folders are timed again at the end, in turns: load on the machine may put a time above its limit. "Nearest" is what a refusal
names; where it names one, it is tried as a budget of its own, and the trial counts as kept only if that is met.
"""

import argparse
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _shared
import torch
from rich.console import Console

from hf_freeze.compression import Budget, Compressed, compress
from hf_freeze.compression.budget import in_bytes, read_bytes
from hf_freeze.compression.engine import Stopwatch, engine_for, new_tokens_of, serve
from hf_freeze.experiments.labelled import inputs_and_labels
from hf_freeze.io import bytes_of
from hf_freeze.publish.export.served import opened

_NEAREST = re.compile(r"the smallest shape .*? needs about ([\d.,]+ [kM]?B)")


@dataclass
class Trial:
    budget: Budget
    result: Compressed | None = None
    refused: str = ""

    @property
    def bytes(self) -> int:
        return 0 if self.result is None else bytes_of(self.result.after.folder)


class Trials:
    """Compressions of one model on the same inputs, each in a folder of its own."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self.options, self.out = options, out
        self.texts, self.labels = inputs_and_labels(str(options.model), options.data, None, None, options.set)
        original = opened(options.model)
        engine = engine_for(options.engine, original.task, original.model.config.model_type)
        self.engine, whole = engine.name, serve(options.model, engine.format, engine.quantization, out / "dense")
        written = [label for _, label in self.labels.dev] if original.task == "seq2seq-lm" else []
        texts = [item if isinstance(item, str) else " ".join(item) for item, _ in self.labels.dev]
        self.whole, self.stopwatch = whole, Stopwatch(whole, texts[:256], new_tokens_of(whole, original.task, written))

    def run(self, name: str, budget: Budget) -> Trial:
        one = Trial(budget)
        options: dict[str, Any] = {"engine": self.engine, "heal": self.options.heal, "console": Console(quiet=True)}
        try:
            one.result = compress(
                self.options.model, texts=self.texts, labels=self.labels, budget=budget, out=self.out / name, **options
            )
        except ValueError as error:
            one.refused = str(error)
        print(f"{budget.words()}: {one.refused or in_bytes(one.bytes)}", flush=True)
        return one


def kept(one: Trial, nearest: Trial | None) -> bool:
    """Whether the trial ended as promised. `nearest`: the trial of the budget that a refusal named."""
    if one.result is not None:
        return not one.budget.excess(one.bytes, one.result.after.ms)
    return nearest is not None and kept(nearest, None)


def main() -> None:
    parser: argparse.ArgumentParser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", type=Path, help="folder of a trained model with its tokenizer")
    parser.add_argument("--data", required=True, help="its recipe, or files with labels")
    parser.add_argument("--engine", help="the default is that of compress")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument(
        "--least", type=float, default=0.25, help="the smallest budget, as a share of the model's bytes"
    )
    parser.add_argument("--heal", default="0epochs", help="of each trial")
    parser.add_argument("--set", action="append", default=[], help="change a setting of the recipe")
    parser.add_argument("--runs", type=Path, help="where the compressions are kept, to go on; nowhere if not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        report(options, options.runs or Path(temporary))


def report(options: argparse.Namespace, out: Path) -> None:
    trials = Trials(options, out)
    whole, ms = bytes_of(trials.whole), trials.stopwatch.milliseconds({"whole": trials.whole})["whole"]
    found: list[tuple[Trial, Trial | None]] = []
    for number in range(options.trials):
        share = options.least + (1.05 - options.least) * number / (options.trials - 1)
        limit = min(share + 0.25, 1.0) * ms if number % 2 else None
        one = trials.run(f"trial-{number}", Budget(max_bytes=round(share * whole), max_ms=limit))
        nearest = None
        if named := _NEAREST.search(one.refused):
            size = round(1.001 * read_bytes(named[1].replace(",", "")))  # it is rounded to three digits or more
            nearest = trials.run(f"trial-{number}-nearest", Budget(max_bytes=size))
        found.append((one, nearest))
    limited = {
        str(one.result.after.folder): one.result.after.folder for one, _ in found if one.result and one.budget.max_ms
    }
    again = trials.stopwatch.milliseconds(limited) if limited else {}
    trials.stopwatch.close()
    lines, kept_ones = [], 0
    for one, nearest in found:
        held = kept(one, nearest)
        kept_ones += held
        cells = [one.budget.words()]
        if one.result is not None:
            after = one.result.after
            ms_again = again.get(str(after.folder))
            cells += [in_bytes(one.bytes), *("" if each is None else f"{each:.2f}" for each in (after.ms, ms_again))]
            cells += [f"{-one.result.loss:+.1f}", "yes" if held else "no"]
        else:
            cells += ["refused", "", "", "", ("yes" if held else "no") + f": {one.refused}"]
            cells[-1] += f"; {in_bytes(nearest.bytes)} was made" if nearest and nearest.result else ""
        lines.append(cells)
    header = ["budget", "made", "ms", "ms again", "points to the model", "kept"]
    text = f"The model: {in_bytes(whole)}, {ms:.2f} ms.\n\n{_shared.markdown(header, lines)}"
    _shared.report(options, text, f"{kept_ones} of {len(found)} budgets kept")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
