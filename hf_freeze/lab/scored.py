"""How good saved and exported models of one task are on the same texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from hf_freeze.analysis.perplexity import window_losses
from hf_freeze.analysis.significance import compare
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.compat.pipelines import max_positions
from hf_freeze.compat.transformers import mapped_class
from hf_freeze.data.lines import decoded_lines
from hf_freeze.io import bytes_of
from hf_freeze.lab.recipes.recipe import Recipe
from hf_freeze.lab.tasks.items import bleu_items, log_perplexity
from hf_freeze.lab.tasks.labelled import columns_of
from hf_freeze.lab.tasks.registry import task_of
from hf_freeze.lab.tasks.scoring import SCORING
from hf_freeze.lab.training.decoding import most_new_tokens, translate
from hf_freeze.model.loading import check_exists, load_tokenizer
from hf_freeze.publish.export.ctranslate2 import CTranslate2Translator
from hf_freeze.publish.export.folders import mark_of
from hf_freeze.publish.export.llama_served import LlamaCppForward, LlamaCppTranslator

TASKS = ("translation", "sequence-classification")
_BATCH = 32
_WINDOW = 2048
SPLITS = ("test", "dev")


@dataclass(frozen=True, kw_only=True)
class Scored:
    """`score`: BLEU, accuracy in %, or perplexity. `to_first`: its difference from the first folder, and the ends of its 95 %
    interval by a paired bootstrap over the texts or windows; None for the first."""

    folder: Path
    bytes: int
    score: float
    to_first: tuple[float, float, float] | None


def score_folders(
    folders: Sequence[Path],
    recipe: Recipe,
    *,
    split: str = "test",
    say: Callable[[str], Any] = lambda line: None,
) -> tuple[str, int, list[Scored]]:
    """(what the score is called, number of texts, one `Scored` for each folder), on a split of the data of `recipe`, whose
    decoding they all use. Saved models answer in PyTorch, exported ones in their engine.

    Raises ValueError for an unknown split, a task other than translation and sequence classification, and a folder that is not
    there.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: choose from {list(SPLITS)}")
    if recipe.task not in TASKS:
        raise ValueError(f"task {recipe.task!r}: hf-freeze score is for {list(TASKS)}")
    for folder in folders:
        check_exists(str(folder))
    scoring, task = SCORING[recipe.task], task_of(recipe.task)
    texts = task.load(recipe.data)[split]  # type: ignore[union-attr]
    measured, results = [], []
    for folder in folders:
        say(f"{folder}: {len(texts):,} {scoring.item}")
        measured.append(items_of(folder, recipe.task, texts, recipe.decoding.given()))
        results.append(_scored(folder, measured, scoring.score))
    return scoring.name, len(texts), results


def score_windows(
    folders: Sequence[Path],
    text: Path,
    *,
    window: int | None = None,
    batch_size: int = 1,
    say: Callable[[str], Any] = lambda line: None,
) -> tuple[int, int, list[Scored]]:
    """(window, number of windows, one `Scored` for each folder): `analysis.window_perplexity` on a UTF-8 text file, which is
    tokenised as a whole. `window`: None is as many tokens as all models have positions for, at most 2,048.

    Raises ValueError for a folder that is not a causal language model, a window longer than its positions, tokenizers that split
    the text differently, since perplexity is per token, and a text shorter than two windows; FileNotFoundError.
    """
    configs = [language_model_config(folder, ("causal-lm",)) for folder in folders]
    limits = [max_positions(config.get_text_config(), "decoder") or _WINDOW for config in configs]
    window = min(_WINDOW, *limits) if window is None else window
    content, tokens, items, results = "".join(decoded_lines(text)), None, [], []
    for folder, limit in zip(folders, limits, strict=True):
        if window > limit:
            raise ValueError(f"window {window}: {folder} has {limit} positions")
        if (tokenizer := load_tokenizer(folder)) is None:
            raise ValueError(f"{folder}: no tokenizer there")
        ids = tokenizer(content, verbose=False)["input_ids"]
        tokens = tokens or tokenizer.convert_ids_to_tokens(ids)
        if tokenizer.convert_ids_to_tokens(ids) != tokens:
            raise ValueError(f"perplexity is per token, and {folder} splits {text} into other tokens than {folders[0]}")
        say(f"{folder}: {len(ids):,} tokens")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        losses = window_losses(model.to(device()), torch.tensor(ids), window, batch_size=batch_size).numpy()
        items.append(np.stack([losses, np.ones(len(losses))], axis=1))
        results.append(_scored(folder, items, perplexity))
    return window, len(items[0]), results


