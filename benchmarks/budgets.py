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

import _shared
import torch
from rich.console import Console

from hf_freeze.compression.budget import in_bytes, read_bytes
from hf_freeze.experiments.compress import serving
from hf_freeze.experiments.recipes.load import load_recipe
from hf_freeze.experiments.tasks.registry import task_of
from hf_freeze.io import bytes_of
from hf_freeze.model.loading import load_tokenizer
from hf_freeze.search import Budget, Compressed, compress

_NEAREST = re.compile(r"the smallest shape .*? has ([\d.,]+ [kM]?B)")


@dataclass
class Trial:
    budget: Budget
    out: Path
    result: Compressed | None = None
    refused: str = ""

    @property
    def served(self) -> Path:
        return self.out / "served"


def trial(options: argparse.Namespace, budget: Budget, out: Path) -> Trial:
    one = Trial(budget, out)
    try:
        one.result = compress(
            options.model,
            data=options.data,
            budget=budget,
            out=out,
            engine=options.engine,
            epochs=options.epochs,
            settings=options.set,
            jobs=options.jobs,
            console=Console(quiet=True),
        )
    except ValueError as error:
        one.refused = str(error)
    print(f"{budget.words()}: {one.refused or in_bytes(bytes_of(one.served))}", flush=True)
    return one


def kept(one: Trial, whole: int, nearest: Trial | None) -> bool:
    """Whether the trial ended as promised. `nearest`: the trial of the budget that a refusal named."""
    if one.result is not None:
        return not one.budget.excess(bytes_of(one.served), one.result.after.ms)
    if "within the budget already" in one.refused:
        return one.budget.max_bytes is not None and one.budget.max_bytes >= whole
    return nearest is not None and nearest.result is not None and kept(nearest, whole, None)


def main() -> None:
    parser: argparse.ArgumentParser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", type=Path, help="folder of a trained model with its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="its recipe")
    parser.add_argument("--engine", default="ctranslate2", choices=list(serving.ENGINES))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument(
        "--least", type=float, default=0.25, help="the smallest budget, as a share of the model's bytes"
    )
    parser.add_argument("--epochs", type=float, default=2.0, help="of all trainings of a trial together")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="change a setting of the recipe")
    parser.add_argument("--runs", type=Path, help="where the compressions are kept, to go on; nowhere if not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        report(options, options.runs or Path(temporary))


def report(options: argparse.Namespace, out: Path) -> None:
    whole, ms = dense(options, out / "dense")
    trials: list[tuple[Trial, Trial | None]] = []
    for number in range(options.trials):
        share = options.least + (1.05 - options.least) * number / (options.trials - 1)
        limit = min(share + 0.25, 1.0) * ms if number % 2 else None
        one = trial(options, Budget(max_bytes=round(share * whole), max_ms=limit), out / f"trial-{number}")
        named = _NEAREST.search(one.refused)
        nearest = None
        if named:
            size = round(1.001 * read_bytes(named[1].replace(",", "")))  # it is rounded to three digits or more
            nearest = trial(options, Budget(max_bytes=size), out / f"trial-{number}-nearest")
        trials.append((one, nearest))
    again = timed_again(options, trials)
    lines, broken = [], []
    for one, nearest in trials:
        held = kept(one, whole, nearest)
        broken += [] if held else [(1, one.budget.words())]
        cells = [one.budget.words()]
        if one.result is not None:
            after = one.result.after
            cells += [in_bytes(bytes_of(one.served)), "" if after.ms is None else f"{after.ms:.2f}"]
            cells += [again.get(one.served, ""), f"{after.test_score:.1f}", "yes" if held else "no"]
        else:
            cells += ["refused", "", "", "", ("yes" if held else "no") + f": {one.refused}"]
            cells[-1] += f"; {in_bytes(bytes_of(nearest.served))} was made" if nearest and nearest.result else ""
        lines.append(cells)
    header = ["budget", "made", "ms", "ms again", "test score", "kept"]
    text = f"The model: {in_bytes(whole)}, {ms:.2f} ms.\n\n{_shared.markdown(header, lines)}"
    _shared.report(options, text, f"{len(trials) - len(broken)} of {len(trials)} budgets kept")


def dense(options: argparse.Namespace, out: Path) -> tuple[int, float]:
    """Bytes and ms of the model in the engine."""
    folder = serving.serve(options.model, serving.ENGINES[options.engine], out)
    return bytes_of(folder), milliseconds(options, {"dense": folder})["dense"]


def milliseconds(options: argparse.Namespace, folders: dict[str, Path]) -> dict[str, float]:
    """As a compression measures them."""
    recipe = load_recipe(options.data, options.set)
    dev = task_of(recipe["task"]).load(recipe["data"])["dev"]
    return serving.milliseconds(folders, recipe["task"], dev, load_tokenizer(options.model), lambda line: None)


def timed_again(options: argparse.Namespace, trials: list[tuple[Trial, Trial | None]]) -> dict[Path, str]:
    """Folder -> ms, of those whose time is limited."""
    limited = {str(one.served): one.served for one, _ in trials if one.result and one.budget.max_ms}
    if not limited:
        return {}
    times = milliseconds(options, limited)
    return {Path(name): f"{times[name]:.2f}" for name in limited}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
