"""Answers to questions, as a span of a text.

Shapes: T tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_freeze.runtime.models import BATCH, Model
from hf_freeze.runtime.scores import softmax
from hf_freeze.runtime.tokenizing import Encoded, check_texts


class Answerer(Model):
    """Answers questions by a span of a text."""

    def __call__(
        self,
        question: str | Sequence[Mapping[str, str]],
        context: str | None = None,
        *,
        max_answer_len: int = 15,
        doc_stride: int = 128,
        batch_size: int = BATCH,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """A question and its context -> {"score", "start", "end", "answer"}: the span of at most `max_answer_len` tokens with the
        largest product of the probabilities of its first and its last token. `start` and `end` count characters of the context. A
        list of {"question": ..., "context": ...} gives a list. A context that is too long is read in pieces, which share
        `doc_stride` tokens, or half a piece.

        Raises ValueError for an input that is not text, an empty one, and a question that leaves no place for a context."""
        if isinstance(question, str) or context is not None:
            return self._answers([(question, context)], max_answer_len, doc_stride, batch_size)[0]
        pairs = [(one.get("question"), one.get("context")) for one in question]
        return self._answers(pairs, max_answer_len, doc_stride, batch_size)

    def _answers(self, pairs: list[Any], longest: int, stride: int, batch_size: int) -> list[dict[str, Any]]:
        rows: list[Encoded] = []
        owners: list[int] = []
        for number, pair in enumerate(pairs):
            asked, read = check_texts(pair)
            if not asked.strip() or not read.strip():
                raise ValueError(f"input {number} has an empty {'context' if asked.strip() else 'question'}")
            pieces = self._pieces(asked, read, stride)
            rows += pieces
            owners += [number] * len(pieces)
        best: list[dict[str, Any]] = [{"score": -1.0} for _ in pairs]
        for i, outputs in self._outputs(rows, batch_size):
            score, first, last = _best_span(rows[i], outputs["start_logits"], outputs["end_logits"], longest)
            if score > best[owners[i]]["score"]:
                start, end = rows[i].offsets[first][0], rows[i].offsets[last][1]
                answer = pairs[owners[i]][1][start:end]
                best[owners[i]] = {"score": float(score), "start": start, "end": end, "answer": answer}
        return best

    def _pieces(self, question: str, context: str, stride: int) -> list[Encoded]:
        tokenizer: Any = getattr(self._tokenizer, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(f"{self.folder} has a tokenizer without places in the text, which answers need")
        whole = tokenizer.encode(question, context)
        room = self._limit - (len(whole.ids) - whole.sequence_ids.count(1))
        if room < 1:
            raise ValueError(
                f"a question of {len(whole.ids)} tokens with its context: the model reads {self._limit}; shorten it"
            )
        tokenizer.enable_truncation(self._limit, stride=min(stride, room // 2), strategy="only_second")
        try:
            found = tokenizer.encode(question, context)
        finally:
            tokenizer.no_truncation()
        return [Encoded(one.ids, one.type_ids, one.offsets, one.sequence_ids) for one in (found, *found.overflowing)]


def _best_span(row: Encoded, start: np.ndarray, end: np.ndarray, longest: int) -> tuple[float, int, int]:
    """(score, first token, last token), by the logits (T,) of the first and the last token. Tokens outside of the context have no
    probability."""
    outside = np.array([side != 1 for side in row.sides])
    first, last = (softmax(np.where(outside, -np.inf, logits)) for logits in (start, end))
    products = np.triu(first[:, None] * last[None])
    products = np.tril(products, longest - 1)
    place = int(products.argmax())
    return float(products.flat[place]), *divmod(place, len(products))
