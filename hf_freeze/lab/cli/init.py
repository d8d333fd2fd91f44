"""`hf-freeze init`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_freeze import terminal

_TASKS = {
    "translation": "translation",
    "classification": "sequence-classification",
    "lm": "language-modelling",
    "masked-lm": "masked-lm",
}
_GOALS = ("study", "shrink", "budget")  # those of lab.init.goals, which imports torch
_QUESTIONS = {
    "task": f"Task: {', '.join(_TASKS)}",
    "model": "Model: a folder or Hub id of a trained one, or new for a small one from scratch",
    "data": "Data: a folder, training files separated by commas, or builtin",
    "goal": "Goal: study (which parts must be trained), shrink (what each way to a smaller one costs), budget (fit a limit)",
}


def init(
    task: Annotated[str | None, typer.Option(help=f"{', '.join(_TASKS)}.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or Hub id of a trained model, or new: a small one.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILES",
            help="Training files (.csv, .tsv, .jsonl, .json, .parquet, .arrow; lines of text), separated by commas; "
            "a folder with train*, dev* or val*, and test*; or builtin.",
        ),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            help="study: which parts must be trained; shrink: what sizes cost; budget: for hf-freeze compress."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The recipe to write.")] = Path("recipe.yaml"),
    dev: Annotated[
        str | None, typer.Option(metavar="FILES", help="Dev files; if not given, a part of the training data.")
    ] = None,
    test: Annotated[
        str | None, typer.Option(metavar="FILES", help="Test files; if not given, a part of the training data.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            "--column",
            help="Columns of the texts in CSV, TSV, JSON, Parquet and Arrow files, separated by commas.",
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of the label of a classification; label if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing recipe.")] = False,
) -> None:
    """Write a recipe of your own: for your task, model, data and goal, with comments. Asks for options that are not given.

    Files, columns and model are checked at once. In a terminal it asks; elsewhere it names the missing option.

    Example: hf-freeze init --task translation --model new --data train.de,train.en --goal study

    Example: hf-freeze init --task classification --model new --data reviews.csv --columns Review --label Sentiment --goal shrink
    """
    with terminal.one_line_errors():
        if out.exists() and not force:
            raise ValueError(f"{out} exists; use --force to overwrite it, or --out FILE")
        answers = _asked({"task": task, "model": model, "data": data, "goal": goal})
        task, goal = answers["task"], answers["goal"]
        full_names = _TASKS | {name: name for name in _TASKS.values()}
        if task not in full_names:
            raise ValueError(f"--task {task}: choose from {list(_TASKS)}")
        if goal not in _GOALS:
            raise ValueError(f"--goal {goal}: choose from {list(_GOALS)}")
        full_task = full_names[task]
        of_files = {"dev": dev, "test": test, "columns": columns, "label": label}
        for option, value in of_files.items():
            if value is not None and answers["data"] == "builtin":
                raise ValueError(f"--{option} {value}: the built-in data has its own; leave it out")
        if label is not None and full_task != "sequence-classification":
            raise ValueError(f"--label {label} is for classification, not for {task}")
        import datasets
        from transformers.utils import logging

        from hf_freeze.io import write_whole
        from hf_freeze.lab.init.backbone import backbone_for, builtin_data
        from hf_freeze.lab.init.data import data_section
        from hf_freeze.lab.init.goals import goal_of
        from hf_freeze.lab.init.write import next_commands, recipe_name, recipe_text
        from hf_freeze.lab.recipes.load import load_recipe

        datasets.disable_progress_bars()
        logging.set_verbosity_error()
        if answers["data"] == "builtin":
            section = builtin_data(full_task)
        else:
            names = None if columns is None else [name.strip() for name in columns.split(",")]
            section = data_section(full_task, answers["data"], dev, test, names, label)
        backbone = backbone_for(full_task, answers["model"], answers["data"])
        chosen = goal_of(goal, backbone)
        given = answers | of_files
        words = [f"--{option} {shlex.quote(value)}" for option, value in given.items() if value is not None]
        name = recipe_name(out)
        command = " ".join(["hf-freeze init", *words, f"--out {shlex.quote(str(out))}"])
        text = recipe_text(name, full_task, section, backbone, chosen, command)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)
        load_recipe(out)
    terminal.say(f"Written: {out}, with {len(chosen.rows)} {'row' if len(chosen.rows) == 1 else 'rows'}. Next:")
    for line, purpose in next_commands(out, name, full_task, goal, chosen, backbone):
        terminal.say(f"  {line}  # {purpose}")


def _asked(answers: dict[str, str | None]) -> dict[str, str]:
    """The answers, with those that are missing from the terminal. Raises ValueError where there is none to ask."""
    missing = [name for name, answer in answers.items() if answer is None]
    if missing and not sys.stdin.isatty():
        options = ", ".join(f"--{name}" for name in missing)
        raise ValueError(f"{options} missing. {'. '.join(_QUESTIONS[name] for name in missing)}")
    defaults = {"model": "new", "data": "builtin", "goal": "study"}
    asked = {name: typer.prompt(_QUESTIONS[name], default=defaults.get(name)) for name in missing}
    return {name: (answer if answer is not None else asked[name]).strip() for name, answer in answers.items()}
