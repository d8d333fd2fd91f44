"""`hf-freeze diff`."""

from typing import TYPE_CHECKING, Annotated

import typer

from hf_freeze.cli import terminal

if TYPE_CHECKING:
    from hf_freeze.analysis.diff import Comparison


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Directory or Hub id of a variant or a native model.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another model of the same architecture.")],
    top: Annotated[int, typer.Option(min=0, help="How many tensors to list, the most different ones first.")] = 10,
) -> None:
    """Compare two models: their settings and methods, and by how much their components and tensors differ.

    Example: hf-freeze diff runs/freeze-ablation/row-0-seed-1/model runs/freeze-ablation/row-3-seed-1/model
    """
    from hf_freeze.analysis.diff import KINDS, SAME, compare
    from hf_freeze.model.loading import load_model
    from hf_freeze.publish.cards import shortened

    with terminal.one_line_errors():
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
