"""Writes a smaller copy of a model for some texts: fewer tokens, a tokenizer that matches, and a card with before and after."""

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_freeze import surgery
from hf_freeze._version import __version__
from hf_freeze.analysis import choose_vocabulary, trimming_effect
from hf_freeze.analysis.accounting import count_parameters, stored_bytes
from hf_freeze.analysis.vocabulary import CHARACTERS
from hf_freeze.architectures.base import read
from hf_freeze.architectures.examples import probe_inputs
from hf_freeze.architectures.registry import architecture_for, architecture_of
from hf_freeze.compat.pipelines import max_positions
from hf_freeze.data.trimming import check_kind, trim_tokenizer
from hf_freeze.io import holds_files, whole_folder
from hf_freeze.methods import VocabularyTrimming
from hf_freeze.methods.checks import check_choice, check_positive_share
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.loading import check_exists, load_model, load_tokenizer
from hf_freeze.model.make import make_variant
from hf_freeze.model.running import without_cache
from hf_freeze.model.token_ids import fixed_token_ids, named_token_ids
from hf_freeze.publish.cards import TRIMMING, model_card, read_trained_model
from hf_freeze.publish.sentence_files import copy_sentence_files

_COMPARED = 16  # texts whose hidden states are compared
_LENGTH = 64  # tokens of each that are compared, at most
_TOLERANCE = 1e-4  # of the largest hidden state
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")


def trim_model(
    source: str | os.PathLike[str],
    texts: Iterable[str],
    *,
    out: str | os.PathLike[str],
    coverage: float = 0.999,
    size: int | None = None,
    targets: Iterable[str] = (),
    characters: str = "all",
    files: Sequence[str] = (),
    force: bool = False,
    counts: np.ndarray | None = None,
    say: Callable[[str], Any] = lambda text: None,
) -> Path:
    """Write the model of a directory or Hub id with only the tokens that `texts` need, and its tokenizer; returns `out`.

    Kept are the most frequent tokens that cover the share `coverage` of all occurrences in the texts, or at most `size` tokens if
    that is given, and those that `analysis.choose_vocabulary` always keeps; `characters` and `targets` are its settings. Texts
    whose tokens are all kept have the same ids as before, only renumbered, and the model computes the same for them. Other text
    is split into smaller tokens. A native model stays native; a variant keeps its methods. The matrices of token tables, tied or
    not, the output matrix and its bias get smaller.

    The folder also gets a card and a record of the sizes before and after. `files`: names of the files that the texts are from,
    for the card. `texts` and `targets` are read several times. `counts`: what `analysis.count_tokens` gave for many texts. They
    choose the tokens then, and `texts` may be a sample on which both tokenizers are compared. An earlier result of this function
    in `out` is replaced with `force`; anything else never is. `say` is called with a message before each slow step.

    Raises ValueError for a source without a model or tokenizer, a tokenizer that cannot be trimmed, texts without a token, a
    coverage outside (0, 1], unknown `characters`, a model whose vocabulary cannot be trimmed or that computes something else
    afterwards, and an `out` that must not be replaced.
    """
    check_positive_share(coverage, "trim_model", "coverage")
    check_choice(characters, CHARACTERS, "trim_model", "characters")
    folder = Path(out)
    if holds_files(folder, source):
        if not (folder / TRIMMING).is_file():
            raise ValueError(f"{folder} exists, and hf-freeze trim did not write it; choose another --out")
        if not force:
            raise ValueError(
                f"{folder} holds an earlier result of hf-freeze trim; choose another --out, or use --force"
            )
    check_exists(source)
    if Path(source).is_dir() and not Path(source, "config.json").is_file():
        raise ValueError(f"{source} holds no model: it has no config.json")
    say(f"reading {source}")
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise ValueError(f"{source} holds no tokenizer; save it beside the model, since both are trimmed together")
    check_kind(tokenizer)
    model = load_model(source).eval()
    say("counting the tokens of the texts")
    chosen = choose_vocabulary(
        copy.deepcopy(tokenizer),
        texts,
        targets=targets,
        size=size,
        coverage=coverage if size is None else None,
        characters=characters,
        always=named_tokens(model),
        counts=counts,
    )
    chosen.check(architecture_of(model.config), model.config)
    trimmed = trim_tokenizer(tokenizer, chosen.keep)
    say(f"keeping {len(chosen.keep):,} of {len(tokenizer):,} tokens; splitting the texts with both tokenizers")
    before = {"tokens": len(tokenizer)} | _sizes(model)
    # Calls change how a tokenizer pads and truncates, which is saved with it.
    tokenizers = copy.deepcopy(tokenizer), copy.deepcopy(trimmed)
    effect = trimming_effect(*tokenizers, chosen.keep, texts, targets=targets)
    small, compared, difference = _trimmed_model(model, tokenizers, chosen, texts, say)
    record = {
        "hf_freeze_version": __version__,
        "base_model": _hub_id(source),
        "files": list(files),
        "coverage": coverage if size is None else effect.covered / effect.tokens_before,
        "characters": characters,
        "before": before,
        "after": {"tokens": len(trimmed)} | _sizes(small),
        "texts": asdict(effect),
        "compared": compared,
        "largest_difference": difference,
    }
    with whole_folder(folder) as written:
        small.save_pretrained(written)
        trimmed.save_pretrained(written)
        copy_sentence_files(source, written)
        (written / TRIMMING).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        model_card(read_trained_model(written), model=small).save(written / "README.md")
    return folder


