"""`hf-freeze latency`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze import terminal
from hf_freeze.cli import options as shared


def latency(
    folders: Annotated[list[Path], typer.Argument(help="Saved models, variants and exported folders, of one task.")],
    texts: Annotated[list[Path], typer.Option(help="File with a text per line, or a table, such as CSV; repeatable.")],
    column: shared.Column = "text",
    batch: Annotated[list[int] | None, typer.Option(help="Texts in a batch; repeatable. [default: 1 and 32]")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for a text, at most.")] = 64,
    exactly: Annotated[
        bool,
        typer.Option("--exactly", help="Generate --new-tokens for every text, so that all folders do the same work."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all texts are answered.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for latency.json, latency.md and latency.png.")] = None,
) -> None:
    """Time folders as users feel it: cold start, first token, tokens a second, memory, one text at a time and in batches.

    Each folder answers in a process of its own, by greedy search; the processes take turns.

    Example: hf-freeze latency runs/small-translator/row-tt-seed-1/model model-onnx-int8 --texts texts.txt --out latency

    Example: hf-freeze latency runs/reviews/row-0-seed-1/model --texts reviews.csv --column Review
    """
    from hf_freeze.publish import latency as module

    with terminal.one_line_errors():
        lines = list(shared.texts_in(texts, "lines", column))
        options = {"new_tokens": new_tokens, "exactly": exactly, "rounds": rounds, "threads": threads}
        results = module.measure(folders, lines, batches=batch or module.BATCHES, **options, say=terminal.say)
        rows = module.table(results)
        title = (
            f"Median (95th percentile), {threads} thread{'s' * (threads > 1)} each, {rounds} round{'s' * (rounds > 1)}"
        )
        cells = [[cell.replace(" (", "\n(") for cell in row.values()] for row in rows]
        terminal.show_table(list(rows[0]), cells, title=title, numbers=list(rows[0])[2:])
        if out is not None:
            module.write(results, out)
            terminal.say(f"Written: {', '.join(str(out / name) for name in module.FILES)}")
