"""From the names of files or of a folder to the `data` section of a recipe, read once to see that it works."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_freeze.data.files import endings, kind_of, matching_files
from hf_freeze.lab.data.tables import TABLES, check_columns, columns_of
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.tasks.registry import task_of

BUILTIN = "builtin"
_STARTS = {"train": ("train",), "dev": ("dev", "val"), "test": ("test",)}  # of the names of files, in a folder
_USUAL = {  # names of columns, the first of which is what a recipe takes without a word
    "translation": [("source", "target")],
    "sequence-classification": [("sentence",), ("text",)],
    "regression": [("sentence",), ("text",)],
    "language-modelling": [("text",)],
    "masked-lm": [("text",)],
}


def data_section(
    task: str, data: str, dev: str | None, test: str | None, columns: Sequence[str] | None, label: str | None
) -> dict[str, Any]:
    """`data`: a folder with files that begin with train, dev or val, and test, or the training files, separated by commas. What
    there is no dev or test file of is drawn from the training file: a tenth of it, at most 1,000 items.

    Raises ValueError and FileNotFoundError, in one line, for anything that training could not read: files, lines, columns.
    """
    folder = Path(data)
    files = {"train": [] if folder.is_dir() else _listed(data, "--data")}
    files |= {name: _listed(given, f"--{name}") for name, given in (("dev", dev), ("test", test)) if given}
    section: dict[str, Any] = {}
    if folder.is_dir():
        section["root"] = data
        files = {split: [str(Path(file).absolute()) for file in named] for split, named in files.items() if named}
        files = {split: _beginning(folder, split) for split in _STARTS if split not in files} | files
        if not files["train"]:
            raise ValueError(f"--data {data}: no file in this folder begins with 'train'; name the training files")
    files = {split: files[split] for split in _STARTS if files.get(split)}
    if "test" not in files and "dev" in files and dev is None:  # of a folder: training data do for the choice of epochs
        files["test"] = files.pop("dev")
    for split, named in files.items():
        _check_number(task, split, named)
    section |= files
    section |= _column_fields(
        task, matching_files(folder / file if "root" in section else file for file in files["train"]), columns, label
    )
    missing = {"dev": "holdout", "test": "holdout_test"}
    missing = {split: field for split, field in missing.items() if split not in files}
    of_text: Any = task_of(task)
    items = len(of_text.load(Data.model_validate(section | dict.fromkeys(missing.values(), 1)))["train"]) + len(missing)
    drawn = min(max(items // 10, 1), 1000)
    return section | dict.fromkeys(missing.values(), drawn)


def _listed(names: str, option: str) -> list[str]:
    files = [name.strip() for name in names.split(",") if name.strip()]
    for file in matching_files(files):
        if not file.is_file():
            raise FileNotFoundError(f"{option} {names}: there is no file {str(file)!r}")
    return files


def _beginning(folder: Path, split: str) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return [name for name in names if name.lower().startswith(_STARTS[split]) and _is_text(name)]


def _is_text(name: str) -> bool:
    return kind_of(name) != "lines" or len((endings(name) or ["too long"])[-1]) <= 4  # .txt, .de, .eng


def _check_number(task: str, split: str, files: list[str]) -> None:
    """As many files as the task takes."""
    kinds = {kind_of(file) for file in files}
    option = "--data" if split == "train" else f"--{split}"
    if task == "translation" and "lines" in kinds and len(files) != 2:
        raise ValueError(
            f"{len(files)} files for {split}, {files}: translation takes two files of lines, the source and the target, or files "
            f"with both in columns, whose names end in {TABLES}; name them: {option} SOURCE,TARGET"
        )
    if task in ("sequence-classification", "regression") and "lines" in kinds:
        raise ValueError(
            f"{files} for {split}: classification takes files with columns, whose names end in {TABLES}; there a row has a text "
            "and its label"
        )


def _column_fields(task: str, files: list[Path], columns: Sequence[str] | None, label: str | None) -> dict[str, Any]:
    """The fields of the section that say which columns hold the texts, and the label; none for files of lines."""
    if kind_of(files[0]) == "lines" or task not in _USUAL:
        for option, given in (("--columns", columns), ("--label", label)):
            if given:
                lines = f"{files[0]} is a file of lines, without columns"
                raise ValueError(f"{option} {given!r}: {lines if task in _USUAL else f'{task} names no columns'}")
        return {}
    present = columns_of(files[0])
    lower = {name.lower(): name for name in reversed(present)}
    is_labelled = task in ("sequence-classification", "regression")
    if columns is None:
        usual = next((usual for usual in _USUAL[task] if set(usual) <= set(lower)), None)
        if usual is None:
            wanted = " or ".join(" and ".join(map(repr, usual)) for usual in _USUAL[task])
            options = "--columns which to take" + " and with --label which is the label" * is_labelled
            raise ValueError(f"{files[0]} has no column {wanted}; say with {options}; choose from {present}")
        columns = [lower[name] for name in usual]
    check_columns(files[0], columns, present, ", with --columns")
    if is_labelled:
        label = label or lower.get("label", "label")
        check_columns(files[0], [label], present, ", with --label")
        return {"columns": list(columns), "label": label}
    if task == "translation":
        if len(columns) != 2:
            raise ValueError(f"--columns {','.join(columns)}: translation takes two, such as source,target")
        return dict(zip(("source", "target"), columns, strict=True))
    if len(columns) != 1:
        raise ValueError(f"--columns {','.join(columns)}: this task takes one, such as text")
    return {"column": columns[0]}
