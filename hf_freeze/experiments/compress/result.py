"""What a compression came to, for people: a table and a picture."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_freeze.experiments.compress.budget import in_bytes
from hf_freeze.experiments.compress.compress import Compressed, Compression
from hf_freeze.experiments.compress.serving import Served
from hf_freeze.experiments.report.markdown import markdown_table
from hf_freeze.experiments.runs.environment import environment
from hf_freeze.io import write_whole

FILES = ("compressed.json", "report.md", "report.png")


def write_result(compression: Compression, result: Compressed, command: str) -> list[str]:
    """Write `FILES` into the folder of the compression; returns the lines that tell the result."""
    out, work = compression.out, compression.trainings
    name = work.score_name
    rows = [_row("before", result.before, name), _row("after", result.after, name)]
    difference, low, high = result.difference
    ratio = result.before.bytes / result.after.bytes
    lines = [f"Kept: {result.words}.", f"{ratio:.1f} times smaller"]
    if result.after.ms and result.before.ms:
        lines[1] += f", {result.before.ms / result.after.ms:.1f} times faster"
    interval = f"95 % interval over its {work.item_name}: {low:+.1f} to {high:+.1f}; one seed"
    lines[1] += f"; {name} on the test split {difference:+.1f} ({interval})."
    lines.append(
        f"The dev split of {len(work.texts()):,} {work.item_name} tells no difference below {result.resolution:.1f}."
    )
    lines.append(
        f"Budget: {compression.budget.words()}. Trained for {result.epochs:g} epochs, {result.seconds / 60:.0f} minutes in all."
    )
    table = "\n".join(markdown_table(list(rows[0]), [list(row.values()) for row in rows], left=1))
    where = environment()
    about = f"`{command}`; code {where['commit']}, {where['device']}, torch {where['torch']}"
    write_whole(out / FILES[1], "\n\n".join(["# Compressed", table, *lines, about]) + "\n")
    record: dict[str, Any] = json.loads(json.dumps(asdict(result), default=str))
    record |= {"command": command, "budget": asdict(compression.budget), "environment": where}
    record["seconds_by_phase"] = compression.phases.seconds_by_phase
    write_whole(out / FILES[0], json.dumps(record, indent=1) + "\n")
    _draw(compression, result, out / FILES[2])
    return [
        table,
        *lines,
        f"Written: {result.after.folder} (to serve), {result.model} (to train on), {out / FILES[1]}",
    ]


def _row(label: str, served: Served, score: str) -> dict[str, str]:
    row = {"": label, "folder": in_bytes(served.bytes)}
    if served.ms is not None:
        row["ms a text"] = f"{served.ms:.2f}"
    return row | {f"{score}, dev": f"{served.dev_score:.1f}", f"{score}, test": f"{served.test_score:.1f}"}


def _draw(compression: Compression, result: Compressed, path: Path) -> None:
    """Bars of before and after: bytes, time, score, with the limits of the budget."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    budget, before, after = compression.budget, result.before, result.after
    panels: list[tuple[str, list[float], float | None]] = [
        ("served folder, MB", [before.bytes / 1e6, after.bytes / 1e6], budget.max_bytes and budget.max_bytes / 1e6)
    ]
    if before.ms is not None and after.ms is not None:
        panels.append(("one text alone, ms", [before.ms, after.ms], budget.max_ms))
    scores = [before.test_score or 0.0, after.test_score or 0.0]
    panels.append((f"{compression.trainings.score_name}, test split", scores, None))
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}):
        figure = Figure(figsize=(3.0 * len(panels), 3.2), layout="constrained")
        for axis, (label, values, limit) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            bars = axis.bar(["before", "after"], values, color=["#bbbbbb", "#4477aa"], width=0.6)
            axis.bar_label(bars, fmt="%.2f" if max(values) < 10 else "%.1f")
            axis.set_title(label, fontsize=10)
            axis.set_ylim(0, max(values) * 1.15)
            if limit is not None:
                axis.axhline(limit, color="#cc3311", linewidth=1, linestyle="--")
                axis.annotate("budget", (1.45, limit), color="#cc3311", fontsize=8, ha="right", va="bottom")
        figure.savefig(path, dpi=130, facecolor="white")
