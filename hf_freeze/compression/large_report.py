"""What a compression layer by layer came to, for people: a page with a table and a picture, and a record."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hf_freeze._version import __version__
from hf_freeze.compression.budget import in_bytes
from hf_freeze.compression.layer_costs import LayerCosts
from hf_freeze.compression.results import LargeCompressed
from hf_freeze.compression.shape import Shape
from hf_freeze.io import write_whole
from hf_freeze.publish.markdown import markdown_table

_COLOURS = {4: "#56B4E9", 8: "#0072B2", 16: "#00416B", 32: "#000000", 64: "#000000"}  # bits of a weight


def sentences(result: LargeCompressed) -> list[str]:
    """What came of it, in words; the last one says where it lies."""
    found, low_high = result.fidelity, result.fidelity.intervals.get("kl")
    interval = "" if low_high is None else f" (95 % interval {low_high[0]:.3g} to {low_high[1]:.3g})"
    lines = [
        f"Kept: {result.kept}.",
        f"{in_bytes(result.bytes)}, {result.bytes / result.original_bytes:.1%} of the original.",
    ]
    if result.folder.name.startswith("served-") and (result.folder / "model.gguf").exists():
        lines.append("Before its weights are rounded to q8_0:")
    if found.kl is not None and found.agreement is not None:
        lines.append(
            f"On {found.compared} texts that nothing was chosen by: KL {found.kl:.3g}{interval} nats a token to the "
            f"original; the likeliest next token is the same for {found.agreement:.1%}."
        )
    if found.perplexity is not None and found.original_perplexity is not None:
        lines.append(f"Perplexity there: {found.perplexity:.3f}, of the original {found.original_perplexity:.3f}.")
    train_on = "" if result.folder == result.model else f" (to serve), {result.model} (to train on)"
    return [*lines, f"Written: {result.folder}{train_on}."]


def write_report(
    result: LargeCompressed, costs: LayerCosts, depths: Mapping[str, int], out: Path, command: str
) -> None:
    """Write `compressed.json`, and `README.md` with a row for each layer and the picture `kept.png`."""
    facts = {"command": command, "hf_freeze_version": __version__}
    write_whole(out / "compressed.json", json.dumps(asdict(result) | facts, default=str, indent=1) + "\n")
    rows = []
    for stack, depth in depths.items():
        for layer in range(depth):
            some = [block for block in costs.blocks.values() if block.place == (stack, layer)]
            stays = layer in result.shape.layers[stack]
            cells = [f"{stack} {layer}", f"{costs.layers.get((stack, layer), math.nan):.3g}"]
            for kind in ("heads", "neurons"):
                of_kind = [block for block in some if block.kind == kind]
                kept = ", ".join(f"{result.shape.units[block.name]} of {block.units}" for block in of_kind) or "–"
                bits = ", ".join(str(result.shape.bits[block.name]) for block in of_kind) or "–"
                cells += [kept, bits] if stays else ["–", "–"]
            rows.append(cells)
    headings = ["layer", "changes the states by", "heads or groups kept", "bits", "neurons kept", "bits of the FFN"]
    text = ["# A large model, compressed", "\n".join(f"- {line}" for line in sentences(result)[:-1])]
    picture(result.shape, costs, depths).savefig(out / "kept.png", dpi=130, facecolor="white")
    text.append("![Heads and neurons that each layer keeps, and bits of their weights](kept.png)")
    text += ["\n".join(markdown_table(headings, rows, left=1)), f"Made by hf_freeze {__version__}: `{command}`"]
    write_whole(out / "README.md", "\n\n".join(text) + "\n")


def picture(shape: Shape, costs: LayerCosts, depths: Mapping[str, int]) -> Figure:
    """For each layer what it is worth, the share of its heads and neurons that stays, and the bits of their weights."""
    places = [(stack, layer) for stack, depth in depths.items() for layer in range(depth)]
    labels = [f"{stack} {layer}" for stack, layer in places]
    figure = Figure(figsize=(9.5, 1.6 + 0.24 * len(places)), layout="constrained")
    worth, *sides = figure.subplots(1, 3, sharey=True, width_ratios=[1, 2, 2])
    worth.barh(labels, [costs.layers.get(place, 0.0) for place in places], color="#777777", height=0.7)
    worth.set_xlabel("the layer changes the states\nby, share of their mean square")
    used = set()
    for axes, kind, words in zip(sides, ("heads", "neurons"), ("heads or groups", "neurons of the FFN"), strict=True):
        axes.barh(labels, [100.0] * len(labels), color="#dddddd", height=0.7)
        for block in costs.blocks.values():
            if block.kind == kind and shape.has(block):
                used.add(bits := shape.bits[block.name])
                kept = 100 * shape.units[block.name] / block.units
                axes.barh([f"{block.place[0]} {block.place[1]}"], [kept], color=_COLOURS[bits], height=0.7)
        axes.set(xlim=(0, 100), xlabel=f"{words} kept, %")
    handles = [Patch(color=_COLOURS[bits], label=f"{bits} bits a weight") for bits in sorted(used)]
    figure.legend(handles=[*handles, Patch(color="#dddddd", label="removed")], loc="outside lower center", ncols=5)
    worth.invert_yaxis()
    return figure
