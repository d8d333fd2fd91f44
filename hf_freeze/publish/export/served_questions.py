"""What a model is asked: texts, images or sounds as rows of inputs, in batches of its forward.

Shapes: N positions, V vocabulary, C classes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_freeze.analysis.answers import Answers, aligned
from hf_freeze.model.samples import MOST_TOKENS, encode
from hf_freeze.publish.export.ctranslate2 import numbered, tokens_of

TOP = 64  # tokens of which the probability is kept, at each position
_BATCH = 4096  # padded tokens of a batch
_NUMBERS = 1 << 26  # of the outputs of a batch
_LANGUAGE = ("causal-lm", "masked-lm", "seq2seq-lm", "speech-seq2seq")  # whose choices are tokens
_PER_TOKEN = ("causal-lm", "masked-lm", "token-classification", "question-answering", "feature-extraction")
_OUTPUTS = ("logits", "last_hidden_state", "start_logits", "end_logits")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model, and all that it needs to answer. `tokenizer`: None for images. `extractor`: of images or sound. `sentence`: what
    `read_sentence_files` says of a sentence encoder. `longest`: tokens of a text.

    `dataclasses.replace(opened(original), model=variant)` is a variant that was not saved."""

    model: Any
    task: str
    tokenizer: Any = None
    extractor: Any = None
    sentence: Mapping[str, Any] = field(default_factory=dict)
    longest: int = MOST_TOKENS

    def read(self, text: str) -> str:
        """What the model reads of a text: a sentence encoder may put a prompt before it, and take small letters."""
        text = self.sentence.get("prompt", "") + text
        return text.lower() if self.sentence.get("lower") else text


