"""Exported GGUF files with the interface of the other engines: see `served.opened`.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_freeze.publish.export.folders import read_mark
from hf_freeze.publish.export.llama_cpp import LlamaCpp
from hf_freeze.publish.export.translator import Translator, set_or, token_ids


class LlamaCppForward(nn.Module):
    """The forward of a language model, classifier or sentence encoder in a folder written by `hf-freeze export --format gguf`."""

    def __init__(self, folder: str | Path, task: str) -> None:
        super().__init__()
        read_mark(Path(folder), "gguf", task)
        self.engine = LlamaCpp(Path(folder), task, threads=torch.get_num_threads())

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> dict[str, Tensor]:
        """(B, T) ids, padded on the right, -> logits (B, T, V) or (B, classes), or last_hidden_state (B, T, hidden size)"""
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        task = self.engine.task
        compute = self.engine.logits if task == "causal-lm" else self.engine.outputs
        found = [torch.from_numpy(compute(ids)) for ids in rows]
        if task == "sequence-classification":
            return {"logits": torch.stack(found)}
        padded = nn.utils.rnn.pad_sequence(found, batch_first=True)
        return {"logits" if task == "causal-lm" else "last_hidden_state": padded}


class LlamaCppTranslator(Translator):
    """Translates with a T5 in a folder written by `hf-freeze export --format gguf`, by greedy search.

    Raises ValueError for more than one beam.
    """

    format = "gguf"
    settings = ("max_new_tokens", "max_length", "num_beams")

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._engine = LlamaCpp(Path(folder), "seq2seq-lm", threads=torch.get_num_threads())

    def translate_ids(self, encoded: list[list[int]], config: Any, batch_size: int) -> list[list[list[int]]]:
        if set_or(config.num_beams, 1) != 1:
            raise ValueError(f"num_beams={config.num_beams}: llama.cpp searches greedily here: 1 beam")
        ends = token_ids(config.eos_token_id)
        return [[self._translated(ids, self._new_tokens(config), ends)] for ids in encoded]

    def _translated(self, ids: list[int], most: int, ends: Sequence[int]) -> list[int]:
        self._engine.encode(ids)
        return self._engine.continued([self._engine.start()], most, ends)

    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        found = []
        for source, target in zip(sources, targets, strict=True):
            self._engine.encode(source)
            logits = torch.from_numpy(self._engine.logits([self._engine.start(), *target[:-1]]))
            found.append(logits.log_softmax(-1)[np.arange(len(target)), target].tolist())
        return found
