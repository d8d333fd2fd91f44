"""Choose the tokens to keep from their counts in a corpus."""

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers
from transformers import MarianTokenizer

from hf_freeze import methods
from hf_freeze.data.trimming import check_kind, merges, special_tokens
from hf_freeze.methods.checks import check_choice, check_one_given, check_positive_share

CHARACTERS = ("occurring", "all")
_BATCH_SIZE = 1000  # texts
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def choose_vocabulary(
    tokenizer: Any,
    texts: Iterable[str],
    *,
    targets: Iterable[str] = (),
    size: int | None = None,
    coverage: float | None = None,
    characters: str = "occurring",
    always: Iterable[int] = (),
    counts: np.ndarray | None = None,
) -> methods.VocabularyTrimming:
    """Keep the tokens that occur most often in `texts`: at most `size` tokens, or as many as cover the share `coverage` of all
    occurrences (1: every token that occurs).

        trimming = analysis.choose_vocabulary(tokenizer, texts, coverage=0.999)
        model = make_variant(model, [trimming])
        tokenizer = data.trim_tokenizer(tokenizer, trimming.keep)

    Some tokens are always kept: special and added tokens, language codes, the byte alphabet or byte tokens if the tokenizer has
    them, single characters, so that other text can be spelled, for each kept BPE token those that merge into it, the least
    probable token of a Unigram model, which decides what an unknown character costs, and the ids in `always`. `characters`:
    "occurring" in the texts, or "all" of the vocabulary, so that text in other scripts can be spelled as well. `targets`: texts
    of the target language, for tokenizers with a separate model for it, such as `MarianTokenizer`. `counts`: what `count_tokens`
    gave for texts and targets, which are then not read.

    Raises ValueError for a tokenizer that cannot be trimmed, for texts without a token, both or neither of size and coverage, a
    size below the number of tokens that are always kept or above the vocabulary, a coverage outside (0, 1], and unknown
    `characters`.
    """
    check_choice(characters, CHARACTERS, "choose_vocabulary", "characters")
    check_one_given("choose_vocabulary", size=size, coverage=coverage)
    if coverage is not None:
        check_positive_share(coverage, "choose_vocabulary", "coverage")
    check_kind(tokenizer)
    vocabulary = tokenizer.get_vocab()
    occurrences = _count(tokenizer, texts, targets) if counts is None else _as_counter(counts)
    parents = _parents(tokenizer)
    spelled = vocabulary.values() if characters == "all" else occurrences
    kept = _closure(_needed(tokenizer, vocabulary, spelled) | set(always), parents)
    if size is not None and (type(size) is not int or not len(kept) <= size <= len(vocabulary)):
        raise ValueError(
            f"choose_vocabulary(size={size!r}): must be in {len(kept)}..{len(vocabulary)}: special tokens and characters need "
            f"{len(kept)}, and the tokenizer has {len(vocabulary)}"
        )
    total = sum(occurrences.values())
    covered = sum(occurrences[token] for token in kept)
    for token, _ in sorted(occurrences.items(), key=lambda item: (-item[1], item[0])):
        if coverage is not None and covered >= coverage * total:
            break
        added = _closure({token}, parents) - kept
        if size is None or len(kept) + len(added) <= size:
            kept |= added
            covered += sum(occurrences[part] for part in added)
    return methods.VocabularyTrimming(keep=sorted(kept))


def count_tokens(tokenizer: Any, texts: Iterable[str], *, targets: Iterable[str] = ()) -> np.ndarray:
    """int64 (V,): the number of occurrences of each id in `texts`, without added special tokens; V is `len(tokenizer)`.

    `targets`: as for `choose_vocabulary`. Raises ValueError for a string instead of a list of strings, and for texts without a
    token.
    """
    counts = _count(tokenizer, texts, targets)
    array = np.zeros(max(len(tokenizer), max(counts) + 1), dtype=np.int64)
    array[list(counts)] = list(counts.values())
    return array


@dataclass(frozen=True, kw_only=True)
class TrimmingEffect:
    """What a trimmed tokenizer does to texts. Added special tokens do not count."""

    texts: int
    renumbered: int  # texts that have the ids of before, only renumbered
    tokens_before: int
    tokens_after: int
    covered: int  # of tokens_before, those that are kept
    unknown_before: int  # texts with an unknown token
    unknown_after: int


def trimming_effect(
    tokenizer: Any, trimmed: Any, keep: Sequence[int], texts: Iterable[str], *, targets: Iterable[str] = ()
) -> TrimmingEffect:
    """Compare `trimmed`, which is `data.trim_tokenizer(tokenizer, keep)`, with `tokenizer` on texts.

    `targets`: as for `choose_vocabulary`. Raises ValueError for a string instead of a list of strings, and for texts without a
    token.
    """
    totals: Counter[str] = Counter()
    kept = set(keep)
    for target, batch in _batches_of(texts, targets):
        for old, new in zip(_ids(tokenizer, batch, target), _ids(trimmed, batch, target), strict=True):
            totals["texts"] += 1
            totals["renumbered"] += [keep[token] for token in new] == old
            totals["tokens_before"] += len(old)
            totals["tokens_after"] += len(new)
            totals["covered"] += sum(token in kept for token in old)
            totals["unknown_before"] += _unknown(tokenizer) in old
            totals["unknown_after"] += _unknown(trimmed) in new
    if not totals["tokens_before"]:
        raise ValueError("the texts hold no token")
    return TrimmingEffect(**{field: totals[field] for field in TrimmingEffect.__dataclass_fields__})


def _unknown(tokenizer: Any) -> int | None:
    """The id of the unknown token; None if the tokenizer has none of its own."""
    unknown = tokenizer.unk_token_id
    return None if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) else unknown


