"""What a model is calibrated on: batches from texts, from batches, or from what the model itself writes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_freeze.model.running import in_eval_mode, on_device

MOST_TOKENS = 512  # of a text; what is longer is cut
_BATCH = 4096  # padded tokens of a batch
_OWN = 64  # samples of the model itself
_HELD_OUT = 8  # one of so many batches


@dataclass(frozen=True)
class Samples:
    """`batches`: for a forward, without labels but where a decoder reads them. `held_out`: further ones, to compare what was made
    with the others. `texts`, `tokens`: their number in `batches`."""

    batches: list[dict[str, Any]]
    held_out: list[dict[str, Any]] = field(default_factory=list)
    texts: int = 0
    tokens: int = 0

    def renumbered(self, kept: Sequence[int]) -> "Samples":
        """For a model that has kept these tokens and renumbered them: the rows that have no others; none are held out, because
        the original model has other numbers. Raises ValueError if no row is left."""
        numbers = torch.full((max(kept) + 2,), -1)
        numbers[list(kept)] = torch.arange(len(kept))
        batches = [each for batch in self.batches if (each := _renumbered(batch, numbers))]
        if not batches:
            raise ValueError(f"each text of calibration has a token that is not among the {len(kept)} kept ones")
        return Samples(batches, [], sum(map(_rows_of, batches)), sum(map(count_tokens, batches)))

    def undivided(self) -> "Samples":
        """The same with nothing held out."""
        texts = self.texts + sum(_rows_of(batch) for batch in self.held_out)
        batches = [*self.batches, *self.held_out]
        return Samples(batches, texts=texts, tokens=sum(map(count_tokens, batches)))


def samples_of(model: Any, calibration: Any, tokenizer: Any = None) -> Samples:
    """Batches of `calibration` for `model`.

    `calibration`: texts, for which `tokenizer` is needed; each may be a pair: of sentences, or for sequence-to-sequence models of
    source and target. Without a target the decoder reads the model's own greedy output. Or a chat, a list of messages as dicts,
    for the tokenizer's template. Or an iterable of batches, dicts of tensors for the forward. Or "samples": what a causal
    language model itself writes. Texts are cut at `MOST_TOKENS` tokens.

    Raises ValueError for no texts, texts without a tokenizer, a tokenizer with more ids than the model, and other types.
    """
    if isinstance(calibration, Samples):
        return calibration
    if isinstance(calibration, str):
        if calibration != "samples":
            raise ValueError(f"calibration={calibration!r}: give a list of texts, batches, or 'samples'")
        return _split(_own_samples(model, tokenizer), _OWN)
    if not isinstance(calibration, Iterable) or isinstance(calibration, Mapping):
        raise ValueError(f"calibration must be texts or batches, not a {type(calibration).__name__}")
    items = list(calibration)
    check_items(items, tokenizer)
    if isinstance(items[0], Mapping):
        batches = [_without_labels(model, batch) for batch in items]
        return _split(batches, sum(_rows_of(batch) for batch in batches))
    return _split(_tokenized(model, items, tokenizer), len(items))


def check_items(items: Sequence[Any], tokenizer: Any) -> None:
    """Raise ValueError for no texts or batches, and for texts without a tokenizer."""
    if not items:
        raise ValueError("calibration is empty: give some hundred texts, or batches")
    if tokenizer is None and not isinstance(items[0], Mapping):
        raise ValueError("calibration with texts needs tokenizer=, the model's")


def _split(batches: list[dict[str, Any]], texts: int) -> Samples:
    held_out = batches[_HELD_OUT - 1 :: _HELD_OUT] if len(batches) >= _HELD_OUT else []
    used = [batch for batch in batches if not any(batch is other for other in held_out)]
    kept_out = sum(_rows_of(batch) for batch in held_out)
    return Samples(used, held_out, texts - kept_out, sum(map(count_tokens, used)))


def _renumbered(batch: dict[str, Any], numbers: torch.Tensor) -> dict[str, Any]:
    """The rows of a batch whose tokens all have a number, with these; {} if there are none. `numbers`: old id -> new or -1, the
    last one is that of all further ids."""
    new: dict[str, Any] = {}
    for name in {"input_ids", "decoder_input_ids", "labels"} & batch.keys():
        ids = batch[name]
        known = numbers.to(ids.device)[ids.clamp(0, len(numbers) - 1)]
        new[name] = torch.where(ids < 0, ids, known)  # -100 is no token
    if not new:
        return batch
    rows = torch.stack([(ids != -1).all(-1) for ids in new.values()]).all(0)
    if not rows.any():
        return {}
    return {
        name: value[rows] if torch.is_tensor(value) and value.dim() and len(value) == len(rows) else value
        for name, value in (batch | new).items()
    }


def _without_labels(model: Any, batch: Any) -> dict[str, Any]:
    """Raises ValueError for a batch that is no dict of tensors."""
    if not isinstance(batch, Mapping) or not any(torch.is_tensor(value) for value in batch.values()):
        raise ValueError(f"a batch of calibration is a dict of tensors for the forward, not {type(batch).__name__}")
    needed = model.config.is_encoder_decoder and "decoder_input_ids" not in batch
    return {name: value for name, value in batch.items() if name != "labels" or needed}


def _rows_of(batch: Mapping[str, Any]) -> int:
    return len(next(value for value in batch.values() if torch.is_tensor(value)))


def count_tokens(batch: Mapping[str, Any]) -> int:
    """The real tokens, of encoder and decoder together; rows where there is no mask."""
    masks = [batch[name] for name in ("attention_mask", "decoder_attention_mask") if batch.get(name) is not None]
    labels = batch.get("labels")
    if labels is not None and batch.get("decoder_attention_mask") is None and labels.dim() == 2:
        masks.append(labels != -100)
    ids = batch.get("input_ids")
    return int(sum(mask.sum() for mask in masks)) or (ids.numel() if ids is not None else _rows_of(batch))


def _tokenized(model: Any, items: Sequence[Any], tokenizer: Any) -> list[dict[str, Any]]:
    if wrong := next((item for item in items if not isinstance(item, str | tuple | list)), None):
        raise ValueError(f"a text of calibration is a str, a pair or a chat, not a {type(wrong).__name__}")
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked
    from hf_freeze.data.tokenization import check_ids  # with which tokenizers of transformers come

    to_targets = bool(model.config.is_encoder_decoder and model.can_generate())
    limit = longest_of(model, tokenizer)
    encoded = [encode(item, tokenizer, limit, to_targets) for item in items]
    for name in ("input_ids", "labels"):
        try:
            check_ids([one[name] for one in encoded if name in one], model.get_input_embeddings().weight.shape[0])
        except ValueError as error:
            raise ValueError(f"the tokenizer is not that of the model: {error}") from None
    encoded = [one for one in encoded if one["input_ids"]]
    if not encoded:
        raise ValueError("no text of calibration has a token")
    encoded.sort(key=lambda one: (len(one["input_ids"]), one["input_ids"]))
    batches: list[dict[str, Any]] = []
    while encoded:
        longest = max(len(encoded[-1]["input_ids"]), len(encoded[-1].get("labels", ())))
        rows = [encoded.pop() for _ in range(min(len(encoded), max(1, _BATCH // longest)))]
        targets = [row.pop("labels") for row in rows if "labels" in row]
        batch = dict(tokenizer.pad(rows, return_tensors="pt", padding_side="right"))
        if targets:
            width = max(map(len, targets))
            batch["labels"] = torch.tensor([row + [-100] * (width - len(row)) for row in targets])
        elif to_targets:
            batch |= own_targets(model, batch)
        batches.append(batch)
    return batches[::-1]


def encode(item: Any, tokenizer: Any, limit: int, to_targets: bool) -> dict[str, list[int]]:
    if isinstance(item, list) and item and isinstance(item[0], Mapping):
        ids = tokenizer.apply_chat_template(item, tokenize=True, return_dict=False)[:limit]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}
    options: dict[str, Any] = {"truncation": True, "max_length": limit}
    if isinstance(item, str):
        return dict(tokenizer(item, **options))
    first, second = item
    if to_targets:
        return dict(tokenizer(first, text_target=second, **options))
    return dict(tokenizer(first, second, **options))


def longest_of(model: Any, tokenizer: Any) -> int:
    """Tokens of a text: at most those that the tokenizer and the model have positions for."""
    positions = getattr(model.config, "max_position_embeddings", None) or MOST_TOKENS
    padding = getattr(model.config, "pad_token_id", None) or 0  # RoBERTa counts its positions from there
    return max(1, min(MOST_TOKENS, tokenizer.model_max_length, positions - 1 - (padding if padding < 4 else 0)))


@torch.no_grad()
def own_targets(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What the decoder reads where it writes the greedy output of the model, for texts or sounds."""
    options = {"num_beams": 1, "do_sample": False}
    if "input_ids" in batch:
        positions = getattr(model.config, "max_position_embeddings", None) or MOST_TOKENS
        options["max_new_tokens"] = min(2 * batch["input_ids"].shape[1] + 10, MOST_TOKENS, positions - 1)
        options["max_length"] = None  # of both, transformers takes the first, and warns each time
    with in_eval_mode(model):
        written = model.generate(**on_device(model, batch), **options)
    start = model.generation_config.decoder_start_token_id
    if start is not None and int(written[0, 0]) != start:  # Whisper leaves it out
        written = torch.cat([torch.full_like(written[:, :1], start), written], 1)
    ends = model.generation_config.eos_token_id
    ends = torch.tensor([ends] if isinstance(ends, int) else ends or [], device=written.device)
    after_end = torch.isin(written[:, 1:], ends).int().cumsum(1) - torch.isin(written[:, 1:], ends).int()
    return {"decoder_input_ids": written[:, :-1], "decoder_attention_mask": (after_end == 0).long()}


@torch.no_grad()
def _own_samples(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Texts that a causal language model draws from itself, from its first token on, with a seed of its own."""
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ValueError(
            f"calibration='samples' needs a causal language model, not a {type(model).__name__}: give texts"
        )
    choices = (model.config.bos_token_id, getattr(tokenizer, "bos_token_id", None), model.config.eos_token_id, 0)
    start = next(token for token in choices if isinstance(token, int))
    length = min(MOST_TOKENS, (getattr(model.config, "max_position_embeddings", None) or 256) - 1, 256)
    batches = []
    with in_eval_mode(model), torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(0)
        for _ in range(_OWN // 8):
            ids = torch.full((8, 1), start, device=model.device)
            options = {
                "do_sample": True,
                "top_k": 0,
                "num_beams": 1,
                "max_new_tokens": length,
                "min_new_tokens": length,
            }
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return batches
