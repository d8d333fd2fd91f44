"""`hf-freeze diff`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_freeze.cli import options as shared
from hf_freeze.cli import terminal

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

    With texts, also by how much their outputs do: take texts that no calibration has seen.

    Example: hf-freeze diff runs/freeze-ablation/row-0-seed-1/model runs/freeze-ablation/row-3-seed-1/model

    Example: hf-freeze diff MODEL small --texts held-out.txt
    """
    from hf_freeze.analysis.diff import KINDS, SAME, compare
    from hf_freeze.model.loading import load_model
    from hf_freeze.publish.cards import shortened

    with terminal.one_line_errors():
        one, other = load_model(first), load_model(second)
        comparison = compare(one, other)
        outputs = _outputs(one, other, first, shared.sampled_texts(texts, column, samples)) if texts else []
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
    if outputs:
        title = f"Outputs of B beside those of A, on {samples} texts at most"
        terminal.show_table(("outputs", "value"), outputs, title=title, numbers=["value"])


def _outputs(one: Any, other: Any, name: str, texts: list[str]) -> list[tuple[str, str]]:
    """(what, value) of the fidelity of `other` to `one`, whose folder is `name`."""
    from hf_freeze.analysis import fidelity

    found = fidelity(one, other, texts, shared.tokenizer_for_texts(name))
    words = {
        "kl": ("KL of the predictions (nats)", ".4g"),
        "agreement": ("same first choice", ".2%"),
        "cosine": ("cosine of the hidden states", ".4f"),
        "perplexity": ("perplexity of B", ".4g"),
        "original_perplexity": ("perplexity of A", ".4g"),
        "error": ("squared error of the outputs / their square", ".4g"),
    }
    values = [(label, getattr(found, field), form) for field, (label, form) in words.items()]
    return [(label, format(value, form)) for label, value, form in values if value is not None]


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