def _scored(folder: Path, measured: Sequence[np.ndarray], score: Callable[[np.ndarray], np.ndarray]) -> Scored:
    """`measured`: the items of each folder up to this one."""
    found = compare({"first": [measured[0]], "this": [measured[-1]]}, score)[0]
    return Scored(
        folder=folder,
        bytes=bytes_of(folder),
        score=float(score(measured[-1].sum(0))),
        to_first=(found.difference, found.low, found.high) if len(measured) > 1 else None,
    )


def language_model_config(folder: Path, tasks: Sequence[str]) -> Any:
    """The config of a saved model. Raises ValueError for an exported folder that transformers does not open, for that of a
    compression, and unless its class is that of one of these tasks; FileNotFoundError."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if (folder / "compressed.json").exists():
        raise ValueError(
            f"{folder} is the folder of a compression: give the model in it that compress has named as written"
        )
    if (kind := mark_of(folder).get("format")) not in (None, "compressed-tensors"):
        raise ValueError(f"{folder} is exported to {kind}: give the saved model or variant that it was made of")
    config = AutoConfig.from_pretrained(folder)
    classes = (mapped_class(AUTO_CLASSES[task], type(config)) for task in tasks)
    if not {model_class.__name__ for model_class in classes if model_class} & {*(config.architectures or ())}:
        raise ValueError(f"{folder} holds {config.architectures or 'no model'}: choose models of {' or '.join(tasks)}")
    return config


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def perplexity(sums: np.ndarray) -> np.ndarray:
    """(..., 2) sums of negative log-likelihoods in nats and of their numbers to (...) perplexity."""
    return np.exp(np.minimum(log_perplexity(sums), 700))


def items_of(folder: Path, task: str, split: Any, decoding: Mapping[str, Any]) -> np.ndarray:
    """What each example of `split` adds to the score, as the engine answers it: `bleu_items`, or (right, 1, class)."""
    if task == "translation":
        return bleu_items(translator_of(folder, decoding)(list(split["source"])), list(split["target"]))
    references = list(split["label"])
    right = np.equal(_classes(folder, split), references)
    return np.stack([right, np.ones(len(right)), references], axis=1).astype(np.int64)


def translator_of(folder: Path, decoding: Mapping[str, Any]) -> Callable[[list[str]], list[str]]:
    """What translates texts in the engine. Open once for several calls."""
    tokenizer = load_tokenizer(folder)
    kind = mark_of(folder).get("format")
    if kind not in ("ctranslate2", "gguf"):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        return lambda texts: translate(model, tokenizer, texts, **decoding)
    options = {"intra_threads": torch.get_num_threads()}
    translator = LlamaCppTranslator(folder) if kind == "gguf" else CTranslate2Translator(folder, **options)

    def translated(texts: list[str]) -> list[str]:
        longest = max(map(len, tokenizer(texts, truncation=True)["input_ids"]))
        settings = {"num_beams": decoding.get("num_beams", 1), "max_new_tokens": most_new_tokens(longest)}
        return [one["translation_text"] for one in translator(texts, truncation=True, **settings)]

    return translated


def _classes(folder: Path, split: Any) -> list[int]:
    """The numbers, in the data, of the classes that the engine answers."""
    tokenizer = load_tokenizer(folder)
    if mark_of(folder).get("format") == "gguf":
        model: Any = LlamaCppForward(folder, "sequence-classification")
        theirs = dict(enumerate(model.engine.labels()))
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        theirs = model.config.id2label
    columns, classes = columns_of(split), []
    with torch.inference_mode():
        for start in range(0, len(split), _BATCH):
            rows = split[start : start + _BATCH]
            inputs = tokenizer(*(rows[name] for name in columns), truncation=True, padding=True, return_tensors="pt")
            classes += model(**inputs)["logits"].argmax(-1).tolist()
    names = getattr(split.features["label"], "names", [])
    if theirs and set(names) == set(theirs.values()):  # the model may number the same classes in another order
        return [names.index(theirs[number]) for number in classes]
    return classes
