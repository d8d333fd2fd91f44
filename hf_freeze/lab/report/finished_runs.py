"""Finished runs, read back: records, settings, logs and test items of one or several grid folders."""

import functools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.io import write_whole
from hf_freeze.lab.recipes.rows import method_of
from hf_freeze.methods.parts import Schedule, parts_of
from hf_freeze.run_folder import LATENCY, read_head_scores, read_head_tests, read_maps, run_folder

_POINTS = 200  # of the curve of a schedule


@dataclass(frozen=True)
class Run:
    """A finished run. What its folder lacks is empty: older ones have no items, and a bare results.jsonl only records."""

    record: dict[str, Any]
    grid: Path
    settings: dict[str, Any]
    log: list[dict[str, Any]]
    items: np.ndarray | None
    source: str = ""  # the letter of its grid, where rows of several are compared

    @property
    def folder(self) -> Path:
        return run_folder(self.grid, self.record)

    @functools.cached_property
    def methods(self) -> list[dict[str, Any]]:
        """Those of its model, what it started from included; where there is no model, those that the recipe added."""
        return _read_json(self.folder / "model" / "config.json").get("methods", self.settings.get("methods", []))

    @functools.cached_property
    def schedules(self) -> dict[str, list[tuple[float, float]]]:
        """What its methods scheduled, in words -> (share of training, value); empty where nothing was, or it did not train."""
        curves: dict[str, list[tuple[float, float]]] = {}
        steps = self.record.get("steps", 0)
        try:
            applied = [method_of(data) for data in self.settings.get("methods", [])]
        except ValueError:  # of another version
            return {}
        for _, schedule in parts_of(applied, Schedule) if steps else ():
            for step in sorted({round(steps * point / _POINTS) for point in range(_POINTS + 1)}):
                for name, value in schedule.values(step, steps).items():
                    curves.setdefault(name, []).append((step / steps, value))
        return curves

    @property
    def head_scores(self) -> dict[str, dict[str, list[float]]]:
        """Name of a score -> attention -> a number for each head; empty where none were measured."""
        return read_head_scores(self.folder)

    @property
    def head_tests(self) -> dict[str, dict[str, list[float]]]:
        """Name of a score -> attention -> a corrected p for each head; empty where none were tested."""
        return read_head_tests(self.folder)

    @property
    def maps(self) -> dict[str, Any]:
        """What the pictures of its attentions and embeddings show; empty where none are wanted."""
        return read_maps(self.folder)

    @property
    def row(self) -> str:
        """Its name among all that it is compared with."""
        return f"{self.source} {self.record['row']}".lstrip()

    @property
    def key(self) -> tuple[str, int]:
        """Row and seed: in a grid there is one run of each."""
        return self.record["row"], self.record["seed"]

    @property
    def recipe(self) -> str:
        """Its name; of old records, which have none, that of their folder."""
        return self.record.get("recipe") or self.grid.resolve().name

    @property
    def latency(self) -> dict[str, Any]:
        """What benchmarks/run_latency.py measured of its model; empty where it did not."""
        return _read_json(self.folder / LATENCY) or self.record.get("latency") or {}

    @property
    def precision(self) -> str:
        """`"bf16"` or `"fp32"`, in which it was trained; empty where it is not known."""
        training = self.settings.get("training", {})
        # Records of earlier releases do not say. Their default was bf16, except for images, which have no `max_tokens`.
        guessed = "bf16" if training.get("bf16", "max_tokens" in training) is True else "fp32"
        return self.record.get("precision") or (guessed if training else "")

    @property
    def machine(self) -> str:
        """On which it was trained and tested; empty where it is not known."""
        environment = self.record.get("environment")
        return machine_of(environment, self.record.get("processes", 1)) if environment else ""

    @property
    def task(self) -> str:
        return self.record.get("task") or self.settings.get("task") or "translation"

    @property
    def metric(self) -> str:
        """By which its task is scored, where the recipe names it; else empty."""
        return self.record.get("metric") or self.settings.get("metric") or ""


