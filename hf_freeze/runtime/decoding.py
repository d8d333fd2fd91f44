"""The next tokens of a language model or a decoder, by the engine, with its past: what the searches ask.

Shapes: R rows, T new tokens, P previous tokens, S source tokens, V vocabulary. `publish.export.caches` names the past.
"""

from collections.abc import Mapping

import numpy as np

from hf_freeze.runtime.sessions import Session
from hf_freeze.runtime.shortlists import TOKENS

_PAST, _PRESENT = "past_key_values", "present"


class Decoder:
    """The state of rows that are written: their past, and for a translator the keys and values of their sources.

    `inputs`: for a translator "encoder_attention_mask" (R, S) and the outputs of the encoder; for a language model
    "attention_mask" (R, T) and "position_ids" (R, T) of the prompts. `listed` (C,): the tokens whose logits alone are computed,
    of a vocabulary of the size `vocabulary`; the others are -inf. None: all.
    """

    def __init__(
        self,
        session: Session,
        inputs: Mapping[str, np.ndarray],
        rows: int,
        listed: np.ndarray | None = None,
        vocabulary: int = 0,
    ) -> None:
        self._session, self._inputs = session, dict(inputs)
        self._listed, self._vocabulary = listed, vocabulary
        for name, shape in session.shapes.items():
            if name.startswith(_PAST) and ".decoder." in name:
                empty = [size if isinstance(size, int) else 0 for size in shape[1:]]
                self._inputs[name] = np.zeros((rows, *empty), np.float32)
            elif name.startswith(_PAST):
                self._inputs[name] = self._inputs.pop(name.replace(_PAST, _PRESENT))

    def scores(self, tokens: np.ndarray) -> np.ndarray:
        """What follows `tokens` (R, T), which become a part of the past: logits (R, V)."""
        logits = self.logits(tokens)[:, -1]
        if self._listed is None:
            return logits
        scores = np.full((len(logits), self._vocabulary), -np.inf, np.float32)
        scores[:, self._listed] = logits
        return scores

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """(R, T, V) after each of `tokens` (R, T), which become a part of the past; of a shortlist's tokens alone (R, T, C)."""
        listed = {} if self._listed is None else {TOKENS: self._listed}
        found = self._session(self._inputs | listed | {"input_ids": tokens})
        for name, value in found.items():
            if name.startswith(f"{_PRESENT}."):
                self._inputs[name.replace(_PRESENT, _PAST)] = value
        if "attention_mask" in self._inputs:
            mask = self._inputs["attention_mask"]
            self._inputs["attention_mask"] = np.concatenate([mask, np.ones_like(mask[:, :1])], 1)
            self._inputs["position_ids"] = self._inputs["position_ids"][:, -1:] + 1
        return found["logits"]

    def select(self, rows: np.ndarray) -> None:
        """Go on with these rows, in this order."""
        if not np.array_equal(rows, np.arange(len(next(iter(self._inputs.values()))))):
            self._inputs = {name: value[rows] for name, value in self._inputs.items()}
