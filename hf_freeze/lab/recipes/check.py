"""Whether the fields of a recipe fit its task and each other; their types and limits are checked by the models."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_freeze.data.files import kind_of
from hf_freeze.lab.data.tables import TABLES
from hf_freeze.lab.recipes.explain import choose, facts_of, fields_for, validated
from hf_freeze.lab.recipes.merge import merge
from hf_freeze.lab.recipes.recipe import Recipe
from hf_freeze.lab.recipes.rows import OF_A_ROW, Row, method_of
from hf_freeze.lab.recipes.settings import (
    AUTO,
    BLOCK_SIZE,
    IMAGES,
    RUNNING_TEXT,
    SPLITS,
    TASKS,
    Backbone,
    Data,
    Settings,
    Training,
)
from hf_freeze.lab.recipes.space import check_search, space_of
from hf_freeze.methods.budget import check_budget
from hf_freeze.methods.order import needs_config
from hf_freeze.methods.registry import METHODS
from hf_freeze.training.schedules import RATED


def check(data: dict[str, Any], path: str | Path) -> Recipe:
    """The recipe that `data` are, with all defaults that are written with a run. `path`: the file, for the ValueError of anything
    that is wrong."""
    recipe = validated(Recipe, data, path)
    task = TASKS[recipe.task]
    if recipe.metric and recipe.metric not in task.metrics:
        choices = choose(task.metrics, recipe.metric) if task.metrics else "it has one metric"
        raise ValueError(f"{path}: task {recipe.task!r} has no metric {recipe.metric!r}; {choices}")
    _check_present(recipe, path)
    _check_fields(recipe, recipe.task, path)
    _check_needed(recipe.training, recipe.task, f"{path}: training")
    _check_sections(recipe, recipe, path)
    _check_data(recipe.data, recipe.task, path)
    if recipe.task in RUNNING_TEXT and "block_size" not in recipe.training.model_fields_set:
        recipe.training.block_size = BLOCK_SIZE
    if recipe.task not in IMAGES and "bf16" not in recipe.training.model_fields_set:
        recipe.training.bf16 = AUTO
    _check_axis(recipe.axis, path)
    for key, values in (("seeds", recipe.seeds), ("only", recipe.only or [])):
        if len(set(values)) < len(values):
            raise ValueError(f"{path}: {key} names one twice: {values!r}")
    for row in recipe.only or []:
        if row not in recipe.rows:
            raise ValueError(f"{path}: no row {row!r}; {choose(recipe.rows, row)}")
    for name, row in recipe.rows.items():
        _check_row(name, row, recipe, f"{path}: row {name!r}")
    if recipe.start is not None:
        owners = [(recipe, f"{path}"), *((row, f"{path}: row {name!r}") for name, row in recipe.rows.items())]
        for owner, where in owners:
            _check_own_sections(owner, f"the grid {recipe.start}", where)
    if recipe.space is not None:
        space_of(recipe, path)
        check_search(recipe, path)
    elif "search" in recipe.model_fields_set:
        raise ValueError(f"{path}: 'search' needs a 'space' to search")
    return recipe


def check_data(data: dict[str, Any], path: str | Path) -> Recipe:
    """Check the task and the data of a recipe alone, of which the rest may be missing or wrong."""
    used = {key: data[key] for key in ("task", "metric", "data") if key in data}
    recipe = validated(Recipe, {"name": "", **used}, path)
    if recipe.data is None:
        raise ValueError(f"{path}: 'data' is missing")
    _check_fields(recipe, recipe.task, path)
    _check_data(recipe.data, recipe.task, path)
    return recipe


def _check_present(recipe: Recipe, path: str | Path) -> None:
    """The sections that the task needs. A run that starts from another one has its backbone, a pretrained one its tokenizer."""
    own = [] if recipe.start is not None else ["backbone", "tokenizer"]
    if recipe.backbone is not None and recipe.backbone.pretrained is not None:
        own.remove("tokenizer") if own else None
    rows = [] if recipe.space is not None else ["rows"]  # those beside a space are there for comparison
    for key in ("data", *own, "training", *rows, "seeds"):
        if key not in recipe.model_fields_set and key in fields_for(Recipe, recipe.task):
            pretrained = key == "backbone" and recipe.task not in IMAGES
            hint = "; name a model with --set backbone.pretrained=FOLDER" if pretrained else ""
            raise ValueError(f"{path}: {key!r} is missing{hint}")
    if "rows" not in recipe.model_fields_set:
        recipe.rows = {}


def _check_fields(section: Settings, task: str, path: str | Path, prefix: str = "") -> None:
    """Whether the task takes the fields that are set, and those within them. Rows are left out: they have names of their own."""
    model = type(section)
    for name in sorted(section.model_fields_set):
        tasks, value = facts_of(model.model_fields[name]).get("tasks", [task]), getattr(section, name)
        if task not in tasks:
            fit = f"the tasks {tasks}" if len(tasks) > 1 else f"task {tasks[0]!r}"
            choices = choose(sorted(fields_for(model, task)), name)
            raise ValueError(f"{path}: {prefix}{name} is for {fit}, not for {task!r}; {choices}")
        if isinstance(value, Settings):
            _check_fields(value, task, path, f"{prefix}{name}.")


def _check_needed(section: Settings, task: str, where: str) -> None:
    for name, info in type(section).model_fields.items():
        facts = facts_of(info)
        if facts.get("needed") and task in facts["tasks"] and name not in section.model_fields_set:
            raise ValueError(f"{where}.{name} is missing")


def _check_sections(owner: Recipe | Row, recipe: Recipe, path: str | Path) -> None:
    """The sections that a recipe and its rows have."""
    kind, kinds = owner.tokenizer.kind if owner.tokenizer is not None else None, TASKS[recipe.task].tokenizers
    if kind is not None and kind not in kinds:
        raise ValueError(f"{path}: tokenizer.kind={kind!r} does not fit task {recipe.task!r}; {choose(kinds, kind)}")
    if recipe.task in IMAGES and owner.backbone is not None:
        _check_needed(owner.backbone, recipe.task, f"{path}: backbone")
    training = owner.training or Training()
    for component in training.learning_rates:
        if component not in RATED:
            raise ValueError(
                f"{path}: unknown component training.learning_rates.{component}; {choose(RATED, component)}"
            )
    if recipe.task in IMAGES and training.epochs is not None and training.epochs != int(training.epochs):
        raise ValueError(f"{path}: training.epochs={training.epochs} is not a value that it takes: an integer")


def _check_axis(axis: str | None, path: str | Path) -> None:
    if axis is None or axis == "heads.fraction":
        return
    method, _, setting = axis.partition(".")
    if method not in METHODS:
        raise ValueError(
            f"{path}: axis={axis!r} names no method; {choose(sorted(METHODS), method)}, such as low_rank.rank"
        )
    settings = [field.name for field in fields(METHODS[method])]
    if setting not in settings:
        raise ValueError(f"{path}: axis={axis!r} is no setting; {choose(settings, setting)} of {method!r}")


# -- data ------------------------------------------------------------------------------------------------------------------------


def _check_data(data: Data, task: str, path: str | Path) -> None:
    given, form, facts = data.model_fields_set, data.form, TASKS[task]
    without_dev = "holdout" in given or (task in IMAGES and "dev" not in given)
    drawn = {"dev": without_dev, "test": "holdout_test" in given}
    splits = [split for split in SPLITS if not drawn.get(split)]
    sides = ["source", "target"] if form == "hub" and task == "translation" else []
    for key in [] if form == "builtin" else [*sides, *splits]:
        if key not in given:
            raise ValueError(f"{path}: data.{key} is missing")
    if form != "files" and "root" in given:
        raise ValueError(f"{path}: data.root says where files are, but the data is of the form {form!r}")
    for split in splits if form == "files" else ():
        named = getattr(data, split)
        are_tables = facts.tables and isinstance(named, list) and all(kind_of(file) != "lines" for file in named)
        if not isinstance(named, list) or not named or not (facts.files is None or len(named) == 2 or are_tables):
            wanted = "a list of files" if facts.files is None else f"two files, {facts.files}"
            others = f"; files that end in {TABLES} hold both" if facts.tables else ""
            raise ValueError(f"{path}: data.{split} must be {wanted}, not {named!r}{others}")
    for key, split in (("holdout", "dev"), ("holdout_test", "test")):
        if key in given and split in given:
            raise ValueError(f"{path}: data.{key}={getattr(data, key)!r} is drawn from train: it replaces data.{split}")
    if form == "builtin" and not facts.builtin:
        raise ValueError(f"{path}: task {task!r} has no built-in data; name files or a data set of the Hub")
    for field in sorted(given):
        forms = facts_of(Data.model_fields[field]).get("forms")
        if forms and form is not None and form not in forms:
            raise ValueError(f"{path}: data.{field} is for data of the form {sorted(forms)}, not {form!r}")
    wanted = str if form == "hub" else list
    if "mismatched" in given and not isinstance(data.mismatched, wanted):
        raise ValueError(f"{path}: data.mismatched must be a {wanted.__name__}, not {data.mismatched!r}")


# -- rows ------------------------------------------------------------------------------------------------------------------------


def _check_row(name: str, row: Row, recipe: Recipe, where: str) -> None:
    for method in row.methods:
        method_of(method)
    _check_fields(row, recipe.task, where)
    _check_sections(row, recipe, where)
    _check_checkpoints([name], recipe.rows, where)
    sections = {key: value for key, value in recipe.given().items() if key in OF_A_ROW}
    merged = merge(sections, {key: value for key, value in row.given().items() if key in OF_A_ROW})
    if merged.get("tokenizer") != sections.get("tokenizer") and TASKS[recipe.task].is_per_token:
        raise ValueError(
            f"{where}: perplexity is per token, so all rows of task {recipe.task!r} must use the same tokenizer"
        )
    _check_teacher(row, where)
    _check_parts(row, recipe, where)
    _check_pretrained(validated(Backbone, merged.get("backbone", {}), where), "tokenizer" in merged, where)
    trained = recipe.start is not None or row.start is not None or "pretrained" in merged.get("backbone", ())
    _check_weights(row, trained, where)


def _check_checkpoints(way: list[str], rows: dict[str, Row], where: str) -> None:
    """What a row starts from or learns from, and that in turn."""
    row = rows[way[-1]]
    if row.start is not None and len(way) == 1:
        _check_own_sections(row, "the row that it starts from", where)
    for field, needed in row.needs.items():
        if needed not in rows:
            raise ValueError(f"{where}: {field}={needed!r} is no row; {choose(rows, needed)}")
        if needed in way:
            raise ValueError(f"{where}: {field!r} refers to itself: {' <- '.join([*way, needed])}")
        _check_checkpoints([*way, needed], rows, where)


def _check_own_sections(owner: Recipe | Row, origin: str, where: str) -> None:
    """What starts from a finished run takes its backbone and tokenizer from there."""
    for section in ("backbone", "tokenizer"):
        if getattr(owner, section) is not None:
            raise ValueError(f"{where} has both 'start' and {section!r}: it takes the {section} of {origin}")


def _check_teacher(row: Row, where: str) -> None:
    learns = row.targets is not None or any(method["method"] == "distillation" for method in row.methods)
    if learns != (row.teacher is not None):
        raise ValueError(
            f"{where}: 'teacher' names the row that distillation learns from, among the methods or by targets: teacher; it has "
            + ("none of these" if row.teacher is not None else "no 'teacher'")
        )


def _check_parts(row: Row, recipe: Recipe, where: str) -> None:
    """Heads and layers are those of a model that the row starts from."""
    for field, done in (("heads", "removed"), ("layers", "chosen")):
        if getattr(row, field) is not None and row.start is None and recipe.start is None:
            raise ValueError(
                f"{where} has {field!r} but no 'start': they are {done} from the model that it starts from"
            )
    if row.layers is not None and row.heads is not None:
        raise ValueError(f"{where} has both 'layers' and 'heads', which name layers by their old numbers; use two rows")
    if row.layers is not None and row.layers.trials is not None and row.layers.by != "search":
        raise ValueError(f"{where}: layers.trials={row.layers.trials} is for by: search, not for {row.layers.by!r}")
    if row.heads is None or row.heads.by == "random" or row.start is None:
        return  # what is measured in another grid is known when it is read
    if row.heads.by not in recipe.rows[row.start].head_scores:
        raise ValueError(f"{where}: heads.by={row.heads.by!r} is not in the head_scores of row {row.start!r}")


def _check_pretrained(backbone: Backbone, has_tokenizer: bool, where: str) -> None:
    """A backbone with weights has its own config and tokenizer."""
    if backbone.pretrained is None:
        return
    others = [f"backbone.{name}" for name in sorted(backbone.model_fields_set - {"pretrained"})]
    for field in [*others, *["tokenizer"] * has_tokenizer]:
        raise ValueError(
            f"{where} has both 'backbone.pretrained' and {field!r}: pretrained weights come with their own"
        )


def _check_weights(row: Row, trained: bool, where: str) -> None:
    """Methods that need weights to begin with, or cannot take them over. `trained`: whether the row has any."""
    if row.calibration is not None and not trained:
        raise ValueError(
            f"{where} has 'calibration' but neither 'start' nor 'backbone.pretrained': fresh weights have none"
        )
    methods = [method_of(method) for method in row.methods]
    try:
        check_budget(methods, row.calibration.budget if row.calibration is not None else None, row.calibration)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    for number, method in enumerate(methods):
        if trained and needs_config(method, methods[:number]):
            raise ValueError(
                f"{where}: the blocks of method {method.name!r} train from scratch: it can have neither 'start' nor "
                "'backbone.pretrained'"
            )
