"""The engine that a compressed model is served by: folders for it, and what they cost."""

import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.io import whole_folder
from hf_freeze.model.loading import load_tokenizer
from hf_freeze.publish.export import ctranslate2
from hf_freeze.publish.export.convert import export_model
from hf_freeze.publish.export.folders import require
from hf_freeze.publish.export.gguf_model import FAMILIES
from hf_freeze.publish.latency import Worker, measure

# Of a saved model, with what reads its inputs.
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "*.spm", "[0-9]_*/*")
_ROUNDS = 3
_GENERATED = ("seq2seq-lm", "causal-lm")
_WRITTEN = 16  # tokens, when times of language models are measured


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`bits`: of weights, the most first; `float_bytes`: of numbers that are none, such as biases; `scale_bytes`: of scales for
    each weight, where they do not depend on the hidden size; `uniform`: whether it needs one width for all layers of a stack;
    `multiple`: of the neurons that a layer keeps; `lists`: whether its folders have a config with what is kept."""

    name: str
    format: str | None
    quantization: str | None
    bits: tuple[int, ...]
    float_bytes: int = 4
    scale_bytes: float | None = None
    uniform: bool = False
    multiple: int = 8
    lists: bool = True


ENGINES = {
    "onnx": Engine(name="onnx", format="onnx", quantization="int8", bits=(8, 4)),
    "ctranslate2": Engine(
        name="ctranslate2",
        format="ctranslate2",
        quantization="int8_float16",
        bits=(8,),
        float_bytes=2,
        uniform=True,
        lists=False,
    ),
    "gguf": Engine(
        name="gguf",
        format="gguf",
        quantization="q8_0",
        bits=(8,),
        scale_bytes=2 / 32,
        multiple=32,  # which q8_0 needs
        lists=False,
    ),
    "openvino": Engine(name="openvino", format="openvino", quantization="int8", bits=(8,)),
    "torch": Engine(name="torch", format=None, quantization=None, bits=(32,)),
}


def engine_for(name: str | None, task: str, model_type: str) -> Engine:
    """By default CTranslate2 for translators that it knows, else ONNX Runtime. Raises ValueError for an unknown engine, and where
    llama.cpp does not know the model or is not installed."""
    if name is None:
        knows = task == "seq2seq-lm" and task in ctranslate2.SUPPORTED_TASKS.get(model_type, ())
        name = "ctranslate2" if knows and importlib.util.find_spec("ctranslate2") else "onnx"
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; choose from {list(ENGINES)}")
    if name == "openvino":
        require("openvino", "openvino")
    if name == "gguf":
        require("llama_cpp", "llama-cpp")
        if model_type not in FAMILIES or task not in FAMILIES[model_type].tasks:
            raise ValueError(
                f"gguf does not support {model_type} ({task}); choose from {', '.join(FAMILIES)}, or engine onnx"
            )
        return replace(ENGINES[name], uniform=FAMILIES[model_type].uneven is None)
    return ENGINES[name]


def serve(source: Path, format: str | None, quantization: str | None, out: Path) -> Path:
    """The folder `out`, for an engine, from the saved model in `source`; written whole, and not again. `format`,
    `quantization`: of `export_model`; without a format, PyTorch reads the model as it is saved."""
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    if format is not None:
        return export_model(source, format, quantization=quantization, out=out)
    with whole_folder(out) as written:
        for path in files_of(source):
            target = written / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    return out


def files_of(folder: Path) -> list[Path]:
    """Those of a saved model that it needs to answer."""
    return sorted({path for pattern in FILES for path in folder.glob(pattern) if path.is_file()})


class Stopwatch:
    """Measures the time of one text alone on one thread, in milliseconds. One process answers for all folders; `close` it.
    `whole`: the folder of the whole model, which takes turns with the others."""

    def __init__(self, whole: Path, texts: Sequence[str], new_tokens: int) -> None:
        self._whole, self._texts, self._new_tokens = whole, list(texts), new_tokens
        self._worker: Worker | None = None

    def milliseconds(self, folders: Mapping[str, Path], unit: float | None = None) -> dict[str, float]:
        """The median of each folder. `unit`: the time of the whole model: those of the others are that time, times the median
        ratio to it, because other work on the machine makes all of them slower alike."""
        self._worker = self._worker or Worker()
        measured = list(dict.fromkeys([self._whole, *folders.values()]))
        options: Any = {"batches": (1,), "new_tokens": self._new_tokens, "exactly": True, "rounds": _ROUNDS}
        results = measure(measured, self._texts, worker=self._worker, **options)
        times = dict(zip(measured, results, strict=True))
        first = times[self._whole]
        unit = unit or first.percentile(1, 50)
        return {name: unit * times[folder].ratio_to(first, 1)[0] for name, folder in folders.items()}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def new_tokens_of(folder: Path, task: str, written: Sequence[str]) -> int:
    """As many as the original writes in the mean; of language models a fixed number."""
    if task == "seq2seq-lm" and written:
        tokenizer = load_tokenizer(folder)
        return max(round(float(np.mean([len(tokenizer(text)["input_ids"]) for text in written]))), 1)
    return _WRITTEN if task in _GENERATED else 1