class Questions:
    """The rows of inputs for some items. `vocabulary`: what `vocabulary_of` says, where the choices of tokens are asked for.
    `like`: the answers of the original to the items. `numbers`: ids of the original's tokens here, -1 for those that are not."""

    def __init__(
        self, served: Served, items: Iterable[Any], vocabulary: Sequence[str] = (), like: Answers | None = None
    ) -> None:
        self.served, self.vocabulary, self.like = served, list(vocabulary), like
        self.rows = [row for item in items for row in _rows(served, item)]
        here = Answers(served.task, [], self.vocabulary)
        self.numbers = None if like is None else torch.from_numpy(like.numbers_in(here))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        if self.vocabulary:
            return [self.vocabulary[token] for token in ids]
        return self.served.tokenizer.convert_ids_to_tokens(list(ids))

    def words(self, ids: Sequence[int]) -> list[int]:
        """Where there is no token that only begins or ends a text."""
        names = ("bos", "eos", "cls", "sep", "pad")
        others = {getattr(self.served.tokenizer, f"{name}_token_id") for name in names}
        return [place for place, token in enumerate(ids) if token not in others]

    def batches(self, rows: Sequence[dict[str, Any]] | None = None) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """(numbers of the rows, the inputs of the forward), the longest first; rows without a token are left out."""
        rows = self.rows if rows is None else rows
        most = min(_BATCH, _NUMBERS // max(len(self.vocabulary), 1))
        order = sorted((i for i, row in enumerate(rows) if _size(row)), key=lambda i: -_size(rows[i]))
        while order:
            chosen = order[: max(1, most // _size(rows[order[0]]))]
            del order[: len(chosen)]
            yield chosen, _together(self.served, [rows[i] for i in chosen])

    def outputs(self, rows: Sequence[dict[str, Any]] | None = None) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(number of the row, its outputs), without what was computed for padding"""
        rows = self.rows if rows is None else rows
        for chosen, batch in self.batches(rows):
            result = self.served.model(**batch)
            for place, number in enumerate(chosen):
                found = {name: result[name][place].float() for name in _OUTPUTS if result.get(name) is not None}
                if "input_ids" in batch and self.served.task in _PER_TOKEN:
                    found = {name: value[: len(rows[number]["input_ids"])] for name, value in found.items()}
                yield number, found

    def choices(self, number: int, log_probs: Tensor, at: Sequence[int] | None = None) -> dict[str, Any]:
        """What is kept of the probabilities of tokens, (N, V). `at`: which of the original's positions these are."""
        answer = {"best": log_probs.argmax(-1).numpy()}
        if self.like is None or self.numbers is None:
            values, top = log_probs.topk(min(TOP, log_probs.shape[-1]))
            return answer | {"top": top.int().numpy(), "log_probs": values.numpy(), "at": np.arange(len(log_probs))}
        top = self.like.items[number]["top"][at]
        ids = self.numbers[torch.from_numpy(top).long()].clamp(min=0)
        return answer | {"log_probs": log_probs.gather(1, ids).numpy(), "at": np.array(at, dtype=int)}

    def aligned(self, number: int, tokens: list[str]) -> tuple[list[int], list[int]]:
        """(positions of the original, positions here) that have the same tokens."""
        return aligned(tokens if self.like is None else self.like.items[number].get("tokens", []), tokens)


def _rows(served: Served, item: Any) -> list[dict[str, Any]]:
    """The inputs of an item, without padding: names to lists of ids, or to tensors of images and sound."""
    if isinstance(item, Mapping):
        return _rows_of_batch(item)
    if served.extractor is not None:
        is_sound = hasattr(served.extractor, "sampling_rate")
        rate = {"sampling_rate": served.extractor.sampling_rate} if is_sound else {}
        return _rows_of_batch(served.extractor(np.asarray(item) if is_sound else item, **rate, return_tensors="pt"))
    if not isinstance(item, str | tuple | list):
        raise ValueError(f"a {served.task} model reads texts, not a {type(item).__name__}")
    if served.task == "multiple-choice":
        return [{"choices": [_encoded(served, (item[0], choice)) for choice in item[1]]}]
    return [_encoded(served, item)]


def _encoded(served: Served, item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        item = served.read(item)
    if served.task == "seq2seq-lm" and not isinstance(item, str):
        item = item[0]  # a pair with a target, which is not needed
    if served.task == "question-answering":
        encoded = served.tokenizer(*item, truncation=True, max_length=served.longest)
        context = [side == 1 for side in encoded.sequence_ids()] if encoded.is_fast else None
        return {**encoded, "context": context}
    row = encode(item, served.tokenizer, served.longest, False)
    if served.task in _LANGUAGE and served.task != "masked-lm":
        row.pop("token_type_ids", None)
    return row


def _rows_of_batch(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    tensors = {name: value for name, value in batch.items() if torch.is_tensor(value) and name != "labels"}
    ids, rows = tensors.get("input_ids"), []
    for number in range(len(next(iter(tensors.values()), ()))):
        row = {name: value[number] for name, value in tensors.items()}
        if ids is not None:
            mask = row.get("attention_mask", torch.ones_like(row["input_ids"])).bool()
            if ids.dim() == 3:
                texts = [{name: value[i][mask[i]].tolist() for name, value in row.items()} for i in range(len(mask))]
                row = {"choices": texts}
            else:
                row = {name: value[mask].tolist() for name, value in row.items()}
        rows.append(row)
    return rows


def vocabulary_of(served: Served) -> list[str]:
    """The token of each output of the model; none if its outputs are no tokens."""
    if served.task not in _LANGUAGE:
        return []
    tokens, config = tokens_of(served.tokenizer)[1], getattr(served.model, "config", None)
    size = getattr(config, "decoder_vocab_size", None) or getattr(config, "vocab_size", None) or 0
    return numbered(tokens, max(size, max(tokens) + 1))


def _size(row: Mapping[str, Any]) -> int:
    """What a row counts in a batch, as a number of tokens. Sound of different lengths is not padded."""
    if "input_ids" in row:
        return len(row["input_ids"])
    if "choices" in row:
        return _BATCH if all(choice["input_ids"] for choice in row["choices"]) else 0
    return _BATCH if "input_values" in row else _BATCH // 16


def _together(served: Served, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    if "choices" in rows[0]:
        (row,) = rows
        padded = served.tokenizer.pad(row["choices"], return_tensors="pt", padding_side="right")
        return {name: value[None] for name, value in padded.items()}
    if "input_ids" not in rows[0]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    rows = [{name: value for name, value in row.items() if name != "context"} for row in rows]
    return dict(served.tokenizer.pad(rows, return_tensors="pt", padding_side="right"))
