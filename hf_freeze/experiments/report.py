"""A grid's results as a Markdown table and a picture."""

import json
import statistics
from pathlib import Path
from typing import Any

# column: (heading, where it is in a record, format)
_COLUMNS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "bleu": ("BLEU", ("metrics", "test_bleu"), ".1f"),
    "chrf": ("chrF", ("metrics", "test_chrf"), ".1f"),
    "perplexity": ("dev ppl", ("metrics", "dev_perplexity"), ".2f"),
    "epochs": ("best epoch", ("epochs_to_convergence",), ".1f"),
    "share": ("share %", ("parameters", "trainable_share"), ".1%"),
    "stored": ("stored MB", ("parameters", "stored_bytes"), ".2f"),
    "minutes": ("train min", ("seconds", "train"), ".1f"),
}
_SCALES = {"stored": 1e-6, "minutes": 1 / 60}


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The records of `folder/results.jsonl`. Raises ValueError where there are none, or a line is not JSON."""
    path = folder / "results.jsonl"
    if not path.exists():
        raise ValueError(f"{path} does not exist: run `hf-freeze run RECIPE.yaml --out {folder}` first")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not records:
        raise ValueError(f"{path} holds no finished run yet")
    return records


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One dict a row, in grid order: for each column its mean and, over two or more seeds, standard deviation."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        rows.setdefault(record["row"], []).append(record)
    return [
        {"row": row, "label": group[0]["label"], "seeds": len(group)}
        | {column: _mean_and_spread(group, column) for column in _COLUMNS}
        for row, group in rows.items()
    ]


def _mean_and_spread(group: list[dict[str, Any]], column: str) -> tuple[float, float | None]:
    values = []
    for record in group:
        value: Any = record
        for key in _COLUMNS[column][1]:
            value = value[key]
        values.append(value * _SCALES.get(column, 1))
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def table_cells(records: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and formatted rows."""
    rows = summarise(records)
    uneven = len({row["seeds"] for row in rows}) > 1
    headings = ["row", "trained", *(["seeds"] if uneven else []), *(heading for heading, _, _ in _COLUMNS.values())]
    cells = []
    for row in rows:
        values = [_cell(row[column][0], row[column][1], form) for column, (_, _, form) in _COLUMNS.items()]
        cells.append([row["row"], row["label"], *([str(row["seeds"])] if uneven else []), *values])
    return headings, cells


def _cell(mean: float, spread: float | None, form: str) -> str:
    varies = spread is not None and f"{spread:{form}}" != f"{0:{form}}"
    return f"{mean:{form}}" + (f" ± {spread:{form}}" if varies else "")


def write_report(folder: Path) -> str:
    """Write `report.md` and `report.png` into `folder`; returns the Markdown."""
    records = read_results(folder)
    headings, cells = table_cells(records)
    seeds = sorted({record["seed"] for record in records})
    lines = [f"# {records[0].get('recipe') or folder.resolve().name}", ""]
    lines += ["| " + " | ".join(headings) + " |", "| --- | --- |" + " ---: |" * (len(headings) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    spread = (
        "± is the standard deviation over seeds." if len(seeds) > 1 else "One seed: small differences mean nothing."
    )
    environments = {json.dumps(record["environment"], sort_keys=True): record["environment"] for record in records}
    lines += ["", "![Quality against trainable share](report.png)", ""]
    command = folder / "command.txt"
    if command.exists():
        lines += [f"Command: `{command.read_text(encoding='utf-8').strip()}`", ""]
    lines += ["share %: trained parameters of all; stored MB: tensors that the checkpoint holds.", ""]
    lines += [f"Seeds {', '.join(map(str, seeds))}. {spread} BLEU: `{records[0]['signatures']['test_bleu']}`.", ""]
    for environment in environments.values():
        lines.append(
            f"Code {environment['commit'] or 'version ' + environment['hf_freeze']}, torch {environment['torch']}, "
            f"transformers {environment['transformers']}; {environment['device']}, {environment['threads']} of "
            f"{environment['cores']} cores for each run."
        )
    text = "\n".join(lines) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    draw(summarise(records), folder / "report.png")
    return text


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Test BLEU against the share of parameters that is trained, a point a row, bars over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    points = []
    for index, row in enumerate(rows):
        (share, _), (bleu, spread) = row["share"], row["bleu"]
        marker, colour = "os^Dv<>Ph*X"[index % 11], pyplot.get_cmap("tab10")(index % 10)
        label = f"{row['row']}: {_plain(row['label'])}"
        axes.errorbar(100 * share, bleu, yerr=spread, fmt=marker, color=colour, markersize=8, capsize=4, label=label)
        points.append((100 * share, bleu, row["row"]))
    low, high = min(p[1] for p in points), max(p[1] for p in points)
    near = 0.035 * max(high - low, 1e-9)
    taken: list[tuple[float, float]] = []
    for x, y, name in sorted(points):
        # Rows that train the same share may fall together: write the later name on the other side.
        crowded = any(abs(x - a) < 4 and abs(y - b) < 2 * near for a, b in taken)
        axes.annotate(
            name,
            (x, y),
            xytext=(-8 if crowded else 8, 6),
            textcoords="offset points",
            ha="right" if crowded else "left",
        )
        taken.append((x, y))
    axes.set(xlabel="trained parameters, % of all", ylabel="test BLEU", xlim=(0, 108))
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _plain(label: str) -> str:
    return label.lstrip("✓✗ ")  # the default font of matplotlib lacks these marks
