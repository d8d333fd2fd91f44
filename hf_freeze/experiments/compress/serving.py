"""The engine that a compressed model is served by: folders for it, what they cost and how good they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from hf_freeze.compression.engine import serve as write_served
from hf_freeze.experiments.tasks.items import bleu_items
from hf_freeze.experiments.tasks.labelled import columns_of
from hf_freeze.model.loading import load_tokenizer
from hf_freeze.publish.export.ctranslate2 import CTranslate2Translator
from hf_freeze.publish.latency import Worker, measure
from hf_freeze.training.decoding import most_new_tokens, translate

_BATCH = 32
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`keeps_structure`: whether it holds layers of different shapes and factors, as they are."""

    format: str | None
    quantization: str | None
    keeps_structure: bool

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 8 if self.quantization == "int8" else 32


ENGINES = {
    "ctranslate2": Engine(format="ctranslate2", quantization="int8", keeps_structure=False),
    "onnx": Engine(format="onnx", quantization="int8", keeps_structure=True),
    "torch": Engine(format=None, quantization=None, keeps_structure=True),
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A folder in its engine. `ms`: of one text alone; None where the budget does not limit it. `test_score`: None before the
    end."""

    folder: Path
    bytes: int
    ms: float | None
    dev_score: float
    test_score: float | None = None


def serve(source: Path, engine: Engine, out: Path) -> Path:
    """The folder `out`, for the engine, from the saved model in `source`; written whole, and not again."""
    return write_served(source, engine.format, engine.quantization, out)


def milliseconds(
    folders: Mapping[str, Path],
    task: str,
    split: Any,
    tokenizer: Any,
    say: Callable[[str], Any],
    *,
    unit: tuple[Path, float] | None = None,
    worker: Worker | None = None,
) -> dict[str, float]:
    """The median time of an input of `split` alone on one thread, for each folder; they take turns. Models that generate make
    exactly as many tokens for each as its targets have in the mean, in those of `tokenizer`.

    `unit`: a folder and its time. It takes turns with them, and theirs are that time, times the median ratio to it: other work
    on the machine makes all of them slower alike. `worker`: the process to open them in, instead of one for each."""
    texts, new_tokens = list(split["source" if task == "translation" else "sentence"]), 1
    if task == "translation":
        new_tokens = round(float(np.mean([len(ids) for ids in tokenizer(list(split["target"]))["input_ids"]])))
    every: list[Path] = [*folders.values(), *([unit[0]] if unit else [])]
    measured = list(dict.fromkeys(every))
    results = measure(
        measured,
        texts,
        batches=(1,),
        new_tokens=max(new_tokens, 1),
        exactly=True,
        rounds=_ROUNDS,
        say=say,
        worker=worker,
    )
    times = dict(zip(measured, results, strict=True))
    if unit is None:
        return {name: times[folder].percentile(1, 50) for name, folder in folders.items()}
    return {name: unit[1] * times[folder].ratio_to(times[unit[0]], 1)[0] for name, folder in folders.items()}


def translator_of(folder: Path, engine: Engine, decoding: Mapping[str, Any]) -> Callable[[list[str]], list[str]]:
    """What translates texts in the engine. Open once for several calls."""
    tokenizer = load_tokenizer(folder)
    if engine.format != "ctranslate2":
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        return lambda texts: translate(model, tokenizer, texts, **decoding)
    translator = CTranslate2Translator(folder, intra_threads=torch.get_num_threads())

    def translated(texts: list[str]) -> list[str]:
        longest = max(map(len, tokenizer(texts, truncation=True)["input_ids"]))
        settings = {"num_beams": decoding.get("num_beams", 1), "max_new_tokens": most_new_tokens(longest)}
        return [one["translation_text"] for one in translator(texts, truncation=True, **settings)]

    return translated


def answers_of(folder: Path, engine: Engine, task: str, split: Any, decoding: Mapping[str, Any]) -> list[Any]:
    """What the engine answers for each example of `split`: a translation, or the number of a class."""
    if task == "translation":
        return translator_of(folder, engine, decoding)(list(split["source"]))
    tokenizer = load_tokenizer(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    columns, classes = columns_of(split), []
    with torch.inference_mode():
        for start in range(0, len(split), _BATCH):
            rows = split[start : start + _BATCH]
            inputs = tokenizer(*(rows[name] for name in columns), truncation=True, padding=True, return_tensors="pt")
            classes += model(**inputs).logits.argmax(-1).tolist()
    names = getattr(split.features["label"], "names", [])
    theirs = model.config.id2label
    if theirs and set(names) == set(theirs.values()):  # the model may number the same classes in another order
        return [names.index(theirs[number]) for number in classes]
    return classes


def references_of(task: str, split: Any) -> list[Any]:
    """What `answers_of` is compared with."""
    return list(split["target" if task == "translation" else "label"])


def items_of(folder: Path, engine: Engine, task: str, split: Any, decoding: Mapping[str, Any]) -> np.ndarray:
    """What each example of `split` adds to the score, as the engine answers it: `bleu_items`, or (right, 1, class)."""
    answers, references = answers_of(folder, engine, task, split, decoding), references_of(task, split)
    if task == "translation":
        return bleu_items(answers, references)
    right = np.equal(answers, references)
    return np.stack([right, np.ones(len(right)), references], axis=1).astype(np.int64)
