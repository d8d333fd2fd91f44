"""Answers of a model as it is served: in PyTorch, or in the engine of an exported folder, with its own tokenizer.

`opened` opens it, `answers` asks it, and `analysis.answers.compare_answers` compares its answers with those of the original,
which are needed once for any number of smaller models.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoFeatureExtractor, AutoImageProcessor

from hf_freeze.analysis.answers import SPEECH, Answers, compare_answers
from hf_freeze.architectures.tasks import task_of
from hf_freeze.data import sample
from hf_freeze.model.fidelity import Fidelity
from hf_freeze.model.loading import load_model, load_tokenizer
from hf_freeze.model.running import in_eval_mode, without_cache
from hf_freeze.model.samples import MOST_TOKENS, longest_of
from hf_freeze.publish.export.ctranslate2 import CTranslate2Generator, CTranslate2Translator
from hf_freeze.publish.export.exported import CLASSES
from hf_freeze.publish.export.folders import mark_of
from hf_freeze.publish.export.llama_served import LlamaCppForward, LlamaCppTranslator
from hf_freeze.publish.export.runners import thread_options
from hf_freeze.publish.export.served_answers import answers_of, decoded
from hf_freeze.publish.export.served_questions import Questions, vocabulary_of
from hf_freeze.publish.export.served_questions import Served as Served
from hf_freeze.publish.export.static_table import StaticForward
from hf_freeze.publish.sentence_files import read_sentence_files

_COMPARED = 512  # of the texts of an export


def opened(source: str | os.PathLike[str], tokenizer: Any = None) -> Served:
    """The model of a directory or Hub id, a variant or an exported folder of any format. `tokenizer`: if there is none beside it.

    Raises ValueError if there is no tokenizer, and as `load_model` and the class of the engine do."""
    folder = Path(source)
    mark = mark_of(folder)
    kind, task = mark.get("format"), mark.get("task", "")
    if kind == "ctranslate2":
        model: Any = (CTranslate2Generator if task == "causal-lm" else CTranslate2Translator)(folder)
    elif kind == "gguf":
        model = LlamaCppTranslator(folder) if task == "seq2seq-lm" else LlamaCppForward(folder, task)
    elif kind == "static":
        model = StaticForward(folder)
    elif kind in (None, "dense", "compressed-tensors"):
        model = load_model(source, dtype=torch.float32).eval()
        task = task_of(model)
    else:
        model = CLASSES[task].from_pretrained(folder, engine=thread_options(kind, torch.get_num_threads()))
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
    asked = Questions(served, items, vocabulary_of(served), like)
    if not asked.rows:
        raise ValueError("no texts to compare the models on")
    if like is not None and len(like.items) != len(asked.rows):
        raise ValueError(
            f"{len(asked.rows)} items for {len(like.items)} answers of the original: give it the same ones"
        )
    found: list[dict[str, Any]] = [{} for _ in asked.rows]
    with contextlib.ExitStack() as stack:
        if isinstance(served.model, nn.Module):
            stack.enter_context(in_eval_mode(served.model))
            stack.enter_context(without_cache(served.model))
        for number, answer in answers_of(asked):
            found[number] = answer
    return Answers(served.task, found, asked.vocabulary)


@torch.no_grad()
def texts_written(served: Served, texts: Sequence[str], beams: int = 1) -> list[str]:
    """What a translator writes for texts, in PyTorch or its engine, by a search with `beams` beams; with 1, as in `answers`."""
    asked, found = Questions(served, texts), [""] * len(texts)
    with in_eval_mode(served.model) if isinstance(served.model, nn.Module) else contextlib.nullcontext():
        for chosen, batch in asked.batches():
            for number, ids in zip(chosen, decoded(asked, chosen, batch, beams)[1], strict=True):
                found[number] = served.tokenizer.decode(ids, skip_special_tokens=True)
    return found


def forward_batches(served: Served, items: Iterable[Any]) -> list[dict[str, Tensor]]:
    """The same items as inputs of the forward: see `answers`."""
    return [batch for _, batch in Questions(served, items).batches()]
