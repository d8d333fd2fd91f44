"""What a search finds, with each sampler and as many trainings, and what rows made by hand have: hypervolumes on the test split.

    hf-freeze run recipes/small_translator/recipe.yaml --out runs/small-translator
    python benchmarks/searched.py --recipe recipes/search/recipe.yaml --by-hand runs/small-translator --out searched.md

Claim: TPE and NSGA-II find fronts of a larger hypervolume than random search, and than the rows made by hand.

A search is `hf-freeze search` with `--trials` trials; its front is chosen by dev loss, stored bytes and multiply-adds, and scored
on the test split. The hypervolume is that of the models of the front, and of all rows made by hand, in BLEU, ln(bytes) and
ln(multiply-adds): from 0 BLEU and the largest bytes and multiply-adds of all models compared. Repetitions differ in the seed of
the sampler; trainings have one seed. Epochs are those that all trials were trained for, refused ones none.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import _shared
import numpy as np

SAMPLERS = ("tpe", "nsga2", "random")
FRONT = "front/results.jsonl"


def searched(options: argparse.Namespace, sampler: str, seed: int) -> Path:
    """The folder of a finished search; one that is there from an earlier call is used again."""
    folder = options.runs / f"{sampler}-{seed}"
    if not (folder / "report.html").exists():
        command = [
            "-m",
            "hf_freeze",
            "search",
            str(options.recipe),
            "--trials",
            str(options.trials),
            "--sampler",
            sampler,
        ]
        command += ["--seed", str(seed), "--jobs", str(options.jobs), "--out", str(folder)]
        command += [word for setting in options.set for word in ("--set", setting)]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    print(f"{sampler}, seed {seed}: done", flush=True)
    return folder


def models(results: Path, *, found: bool) -> list[dict[str, Any]]:
    """The lines of a grid's results. `found`: those of trials alone, whose rows are t0, t1 ..."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if not found or (line["row"][0] == "t" and line["row"][1:].isdecimal())]


def epochs(folder: Path) -> float:
    """Of all trials together."""
    return sum(
        json.loads(path.read_text(encoding="utf-8").splitlines()[-1]).get("epoch", 0.0)
        for path in folder.glob("trials/row-*/log.jsonl")
    )


def costs(model: dict[str, Any]) -> tuple[float, float]:
    return model["parameters"]["stored_bytes"], model["multiply_adds"]


def hypervolume(points: list[dict[str, Any]], corner: tuple[float, float]) -> float:
    """Of what is dominated between the models and the corner (0 BLEU, most bytes, most multiply-adds)."""
    gains = np.array(
        [
            [
                one["metrics"]["test_bleu"],
                *(math.log(most / cost) for most, cost in zip(corner, costs(one), strict=True)),
            ]
            for one in points
        ]
    )
    ends = [np.unique(np.append(gains[:, axis], 0.0)) for axis in range(3)]
    upper = np.meshgrid(*(end[1:] for end in ends), indexing="ij")  # of the cells between the coordinates of all models
    inside = np.any(
        [np.all([end <= gain for end, gain in zip(upper, one, strict=True)], axis=0) for one in gains], axis=0
    )
    return float((inside * np.einsum("i,j,k->ijk", *(np.diff(end) for end in ends))).sum())


def main() -> None:
    parser: argparse.ArgumentParser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--recipe", type=Path, required=True, help="with a space")
    parser.add_argument(
        "--by-hand", type=Path, required=True, help="folder of a finished grid of the same data and length"
    )
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=SAMPLERS, help="random among them")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="change a setting of the recipe")
    parser.add_argument("--runs", type=Path, default=Path("runs/searched"), help="where the searches are kept")
    options = parser.parse_args()
    if "random" not in options.samplers:
        parser.error("--samplers: random must be among them, to compare with")
    folders = {
        sampler: [searched(options, sampler, seed) for seed in range(options.repetitions)]
        for sampler in options.samplers
    }
    fronts = {sampler: [models(one / FRONT, found=True) for one in of] for sampler, of in folders.items()}
    by_hand = models(options.by_hand / "results.jsonl", found=False)
    everything = [model for of in fronts.values() for front in of for model in front] + by_hand
    corner = tuple(max(costs(model)[axis] for model in everything) for axis in range(2))
    volumes = {sampler: [hypervolume(front, corner) for front in of] for sampler, of in fronts.items()}
    hand = hypervolume(by_hand, corner)
    lines = [
        [
            sampler,
            f"{statistics.mean(values):.1f}",
            ", ".join(f"{value:.1f}" for value in values),
            ", ".join(f"{len(front)}" for front in fronts[sampler]),
            ", ".join(f"{epochs(folder):.0f}" for folder in folders[sampler]),
        ]
        for sampler, values in volumes.items()
    ]
    trained = sum(model["epochs_trained"] for model in by_hand)
    lines.append(["by hand", f"{hand:.1f}", "", str(len(by_hand)), f"{trained:.0f}"])
    least = {sampler: min(values) for sampler, values in volumes.items()}
    most_random = max(volumes["random"])
    verdicts = [
        f"{sampler}: {'above' if least[sampler] > most_random else 'not above'} every random search, "
        f"{'above' if least[sampler] > hand else 'not above'} the rows made by hand"
        for sampler in options.samplers
        if sampler != "random"
    ]
    header = ["models", "hypervolume, mean", "of each repetition", "models of the front", "epochs trained"]
    _shared.report(options, _shared.markdown(header, lines), "; ".join(verdicts))


if __name__ == "__main__":
    main()
