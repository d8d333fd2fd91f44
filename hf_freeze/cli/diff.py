"""`hf-freeze diff`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_freeze import terminal
from hf_freeze.cli import options as shared

if TYPE_CHECKING:
    from hf_freeze.analysis.diff import Comparison


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Directory or Hub id of a variant or a native model.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another model of the same architecture.")],
    top: Annotated[int, typer.Option(min=0, help="How many tensors to list, the most different ones first.")] = 10,
    texts: shared.CalibrationTexts = None,
    column: shared.Column = "text",
    samples: shared.Samples = 512,
) -> None:
    """Compare two models: their settings and methods, and by how much their components and tensors differ.

    With texts, also by how much their answers do, each with its own tokenizer: take texts that no calibration has seen. Exported
    folders are compared by their answers alone, in their engines.

    Example: hf-freeze diff runs/freeze-ablation/row-0-seed-1/model runs/freeze-ablation/row-3-seed-1/model

    Example: hf-freeze diff MODEL MODEL-onnx-int8 --texts held-out.txt
    """
    from hf_freeze.publish.export.folders import mark_of

    with terminal.one_line_errors():
        exported = [name for name in (first, second) if mark_of(Path(name)).get("format") not in (None, "dense")]
        if exported and not texts:
            raise ValueError(
                f"{exported[0]} is exported, so its tensors cannot be compared; compare answers: --texts FILE"
            )
        answers = _answers(first, second, shared.sampled_texts(texts, column, samples)) if texts else None
        if not exported:
            _show_tensors(first, second, top)
    if answers is not None:
        rows, compared, left_out = answers
        title = f"Answers of B beside those of A, on {compared:,} texts"
        headings = ("answers", "value", "95 % interval")
        terminal.show_table(headings, rows, title=title, numbers=headings[1:])
        if left_out:
            terminal.say(
                f"{left_out:,} further texts cannot be compared: they are empty, or the tokenizers share no token."
            )


def _show_tensors(first: str, second: str, top: int) -> None:
    from hf_freeze.analysis.diff import KINDS, SAME, compare
    from hf_freeze.methods.registry import shortened
    from hf_freeze.model.loading import load_model

    comparison = compare(load_model(first), load_model(second))
    for name, one, other in comparison.settings:
        terminal.say(f"{name}: {shortened(one)} -> {shortened(other)}")
    headings = ("component", *KINDS, "|b - a| / |a|")
    rows = [
        (component, *(numbers[kind] for kind in KINDS), f"{relative:.3g}")
        for component, (numbers, relative) in comparison.by_component().items()
    ]
    terminal.show_table(headings, rows, title="Tensors of A, the first, and B, the second", numbers=headings[1:])
    different = sum(tensor.kind != SAME for tensor in comparison.tensors)
    if not different:
        terminal.say("All tensors are bit-equal.")
    elif top:
        headings = ("tensor", "what", "A", "B", "|b - a| / |a|", "largest |b - a|")
        terminal.show_table(headings, _most_different(comparison, top), numbers=headings[4:])
        if different > top:
            terminal.say(f"... and {different - top} more: --top {different}")


def _answers(first: str, second: str, texts: list[str]) -> tuple[list[tuple[str, ...]], int, int]:
    """Lines of (what, value, interval), and how many texts were compared and were not."""
    from hf_freeze.publish.export.served import served_fidelity

    found = served_fidelity(first, second, texts)
    return found.in_words("A", "B"), found.compared, found.left_out


def _most_different(comparison: "Comparison", top: int) -> list[tuple[str, ...]]:
    """The tensors with the largest relative change, then those that only one model has or that differ in shape."""
    from hf_freeze.analysis.diff import CHANGED, SAME

    rows = []
    different = [tensor for tensor in comparison.tensors if tensor.kind != SAME]
    for tensor in sorted(different, key=lambda tensor: (tensor.kind != CHANGED, -tensor.relative))[:top]:
        numbers = (f"{tensor.relative:.3g}", f"{tensor.largest:.3g}") if tensor.kind == CHANGED else ("", "")
        shapes = ("" if shape is None else " x ".join(map(str, shape)) for shape in tensor.shapes)
        rows.append((tensor.name, tensor.kind, *shapes, *numbers))
    return rows
