"""Answers of exported folders without PyTorch: this package imports numpy, tokenizers, and onnxruntime or openvino alone.

from hf_freeze import runtime

encode = runtime.open("model-onnx-int8")                  # written by hf-freeze export --format onnx (or openvino)
encode(["a sentence"])                                    # array (1, 384)
translate = runtime.open("translator-onnx-int8")
translate(["Guten Morgen"], num_beams=5)                  # ["good morning"]

The answers are those of transformers with the same folder. The pipelines of transformers open it too, with PyTorch.
"""

import os
from pathlib import Path
from typing import Any

from hf_freeze.runtime.folders import read_mark
from hf_freeze.runtime.labels import Classifier as Classifier
from hf_freeze.runtime.labels import MaskFiller as MaskFiller
from hf_freeze.runtime.labels import Tagger as Tagger
from hf_freeze.runtime.models import Parts
from hf_freeze.runtime.questions import Answerer as Answerer
from hf_freeze.runtime.sentences import SentenceEncoder as SentenceEncoder
from hf_freeze.runtime.sentences import StaticEncoder as StaticEncoder
from hf_freeze.runtime.sessions import SESSIONS
from hf_freeze.runtime.settings import Settings as Settings
from hf_freeze.runtime.writers import Generator as Generator
from hf_freeze.runtime.writers import Translator as Translator

_CLASSES: dict[str, Any] = {
    "feature-extraction": SentenceEncoder,
    "sequence-classification": Classifier,
    "token-classification": Tagger,
    "question-answering": Answerer,
    "masked-lm": MaskFiller,
    "seq2seq-lm": Translator,
    "causal-lm": Generator,
}


def open(
    folder: str | os.PathLike[str], *, threads: int | None = None, use_shortlist: bool = True, **engine: Any
) -> Any:
    """The model of an exported folder, whose answers a call gives: a `SentenceEncoder`, `StaticEncoder`, `Classifier`, `Tagger`,
    `Answerer`, `MaskFiller`, `Translator` or `Generator`, by the task that it was exported for.

    `threads`: of the engine; None: as many as there are cores that this process may use. `use_shortlist`: whether a translator
    that was exported with a shortlist computes only the tokens of it. `engine`: other fields of `onnxruntime.SessionOptions`, or
    properties of OpenVINO's CPU plugin.

    Raises ValueError for a folder that is no export, holds another format or a task that is none of these, or is damaged, for a
    tokenizer or a setting of generation that the runtime does not have, and if a package is missing."""
    place = Path(folder)
    mark = read_mark(place, (*SESSIONS, "static"), tuple(_CLASSES))
    if mark["format"] == "static":
        return StaticEncoder(place)
    options = engine if threads is None else {SESSIONS[mark["format"]][2]: threads} | engine
    return _CLASSES[mark["task"]](Parts.open(place, mark, use_shortlist=use_shortlist, **options), mark["task"])
