"""Model cards: methods, sizes, costs and scores of a model.

All facts come from the folder of the model and the record of the run that trained it. Paths of the training machine are left
out.
"""

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
from hf_freeze.architectures.tasks import AUTO_CLASSES, task_of
from hf_freeze.install import how_to_install
from hf_freeze.methods.registry import METHODS
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.loading import empty_model
from hf_freeze.model.native_code import is_native
from hf_freeze.model.remote_code import has_remote_code
from hf_freeze.publish.card_sections import compression_section, vocabulary_section
from hf_freeze.run_folder import commands_of, run_folder

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
COMPRESSION = "hf_freeze_compression.json"  # beside a model that `hf-freeze compress` made
TRIMMING = "hf_freeze_trimming.json"  # in a folder that `trim_model` wrote: sizes before and after
PICTURES = ("report.png",)  # in the folder of the grid that a run belongs to
_TAGS = {  # our name of a task -> the Hub's
    "seq2seq-lm": "translation",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "feature-extraction": "feature-extraction",
    "multiple-choice": "multiple-choice",
    "image-classification": "image-classification",
    "audio-classification": "audio-classification",
    "speech-seq2seq": "automatic-speech-recognition",
    "ctc": "automatic-speech-recognition",
}
_INPUTS = {  # the Hub's name of a task -> code of an input, if it is not a sentence
    "fill-mask": 'f"A {pipe.tokenizer.mask_token} word"',
    "image-classification": '"image.jpg"',
    "audio-classification": '"sound.wav"',
    "automatic-speech-recognition": '"sound.wav"',
}
_METRICS = {  # key in a record -> (the Hub's name, our label, format)
    "test_bleu": ("sacrebleu", "BLEU", "{:.1f}"),
    "test_chrf": ("chrf", "chrF", "{:.1f}"),
    "test_perplexity": ("perplexity", "perplexity", "{:.2f}"),
    "test_accuracy": ("accuracy", "accuracy", "{:.2%}"),
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class TrainedModel:
    """The folder of a model, with the record and settings of the run that trained it; both are None without a run. `trimming`:
    what trimming its vocabulary has changed, None if `trim_model` did not write the folder. `compression`: the same of
    `hf-freeze compress`."""

    model: Path
    record: dict[str, Any] | None
    settings: dict[str, Any] | None
    trimming: dict[str, Any] | None = None
    compression: dict[str, Any] | None = None

    @property
    def grid(self) -> Path:
        """The folder of the grid that the run belongs to."""
        return self.model.parent.parent

    @property
    def pictures(self) -> list[Path]:
        return [self.grid / name for name in PICTURES if self.record is not None and (self.grid / name).exists()]


def read_trained_model(folder: Path) -> TrainedModel:
    """Reads the folder of a model, or the folder of a finished run that contains its model.

    Raises ValueError if there is no model, or if the run is not finished.
    """
    model = folder / "model" if (folder / "model" / "config.json").exists() else folder
    if not (model / "config.json").exists():
        raise ValueError(f"{folder} holds no model: it has neither config.json nor model/config.json")
    if (model / TRIMMING).exists():
        return TrainedModel(model, None, None, _read_json(model / TRIMMING))
    if (model / COMPRESSION).exists():
        return TrainedModel(model, None, None, compression=_read_json(model / COMPRESSION))
    run, documents = model.parent, []
    if model.name != "model" or not (run / "run.json").exists():
        return TrainedModel(model, None, None)
    for name in ("metrics.json", "run.json"):
        try:
            documents.append(json.loads((run / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ValueError(f"{run} is not finished: {name} is missing") from None
        except ValueError as error:
            raise ValueError(f"{run / name} is damaged: {error}") from None
    return TrainedModel(model, *documents)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def published_record(source: TrainedModel) -> dict[str, Any] | None:
    """The record and settings of the run, without paths of the training machine; None without a run."""
    if source.record is None:
        return None
    return source.record | {"settings": _without_folders(source.settings)}


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_folders(entry) for name, entry in value.items() if name != "root"}
    if isinstance(value, list):
        return [_without_folders(entry) for entry in value]
    return without_folder(value) if isinstance(value, str) else value


def without_folder(word: str) -> str:
    """The file name of an absolute path, which may follow `KEY=`; other words are unchanged."""
    key, equals, value = word.rpartition("=")
    return key + equals + (Path(value).name if Path(value).is_absolute() else value)


def model_card(
    source: TrainedModel,
    repo_id: str | None = None,
    *,
    model: Any = None,
    datasets: Sequence[str] = (),
    language: Sequence[str] = (),
    license: str | None = None,
    base_model: str | None = None,
    remote_code: bool = False,
) -> ModelCard:
    """The model card of `source` for the repository `repo_id`.

    `datasets`, `language`, `license` and `base_model` are metadata (Hub ids, ISO 639 codes) that the record does not contain.
    `model`: the model in the folder, perhaps without weights, if it is already loaded. `remote_code`: the repository loads with
    `trust_remote_code`. Scores come from the record alone; without a record, the card has none.
    """
    model = empty_model(source.model) if model is None else model
    is_variant, task = isinstance(model, VariantMixin), task_of(model)
    remote_code = is_variant and (remote_code or has_remote_code(model.config))
    needs_hf_freeze = is_variant and not (remote_code and is_native(model))
    name = repo_id or "REPO_ID"
    trained_on = list(datasets) or _hub_data(source)
    results = _results(source, task, trained_on)
    data = ModelCardData(
        library_name="transformers" if remote_code or not is_variant else "hf_freeze",
        pipeline_tag=_TAGS[task],
        base_model=base_model or (source.trimming or {}).get("base_model") or _pretrained(source),
        datasets=trained_on or None,
        language=list(language) or None,
        license=license,
        metrics=[result.metric_type for result in results] or None,
        tags=_tags(model) if is_variant else None,
        model_name=name.split("/")[-1],
        eval_results=results or None,
    )
    native = type(model).native_class.__name__ if is_variant else type(model).__name__
    counts = count_parameters(model)
    sizes = [*counts.by_component.items(), ("all", counts)]
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=name.split("/")[-1],
        summary=_summary(source, native, is_variant),
        example=_example(name, task, needs_hf_freeze, remote_code),
        methods=[_describe(settings) for settings in getattr(model.config, "methods", ())],
        calibration=getattr(model.config, "calibration", None),
        vocabulary=vocabulary_section(source.trimming) if source.trimming else None,
        compression=compression_section(source.compression, _TAGS[task]) if source.compression else None,
        sizes=sizes,
        stored_bytes=stored_bytes(model),
        multiply_adds=(source.record or {}).get("multiply_adds"),
        results=[
            {"name": label, "data": _data_name(source) + _split(source), "value": value}
            for label, value in _scores(source.record)
        ],
        comparison=_comparison(source),
        pictures=[path.name for path in source.pictures],
        training=_training(source),
        limits=_limits(source, needs_hf_freeze),
    )


def shortened(value: Any) -> Any:
    """A long list, such as the ids of a vocabulary, as a string with its first and last values; other values are unchanged."""
    is_long = isinstance(value, list) and len(value) > 20
    return f"{value[:3]} ... {value[-1:]} ({len(value)})".replace("] ... [", ", ..., ") if is_long else value


def _tags(model: Any) -> list[str]:
    names = dict.fromkeys(method["method"] for method in model.config.methods)
    return ["hf_freeze", *(name.replace("_", "-") for name in names)]


def _describe(settings: dict[str, Any]) -> dict[str, Any]:
    """The first paragraph of a method's module docstring, and the settings that differ from the defaults."""
    method_class = METHODS[settings["method"]]
    description = " ".join((sys.modules[method_class.__module__].__doc__ or "").split("\n\n")[0].split())
    defaults = {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(method_class)
    }
    changed = {
        name: shortened(value) for name, value in settings.items() if name in defaults and value != defaults[name]
    }
    return {
        "title": method_class.__name__,
        "description": description,
        "settings": json.dumps(changed, ensure_ascii=False),
    }


def _summary(source: TrainedModel, native: str, is_variant: bool) -> str:
    if source.compression:
        return f"A `{native}`, made by `hf-freeze compress` for a budget of {source.compression['budget']}."
    label = f" Row “{source.record['label']}” of the grid `{source.record['recipe']}`." if source.record else ""
    if not is_variant and source.trimming:
        before, after = (source.trimming[when]["tokens"] for when in ("before", "after"))
        return f"A `{native}` with {after:,} of its {before:,} tokens, the ones that some texts need. Trimmed by hf_freeze."
    if not is_variant:
        return f"A `{native}`.{label}"
    return f"A `{native}`, changed by hf_freeze with the methods below.{label}"


def _example(name: str, task: str, needs_hf_freeze: bool, remote_code: bool) -> str:
    option = ", trust_remote_code=True" if remote_code else ""
    if task == "seq2seq-lm" and remote_code and not needs_hf_freeze:  # the translation pipeline is part of hf_freeze
        return (
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
            f'model = AutoModelForSeq2SeqLM.from_pretrained("{name}", trust_remote_code=True)\n'
            'print(tokenizer.batch_decode(model.generate(**tokenizer("A sentence", return_tensors="pt"))))'
        )
    first = []
    if needs_hf_freeze and remote_code:  # the repository's code imports it
        first = [f"# needs hf_freeze, {how_to_install()}"]
    elif needs_hf_freeze or task == "seq2seq-lm":
        first = [f"import hf_freeze  # {how_to_install()}"]
    if task in ("question-answering", "multiple-choice"):  # transformers 5 has no pipeline for them
        auto = AUTO_CLASSES[task].__name__
        return "\n".join([*first, f"from transformers import {auto}", f'{auto}.from_pretrained("{name}"{option})'])
    example = _INPUTS.get(_TAGS[task], '"A sentence"')
    lines = ["from transformers import pipeline", f'pipe = pipeline("{_TAGS[task]}", model="{name}"{option})']
    return "\n".join([*first, *lines, f"print(pipe({example}))"])


def _pretrained(source: TrainedModel) -> str | None:
    """The Hub id of the pretrained model that the run started from; None for a local folder or fresh weights."""
    name = str((source.settings or {}).get("backbone", {}).get("pretrained", ""))
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _hub_data(source: TrainedModel) -> list[str]:
    data = (source.settings or {}).get("data", {})
    return [data["hub"]] if "hub" in data else []


def _data_name(source: TrainedModel) -> str:
    data = (source.settings or {})["data"]
    if "builtin" in data:
        return "the built-in corpus of hf_freeze"
    if "hub" in data:
        return " ".join(filter(None, (data["hub"], data.get("name"))))
    named = data.get("test", data["train"])  # the test split may be drawn from the training files
    files = ", ".join(dict.fromkeys(Path(name).name.split(".")[0] for name in named))  # without .de and .en, say
    return f"{Path(data['root']).name} ({files})" if "root" in data else files


def _split(source: TrainedModel) -> str:
    """What is not the test split is said: of the trials of a search."""
    split = (source.record or {}).get("scored_on", "test")
    return "" if split == "test" else f", {split} split"


def _scores(record: dict[str, Any] | None) -> list[tuple[str, str]]:
    """(our label of a metric, its formatted value)"""
    metrics = (record or {}).get("metrics", {})
    return [(label, form.format(metrics[key])) for key, (_, label, form) in _METRICS.items() if key in metrics]


def _results(source: TrainedModel, task: str, datasets: Sequence[str]) -> list[EvalResult]:
    if source.record is None:
        return []
    name = _data_name(source)
    # The metadata needs the id of a data set; without one, the name joined by hyphens serves.
    dataset_id = datasets[0] if datasets else name.split(" (")[0].replace(" ", "-")
    return [
        EvalResult(
            task_type=_TAGS[task],
            dataset_type=dataset_id,
            dataset_name=name,
            dataset_split=source.record.get("scored_on", "test"),
            metric_type=metric,
            metric_name=label,
            metric_value=source.record["metrics"][key],
        )
        for key, (metric, label, _) in _METRICS.items()
        if key in source.record["metrics"]
    ]


def _comparison(source: TrainedModel) -> str:
    """The scores and size of row 0 of the grid with the same seed, if that run is finished."""
    if source.record is None:
        return ""
    signatures = "; ".join(f"`{signature}`" for signature in source.record.get("signatures", {}).values())
    computed_by = f"Computed by: {signatures}." if signatures else ""
    first = run_folder(source.grid, source.record | {"row": "0"}) / "metrics.json"
    if source.record["row"] == "0" or not first.exists():
        return computed_by
    other = json.loads(first.read_text(encoding="utf-8"))
    scores = ", ".join(map(" ".join, _scores(other)))
    size = f"{other['parameters']['stored_bytes']:,} bytes"
    return f"Row 0 of the same grid with the same seed, “{other['label']}”: {scores}, {size}. {computed_by}".strip()


def _training(source: TrainedModel) -> list[str]:
    if source.record is None or source.settings is None:
        return []
    record, environment = source.record, source.record["environment"]
    commands = [shlex.split(command) for command in commands_of(source.grid)]
    start = source.settings.get("backbone", {}).get("pretrained")
    start = f"the weights of {without_folder(start)}" if start else "fresh weights"
    if "start" in source.settings:
        start = f"the model of row {source.settings['start']['row']}"
    steps = f"{record['steps']:,} steps, {record['epochs_trained']:g} epochs, seed {record['seed']}, from {start}"
    facts = [f"Data: {_data_name(source).split(' (')[0]}. {steps}."]
    if commands:
        listed = "; ".join(f"`{shlex.join(map(without_folder, words))}`" for words in commands)
        facts.append(f"Command: {listed}" if len(commands) == 1 else f"Commands of the grid of this model: {listed}")
    minutes = record["seconds"]["train"] / 60
    where = f"{environment['device']}, threads: {environment['threads']}, processes: {record['processes']}"
    resumed = " after the last interruption" if record["resumed"] else ""
    facts.append(f"Machine: {where}; {minutes:.0f} minutes of training{resumed}.")
    versions = ", ".join(f"{name} {environment[name]}" for name in ("hf_freeze", "torch", "transformers", "python"))
    commit = environment.get("commit")
    facts.append(f"Code: {versions}" + (f", commit {commit}." if commit else "."))
    return facts


def _other_seeds(source: TrainedModel) -> str:
    """The scores of finished runs of the same row with other seeds."""
    assert source.record is not None
    scores = []
    for folder in sorted(source.grid.glob(run_folder(Path(), source.record | {"seed": "*"}).name)):
        if folder == source.model.parent or not (folder / "metrics.json").exists():
            continue
        other = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        scores.append(f"{' '.join(_scores(other)[0])} with seed {other['seed']}")
    return f"Other seeds: {', '.join(scores)}." if scores else "Another seed would give other scores."


def _limits(source: TrainedModel, needs_hf_freeze: bool) -> list[str]:
    limits = [f"Loading it requires hf_freeze ({how_to_install()})."] if needs_hf_freeze else []
    if source.trimming is not None:
        limits.append(
            "Text unlike the texts that the tokens were chosen for takes more tokens, and may get worse results."
        )
    if source.record is not None:
        limits.append(f"The scores are of one training run. {_other_seeds(source)}".strip())
        limits.append("It was tested on text similar to its training data only.")
    return [*limits, "Bias and harmful output were not measured."]