def _count(tokenizer: Any, texts: Iterable[str], targets: Iterable[str]) -> Counter[int]:
    """Id -> number of occurrences, without added special tokens."""
    counts: Counter[int] = Counter()
    for ids in token_batches(tokenizer, texts, targets):
        counts.update(itertools.chain.from_iterable(ids))
    if not counts:
        raise ValueError("the texts hold no token")
    return counts


def token_batches(tokenizer: Any, texts: Iterable[str], targets: Iterable[str]) -> Iterator[list[list[int]]]:
    """The ids of some texts at a time, without added special tokens. Raises ValueError for a string instead of texts."""
    yield from (_ids(tokenizer, batch, target) for target, batch in _batches_of(texts, targets))


def _as_counter(counts: np.ndarray) -> Counter[int]:
    return Counter({int(token): int(counts[token]) for token in np.flatnonzero(counts)})


def _ids(tokenizer: Any, batch: list[str], target: bool) -> list[list[int]]:
    settings = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return tokenizer(**{"text_target" if target else "text": batch}, **settings)["input_ids"]


def _batches_of(texts: Iterable[str], targets: Iterable[str]) -> Iterator[tuple[bool, list[str]]]:
    """(whether they are targets, some texts)"""
    if isinstance(texts, str) or isinstance(targets, str):
        raise ValueError("texts and targets are lists of strings, not a string")
    yield from ((False, batch) for batch in _batches(texts))
    yield from ((True, batch) for batch in _batches(targets))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    datasets = sys.modules.get("datasets")  # it need not be installed
    if datasets is not None and isinstance(texts, datasets.arrow_dataset.Column):
        # A slice takes a tenth of the time of its rows one by one.
        column: Any = texts
        yield from (column[start : start + _BATCH_SIZE] for start in range(0, len(column), _BATCH_SIZE))
        return
    texts = iter(texts)
    while batch := list(itertools.islice(texts, _BATCH_SIZE)):
        yield batch


def _needed(tokenizer: Any, vocabulary: Mapping[str, int], spelled: Iterable[int]) -> set[int]:
    """The ids that are always kept, without merge parents. `spelled`: ids whose characters are kept as tokens."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *special_tokens(tokenizer).values()}
    special |= {number for token, number in vocabulary.items() if _BYTE.fullmatch(token)}
    tokens = tokenizer.convert_ids_to_tokens([token for token in spelled if token not in special])
    characters = set(itertools.chain.from_iterable(tokens))
    prefix = suffix = ""
    if isinstance(tokenizer, MarianTokenizer):
        special |= {vocabulary[code] for code in tokenizer.supported_language_codes}
        least = {_least_probable(model) for model in (tokenizer.spm_source, tokenizer.spm_target)}
        special |= {vocabulary[piece] for piece in least if piece in vocabulary}
    else:
        data = json.loads(tokenizer.backend_tokenizer.to_str())
        if data["model"]["type"] == "Unigram":
            scores = [score for _, score in data["model"]["vocab"]]
            special.add(scores.index(min(scores)))
        prefix = data["model"].get("continuing_subword_prefix") or ""
        suffix = data["model"].get("end_of_word_suffix") or ""
        if '"ByteLevel"' in json.dumps(data["pre_tokenizer"]):
            characters |= set(pre_tokenizers.ByteLevel.alphabet())
    forms = {form for c in characters for form in (c, prefix + c, c + suffix, prefix + c + suffix)}
    return special | {vocabulary[form] for form in forms if form in vocabulary}


def _least_probable(model: Any) -> str:
    """The piece of a sentencepiece model whose score its penalty for unknown characters depends on."""
    numbers = [n for n in range(len(model)) if not (model.is_control(n) or model.is_unknown(n) or model.is_unused(n))]
    return model.id_to_piece(min(numbers, key=model.get_score))


def _parents(tokenizer: Any) -> dict[int, set[int]]:
    """Id -> the ids that merge into it, for BPE; empty for other tokenizers."""
    if isinstance(tokenizer, MarianTokenizer):
        return {}
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    parents: dict[int, set[int]] = {}
    if model["type"] == "BPE":
        vocab = model["vocab"]
        for pair, piece in merges(model):
            parents.setdefault(vocab[piece], set()).update(vocab[part] for part in pair)
    return parents


def _closure(tokens: set[int], parents: Mapping[int, set[int]]) -> set[int]:
    """The tokens and all that merge into them, directly or not."""
    closure, waiting = set(tokens), list(tokens)
    while waiting:
        new = parents.get(waiting.pop(), set()) - closure
        closure |= new
        waiting += new
    return closure


def word_continuations(tokenizer: Any) -> list[int]:
    """Ids of the tokens that continue a word, for `FixedAttention(unit="word")`. In WordPiece they begin with `##`; in tokenizers
    that mark the start of a word (`▁`, or `Ġ` in byte-level BPE) they lack the mark. Special and added tokens are words of their
    own.

    Raises ValueError for a tokenizer that marks neither.
    """
    whole = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    tokens = {number: token for token, number in tokenizer.get_vocab().items() if number not in whole}
    if any(token.startswith("##") for token in tokens.values()):
        return sorted(number for number, token in tokens.items() if token.startswith("##"))
    for mark in ("\u2581", "\u0120"):
        if any(token.startswith(mark) for token in tokens.values()):
            return sorted(number for number, token in tokens.items() if not token.startswith(mark))
    raise ValueError(
        f"this {type(tokenizer).__name__} marks neither the start of a word (▁, Ġ) nor its continuation (##)"
    )
