"""A new recipe as text, with comments, and what to do with it next."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_freeze.analysis.accounting import count_parameters
from hf_freeze.lab.init.backbone import Backbone
from hf_freeze.lab.init.goals import Goal
from hf_freeze.lab.recipes.settings import Backbone as BackboneSection
from hf_freeze.lab.recipes.settings import Data, Tokenizer, Training

_SECTIONS = {"data": Data, "tokenizer": Tokenizer, "backbone": BackboneSection, "training": Training}


def recipe_text(name: str, task: str, data: dict[str, Any], backbone: Backbone, goal: Goal, command: str) -> str:
    """The recipe, as YAML that a person can go on with."""
    lines = [f"# To find out {goal.about}. Written by", f"#   {command}", f"name: {_inline(name)}"]
    lines += [f"about: {_inline(goal.about)}", f"task: {task}", ""]
    for section, fields in ({"data": data} | backbone.sections).items():
        help = {key: info.description for key, info in _SECTIONS[section].model_fields.items()}
        lines += [f"{section}:", *(_field(key, value, help[key]) for key, value in fields.items()), ""]
    lines += ["seeds: [1] # each row is run with each seed; three tell what is chance", ""]
    lines += [f"# {note}" for note in goal.notes] + ["rows:"]
    for row, settings in goal.rows.items():
        lines.append(f"  {_inline(row, quoted=True)}:")
        lines += [f"    {key}: {_inline(value, quoted=key == 'start')}" for key, value in settings.items()]
    lines += [
        f"# Left out, because it does not work on this model: {row} ({reason})" for row, reason in goal.left_out.items()
    ]
    lines += ["", "smoke: # with --smoke: does everything work? The scores mean nothing", "  data: {limit: 200}"]
    return "\n".join([*lines, "  training: {epochs: 1}", ""])


def next_commands(
    path: Path, name: str, task: str, goal_name: str, goal: Goal, backbone: Backbone
) -> list[tuple[str, str]]:
    """Three commands, each with what it is for."""
    recipe, runs = shlex.quote(str(path)), f"runs/{name}"
    commands = [
        (f"hf-freeze run {recipe} --smoke", "does everything work? The scores mean nothing"),
        (
            f"hf-freeze run {recipe}",
            f"{len(goal.rows)} {'row' if len(goal.rows) == 1 else 'rows'}; a stopped grid resumes; then open {runs}/report.html",
        ),
    ]
    if goal_name == "study":
        return [
            *commands,
            (f"hf-freeze run {recipe} --seeds 3", "two more seeds of each row, to tell effect from chance"),
        ]
    if goal_name == "shrink":
        chosen = next(row for row in goal.rows if row != "0")
        return [*commands, (f"hf-freeze export {runs}/row-{chosen}-seed-1/model --format onnx", "a row to serve")]
    marian = task == "translation" and backbone.model.config.model_type.endswith("marian")
    engine = "ctranslate2" if marian else "onnx"
    limit = _size(count_parameters(backbone.model).total // 2)  # int8 alone takes a byte for each
    options = f"--max-bytes {limit} --engine {engine} --out {name}-small"
    return [*commands, (f"hf-freeze compress {runs}/row-0-seed-1/model --data {recipe} {options}", "within your limit")]


def recipe_name(path: Path) -> str:
    """The name of a recipe in this file, which is that of a folder."""
    return re.sub(r"[^\w.-]+", "-", path.stem).strip("-.") or "recipe"


def _field(key: str, value: Any, help: str | None) -> str:
    if isinstance(value, Mapping) and len(value) > 3:
        return "\n".join([f"  {key}:", *(f"    {name}: {_inline(inner)}" for name, inner in value.items())])
    return f"  {key}: {_inline(value)} # {help}"


def _inline(value: Any, *, quoted: bool = False) -> str:
    """YAML on one line."""
    style = '"' if quoted else None
    text = yaml.safe_dump(
        value, default_flow_style=True, default_style=style, width=10**9, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _size(count: int) -> str:
    return f"{count / 1e6:.3g}MB" if count >= 1e6 else f"{max(1, round(count / 1e3))}kB"
