"""Answers of a model as it is served: in PyTorch, or in the engine of an exported folder, with its own tokenizer.

`opened` opens it, `answers` asks it, and `analysis.answers.compare_answers` compares its answers with those of the original,
which are needed once for any number of smaller models.

Shapes: B rows, T tokens, V vocabulary, C classes, D hidden size.
"""

import contextlib
import copy
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoFeatureExtractor, AutoImageProcessor

from hf_freeze.analysis.answers import SPEECH, Answers, aligned, compare_answers
from hf_freeze.architectures.tasks import task_of
from hf_freeze.data import sample
from hf_freeze.model.fidelity import Fidelity
from hf_freeze.model.loading import load_model, load_tokenizer
from hf_freeze.model.running import in_eval_mode, without_cache
from hf_freeze.model.samples import MOST_TOKENS, encode, longest_of
from hf_freeze.publish.export.ctranslate2 import CTranslate2Generator, CTranslate2Translator, numbered, tokens_of
from hf_freeze.publish.export.exported import CLASSES
from hf_freeze.publish.export.folders import mark_of
from hf_freeze.publish.export.translator import token_ids
from hf_freeze.publish.sentence_files import read_sentence_files

TOP = 64  # tokens of which the probability is kept, at each position
_COMPARED = 512  # of the texts of an export
_BATCH = 4096  # padded tokens of a batch
_NUMBERS = 1 << 26  # of the outputs of a batch
_MASKED = 0.15  # of the tokens, for masked language models
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


def opened(source: str | os.PathLike[str], tokenizer: Any = None) -> Served:
    """The model of a directory or Hub id, a variant or an exported folder of any format. `tokenizer`: if there is none beside it.

    Raises ValueError if there is no tokenizer, and as `load_model` and the class of the engine do."""
    folder = Path(source)
    mark = mark_of(folder)
    kind, task = mark.get("format"), mark.get("task", "")
    if kind == "ctranslate2":
        model: Any = (CTranslate2Generator if task == "causal-lm" else CTranslate2Translator)(folder)
    elif kind in (None, "dense"):
        model = load_model(source).float().eval()
        task = task_of(model)
    else:
        options = {"intra_op_num_threads": torch.get_num_threads()} if kind == "onnx" else {}
        model = CLASSES[task].from_pretrained(folder, engine=options)
    reads = getattr(model, "main_input_name", "input_ids")
    extractors = {"input_ids": None, "pixel_values": AutoImageProcessor}
    extractor = extractors.get(reads, AutoFeatureExtractor)
    found = Served(model=model, task=task, extractor=extractor and extractor.from_pretrained(source))
    if reads != "input_ids" and task not in SPEECH:
        return found
    tokenizer = load_tokenizer(source) or tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{source} has no tokenizer, which its answers need: save that of the model there, by save_pretrained"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked
    sentence = read_sentence_files(source) if task == "feature-extraction" else {}
    longest = longest_of(model, tokenizer) if hasattr(model, "config") else MOST_TOKENS
    longest = min(longest, sentence.get("longest") or longest)
    return replace(found, tokenizer=tokenizer, sentence=sentence, longest=longest)


def served_fidelity(
    original: str | os.PathLike[str], served: str | os.PathLike[str], items: Sequence[Any], tokenizer: Any = None
) -> Fidelity:
    """How faithful the model in the folder `served` is to `original`, on `items`: see `answers`."""
    first = opened(original, tokenizer)
    expected = answers(first, items)
    return compare_answers(expected, answers(opened(served, first.tokenizer), items, like=expected))


def check_fidelity(original: Any, folder: Path, items: Sequence[Any], least: float, say: Callable[[str], Any]) -> None:
    """Raises ValueError if the model in `folder` is less faithful to `original` than `least`, on a sample of `items`."""
    found = served_fidelity(original, folder, sample(items, _COMPARED))
    low, high = found.intervals["score"]
    measured = f"fidelity {found.score:.4f} (95 % interval {low:.4f} to {high:.4f}) on {found.compared} texts"
    if not (found.score or 0.0) >= least:
        raise ValueError(
            f"{measured}, below min_fidelity={least:g}: choose another quantization or none, or a lower limit"
        )
    say(measured)