@dataclass
class Source:
    """One grid: a folder, or several that hold other rows or seeds of it. `letter` is empty where there is no other grid."""

    folders: list[Path]
    runs: list[Run]
    letter: str = ""

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(run.recipe for run in self.runs))

    @property
    def described(self) -> str:
        """Its recipes and the names of its folders: where they lie is nobody's business."""
        return ", ".join(dict.fromkeys([*self.recipes, *(folder.resolve().name for folder in self.folders)]))


def machine_of(environment: dict[str, Any], processes: int = 1) -> str:
    """What times depend on beside the model."""
    several = f", {processes} processes" if processes > 1 else ""
    return f"{environment['device']}, {environment['threads']} of {environment['cores']} cores{several}"


def read_results(folder: Path, say: Callable[[str], Any] = print) -> list[dict[str, Any]]:
    """The records of `folder/results.jsonl`. A broken last line, of a killed copy, is removed from the file, and said.

    Raises ValueError where there are none, or an earlier line is not JSON.
    """
    path = folder / "results.jsonl"
    if not path.exists():
        raise ValueError(f"{path} does not exist: run `hf-freeze run RECIPE.yaml --out {folder}` first")
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
            if line:
                write_whole(path, "".join(kept.decode() + "\n" for kept in lines[:-1]))
                say(f"{path}: the last line was cut off and is removed; `hf-freeze run` collects that run again")
    if not records:
        raise ValueError(f"{path} holds no finished run yet")
    return records


def read_folder(folder: Path, say: Callable[[str], Any] = print) -> list[Run]:
    """The finished runs of one folder, of whatever tasks. Raises ValueError where it holds a row twice with the same seed."""
    runs: dict[tuple[str, int], Run] = {}
    for record in read_results(folder, say):
        own = run_folder(folder, record)
        log = own / "log.jsonl"
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
        items = np.load(own / "items.npy") if (own / "items.npy").exists() else None
        run = Run(record, folder, _read_json(own / "run.json"), entries, items)
        if run.key in runs:
            raise ValueError(f"{folder} holds twice row {run.row!r} with seed {run.key[1]}")
        runs[run.key] = run
    return list(runs.values())


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def by_row(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each row, in the order of the grid."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.row, []).append(run)
    return groups


def split_of(runs: Sequence[Run]) -> str:
    """The split that `runs`, which may be compared, were scored on."""
    return next((run.record["scored_on"] for run in runs if "scored_on" in run.record), "test")


def label_of(record: dict[str, Any]) -> str:
    """The label of a run's row, and which row it started from."""
    return record["label"] + (f", from {record['start']}" if "start" in record else "")


def unlike_settings(runs: Sequence[Run]) -> list[str]:
    """A sentence on the rows whose runs differ in more than their seed, so that their means are of unlike things."""
    rows_by_setting: dict[str, list[str]] = {}
    for row, group in by_row(runs).items():
        base, *others = map(_without_seed, group)
        unlike = {key for other in others for key in base.keys() & other.keys() if base[key] != other[key]}
        for name in sorted(unlike):
            rows_by_setting.setdefault(name, []).append(row)
    return [
        f"Row {', '.join(rows)}: the seeds differ in {name}, so the mean is of unlike runs."
        for name, rows in rows_by_setting.items()
    ]


def _without_seed(run: Run) -> dict[str, Any]:
    """What must be equal in all seeds of a row. Only what both know is compared: later versions may know more settings."""
    settings = left_out(run.settings, ("seed", "name", "preset", "root"))
    if isinstance(settings.get("training"), dict):  # "auto" may stand for what another seed's run names
        settings["training"] |= {"bf16": run.precision}
    return settings | {"label": run.record["label"]}


def left_out(settings: Any, names: Collection[str]) -> Any:
    """A copy without `names`, at any depth: also in what a run starts from, learns from, and in its methods."""
    if isinstance(settings, dict):
        return {key: left_out(value, names) for key, value in settings.items() if key not in names}
    return [left_out(value, names) for value in settings] if isinstance(settings, list) else settings
