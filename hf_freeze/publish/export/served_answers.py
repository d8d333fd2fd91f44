"""What a model answers to its questions, by task.

Shapes: B rows, T tokens, V vocabulary, D hidden size.
"""

import copy
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_freeze.model.samples import MOST_TOKENS
from hf_freeze.publish.export.served_questions import Questions
from hf_freeze.publish.export.translator import Translator, token_ids

_MASKED = 0.15  # of the tokens, for masked language models
_Answers = Iterator[tuple[int, dict[str, Any]]]  # (number of the row, what is kept of its answer)


def _classes(asked: Questions) -> _Answers:
    """Of classifiers of texts, images and sound, and of multiple choice."""
    several = getattr(getattr(asked.served.model, "config", None), "problem_type", None) == "multi_label_classification"
    for number, found in asked.outputs():
        logits = found["logits"]
        if several:
            both = torch.stack([logits, -logits], -1)  # whether each label applies
            yield number, {"log_probs": nn.functional.logsigmoid(both).numpy()}
        elif logits.shape[-1] == 1:
            yield number, {"values": logits.numpy()}
        else:
            yield number, {"log_probs": logits.log_softmax(-1)[None].numpy()}


def _tokens_classes(asked: Questions) -> _Answers:
    for number, found in asked.outputs():
        ids = asked.rows[number]["input_ids"]
        if places := asked.words(ids):
            log_probs = found["logits"][places].log_softmax(-1)
            yield number, {"tokens": asked.tokens(ids[i] for i in places), "log_probs": log_probs.numpy()}


def _spans(asked: Questions) -> _Answers:
    for number, found in asked.outputs():
        row = asked.rows[number]
        context = row.get("context") or [True] * len(row["input_ids"])
        if places := [i for i, inside in enumerate(context) if inside]:
            both = torch.stack([found["start_logits"], found["end_logits"]])[:, places].log_softmax(-1)
            tokens = asked.tokens(row["input_ids"][i] for i in places)
            yield number, {"tokens": tokens, "log_probs": both.numpy(), "choices": True}


def _next_tokens(asked: Questions) -> _Answers:
    for number, found in asked.outputs():
        ids = asked.rows[number]["input_ids"]
        tokens, log_probs = asked.tokens(ids), found["logits"].log_softmax(-1)
        theirs, ours = asked.aligned(number, tokens)
        if ours:
            nats = {"nats": _nats(log_probs[:-1], ids[1:])}
            yield number, {"tokens": tokens} | asked.choices(number, log_probs[ours], theirs) | nats


def _masked_tokens(asked: Questions) -> _Answers:
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


def _vectors(asked: Questions) -> _Answers:
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


def _written(asked: Questions) -> _Answers:
    """Of models that write: the text of greedy search, and the probabilities of the tokens that the original wrote."""
    tokenizer = asked.served.tokenizer
    for chosen, batch in asked.batches():
        starts, written = decoded(asked, chosen, batch)
        targets, found = written, [{"text": tokenizer.decode(ids, skip_special_tokens=True)} for ids in written]
        if asked.like is not None and asked.numbers is not None:
            theirs = [asked.like.items[i].get("target", np.empty(0)) for i in chosen]
            targets = [asked.numbers[torch.from_numpy(ids).long()].tolist() for ids in theirs]
        else:
            found = [each | {"target": np.array(ids)} for each, ids in zip(found, targets, strict=True)]
        for place, log_probs in _forced(asked, chosen, batch, starts, targets).items():
            ids = targets[place]
            if log_probs.dim() == 1:  # of the target alone
                found[place]["nats"] = -log_probs.numpy()
            elif asked.like is None or "top" in asked.like.items[chosen[place]]:
                at = [*range(len(ids))]
                found[place] |= asked.choices(chosen[place], log_probs, at) | {"nats": _nats(log_probs, ids)}
        yield from zip(chosen, found, strict=True)


