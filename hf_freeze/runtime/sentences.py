"""Vectors of sentences, and the files of sentence-transformers that say how they are made of those of the tokens.

Shapes: B texts, T tokens, D hidden size, E size of a vector.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.runtime.folders import read_json
from hf_freeze.runtime.models import BATCH, Model, Parts, one_or_all
from hf_freeze.runtime.tokenizing import check_texts, fitted, open_tokenizer

_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def read_sentence_files(folder: Path) -> dict[str, Any]:
    """How a folder makes one vector of those of the tokens; {} if it has no files of sentence-transformers.

    "mode": of pooling, such as "mean" or "cls"; several with + between them. "dense": (weight, bias, name of the activation) of
    each linear after it. "normalize": whether the vector then gets the length 1. "prompt": what is put before each text.
    "longest": tokens of a text. "lower": whether texts are in small letters.
    """
    modules: Any = read_json(folder / "modules.json")
    if not modules:
        return {}
    settings, prompts = (
        read_json(folder / f"{n}.json") for n in ("sentence_bert_config", "config_sentence_transformers")
    )
    prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name"), "")
    found: dict[str, Any] = {"mode": "mean", "dense": [], "normalize": False, "prompt": prompt}
    found |= {"longest": settings.get("max_seq_length"), "lower": settings.get("do_lower_case", False)}
    for module in modules:
        place, kind = folder / module["path"], module["type"].rpartition(".")[2]
        config = read_json(place / "config.json")
        if kind == "Pooling":
            names = [name for name in _MODES if config.get(_MODES[name])]
            found["mode"] = config.get("pooling_mode") or "+".join(names) or "mean"
        elif kind == "Dense":
            weights = _tensors(place / "model.safetensors")
            activation = config.get("activation_function", "Identity").rpartition(".")[2]
            found["dense"].append((weights["linear.weight"], weights.get("linear.bias"), activation))
        found["normalize"] |= kind == "Normalize"
    return found


def _tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file in fp32 or fp16: 8 bytes with the length of a JSON header, the header, the numbers."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in ("F32", "F16"):
            raise ValueError(f"{path} holds {name} in {entry['dtype']}; choose from F32, F16")
        first, last = entry["data_offsets"]
        values = np.frombuffer(
            content[begin + first : begin + last], np.float32 if entry["dtype"] == "F32" else np.float16
        )
        found[name] = values.reshape(entry["shape"]).astype(np.float32)
    return found


class SentenceEncoder(Model):
    """Vectors of texts, pooled and normalised as the files of sentence-transformers in the folder say; without them, the mean
    over the tokens.

    Raises ValueError for an activation that it does not know.
    """

    def __init__(self, parts: Parts, task: str) -> None:
        super().__init__(parts, task)
        self._how = {"mode": "mean", "dense": [], "normalize": False, "prompt": "", "lower": False}
        self._how |= read_sentence_files(parts.folder)
        for _, _, activation in self._how["dense"]:
            if activation not in _ACTIVATIONS:
                raise ValueError(
                    f"{parts.folder} has the activation {activation}; choose from {', '.join(_ACTIVATIONS)}"
                )
        self._limit = min(self._limit, self._how.get("longest") or self._limit)

    def __call__(self, texts: str | Sequence[str], *, batch_size: int = BATCH) -> np.ndarray:
        """Texts -> (B, E) in fp32; one text -> (E,). Texts are cut at the length that the encoder was made for.

        Raises ValueError for an input that is not text."""
        return one_or_all(texts, lambda given: self._vectors(given, batch_size))

    def _vectors(self, texts: list[str], batch_size: int) -> np.ndarray:
        texts = [self._how["prompt"] + text for text in check_texts(texts)]
        texts = [text.lower() for text in texts] if self._how["lower"] else texts
        rows = fitted(self._tokenizer, texts, self._limit, truncation=True)
        found: list[Any] = [None] * len(rows)
        for i, outputs in self._outputs(rows, batch_size):
            found[i] = self._vector(outputs["last_hidden_state"])
        return np.stack(found) if found else np.zeros((0, 0), np.float32)

    def _vector(self, states: np.ndarray) -> np.ndarray:
        """(T, D) -> (E,)"""
        vector = _pooled(states, self._how["mode"])
        for weight, bias, activation in self._how["dense"]:
            vector = _ACTIVATIONS[activation](weight @ vector + (0 if bias is None else bias))
        return vector / max(float(np.linalg.norm(vector)), 1e-12) if self._how["normalize"] else vector


class StaticEncoder:
    """Vectors of texts from a table (hf-freeze export --format static): the mean of those of the tokens, with the length 1."""

    task = "feature-extraction"

    def __init__(self, folder: Path) -> None:
        self.folder, self._tokenizer = folder, open_tokenizer(folder)
        self._table = _tensors(folder / "model.safetensors")["embedding.weight"]

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Texts -> (B, D) in fp32; one text -> (D,). A text without tokens has the vector 0.

        Raises ValueError for an input that is not text."""
        return one_or_all(texts, self._vectors)

    def _vectors(self, texts: list[str]) -> np.ndarray:
        rows = [self._tokenizer.encode(text, special=False).ids for text in check_texts(texts)]
        vectors = np.stack([self._table[row].sum(0) for row in rows])
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _pooled(states: np.ndarray, mode: str) -> np.ndarray:
    """(T, D) to (D,); several modes to one after the other."""
    weights = np.arange(1, len(states) + 1, dtype=states.dtype)[:, None]
    modes: dict[str, Callable[[], np.ndarray]] = {
        "cls": lambda: states[0],
        "lasttoken": lambda: states[-1],
        "max": lambda: states.max(0),
        "mean": lambda: states.mean(0),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / np.float32(len(states) ** 0.5),
        "weightedmean": lambda: (states * weights).sum(0) / weights.sum(),
    }
    return np.concatenate([modes[each]() for each in mode.split("+")])
