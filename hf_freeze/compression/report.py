"""What a compression came to, for people: a table, a picture, a page that needs no network, and a record."""

import base64
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from hf_freeze._version import __version__
from hf_freeze.compression.budget import in_bytes
from hf_freeze.compression.compression import Compression
from hf_freeze.compression.progress import duration
from hf_freeze.compression.results import Compressed, Measured, Tried
from hf_freeze.compression.shape import share_kept
from hf_freeze.io import write_whole
from hf_freeze.publish.cards import COMPRESSION, without_folder
from hf_freeze.publish.markdown import markdown_table

_BLUE, _ORANGE, _GREY, _RED = "#0072B2", "#E69F00", "#777777", "#D55E00"  # Okabe and Ito's, with different markers
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("hf_freeze.publish", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_report(compression: Compression, result: Compressed | None = None, *, stopped: str = "") -> list[str]:
    """Write report.html and report.png, and at the end README.md and compressed.json, into the folder of the compression;
    returns the lines that tell the result."""
    out, lines = compression.out, [] if result is None else sentences(compression, result)
    out.mkdir(parents=True, exist_ok=True)
    rows, parts, left = rows_of(compression), parts_of(compression), compression.progress.last.seconds_left
    if rows:
        picture(compression, parts).savefig(out / "report.png", dpi=150)
    page = _ENVIRONMENT.get_template("compressed.html").render(
        title=f"{Path(compression.source).name}, {'compressed' if result else 'being compressed'}",
        finished=result is not None,
        stopped=stopped,
        now=compression.progress.last.text,
        written=time.strftime("%H:%M:%S"),
        left=None if left is None else duration(left),
        budget=compression.budget.words(),
        lines=lines,
        rows=rows,
        tried=[_tried_row(one) for one in compression.tried],
        picture=_data_uri(out / "report.png") if rows else "",
        command=compression.command,
        version=__version__,
        phases=compression.phases.seconds_by_phase,
    )
    write_whole(out / "report.html", page)
    if result is not None:
        facts = {"command": compression.command, "hf_freeze_version": __version__}
        facts |= {"budget": compression.budget.to_dict(), "tried": [asdict(one) for one in compression.tried]}
        facts |= {"seconds_by_phase": compression.phases.seconds_by_phase}
        write_whole(out / "compressed.json", json.dumps(asdict(result) | facts, default=str, indent=1) + "\n")
        write_card(compression, result, rows, parts, lines[:-1])  # the last line names paths of this machine
    return lines


def write_card(
    compression: Compression,
    result: Compressed,
    rows: Sequence[dict[str, str]],
    parts: Sequence[tuple[str, float, str]],
    facts: Sequence[str],
) -> None:
    """A model card, beside the folder that is served: there it would take bytes of the budget."""
    kept = [(kind, words) for kind, _, words in parts]
    text = [f"# {Path(compression.source).name}, compressed", _markdown(rows)]
    text += ["![what it costs, and what is kept](report.png)", "\n".join(f"- {fact}" for fact in facts)]
    text += [_markdown([{"part": kind, "kept": words} for kind, words in kept])] if kept else []
    text += ["Bias and harmful output were not measured. Other kinds of inputs than these may get worse results."]
    command = shlex.join(map(without_folder, shlex.split(compression.command))) or "hf_freeze.compress(...)"
    text += [f"Made by hf_freeze {__version__}:", f"```bash\n{command}\n```"]
    write_whole(compression.out / "README.md", "\n\n".join(text) + "\n")
    if result.model is not None:  # for `hf-freeze card` and `push`
        record = {"budget": compression.budget.words(), "table": rows, "facts": facts, "parts": kept}
        record |= {"engine": compression.engine.name, "served": result.after.folder.name}
        write_whole(result.model / COMPRESSION, json.dumps(record, indent=1) + "\n")


def write_front(compression: Compression, results: Sequence[Compressed]) -> list[str]:
    """Write the table of a front, with the picture and the page; returns the lines that tell it."""
    rows = [{"kept": one.kept} | {name: cell for name, cell in _row("", one.after).items() if name} for one in results]
    write_report(compression)
    text = [
        "# Sizes and what they lose",
        table := _markdown(rows),
        "![distance from the original against size](report.png)",
    ]
    write_whole(compression.out / "front.md", "\n\n".join([*text, f"`{compression.command}`"]) + "\n")
    return [table, f"Written: {compression.out / 'front.md'}, {compression.out / 'report.png'}"]


def rows_of(compression: Compression) -> list[dict[str, str]]:
    """A row for the model as it is, for the whole of it in the engine, and for what came of it."""
    whole, engine = compression.whole, compression.engine.name
    if whole is None:
        return []
    original = _row("the model", whole) | {"folder": in_bytes(compression.original.bytes)}
    original |= {name: cell for name, cell in (("ms a text", "–"), (_FIDELITY, "1"), ("KL", "0")) if name in original}
    if whole.score is not None:
        original |= {whole.score.name: whole.score.shown(whole.score.original), _DIFFERENCE: "–"}
    smaller = [_row(f"compressed, in {engine}", one) for one in compression.results]
    return [original, _row(f"whole, in {engine}", whole), *smaller]


_HARDLY = 0.5  # a fidelity below which a reader is warned
_FIDELITY, _DIFFERENCE = "fidelity (95 %)", "points to the model (95 %)"


def _row(label: str, measured: Measured) -> dict[str, str]:
    found, score = measured.fidelity, measured.score
    row = {"": label, "folder": in_bytes(measured.bytes)}
    row |= {} if measured.ms is None else {"ms a text": f"{measured.ms:.2f}"}
    if score is not None:
        difference = f"{score.difference:+.1f} ({score.low:+.1f} to {score.high:+.1f})"
        row |= {score.name: score.shown(score.value), _DIFFERENCE: difference}
    low, high = found.intervals["score"]
    row |= {_FIDELITY: f"{found.score:.4f} ({low:.4f} to {high:.4f})"}
    return row | ({} if found.kl is None else {"KL": f"{found.kl:.2g}"})


def _tried_row(tried: Tried) -> dict[str, str]:
    row = {"kept": tried.words, "folder": f"~{in_bytes(tried.bytes)}"}
    row |= {} if tried.ms is None else {"ms a text": f"~{tried.ms:.2f}"}
    return row | {"loss": f"{tried.loss:.2g}", "expected": f"{tried.expected:.2g}"}


def sentences(compression: Compression, result: Compressed) -> list[str]:
    """What came of it, a sentence each."""
    after, inputs, score, healed = result.after, compression.inputs, result.after.score, result.healed
    small = f"{in_bytes(after.bytes)}, {after.bytes / result.original_bytes:.1%} of the model's {in_bytes(result.original_bytes)}"
    if after.ms is not None and result.whole.ms:
        small += f"; {after.ms:.2f} ms a text, {after.ms / result.whole.ms:.0%} of the whole model's in the same engine"
    lines = [f"Kept: {result.kept}.", f"Budget: {compression.budget.words()}. It is {small}."]
    compared = f"{after.fidelity.compared:,} inputs that nothing was chosen by"
    if after.fidelity.left_out:
        compared += f" ({after.fidelity.left_out:,} more could not be compared: their tokens differ)"
    low, high = after.fidelity.intervals["score"]
    interval = f"95 % interval {low:.4f} to {high:.4f}"
    lines.append(f"Fidelity to the original: {after.fidelity.score:.4f} ({interval}), on {compared}.")
    if after.fidelity.score is not None and after.fidelity.score < _HARDLY:
        lines.append("Hardly anything of the original is left: give more bytes or time, more texts, or longer healing.")
    if score is not None:
        change = f"{score.difference:+.1f} points (95 % interval {score.low:+.1f} to {score.high:+.1f})"
        before, now = score.shown(score.original), score.shown(score.value)
        lines.append(f"By the labels of {score.count:,} of them: {score.name} {before} before, {now} after, {change}.")
    if healed is not None and not healed.steps:
        lines.append(
            f"Not healed: it gives the outputs of the original already (held-out loss {healed.loss_before:.2g})."
        )
    elif healed is not None:
        effect = f"held-out loss {healed.loss_before:.4g} to {healed.loss_after:.4g}"
        effect = effect if healed.better else "it did not help, and was undone"
        lines.append(f"Healed for {duration(healed.seconds)}, {healed.epochs:.2g} epochs of the texts: {effect}.")
    unlabelled = " without labels," if inputs.labels is None else ", whose labels are not used,"
    samples = min(compression.settings.samples, len(inputs.learnt))
    measured = f"; measured and refitted on {samples:,}" * (result.model is not None)
    lines.append(f"Made from {len(inputs.learnt):,} texts{unlabelled} in {duration(result.seconds)}{measured}.")
    where = f"Written: {after.folder} (to serve)" + (f", {result.model} (to train on)" if result.model else "")
    return [*lines, f"{where}, {compression.out / 'report.html'}."]


def parts_of(compression: Compression) -> list[tuple[str, float, str]]:
    """(kind of part, share that is kept, in words) of the chosen shape; empty before there is one."""
    shape, parts = compression.chosen, []
    if shape is None:
        return []
    for stack, kept in shape.layers.items():
        depth = compression.depths[stack]
        parts.append((f"{stack}: layers", len(kept) / depth, f"{len(kept)} of {depth}"))
        for kind in ("heads", "neurons"):
            share = share_kept(shape, compression.blocks, stack, kind)
            if share is not None:
                parts.append((f"{stack}: {kind} in these layers", share, f"{share:.0%}"))
    total = compression.original.tokens
    if shape.tokens is not None and total:
        parts.append(("tokens", shape.tokens / total, f"{shape.tokens:,} of {total:,}"))
    some = [block for block in compression.blocks.values() if shape.has(block)]
    bits = sum(shape.bits[block.name] * block.weights for block in some) / max(sum(block.weights for block in some), 1)
    return [*parts, ("bits of a weight in layers", bits / 32, f"{bits:.2g} of 32")]


def picture(compression: Compression, parts: Sequence[tuple[str, float, str]]) -> Figure:
    """How far each shape that was tried is from the original, against its size; and what the chosen one keeps."""
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    axes: Any
    axes, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    unit, name = _unit(compression.original.bytes)
    served = [compression.whole, *compression.results]
    writes = any(one is not None and one.fidelity.kl is None and one.fidelity.cosine is None for one in served)
    tried = axes.twinx() if writes and compression.tried else axes  # texts are compared otherwise than probabilities
    whole, after = (
        [(one.bytes, one.fidelity.distance) for one in some if one is not None]
        for some in ([compression.whole], compression.results)
    )
    for plot, points, marker, color, label in (
        (axes, whole, "s", _BLUE, "the whole model in the engine"),
        (
            tried,
            [(one.bytes, one.loss) for one in compression.tried],
            "o",
            _ORANGE,
            "tried in PyTorch, not healed; bytes estimated",
        ),
        (axes, after, "D", _RED, "compressed, in the engine"),
    ):
        if points:
            sizes, losses = zip(*points, strict=True)
            plot.plot([size / unit for size in sizes], losses, marker, color=color, markersize=9, label=label)
    if compression.budget.max_bytes:
        axes.axvline(compression.budget.max_bytes / unit, color=_GREY, linestyle="--", label="budget")
    axes.set(xlabel=f"size of the served folder, {name}", ylabel="distance from the original (lower is better)")
    for plot in {axes, tried}:
        plot.margins(0.1)
        plot.set(xlim=(0, None), ylim=(0, None))
    if tried is not axes:
        tried.set_ylabel("distance of probabilities, of those tried", color=_ORANGE)
    axes.grid(alpha=0.4)
    figure.legend(loc="outside lower left", ncols=2, fontsize=8)
    names = [part[0] for part in parts]
    bars.barh(names, [100.0] * len(parts), color="#cccccc", height=0.6)
    bars.barh(names, [100 * part[1] for part in parts], color=_BLUE, height=0.6)
    beside: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    for label, _, words in parts:
        bars.annotate(words, (100, label), fontsize=8, **beside)
    bars.set(xlim=(0, 100), xlabel="kept, % of the model's")
    bars.tick_params(axis="y", labelsize=8)
    bars.invert_yaxis()
    bars.set_visible(bool(parts))
    return figure


def _unit(size: float) -> tuple[float, str]:
    return (1e6, "MB") if size >= 1e6 else (1e3, "kB")


def _markdown(rows: Sequence[dict[str, str]]) -> str:
    headings = list(rows[0])
    return "\n".join(markdown_table(headings, [[row.get(name, "–") for name in headings] for row in rows], left=1))


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
