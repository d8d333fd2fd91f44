"""Which tokens a corpus needs."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers
from transformers import MarianTokenizer

from hf_freeze import methods
from hf_freeze.data.trimming import check_kind, merges, special_tokens

_AT_ONCE = 1000  # texts
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def choose_vocabulary(
    tokenizer: Any,
    texts: Iterable[str],
    *,
    targets: Iterable[str] = (),
    size: int | None = None,
    coverage: float | None = None,
) -> methods.VocabularyTrimming:
    """Keep the tokens that occur most often in `texts`: at most `size`, or as many as it takes to cover this share of all
    occurrences, 1 for every token that occurs.

        trimming = analysis.choose_vocabulary(tokenizer, texts, coverage=0.999)
        model = make_variant(model, [trimming])
        tokenizer = data.trim_tokenizer(tokenizer, trimming.keep)

    Kept in any case: special and added tokens, language codes, the byte alphabet or byte tokens where the tokenizer has them, and
    the single characters that occur, so that other text can be spelled; and for each token of BPE, those that merge into it.
    `targets`: texts of the other language, where the tokenizer splits that by a model of its own, as `MarianTokenizer` does.

    Raises ValueError for a tokenizer that cannot be trimmed, without text, for both or neither of size and coverage, a size below
    what is kept in any case or above the vocabulary, and a coverage outside (0, 1].
    """
    if (size is None) == (coverage is None):
        raise ValueError(f"choose_vocabulary(size={size!r}, coverage={coverage!r}): give one of them")
    number = isinstance(coverage, int | float) and not isinstance(coverage, bool)
    if coverage is not None and not (number and 0 < coverage <= 1):
        raise ValueError(f"choose_vocabulary(coverage={coverage!r}): must be a share in (0, 1]")
    check_kind(tokenizer)
    vocabulary = tokenizer.get_vocab()
    counts = _count(tokenizer, texts, targets)
    parents = _parents(tokenizer)
    kept = _closure(_needed(tokenizer, vocabulary, counts), parents)
    if size is not None and (type(size) is not int or not len(kept) <= size <= len(vocabulary)):
        raise ValueError(
            f"choose_vocabulary(size={size!r}): must be in {len(kept)}..{len(vocabulary)}: special tokens and characters need "
            f"{len(kept)}, and the tokenizer has {len(vocabulary)}"
        )
    total = sum(counts.values())
    covered = sum(counts[token] for token in kept)
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if coverage is not None and covered >= coverage * total:
            break
        added = _closure({token}, parents) - kept
        if size is None or len(kept) + len(added) <= size:
            kept |= added
            covered += sum(counts[each] for each in added)
    return methods.VocabularyTrimming(keep=sorted(kept))


def count_tokens(tokenizer: Any, texts: Iterable[str], *, targets: Iterable[str] = ()) -> np.ndarray:
    """int64 (V,): how often each id occurs in `texts`, without special tokens added; V is `len(tokenizer)`.

    `targets`: as for `choose_vocabulary`. Raises ValueError for a string instead of a list of them, and without any token.
    """
    counts = _count(tokenizer, texts, targets)
    found = np.zeros(max(len(tokenizer), max(counts) + 1), dtype=np.int64)
    found[list(counts)] = list(counts.values())
    return found


def _count(tokenizer: Any, texts: Iterable[str], targets: Iterable[str]) -> Counter[int]:
    """Id -> how often it occurs; no special token is added."""
    if isinstance(texts, str) or isinstance(targets, str):
        raise ValueError("texts and targets are lists of strings, not a string")
    settings = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    counts: Counter[int] = Counter()
    for batch in _batches(texts):
        counts.update(itertools.chain.from_iterable(tokenizer(batch, **settings)["input_ids"]))
    for batch in _batches(targets):
        counts.update(itertools.chain.from_iterable(tokenizer(text_target=batch, **settings)["input_ids"]))
    if not counts:
        raise ValueError("the texts hold no token")
    return counts


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while batch := list(itertools.islice(texts, _AT_ONCE)):
        yield batch


def _needed(tokenizer: Any, vocabulary: Mapping[str, int], counts: Mapping[int, int]) -> set[int]:
    """The ids without which the tokenizer would not be complete."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *special_tokens(tokenizer).values()}
    special |= {number for token, number in vocabulary.items() if _BYTE.fullmatch(token)}
    occurring = tokenizer.convert_ids_to_tokens([token for token in counts if token not in special])
    characters = set(itertools.chain.from_iterable(occurring))
    prefix = suffix = ""
    if isinstance(tokenizer, MarianTokenizer):
        special |= {vocabulary[code] for code in tokenizer.supported_language_codes}
    else:
        data = json.loads(tokenizer.backend_tokenizer.to_str())
        prefix = data["model"].get("continuing_subword_prefix") or ""
        suffix = data["model"].get("end_of_word_suffix") or ""
        if '"ByteLevel"' in json.dumps(data["pre_tokenizer"]):
            characters |= set(pre_tokenizers.ByteLevel.alphabet())
    forms = {form for c in characters for form in (c, prefix + c, c + suffix, prefix + c + suffix)}
    return special | {vocabulary[form] for form in forms if form in vocabulary}


def _parents(tokenizer: Any) -> dict[int, set[int]]:
    """Id -> the ids that merge into it, of BPE."""
    if isinstance(tokenizer, MarianTokenizer):
        return {}
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    found: dict[int, set[int]] = {}
    if model["type"] == "BPE":
        vocab = model["vocab"]
        for pair, piece in merges(model):
            found.setdefault(vocab[piece], set()).update(vocab[part] for part in pair)
    return found


def _closure(tokens: set[int], parents: Mapping[int, set[int]]) -> set[int]:
    """The tokens and all that merge into them."""
    found, waiting = set(tokens), list(tokens)
    while waiting:
        new = parents.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def word_continuations(tokenizer: Any) -> list[int]:
    """Ids of the tokens that go on with the word before them, for `FixedAttention(unit="word")`: of WordPiece those that begin
    with `##`; of tokenizers that mark the start of a word (`▁`, or `Ġ` in byte-level BPE) those without the mark. Special and
    added tokens are words of their own.

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