@torch.no_grad()
def answers(served: Served, items: Iterable[Any], like: Answers | None = None) -> Answers:
    """What the model answers to each of `items`. `like`: the answers of its original to the same items, which language models
    and those that generate need for a comparison.

    `items`: texts; pairs of texts; chats; for multiple choice (text, [choices]); for question answering (question, context);
    images; arrays of sound, (samples,), of the extractor's rate; or batches, dicts of tensors for the forward. Texts are cut at
    512 tokens. Text is generated by greedy search. Masked language models fill masks of the text, or else of 15 % of its tokens.

    Raises ValueError for no items, items of other kinds, and another number of them than `like` has.
    """
    rows = [row for item in items for row in _rows(served, item)]
    if not rows:
        raise ValueError("no texts to compare the models on")
    if like is not None and len(like.items) != len(rows):
        raise ValueError(f"{len(rows)} items for {len(like.items)} answers of the original: give it the same ones")
    found: list[dict[str, Any]] = [{} for _ in rows]
    vocabulary = _vocabulary(served) if served.task in _LANGUAGE else []
    asked = _Asked(served, rows, like, vocabulary)
    with contextlib.ExitStack() as stack:
        if isinstance(served.model, nn.Module):
            stack.enter_context(in_eval_mode(served.model))
            stack.enter_context(without_cache(served.model))
        for number, answer in _READERS.get(served.task, _classes)(asked):
            found[number] = answer
    return Answers(served.task, found, vocabulary)


@torch.no_grad()
def texts_written(served: Served, texts: Sequence[str], beams: int = 1) -> list[str]:
    """What a translator writes for texts, in PyTorch or its engine, by a search with `beams` beams; with 1, as in `answers`."""
    asked, found = _Asked(served, [_encoded(served, text) for text in texts], None, []), [""] * len(texts)
    with in_eval_mode(served.model) if isinstance(served.model, nn.Module) else contextlib.nullcontext():
        for chosen, batch in asked.batches():
            for number, ids in zip(chosen, _decoded(asked, chosen, batch, beams)[1], strict=True):
                found[number] = served.tokenizer.decode(ids, skip_special_tokens=True)
    return found


def forward_batches(served: Served, items: Iterable[Any]) -> list[dict[str, Tensor]]:
    """The same items as inputs of the forward: see `answers`."""
    rows = [row for item in items for row in _rows(served, item)]
    return [batch for _, batch in _Asked(served, rows, None, []).batches()]


# -- inputs ------------------------------------------------------------------------------------------------------------------


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


def _vocabulary(served: Served) -> list[str]:
    """The token of each output of the model."""
    tokens, config = tokens_of(served.tokenizer)[1], getattr(served.model, "config", None)
    size = getattr(config, "decoder_vocab_size", None) or getattr(config, "vocab_size", None) or 0
    return numbered(tokens, max(size, max(tokens) + 1))


class _Asked:
    """What `answers` was given. `numbers`: ids of the original's tokens here, -1 for those that are not."""

    def __init__(self, served: Served, rows: list[dict[str, Any]], like: Answers | None, vocabulary: list[str]) -> None:
        self.served, self.rows, self.like, self.vocabulary = served, rows, like, vocabulary
        here = Answers(served.task, [], vocabulary)
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


# -- answers -----------------------------------------------------------------------------------------------------------------


