"""What compressions of one model to several budgets came to: bytes, time and score on the test split, in a table and a picture.

    hf-freeze compress MODEL --data RECIPE --max-bytes 2MB --seed 1 --out runs/compressed/2MB-1
    python benchmarks/compressed.py runs/compressed/* --data RECIPE --out compressed.md

Claim: every folder is within its budget, as measured again here, and at most `--loss` points below the model.

`FOLDERS` are those of finished compressions; those with one budget, which may differ in their seed, are a row. `--label TEXT
NAME`: those whose command contains TEXT are rows of their own, with NAME behind the budget. Bytes are counted,
scores computed, and times of one text alone measured anew here, with all folders in turns on one thread. The interval of the
difference to the model is over test items, and over seeds where there are several.
"""

import argparse
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _shared
import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

from hf_freeze.analysis.significance import compare
from hf_freeze.compression.budget import Budget, in_bytes
from hf_freeze.compression.engine import Stopwatch, new_tokens_of
from hf_freeze.io import bytes_of
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.report.plots.draw import save_png
from hf_freeze.lab.report.plots.style import STYLE
from hf_freeze.lab.scored import items_of
from hf_freeze.lab.tasks.registry import task_of
from hf_freeze.lab.tasks.scoring import SCORING

_COLORS, _MARKERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"), "sDo^v"  # Okabe and Ito
_LIMITS = ("max_bytes", "max_ms")


@dataclass
class Row:
    """Compressions to one budget."""

    name: str
    budget: Budget
    folders: list[Path]
    kept: list[str]


def rows_of(folders: list[Path], labels: list[tuple[str, str]]) -> list[Row]:
    rows: dict[str, Row] = {}
    for folder in folders:
        record = json.loads((folder / "compressed.json").read_text(encoding="utf-8"))
        budget = Budget(**{name: record["budget"][name] for name in _LIMITS})
        name = ", ".join([budget.words(), *(label for text, label in labels if text in record["command"])])
        row = rows.setdefault(name, Row(name, budget, [], []))
        row.kept.append(record["kept"])
        row.folders.append(folder / "engine" / Path(record["after"]["folder"]).name)
    return sorted(rows.values(), key=lambda row: (-(row.budget.max_bytes or 0), row.budget.max_ms or 0))


def main() -> None:
    parser: argparse.ArgumentParser = _shared.parser(__doc__, presets=False)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDERS", help="of finished compressions of one model"
    )
    parser.add_argument("--data", type=Path, required=True, help="the recipe that they had")
    parser.add_argument("--set", action="append", default=[], help="change a setting of the recipe")
    parser.add_argument("--label", nargs=2, action="append", default=[], metavar=("TEXT", "NAME"), help="see above")
    parser.add_argument("--loss", type=float, default=1.0, help="points of the score")
    parser.add_argument("--picture", type=Path, help="a PNG file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.data, options.set)
    whole, rows = options.folders[0] / "engine" / "whole", rows_of(options.folders, options.label)
    splits = task_of(recipe.task).load(recipe.data)
    folders, decoding = [whole, *(folder for row in rows for folder in row.folders)], recipe.decoding.given()
    items = {folder: items_of(folder, recipe.task, splits["test"], decoding) for folder in folders}
    translates = recipe.task == "translation"
    texts = list(splits["dev"]["source" if translates else "sentence"])
    written = list(splits["dev"]["target"]) if translates else []
    stopwatch = Stopwatch(whole, texts, new_tokens_of(whole, "seq2seq-lm" if translates else "", written))
    times = stopwatch.milliseconds({str(folder): folder for folder in folders})
    stopwatch.close()
    report(options, SCORING[recipe.task], whole, rows, items, {Path(name): ms for name, ms in times.items()})


def report(
    options: argparse.Namespace,
    scoring: Any,
    whole: Path,
    rows: list[Row],
    items: dict[Path, np.ndarray],
    times: dict[Path, float],
) -> None:
    def scores(folders: list[Path]) -> list[float]:
        return [float(scoring.score(items[folder].sum(0))) for folder in folders]

    lines = [["the model", in_bytes(bytes_of(whole)), f"{times[whole]:.2f}", f"{scores([whole])[0]:.1f}", "", ""]]
    points, within, losses = [("the trained model", bytes_of(whole) / 1e6, scores([whole]))], [], []
    for row in rows:
        budget = row.budget.resolved(bytes_of(whole), times[whole])
        sizes, ms = [bytes_of(folder) for folder in row.folders], [times[folder] for folder in row.folders]
        for size, one in zip(sizes, ms, strict=True):
            within.append((float(bool(budget.excess(size, one))), f"{row.name}: {in_bytes(size)}, {one:.2f} ms"))
        (difference,) = compare(
            {"the model": [items[whole]] * len(row.folders), "compressed": [items[folder] for folder in row.folders]},
            scoring.score,
        )
        losses.append((-difference.difference, row.name))
        lines.append(
            [
                row.name,
                ", ".join(map(in_bytes, sizes)),
                ", ".join(f"{one:.2f}" for one in ms),
                ", ".join(f"{score:.1f}" for score in scores(row.folders)),
                f"{difference.difference:+.1f} ({difference.low:+.1f} to {difference.high:+.1f})",
                "; ".join(dict.fromkeys(row.kept)),
            ]
        )
        points.append((row.name, statistics.mean(sizes) / 1e6, scores(row.folders)))
    header = ["budget", "served", "ms", f"{scoring.name} of each seed", "to the model", "kept"]
    bars = [
        ("within the budget", within, lambda missed: not missed),
        (f"at most {options.loss:g} points below the model", losses, lambda loss: loss <= options.loss),
    ]
    verdicts = "; ".join(f"{name}: {_shared.verdict(measured, holds)}" for name, measured, holds in bars)
    _shared.report(options, _shared.markdown(header, lines), verdicts)
    if options.picture is not None:
        draw(options.picture, points, scoring.name)


def draw(path: Path, points: list[tuple[str, float, list[float]]], score: str) -> None:
    """(name, MB, score of each seed) of the model, then of the rows."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        for (name, size, scores), color, marker in zip(points, itertools.cycle(_COLORS), itertools.cycle(_MARKERS)):
            label = f"{name}: {len(scores)} seeds" if len(scores) > 1 else f"{name}: one seed"
            style = {"color": color, "marker": marker, "markersize": 8, "linestyle": "none"}
            axes.plot([size] * len(scores), scores, label=label, alpha=0.8, **style)
        every = [score for _, _, scores in points for score in scores]
        axes.set_xlabel("served folder, tokenizer included, MB (smaller is better)")
        axes.set_ylabel(f"{score} on the test split (higher is better)")
        axes.set_xlim(0, 1.3 * max(size for _, size, _ in points))
        axes.set_ylim(min(every) - 3, max(every) + 1)
        axes.legend(loc="lower right", fontsize=10)
        save_png(figure, path)


if __name__ == "__main__":
    main()
