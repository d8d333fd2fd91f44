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
from hf_freeze.methods.registry import METHODS, shortened
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.fidelity import Fidelity
from hf_freeze.model.loading import empty_model
from hf_freeze.model.native_code import is_native
from hf_freeze.model.remote_code import has_remote_code
from hf_freeze.run_folder import commands_of, run_folder

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
COMPRESSION = "hf_freeze_compression.json"  # beside a model that `hf-freeze compress` made
TRIMMING = "hf_freeze_trimming.json"  # in a folder that `trim_model` wrote: sizes before and after
UNNAMED = "REPO_ID"  # in a card that is written before its repository has a name
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
    if not folder.exists():
        raise ValueError(f"{folder} is not there: the folder of a model or of a finished run is needed")
    if not (model / "config.json").exists():
        raise ValueError(f"{folder} holds no model: it has neither config.json nor model/config.json")
    if (model / TRIMMING).exists():
        return TrainedModel(model, None, None, _read_json(model / TRIMMING))
    if (model / COMPRESSION).exists():
        return TrainedModel(model, None, None, compression=_read_json(model / COMPRESSION))
    run = model.parent
    if model.name != "model" or not (run / "run.json").exists():
        return TrainedModel(model, None, None)
    if not (run / "metrics.json").exists():
        raise ValueError(f"{run} is not finished: metrics.json is missing")
    return TrainedModel(model, _read_json(run / "metrics.json"), _read_json(run / "run.json"))


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
    compared: tuple[str, int | None, Fidelity] | None = None,
) -> ModelCard:
    """The model card of `source` for the repository `repo_id`.

    `datasets`, `language`, `license` and `base_model` are metadata (Hub ids, ISO 639 codes) that the record does not contain.
    `model`: the model in the folder, perhaps without weights, if it is already loaded. `remote_code`: the repository loads with
    `trust_remote_code`. Scores come from the record alone; without a record, the card has none. `compared`: the original, its
    bytes where they are known, and how faithful to it the model is.
    """
    model = empty_model(source.model) if model is None else model
    is_variant, task = isinstance(model, VariantMixin), task_of(model)
    remote_code = is_variant and (remote_code or has_remote_code(model.config))
    name, settings = repo_id or UNNAMED, source.settings or {}
    trained_on = list(datasets) or ([settings["data"]["hub"]] if "hub" in settings.get("data", {}) else [])
    results = _results(source, task, trained_on)
    done = [*getattr(model.config, "merged_methods", ()), *(model.config.methods if is_variant else ())]
    done = [settings for settings in done if settings["method"] in METHODS]  # a later version may have merged others
    tags = dict.fromkeys(method["method"].replace("_", "-") for method in done)
    data = ModelCardData(
        library_name="transformers" if remote_code or not is_variant else "hf_freeze",
        pipeline_tag=_TAGS[task],
        base_model=base_model or (source.trimming or {}).get("base_model") or _pretrained(settings),
        datasets=trained_on or None,
        language=list(language) or None,
        license=license,
        metrics=[result.metric_type for result in results] or None,
        tags=["hf_freeze", *tags] if done else None,
        model_name=name.split("/")[-1],
        eval_results=results or None,
    )
    counts = count_parameters(model)
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        source=source,
        record=source.record,
        repository=name,
        task=task,
        pipeline=_TAGS[task],
        auto_class=AUTO_CLASSES[task].__name__,
        input=_INPUTS.get(_TAGS[task], '"A sentence"'),
        native=(type(model).native_class if is_variant else type(model)).__name__,
        is_variant=is_variant,
        remote_code=remote_code,
        needs_hf_freeze=is_variant and not (remote_code and is_native(model)),
        how_to_install=how_to_install(),
        methods=[_describe(settings) for settings in done],
        original=compared and ((base_model or "the original") if Path(compared[0]).exists() else compared[0]),
        original_bytes=compared and compared[1],
        fidelity=compared and compared[2],
        calibration=getattr(model.config, "calibration", None),
        sizes=[*counts.by_component.items(), ("all", counts)],
        stored_bytes=stored_bytes(model),
        **({} if source.record is None else _of_run(source)),
    )


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


def _pretrained(settings: dict[str, Any]) -> str | None:
    """The Hub id of the pretrained model that the run started from; None for a local folder or fresh weights."""
    name = str(settings.get("backbone", {}).get("pretrained", ""))
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _data_name(data: dict[str, Any]) -> str:
    """`data`: as the recipe says."""
    if "builtin" in data:
        return "the built-in corpus of hf_freeze"
    if "hub" in data:
        return " ".join(filter(None, (data["hub"], data.get("name"))))
    named = data.get("test", data["train"])  # the test split may be drawn from the training files
    files = ", ".join(dict.fromkeys(Path(name).name.split(".")[0] for name in named))  # without .de and .en, say
    return f"{Path(data['root']).name} ({files})" if "root" in data else files


def _scores(record: dict[str, Any]) -> list[tuple[str, str]]:
    """(our label of a metric, its formatted value)"""
    metrics = record["metrics"]
    return [(label, form.format(metrics[key])) for key, (_, label, form) in _METRICS.items() if key in metrics]


def _results(source: TrainedModel, task: str, datasets: Sequence[str]) -> list[EvalResult]:
    if source.record is None or source.settings is None:
        return []
    name = _data_name(source.settings["data"])
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


def _of_run(source: TrainedModel) -> dict[str, Any]:
    """What the template shows of the run that trained the model. `first`: the record of row 0 of the grid with the same seed, if
    that run is finished and another one; `other_seeds`: the records of finished runs of the same row."""
    record, settings = source.record or {}, source.settings or {}
    first = run_folder(source.grid, record | {"row": "0"}) / "metrics.json"
    seeds = sorted(source.grid.glob(run_folder(Path(), record | {"seed": "*"}).name))
    others = [run / "metrics.json" for run in seeds if run != source.model.parent]
    commands = [shlex.split(command) for command in commands_of(source.grid)]
    start = settings.get("backbone", {}).get("pretrained")
    return {
        "data": _data_name(settings["data"]),
        "scores": _scores,
        "first": _read_json(first) if record["row"] != "0" and first.exists() else None,
        "other_seeds": [_read_json(path) for path in others if path.exists()],
        "commands": [shlex.join(map(without_folder, words)) for words in commands],
        "pretrained": start and without_folder(start),
    }
