"""`hf-freeze score`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_freeze import terminal
from hf_freeze.io import write_whole
from hf_freeze.lab.cli import options

_NONE = "–"


def score(
    folders: Annotated[list[Path], typer.Argument(help="Saved models, variants and exported folders, of one task.")],
    data: Annotated[
        str | None, typer.Option(help="A recipe, a file or a name: its task, data and decoding are used.")
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            metavar="TASKS", help="Names of lm-eval's tasks and paths of task files, with commas between them."
        ),
    ] = None,
    perplexity: Annotated[
        Path | None, typer.Option(help="A text file: perplexity in windows, as papers report it for WikiText-2.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="With --data: test (the default), or dev to choose among models.")
    ] = None,
    settings: options.Settings = None,
    include: Annotated[Path | None, typer.Option(help="With lm-eval: a folder of more task files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With lm-eval: only so many samples of each task.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="With lm-eval or --perplexity: samples or windows in a batch, 1 by default."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=2, help="With --perplexity: tokens; by default the positions of the models, at most 2048."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file too.")] = None,
) -> None:
    """Score folders on the same texts, and show the differences from the first with their 95 % intervals.

    One of three: with `--data`, BLEU of translators and accuracy of classifiers, also of exported folders, which answer in
    their engine, so that the loss of an export is counted too. With `--harness`, lm-eval's tasks for language models. With
    `--perplexity`, windows of a text for causal language models. The interval covers the choice of texts, samples or
    windows, which all folders share. It does not cover another training.

    Example: hf-freeze score runs/served/row-0-seed-1/model small/engine/served-* --data served

    Example: hf-freeze score MODEL small --harness hellaswag,sentences.yaml --limit 200

    Example: hf-freeze score MODEL small --perplexity FILE --window 2048
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    with terminal.one_line_errors():
        _check(
            {"--data": data, "--harness": harness, "--perplexity": perplexity},
            {
                "--split": (split, ("--data",)),
                "--set": (settings or None, ("--data",)),
                "--include": (include, ("--harness",)),
                "--limit": (limit, ("--harness",)),
                "--batch-size": (batch_size, ("--harness", "--perplexity")),
                "--window": (window, ("--perplexity",)),
            },
        )
        if data is not None:
            results = _on_data(folders, data, settings, split or "test")
        elif harness is not None:
            results = _by_harness(folders, harness, include=include, limit=limit, batch_size=batch_size or 1)
        else:
            results = _in_windows(folders, perplexity, window=window, batch_size=batch_size or 1)
        if out is not None:
            write_whole(out, json.dumps([asdict(one) for one in results], default=str, indent=2) + "\n")


def _check(ways: dict[str, Any], others: dict[str, tuple[Any, Sequence[str]]]) -> None:
    """`ways`: the options of which one is given. `others`: the values of others, and the ways that they belong to."""
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"{' and '.join(given) or 'nothing to score on'}: give one of {', '.join(ways)}")
    for name, (value, owners) in others.items():
        if value is not None and given[0] not in owners:
            raise ValueError(f"{name} belongs to {' and '.join(owners)}, not to {given[0]}")


def _on_data(folders: list[Path], data: str, settings: list[str] | None, split: str) -> list[Any]:
    from hf_freeze.lab.recipes.load import load_recipe
    from hf_freeze.lab.scored import score_folders

    name, count, results = score_folders(folders, load_recipe(data, settings), split=split, say=terminal.say)
    _show(results, name, "95 % interval", f"On the {count:,} texts of the {split} split", ".1f")
    return results


def _in_windows(folders: list[Path], text: Any, **how: Any) -> list[Any]:
    from hf_freeze.lab.scored import score_windows

    window, count, results = score_windows(folders, text, **how, say=terminal.say)
    title = f"On {count:,} windows of {window:,} tokens; the first of each is given, the rest of the text is left out"
    _show(results, "perplexity", "95 % interval, paired windows", title, ",.2f")
    return results


def _show(results: list[Any], name: str, interval: str, title: str, form: str) -> None:
    from hf_freeze.compression.budget import in_bytes

    rows = [(one.folder, in_bytes(one.bytes), f"{one.score:{form}}", *_to_first(one, form)) for one in results]
    headings = ("folder", "size", name, "to the first", interval)
    terminal.show_table(headings, rows, title=title, numbers=headings[1:])


def _by_harness(folders: list[Path], tasks: str, **how: Any) -> list[Any]:
    from importlib.metadata import version

    from hf_freeze.compression.budget import in_bytes
    from hf_freeze.lab.harness import score_tasks

    results = score_tasks(folders, tasks, **how, say=terminal.say)
    rows: list[tuple[Any, ...]] = []
    for one in results:
        if one.to_first is None:  # the first folder begins a metric
            rows.append((f"{one.task}, {one.metric}: {one.samples:,} samples", *[""] * 5))
        error = _NONE if one.error is None else f"{one.error:#.2g}"
        rows.append((f"  {one.folder}", in_bytes(one.bytes), f"{one.value:#.4g}", error, *_to_first(one, "#.4g")))
    headings = ("folder", "size", "value", "standard error", "to the first", "95 % interval, paired samples")
    title = f"By lm-eval {version('lm_eval')}"
    terminal.show_table(headings, rows, title=title, numbers=headings[1:], optional=("size",))
    return results


def _to_first(one: Any, form: str) -> tuple[str, str]:
    if one.to_first is None:
        return _NONE, _NONE
    middle, low, high = (value if value is None else f"{value:+{form}}" for value in one.to_first)
    return str(middle), _NONE if low is None else f"{low} to {high}"
