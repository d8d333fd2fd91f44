"""Model cards: what a model is, holds, costs and scored, from its folder and the record of the run that made it, and from nothing
else. Settings that say where something lay on this machine are left out."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_freeze.analysis.accounting import count_parameters, stored_bytes
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.compat.transformers import mapped_class
from hf_freeze.install import how_to_install
from hf_freeze.methods.registry import METHODS
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.loading import empty_model
from hf_freeze.run_folder import commands_of, run_folder

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
PICTURES = ("report.png",)  # of the grid that a run belongs to
_TAGS = {  # the Hub's names of the tasks
    "seq2seq-lm": "translation",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "feature-extraction": "feature-extraction",
}
_METRICS = {  # of a record -> the Hub's name, ours, the format
    "test_bleu": ("sacrebleu", "BLEU", "{:.1f}"),
    "test_chrf": ("chrf", "chrF", "{:.1f}"),
    "test_perplexity": ("perplexity", "perplexity", "{:.2f}"),
    "test_accuracy": ("accuracy", "accuracy", "{:.2%}"),
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Made:
    """A folder with a model, and what the run that made it left: None where there was none."""

    model: Path
    record: dict[str, Any] | None
    settings: dict[str, Any] | None

    @property
    def grid(self) -> Path:
        """The folder of the grid, where a run made it."""
        return self.model.parent.parent

    @property
    def pictures(self) -> list[Path]:
        return [self.grid / name for name in PICTURES if self.record is not None and (self.grid / name).exists()]


def read_made(folder: Path) -> Made:
    """`folder` is that of a model, or that of a finished run with its model below it.

    Raises ValueError where it holds no model, or that of a run that is not finished.
    """
    model = folder / "model" if (folder / "model" / "config.json").exists() else folder
    if not (model / "config.json").exists():
        raise ValueError(f"{folder} holds no model: neither config.json nor model/config.json is there")
    run, found = model.parent, []
    if model.name != "model" or not (run / "run.json").exists():
        return Made(model, None, None)
    for name in ("metrics.json", "run.json"):
        try:
            found.append(json.loads((run / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ValueError(f"{run} is not finished: {name} is not there yet") from None
        except ValueError as error:
            raise ValueError(f"{run / name} is damaged: {error}") from None
    return Made(model, *found)


def published_record(made: Made) -> dict[str, Any] | None:
    """The record and settings of the run, without folders of the machine that it ran on."""
    if made.record is None:
        return None
    return made.record | {"settings": _without_folders(made.settings)}


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_folders(each) for name, each in value.items() if name != "root"}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return _without_folder(value) if isinstance(value, str) else value


def _without_folder(word: str) -> str:
    """An absolute path, alone or after `KEY=`, without the folder that it lies in."""
    key, equals, value = word.rpartition("=")
    return key + equals + (Path(value).name if Path(value).is_absolute() else value)


def model_card(
    made: Made,
    repo_id: str | None = None,
    *,
    model: Any = None,
    datasets: Sequence[str] = (),
    language: Sequence[str] = (),
    license: str | None = None,
    base_model: str | None = None,
    remote_code: bool = False,
) -> ModelCard:
    """The card of `made`, as it will be in the repository `repo_id`.

    `datasets`, `language`, `license` and `base_model`: of the metadata, ids of the Hub and ISO 639 codes, where the record does
    not tell. `model`: the one in the folder, perhaps without weights, if it is there already. `remote_code`: the
    repository loads with `trust_remote_code`. Figures come from the record alone; without one there are none.
    """
    model = empty_model(made.model) if model is None else model
    variant, task = isinstance(model, VariantMixin), task_of(model)
    name = repo_id or "REPO_ID"
    trained_on = list(datasets) or _hub_data(made)
    results = _results(made, task, trained_on)
    data = ModelCardData(
        library_name="transformers" if remote_code or not variant else "hf_freeze",
        pipeline_tag=_TAGS[task],
        base_model=base_model or _pretrained(made),
        datasets=trained_on or None,
        language=list(language) or None,
        license=license,
        metrics=[result.metric_type for result in results] or None,
        tags=_tags(model) if variant else None,
        model_name=name.split("/")[-1],
        eval_results=results or None,
    )
    native = type(model).native_class.__name__ if variant else type(model).__name__
    counts = count_parameters(model)
    kinds = [*counts.by_component.items(), ("all", counts)]
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=name.split("/")[-1],
        summary=_summary(made, native, variant),
        example=_example(name, task, variant and not remote_code, remote_code),
        methods=[_described(settings) for settings in getattr(model.config, "methods", ())],
        sizes=kinds,
        stored_bytes=stored_bytes(model),
        multiply_adds=(made.record or {}).get("multiply_adds"),
        results=[{"name": label, "data": _data_name(made), "value": shown} for label, shown in _scores(made.record)],
        compared=_compared(made),
        pictures=[path.name for path in made.pictures],
        training=_training(made),
        limits=_limits(made, variant and not remote_code),
    )


def task_of(model: Any) -> str:
    """The task of `AUTO_CLASSES` that the class of `model` serves. Raises ValueError for any other."""
    for task, auto in AUTO_CLASSES.items():
        if mapped_class(auto, type(model.config)) is type(model):
            return task
    raise ValueError(f"{type(model).__name__} is of no task of {list(AUTO_CLASSES)}")


def shortened(value: Any) -> Any:
    """Of a long list, such as the ids of a vocabulary, the ends."""
    long = isinstance(value, list) and len(value) > 20
    return f"{value[:3]} ... {value[-1:]} ({len(value)})".replace("] ... [", ", ..., ") if long else value


def _tags(model: Any) -> list[str]:
    names = dict.fromkeys(method["method"] for method in model.config.methods)
    return ["hf_freeze", *(name.replace("_", "-") for name in names)]


def _described(settings: dict[str, Any]) -> dict[str, Any]:
    """What a method does, with its sources, as its module says; and its settings that are not the defaults."""
    kind = METHODS[settings["method"]]
    description = " ".join((sys.modules[kind.__module__].__doc__ or "").split("\n\n")[0].split())
    defaults = {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(kind)
    }
    changed = {
        name: shortened(value) for name, value in settings.items() if name in defaults and value != defaults[name]
    }
    return {"title": kind.__name__, "description": description, "settings": json.dumps(changed, ensure_ascii=False)}


def _summary(made: Made, native: str, variant: bool) -> str:
    label = f" Row “{made.record['label']}” of the grid `{made.record['recipe']}`." if made.record else ""
    if not variant:
        return f"A `{native}`.{label}"
    return f"A `{native}` with parts changed by hf_freeze: the methods below.{label}"


def _example(name: str, task: str, needs_us: bool, remote_code: bool) -> str:
    option = ", trust_remote_code=True" if remote_code else ""
    if task == "seq2seq-lm" and remote_code:  # the pipeline is ours
        return (
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
            f'model = AutoModelForSeq2SeqLM.from_pretrained("{name}", trust_remote_code=True)\n'
            'print(tokenizer.batch_decode(model.generate(**tokenizer("A sentence", return_tensors="pt"))))'
        )
    first = [f"import hf_freeze  # {how_to_install()}"] if needs_us or task == "seq2seq-lm" else []
    if task == "question-answering":  # transformers 5 has no pipeline for it
        auto = AUTO_CLASSES[task].__name__
        return "\n".join([*first, f"from transformers import {auto}", f'{auto}.from_pretrained("{name}"{option})'])
    text = {"fill-mask": 'f"A {pipe.tokenizer.mask_token} word"'}.get(_TAGS[task], '"A sentence"')
    lines = ["from transformers import pipeline", f'pipe = pipeline("{_TAGS[task]}", model="{name}"{option})']
    return "\n".join([*first, *lines, f"print(pipe({text}))"])


def _pretrained(made: Made) -> str | None:
    """The Hub id of what the run started from; a folder has none."""
    name = str((made.settings or {}).get("backbone", {}).get("pretrained", ""))
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _hub_data(made: Made) -> list[str]:
    data = (made.settings or {}).get("data", {})
    return [data["hub"]] if "hub" in data else []


def _data_name(made: Made) -> str:
    data = (made.settings or {})["data"]
    if "builtin" in data:
        return "the built-in corpus of hf_freeze"
    if "hub" in data:
        return " ".join(filter(None, (data["hub"], data.get("name"))))
    files = dict.fromkeys(name.split(".")[0] for name in data["test"])  # two of a translation differ in their language
    return f"{Path(data.get('root', '.')).name} ({', '.join(files)})"


def _scores(record: dict[str, Any] | None) -> list[tuple[str, str]]:
    """(our name of a metric, its value as it is shown)"""
    metrics = (record or {}).get("metrics", {})
    return [(label, form.format(metrics[key])) for key, (_, label, form) in _METRICS.items() if key in metrics]


def _results(made: Made, task: str, datasets: Sequence[str]) -> list[EvalResult]:
    if made.record is None:
        return []
    name = _data_name(made)
    # The metadata wants the id of a data set; where there is none, a word of its name.
    kind = datasets[0] if datasets else name.split(" (")[0].replace(" ", "-")
    return [
        EvalResult(
            task_type=_TAGS[task],
            dataset_type=kind,
            dataset_name=name,
            dataset_split="test",
            metric_type=metric,
            metric_name=label,
            metric_value=made.record["metrics"][key],
        )
        for key, (metric, label, _) in _METRICS.items()
        if key in made.record["metrics"]
    ]


def _compared(made: Made) -> str:
    """The same figures of the first row of the grid, with the same seed, where it is finished."""
    if made.record is None:
        return ""
    signatures = "; ".join(f"`{signature}`" for signature in made.record.get("signatures", {}).values())
    said = f"Computed by: {signatures}." if signatures else ""
    first = run_folder(made.grid, made.record | {"row": "0"}) / "metrics.json"
    if made.record["row"] == "0" or not first.exists():
        return said
    other = json.loads(first.read_text(encoding="utf-8"))
    scores = ", ".join(map(" ".join, _scores(other)))
    size = f"{other['parameters']['stored_bytes']:,} bytes"
    return f"Row 0 of the same grid, “{other['label']}”, of the same seed: {scores}, {size}. {said}".strip()


def _training(made: Made) -> list[str]:
    if made.record is None or made.settings is None:
        return []
    record, environment = made.record, made.record["environment"]
    commands = [shlex.split(command) for command in commands_of(made.grid)]
    start = made.settings.get("backbone", {}).get("pretrained")
    start = f"the weights of {_without_folder(start)}" if start else "fresh weights"
    if "start" in made.settings:
        start = f"the model of row {made.settings['start']['row']}"
    steps = f"{record['steps']:,} steps, {record['epochs_trained']:g} epochs, seed {record['seed']}, from {start}"
    facts = [f"Data: {_data_name(made).split(' (')[0]}. {steps}."]
    if commands:
        listed = "; ".join(f"`{shlex.join(map(_without_folder, words))}`" for words in commands)
        facts.append(
            f"Command: {listed}" if len(commands) == 1 else f"Commands of the grid, of which it is a row: {listed}"
        )
    minutes = record["seconds"]["train"] / 60
    where = f"{environment['device']}, threads: {environment['threads']}, processes: {record['processes']}"
    resumed = " after the last interruption" if record["resumed"] else ""
    facts.append(f"Machine: {where}; {minutes:.0f} minutes of training{resumed}.")
    versions = ", ".join(f"{name} {environment[name]}" for name in ("hf_freeze", "torch", "transformers", "python"))
    commit = environment.get("commit")
    facts.append(f"Code: {versions}" + (f", commit {commit}." if commit else "."))
    return facts


def _other_seeds(made: Made) -> str:
    """The scores of the same row with other seeds, where they are finished."""
    assert made.record is not None
    found = []
    for folder in sorted(made.grid.glob(run_folder(Path(), made.record | {"seed": "*"}).name)):
        if folder == made.model.parent or not (folder / "metrics.json").exists():
            continue
        other = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        found.append(f"{' '.join(_scores(other)[0])} with seed {other['seed']}")
    return f"The same with other seeds: {', '.join(found)}." if found else "Another seed would give others."


def _limits(made: Made, needs_us: bool) -> list[str]:
    limits = [f"It loads where hf_freeze is installed ({how_to_install()})."] if needs_us else []
    if made.record is not None:
        limits.append(f"The scores are of one training run. {_other_seeds(made)}".strip())
        limits.append("It knows text like that of its training data. What it does with other text was not measured.")
    return [*limits, "Bias and harmful output were not measured."]