def _trimmed_model(
    model: Any, tokenizers: tuple[Any, Any], chosen: VocabularyTrimming, texts: Iterable[str], say: Callable[[str], Any]
) -> tuple[Any, int, float]:
    """(the model, how many texts it was compared on, the largest difference of hidden states); `tokenizers`: before and after.

    Raises ValueError if it computes something else."""
    compared = list(islice(_covered(*tokenizers, chosen.keep, texts, _length(model.config)), _COMPARED))
    expected = [_hidden_states(model, ids) for ids, _ in compared]
    say("trimming the model")
    is_variant = isinstance(model, VariantMixin)
    small = make_variant(model, [chosen], copy=False)
    small = (small if is_variant else small.merge(copy=False)).eval()
    largest = 0.0
    for states, (_, ids) in zip(expected, compared, strict=True):
        difference = float((_hidden_states(small, ids).float() - states.float()).abs().max())
        limit = _TOLERANCE * float(states.float().abs().max())
        if not difference <= limit:
            raise ValueError(
                f"the trimmed model computes something else: hidden states differ by {difference:.2g}, the limit is {limit:.2g}"
            )
        largest = max(largest, difference)
    return small, len(compared), largest


def named_tokens(model: Any) -> set[int]:
    """The tokens that must stay: those that the config and the generation settings name, and all up to one that must keep its
    number."""
    vocabulary = min(read(model.config, field) for field in architecture_of(model.config).token_tables.values())
    settings = [model.config, *([model.generation_config] if getattr(model, "generation_config", None) else [])]
    fixed = max(fixed_token_ids(model.config).values(), default=-1)
    return set(range(fixed + 1)).union(*(named_token_ids(each, vocabulary) for each in settings))


def _length(config: Any) -> int:
    """The number of tokens of a text that are compared. Some models have fewer positions than their config says, since the first
    ones are for padding, so half of them are used at most."""
    limits = [max_positions(config, side) for side in ("encoder", "decoder")]
    return min([_LENGTH, *(limit // 2 for limit in limits if limit is not None)])


def _covered(
    old: Any, new: Any, keep: Sequence[int], texts: Iterable[str], length: int
) -> Iterable[tuple[list[int], list[int]]]:
    """(ids before, ids after) of the texts that are only renumbered, with special tokens, at most `length` of each."""
    for text in texts:
        before, after = (tokenizer(text, verbose=False)["input_ids"][:length] for tokenizer in (old, new))
        if before and [keep[token] for token in after] == before:
            yield before, after


def _sizes(model: Any) -> dict[str, int]:
    """Parameters of all, bytes of the matrices with a row per token (tied ones count once), bytes in the file."""
    modules = surgery.vocabulary_modules(model, architecture_for(model)).values()
    weights = {id(module.weight): module.weight for module in modules if hasattr(module, "weight")}
    return {
        "parameters": count_parameters(model).total,
        "table_bytes": sum(weight.nbytes for weight in weights.values()),
        "stored_bytes": stored_bytes(model),
    }


@torch.no_grad()
def _hidden_states(model: Any, ids: list[int]) -> torch.Tensor:
    """(1, T, D) of the last layer, for one text; an encoder-decoder reads it on both sides."""
    inputs = probe_inputs(model.config, model.base_model)
    others = {name: value[:1] for name, value in inputs.items() if not name.endswith(("input_ids", "attention_mask"))}
    read_by = [name for name in inputs if name.endswith("input_ids")]
    with without_cache(model):
        return model.base_model(**others, **dict.fromkeys(read_by, torch.tensor([ids])))[0]


def _hub_id(source: str | os.PathLike[str]) -> str | None:
    name = os.fspath(source)
    return name if not Path(name).exists() and _HUB_ID.fullmatch(name) else None