def decoded(
    asked: Questions, chosen: list[int], batch: dict[str, Tensor], beams: int = 1
) -> tuple[list[list[int]], list[list[int]]]:
    """(what each decoder reads first, what it writes then, up to the end), whatever the batch that a text is in"""
    model, limit = asked.served.model, {}
    # As many new tokens as a translation may need.
    most = [min(2 * len(asked.rows[i].get("input_ids", ())) + 10, MOST_TOKENS) for i in chosen]
    if "input_ids" in batch:
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or MOST_TOKENS
        limit = {"max_new_tokens": min(max(most), positions - 1)}
    if isinstance(model, Translator):
        config = copy.deepcopy(model.generation_config)
        config.update(num_beams=beams, num_return_sequences=1, **limit)
        returned = model.translate_ids([asked.rows[i]["input_ids"] for i in chosen], config, len(chosen))
        starts, written = [[] for _ in chosen], [each[0] for each in returned]
    else:
        # Of both limits, transformers takes the first, and warns each time.
        settings = limit | ({"max_length": None} if limit else {})
        found = model.generate(**batch, num_beams=beams, do_sample=False, **settings).tolist()
        config, ends = model.generation_config, token_ids(model.generation_config.eos_token_id)
        if hasattr(config, "no_timestamps_token_id"):  # Whisper returns what follows these tokens
            starts = _starts_of_speech(model, batch)
        else:
            starts, found = [ids[:1] for ids in found], [ids[1:] for ids in found]
        written = [ids[: next((n + 1 for n, token in enumerate(ids) if token in ends), len(ids))] for ids in found]
    if "input_ids" in batch:
        written = [ids[:count] for ids, count in zip(written, most, strict=True)]
    return starts, written


def _starts_of_speech(model: Any, batch: dict[str, Tensor]) -> list[list[int]]:
    """The tokens before a transcript: start, language and task of models that know several, and no times."""
    config, rows = model.generation_config, len(next(iter(batch.values())))
    between: list[list[int]] = [[] for _ in range(rows)]
    if getattr(config, "is_multilingual", False):
        task = config.task_to_id[getattr(config, "task", None) or "transcribe"]
        between = [[language, task] for language in model.detect_language(**batch).tolist()]
    return [[config.decoder_start_token_id, *tokens, config.no_timestamps_token_id] for tokens in between]


def _forced(
    asked: Questions, chosen: list[int], batch: dict[str, Tensor], starts: list[list[int]], targets: list[list[int]]
) -> dict[int, Tensor]:
    """Place -> log-probabilities where the decoder reads the target, if all of its tokens are known: (T, V), or (T,), of its
    tokens, of a `Translator`."""
    model = asked.served.model
    known = [place for place, ids in enumerate(targets) if ids and min(ids) >= 0]
    if not known:
        return {}
    if isinstance(model, Translator):
        sources = [asked.rows[chosen[place]]["input_ids"] for place in known]
        scores = model.log_probabilities(sources, [targets[place] for place in known])
        return dict(zip(known, map(torch.tensor, scores), strict=True))
    read = [torch.tensor([*starts[place], *targets[place][:-1]]) for place in known]
    inputs = {name: value[known] for name, value in batch.items()}
    logits = model(**inputs, decoder_input_ids=nn.utils.rnn.pad_sequence(read, batch_first=True))["logits"]
    return {
        place: row[len(ids) - len(targets[place]) : len(ids)].float().log_softmax(-1)
        for place, row, ids in zip(known, logits, read, strict=True)
    }


def _heard(asked: Questions) -> _Answers:
    """Of CTC: the probabilities of each frame, and the text."""
    for number, found in asked.outputs():
        log_probs = found["logits"].log_softmax(-1)
        text = asked.served.tokenizer.decode(log_probs.argmax(-1).tolist())
        yield number, {"log_probs": log_probs.numpy(), "text": text}


def answers_of(asked: Questions) -> _Answers:
    return _READERS.get(asked.served.task, _classes)(asked)


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