def _classes(asked: _Asked) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of classifiers of texts, images and sound, and of multiple choice."""
    several = getattr(asked.served.model.config, "problem_type", None) == "multi_label_classification"
    for number, found in asked.outputs():
        logits = found["logits"]
        if several:
            both = torch.stack([logits, -logits], -1)  # whether each label applies
            yield number, {"log_probs": nn.functional.logsigmoid(both).numpy()}
        elif logits.shape[-1] == 1:
            yield number, {"values": logits.numpy()}
        else:
            yield number, {"log_probs": logits.log_softmax(-1)[None].numpy()}


def _tokens_classes(asked: _Asked) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, found in asked.outputs():
        ids = asked.rows[number]["input_ids"]
        if places := asked.words(ids):
            log_probs = found["logits"][places].log_softmax(-1)
            yield number, {"tokens": asked.tokens(ids[i] for i in places), "log_probs": log_probs.numpy()}


def _spans(asked: _Asked) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, found in asked.outputs():
        row = asked.rows[number]
        context = row.get("context") or [True] * len(row["input_ids"])
        if places := [i for i, inside in enumerate(context) if inside]:
            both = torch.stack([found["start_logits"], found["end_logits"]])[:, places].log_softmax(-1)
            tokens = asked.tokens(row["input_ids"][i] for i in places)
            yield number, {"tokens": tokens, "log_probs": both.numpy(), "choices": True}


def _next_tokens(asked: _Asked) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, found in asked.outputs():
        ids = asked.rows[number]["input_ids"]
        tokens, log_probs = asked.tokens(ids), found["logits"].log_softmax(-1)
        theirs, ours = asked.aligned(number, tokens)
        if ours:
            nats = {"nats": _nats(log_probs[:-1], ids[1:])}
            yield number, {"tokens": tokens} | asked.choices(number, log_probs[ours], theirs) | nats


def _masked_tokens(asked: _Asked) -> Iterator[tuple[int, dict[str, Any]]]:
    mask, rows, places = asked.served.tokenizer.mask_token_id, [], []
    for number, row in enumerate(asked.rows):
        ids, tokens = row["input_ids"], asked.tokens(row["input_ids"])
        masked = [i for i, token in enumerate(ids) if token == mask]
        if not masked and (words := asked.words(ids)):
            draw = np.random.default_rng(zlib.crc32(" ".join(tokens).encode()))
            masked = sorted(draw.choice(words, max(1, round(_MASKED * len(words))), replace=False).tolist())
        at = [*range(len(masked))]
        if asked.like is not None:  # the same words as there
            here = dict(zip(*asked.aligned(number, tokens), strict=True))
            theirs = asked.like.items[number].get("places", [])
            at, masked = [n for n, i in enumerate(theirs) if i in here], [here[i] for i in theirs if i in here]
        places.append((masked, at))
        rows.append(row | {"input_ids": [mask if i in masked and mask is not None else t for i, t in enumerate(ids)]})
    for number, found in asked.outputs(rows):
        masked, at = places[number]
        if masked:
            ids = asked.rows[number]["input_ids"]
            true, log_probs = [ids[i] for i in masked], found["logits"][masked].log_softmax(-1)
            answer = {"tokens": asked.tokens(ids), "places": masked} | asked.choices(number, log_probs, at)
            yield number, answer | ({} if mask in true else {"nats": _nats(log_probs, true)})


def _nats(log_probs: Tensor, ids: Sequence[int]) -> np.ndarray:
    return -log_probs.gather(1, torch.tensor(ids, dtype=torch.long)[:, None])[:, 0].numpy()


def _vectors(asked: _Asked) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, found in asked.outputs():
        vector = _pooled(found["last_hidden_state"], asked.served.sentence.get("mode", "mean"))
        for weight, bias, activation in asked.served.sentence.get("dense", ()):
            vector = activation(nn.functional.linear(vector, weight, bias))
        yield number, {"vector": vector.numpy()}


def _pooled(states: Tensor, mode: str) -> Tensor:
    """(T, D), without padding, to (D,); several modes to one after the other, as in sentence-transformers."""
    weights = torch.arange(1, len(states) + 1, dtype=states.dtype)[:, None]
    modes = {
        "cls": lambda: states[0],
        "lasttoken": lambda: states[-1],
        "max": lambda: states.max(0).values,
        "mean": lambda: states.mean(0),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / len(states) ** 0.5,
        "weightedmean": lambda: (states * weights).sum(0) / weights.sum(),
    }
    return torch.cat([modes[each]() for each in mode.split("+")])


def _written(asked: _Asked) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of models that write: the text of greedy search, and the probabilities of the tokens that the original wrote."""
    tokenizer = asked.served.tokenizer
    for chosen, batch in asked.batches():
        starts, written = _decoded(asked, chosen, batch)
        targets, found = written, [{"text": tokenizer.decode(ids, skip_special_tokens=True)} for ids in written]
        if asked.like is not None and asked.numbers is not None:
            theirs = [asked.like.items[i].get("target", np.empty(0)) for i in chosen]
            targets = [asked.numbers[torch.from_numpy(ids).long()].tolist() for ids in theirs]
        else:
            found = [each | {"target": np.array(ids)} for each, ids in zip(found, targets, strict=True)]
        known = [place for place, ids in enumerate(targets) if ids and min(ids) >= 0]
        sources = [asked.rows[chosen[place]].get("input_ids", []) for place in known]
        for place, log_probs in zip(known, _forced(asked.served, batch, known, sources, starts, targets), strict=True):
            ids = targets[place]
            if log_probs.dim() == 1:  # of the target alone
                found[place]["nats"] = -log_probs.numpy()
            elif asked.like is None or "top" in asked.like.items[chosen[place]]:
                at = [*range(len(ids))]
                found[place] |= asked.choices(chosen[place], log_probs, at) | {"nats": _nats(log_probs, ids)}
        yield from zip(chosen, found, strict=True)


