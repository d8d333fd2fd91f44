"""Memory, time and quality against how much of a model is never stored.

    hf-freeze run freeze_ablation/few_bits --out runs/few-bits
    python benchmarks/never_stored.py --grid runs/few-bits --picture never_stored.png
    python benchmarks/never_stored.py --width 64 --layers 1 --vocabulary 500 --new-tokens 2   # seconds, without quality

Claim: with embeddings, attention and FFN random and generated where they are used, a process takes at most a tenth of the memory
that it takes for the model without random parts.

Memory and time are of Transformer-big, in one process and one thread, measured as on_the_fly.py does: for each row of the freeze
ablation and with all three parts random, once with all weights in memory, and once with the random ones generated where they are
used ("fused"). Memory is what the peak of the process rises by, from before loading to the end of decoding: weights are read from
the file only when they are used. Quality is that of a finished grid of recipes/freeze_ablation/few_bits.yaml, whose models are
much smaller: means over its seeds with their standard deviation. A share is that of the parameters that a checkpoint leaves out.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import _shared
import on_the_fly
from matplotlib.figure import Figure

from hf_freeze.lab.report.finished_runs import read_results

PARTS = {
    "0": "",
    "1": "embeddings",
    "2": "attention",
    "3": "ffn",
    "4": "embeddings ffn",
    "5": "embeddings attention",
    "6": "attention ffn",
    "all": "embeddings attention ffn",
}
MODES = {"resident": "all in memory", "fused": "generated where used"}
SCHEMES = {"": "uniform", "-int8": "8 bits", "-sign": "signs"}


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    for name, default in on_the_fly.SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--scheme", choices=list(on_the_fly.SCHEMES), default="int8", help="of the random parts")
    parser.add_argument("--grid", type=Path, help="folder of the finished grid whose quality is shown")
    parser.add_argument("--picture", type=Path, help="file of the picture")
    options = parser.parse_args()
    costs = costs_of(options)
    quality = quality_of(options.grid) if options.grid else {}
    if options.picture:
        draw(costs, quality).savefig(options.picture, dpi=150, bbox_inches="tight")
    header = [
        *("row", "random", "never stored", *(f"memory while decoding, MB: {mode}" for mode in MODES)),
        *(f"a step, ms: {mode}" for mode in MODES),
    ]
    lines = [
        [
            *(row, PARTS[row] or "nothing", f"{facts['share']:.0%}"),
            *(f"{facts[mode, 'decoding'] / on_the_fly.MB:.0f}" for mode in MODES),
            *(f"{1e3 * facts[mode, 'step']:.0f}" for mode in MODES),
        ]
        for row, facts in costs.items()
    ]
    scores = [
        [name, row, f"{share:.0%}", f"{mean:.1f} ± {spread:.1f}"]
        for (name, row), (share, mean, spread) in quality.items()
    ]
    tables = [_shared.markdown(header, lines)]
    if scores:
        tables.append(_shared.markdown(["scheme", "row", "never stored", "BLEU"], scores))
    first, last = (costs[row]["fused", "decoding"] for row in ("0", "all"))
    verdict = _shared.verdict([(last / first, "all random")], lambda ratio: ratio <= 0.1)
    _shared.report(options, "\n\n".join(tables), f"memory, of that without random parts at most 0.1: {verdict}")


def costs_of(options: argparse.Namespace) -> dict[str, dict[Any, float]]:
    """Row -> share never stored; (mode, "decoding") bytes and (mode, "step") seconds."""
    costs = {}
    for row, parts in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            random = dict.fromkeys(parts.split(), "random")
            facts: dict[Any, float] = {
                "share": on_the_fly.forked(on_the_fly.save, options, options.scheme, folder, random)
            }
            for mode in MODES:
                measured = on_the_fly.forked(on_the_fly.decode, options, folder, mode)
                facts |= {(mode, name): measured[name] for name in ("decoding", "step")}
        costs[row] = facts
    return costs


def quality_of(grid: Path) -> dict[tuple[str, str], tuple[float, float, float]]:
    """(scheme, row) -> share never stored, mean and standard deviation of BLEU over the seeds of a grid."""
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_results(grid):
        records.setdefault(record["row"], []).append(record)
    quality = {}
    for ending, name in SCHEMES.items():
        for row in PARTS:
            if group := records.get(row if row == "0" else f"{row}{ending}"):
                parameters, scores = group[0]["parameters"], [record["metrics"]["test_bleu"] for record in group]
                spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
                share = 1 - parameters["stored"] / parameters["total"]
                quality[name, row] = share, statistics.fmean(scores), spread
    return quality


def draw(costs: dict[str, dict[Any, float]], quality: dict[tuple[str, str], tuple[float, float, float]]) -> Figure:
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    memory, time, score = figure.subplots(1, 3)
    rows = sorted(costs, key=lambda row: costs[row]["share"])
    shares = [100 * costs[row]["share"] for row in rows]
    for mode, label in MODES.items():
        for plot, name, unit in ((memory, "decoding", 1 / on_the_fly.MB), (time, "step", 1e3)):
            plot.plot(shares, [unit * costs[row][mode, name] for row in rows], "o-", label=label, markersize=5)
    for name in SCHEMES.values():
        points = sorted(values for (scheme, _), values in quality.items() if scheme == name)
        if points:
            x, y, spread = zip(*points, strict=True)
            score.errorbar([100 * share for share in x], y, yerr=spread, fmt="o", label=name, markersize=5, capsize=3)
    for (scheme, row), (share, mean, _) in quality.items():
        if scheme == "uniform":
            label = PARTS[row].replace("ffn", "FFN").replace(" ", ",\n") or "all trained"
            score.annotate(
                label, (100 * share, mean), xytext=(6, 0), textcoords="offset points", fontsize=7, va="center"
            )
    for plot, label, title in (
        (memory, "memory of the process while decoding, MB", "Transformer-big: memory"),
        (time, "milliseconds for a token", "Transformer-big: time on one core"),
        (score, "BLEU (higher is better)", "a small translator: quality, by what is random"),
    ):
        plot.set(xlabel="parameters that are never stored, % of all", ylabel=label, title=title, ylim=(0, None))
        plot.grid(alpha=0.2)
        plot.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
