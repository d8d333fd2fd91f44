"""Classes of texts and tokens, and words for masks, as the pipelines of transformers give them.

Shapes: T tokens, C classes, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_freeze.runtime.models import BATCH, Model, Parts, one_or_all
from hf_freeze.runtime.scores import softmax
from hf_freeze.runtime.tokenizing import Encoded, check_texts


class _Labelled(Model):
    def __init__(self, parts: Parts, task: str) -> None:
        super().__init__(parts, task)
        self.labels: dict[int, str] = {int(i): label for i, label in parts.config.get("id2label", {}).items()}


class Classifier(_Labelled):
    """Classes of texts, or of pairs of texts. `labels`: number -> label."""

    def __call__(
        self, texts: Any, *, top_k: int | None = 1, truncation: bool = False, batch_size: int = BATCH
    ) -> list[Any] | dict[str, Any]:
        """Each text, or {"text": ..., "text_pair": ...}, -> {"label": ..., "score": ...} of the best class; a list of texts gives
        a list. `top_k` other than 1 gives a list of the best classes, best first; None gives all. The score is a probability, or
        the number that a regression predicts.

        Raises ValueError for an input that is not text, and one that is too long without `truncation`."""
        return one_or_all(texts, lambda given: self._classes(given, top_k, truncation, batch_size))

    def _classes(self, texts: list[Any], top_k: int | None, truncation: bool, batch_size: int) -> list[Any]:
        rows = []
        for text in texts:
            pair = dict(text) if isinstance(text, Mapping) else {"text": text}
            if not pair.get("text_pair"):
                rows += self._rows([pair.get("text")], truncation)  # type: ignore[list-item]
                continue
            first, second = check_texts([pair.get("text"), pair["text_pair"]])
            rows.append(self._tokenizer.encode(first, second))
            if len(rows[-1].ids) > self._limit:
                raise ValueError(
                    f"a pair of {len(rows[-1].ids)} tokens is longer than the {self._limit} that the model reads"
                )
        found: list[Any] = [None] * len(rows)
        for i, outputs in self._outputs(rows, batch_size):
            scores = self._scores(outputs["logits"])
            order = np.argsort(-scores, kind="stable")[: len(scores) if top_k is None else top_k]
            best = [{"label": self.labels[n], "score": float(scores[n])} for n in order.tolist()]
            found[i] = best[0] if top_k == 1 else best
        return found

    def _scores(self, logits: np.ndarray) -> np.ndarray:
        kind = self.parts.config.get("problem_type")
        if kind == "regression":
            return logits
        if kind == "multi_label_classification" or len(logits) == 1:
            return 1 / (1 + np.exp(-logits))
        return softmax(logits)


class Tagger(_Labelled):
    """Classes of the tokens of a text, such as names of persons and places. `labels`: number -> label."""

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        aggregation_strategy: str = "none",
        ignore_labels: Sequence[str] = ("O",),
        truncation: bool = False,
        batch_size: int = BATCH,
    ) -> list[Any]:
        """A text -> a dict for each token: {"entity", "score", "index", "word", "start", "end"}, without the class "O".
        `aggregation_strategy="simple"` joins neighbouring tokens of a class: {"entity_group", "score", "word", "start", "end"}.
        A list of texts gives a list of lists.

        Raises ValueError for another strategy, an input that is not text, and one that is too long without `truncation`."""
        if aggregation_strategy not in ("none", "simple"):
            raise ValueError(f"aggregation_strategy={aggregation_strategy!r}: choose from 'none', 'simple'")
        joined = aggregation_strategy == "simple"

        def tags(given: list[str]) -> list[Any]:
            rows, found = self._rows(given, truncation), [[] for _ in given]
            for i, outputs in self._outputs(rows, batch_size):
                tokens = self._tokens(given[i], rows[i], softmax(outputs["logits"]))
                kept = self._groups(tokens) if joined else tokens
                found[i] = [one for one in kept if one.get("entity", one.get("entity_group")) not in ignore_labels]
            return found

        return one_or_all(texts, tags)

    def _tokens(self, text: str, row: Encoded, scores: np.ndarray) -> list[dict[str, Any]]:
        """Of the scores (T, C) of a text."""
        found = []
        for index, (number, side) in enumerate(zip(row.ids, row.sides, strict=True)):
            if side is None:
                continue
            start, end = row.offsets[index]
            word = text[start:end] if number == self._tokenizer.unknown else self._tokenizer.token_of(number)
            best = int(scores[index].argmax())
            one = {"entity": self.labels[best], "score": scores[index, best], "index": index, "word": word}
            found.append(one | {"start": start, "end": end})
        return found

    def _groups(self, tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
        groups: list[list[dict[str, Any]]] = []
        for token in tokens:
            label = token["entity"]
            name = label[2:] if label[:2] in ("B-", "I-") else label
            if groups and name == groups[-1][-1]["name"] and not label.startswith("B-"):
                groups[-1].append(token | {"name": name})
            else:
                groups.append([token | {"name": name}])
        return [
            {
                "entity_group": group[0]["entity"].split("-", 1)[-1],
                "score": np.mean([token["score"] for token in group]),
                "word": self._tokenizer.joined([token["word"] for token in group]),
                "start": group[0]["start"],
                "end": group[-1]["end"],
            }
            for group in groups
        ]


class MaskFiller(Model):
    """Words for the masked tokens of a text.

    Raises ValueError for a tokenizer without a mask."""

    def __init__(self, parts: Parts, task: str) -> None:
        super().__init__(parts, task)
        if parts.tokenizer.mask is None:
            raise ValueError(f"the tokenizer of {parts.folder} has no mask token")

    def __call__(
        self, texts: str | Sequence[str], *, top_k: int = 5, truncation: bool = False, batch_size: int = BATCH
    ) -> list[Any]:
        """A text with one mask -> the `top_k` best words as dicts {"score", "token", "token_str", "sequence"}, best first; with
        several masks a list of such lists. A list of texts gives a list of these.

        Raises ValueError for a text without a mask, an input that is not text, and one that is too long without `truncation`."""

        def filled(given: list[str]) -> list[Any]:
            rows = self._rows(given, truncation)
            for text, row in zip(given, rows, strict=True):
                if self._tokenizer.mask not in row.ids:
                    raise ValueError(f"{text[:80]!r} has no {self._tokenizer.token_of(self._tokenizer.mask or 0)}")
            found: list[Any] = [None] * len(given)
            for i, outputs in self._outputs(rows, batch_size):
                found[i] = self._answers(rows[i].ids, softmax(outputs["logits"]), top_k)
            return found

        return one_or_all(texts, filled)

    def _answers(self, ids: list[int], scores: np.ndarray, top_k: int) -> list[Any]:
        """Of the scores (T, V) of a text."""
        masks, found = [place for place, number in enumerate(ids) if number == self._tokenizer.mask], []
        for place in masks:
            rows = []
            for number in np.argsort(-scores[place], kind="stable")[:top_k].tolist():
                tokens = [number if i == place else one for i, one in enumerate(ids)]
                tokens = [one for one in tokens if one != self._tokenizer.pad]
                rows.append(
                    {
                        "score": float(scores[place, number]),
                        "token": number,
                        "token_str": self._tokenizer.decode([number], skip_special=False),
                        "sequence": self._tokenizer.decode(tokens, skip_special=len(masks) == 1),
                    }
                )
            found.append(rows)
        return found[0] if len(masks) == 1 else found