def _decoded(
    asked: _Asked, chosen: list[int], batch: dict[str, Tensor], beams: int = 1
) -> tuple[list[list[int]], list[list[int]]]:
    """What `_searched` gives, whatever the batch that a text is in."""
    starts, written = _searched(asked, chosen, batch, beams)
    if "input_ids" in batch:
        written = [ids[: _most_new(asked.rows[i])] for ids, i in zip(written, chosen, strict=True)]
    return starts, written


def _searched(
    asked: _Asked, chosen: list[int], batch: dict[str, Tensor], beams: int
) -> tuple[list[list[int]], list[list[int]]]:
    """(what each decoder reads first, what it writes then, up to the end)"""
    model = asked.served.model
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or MOST_TOKENS
    most = max(_most_new(asked.rows[i]) for i in chosen)
    limit = {"max_new_tokens": min(most, positions - 1)} if "input_ids" in batch else {}
    if isinstance(model, CTranslate2Translator):
        config = copy.deepcopy(model.generation_config)
        config.update(num_beams=beams, num_return_sequences=1, **limit)
        found = model.translate_ids([asked.rows[i]["input_ids"] for i in chosen], config, len(chosen))
        return [[] for _ in chosen], [returned[0] for returned in found]
    limit |= {"max_length": None} if limit else {}  # of both, transformers takes the first, and warns each time
    found, config = model.generate(**batch, num_beams=beams, do_sample=False, **limit).tolist(), model.generation_config
    starts = [ids[:1] for ids in found]
    if hasattr(config, "no_timestamps_token_id"):  # Whisper returns what follows these tokens
        starts = [[config.decoder_start_token_id] for _ in found]
        if getattr(config, "is_multilingual", False):
            task = config.task_to_id[getattr(config, "task", None) or "transcribe"]
            starts = [
                [*start, language, task]
                for start, language in zip(starts, model.detect_language(**batch).tolist(), strict=True)
            ]
        starts = [[*start, config.no_timestamps_token_id] for start in starts]
    else:
        found = [ids[1:] for ids in found]
    ends = token_ids(config.eos_token_id)
    return starts, [ids[: next((n + 1 for n, token in enumerate(ids) if token in ends), len(ids))] for ids in found]


def _most_new(row: Mapping[str, Any]) -> int:
    """As many new tokens as a translation may need."""
    return min(2 * len(row.get("input_ids", ())) + 10, MOST_TOKENS)


def _forced(
    served: Served,
    batch: dict[str, Tensor],
    places: list[int],
    sources: list[list[int]],
    starts: list[list[int]],
    targets: list[list[int]],
) -> list[Tensor]:
    """Log-probabilities where the decoder reads the targets: (T, V) of each text, or (T,), of its tokens, in CTranslate2."""
    if not places:
        return []
    if isinstance(served.model, CTranslate2Translator):
        scores = served.model.log_probabilities(sources, [targets[place] for place in places])
        return [torch.tensor(score) for score in scores]
    read = [torch.tensor([*starts[place], *targets[place][:-1]]) for place in places]
    ids = nn.utils.rnn.pad_sequence(read, batch_first=True)
    inputs = {name: value[places] for name, value in batch.items()}
    logits = served.model(**inputs, decoder_input_ids=ids)["logits"]
    ranges = [slice(len(each) - len(targets[place]), len(each)) for each, place in zip(read, places, strict=True)]
    return [row[part].float().log_softmax(-1) for row, part in zip(logits, ranges, strict=True)]


def _heard(asked: _Asked) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of CTC: the probabilities of each frame, and the text."""
    for number, found in asked.outputs():
        log_probs = found["logits"].log_softmax(-1)
        text = asked.served.tokenizer.decode(log_probs.argmax(-1).tolist())
        yield number, {"log_probs": log_probs.numpy(), "text": text}


_READERS = {
    "causal-lm": _next_tokens,
    "masked-lm": _masked_tokens,
    "token-classification": _tokens_classes,
    "question-answering": _spans,
    "feature-extraction": _vectors,
    "seq2seq-lm": _written,
    "speech-seq2seq": _written,
    "ctc": _heard,
}
