"""Trims a tokenizer so that its ids match a model trimmed by `methods.VocabularyTrimming`."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import MarianTokenizer, PreTrainedTokenizerFast

from hf_freeze.data.sentencepiece_model import keep_pieces

KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel")


def trim_tokenizer(tokenizer: Any, keep: Sequence[int]) -> Any:
    """A tokenizer of the same class with only the tokens whose ids are in `keep`, renumbered 0, 1, … in this order.

        trimming = analysis.choose_vocabulary(tokenizer, texts, coverage=0.999)
        model = make_variant(model, [trimming])
        tokenizer = data.trim_tokenizer(tokenizer, trimming.keep)

    Text that consists of kept pieces is split as before, if `keep` also has the pieces that merge into a kept piece (BPE) or the
    single characters of kept pieces (other kinds); `analysis.choose_vocabulary` ensures both. Other text is split into smaller
    kept pieces if there are any.

    Fast tokenizers of the kinds in `KINDS` can be trimmed, and `MarianTokenizer` with one vocabulary for both languages. For
    Marian, both vocab.json and the two sentencepiece models are trimmed: with untrimmed models, rare words would become unknown
    tokens instead of several smaller pieces.

    Raises ValueError for a tokenizer of another kind; for ids that the tokenizer lacks, that repeat or that do not ascend; and if
    `keep` lacks a special token.
    """
    check_kind(tokenizer)
    vocabulary = tokenizer.get_vocab()
    new_ids = _new_ids(keep, vocabulary)
    required = {str(tokenizer.convert_ids_to_tokens(token)): token for token in tokenizer.all_special_ids}
    required |= special_tokens(tokenizer)
    for token, old_id in required.items():
        if old_id not in new_ids:
            raise ValueError(f"trim_tokenizer: keep lacks the id {old_id} of the special token {token!r}")
    folder = Path(tempfile.mkdtemp(prefix="hf_freeze_tokenizer_"))
    # A MarianTokenizer reads its files again when it is copied or pickled, so they must exist until the process ends.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    _edit(folder / "tokenizer_config.json", _trim_config, new_ids)
    if isinstance(tokenizer, MarianTokenizer):
        _edit(folder / "vocab.json", _trim_vocabulary, new_ids)
        pieces = {token for token, old_id in vocabulary.items() if old_id in new_ids}
        for path in folder.glob("*.spm"):
            path.write_bytes(keep_pieces(path.read_bytes(), pieces))
    else:
        _edit(folder / "tokenizer.json", _trim_backend, new_ids)
    trimmed = type(tokenizer).from_pretrained(folder)
    trimmed.name_or_path = tokenizer.name_or_path
    _check_new_ids(tokenizer, trimmed, new_ids)
    return trimmed


def check_kind(tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer that cannot be trimmed."""
    description = type(tokenizer).__name__
    if isinstance(tokenizer, MarianTokenizer):
        if not tokenizer.separate_vocabs:
            return
        description += " with two vocabularies"
    elif isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer.backend_tokenizer.model).__name__
        if kind in KINDS:
            return
        description += f" of kind {kind}"
    raise ValueError(
        f"a {description} cannot be trimmed; fast tokenizers of {', '.join(KINDS)} can, and MarianTokenizer with one vocabulary"
    )


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """{token: id} of the tokens that the tokenizer inserts itself: for unknown text, by templates and as padding."""
    if isinstance(tokenizer, MarianTokenizer):
        return {}
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model, specials = data["model"], {}
    if model["type"] == "Unigram":
        if model["unk_id"] is not None:
            specials[model["vocab"][model["unk_id"]][0]] = model["unk_id"]
    elif model["unk_token"] in model["vocab"]:
        specials[model["unk_token"]] = model["vocab"][model["unk_token"]]
    for processor in _processors(data["post_processor"]):
        for special in processor.get("special_tokens", {}).values():
            specials |= dict(zip(special["tokens"], special["ids"], strict=True))
        specials |= dict(processor[end] for end in ("sep", "cls") if end in processor)
    if data["padding"]:
        specials[data["padding"]["pad_token"]] = data["padding"]["pad_id"]
    return specials


def _new_ids(keep: Sequence[int], vocabulary: Mapping[str, int]) -> dict[int, int]:
    """{old id: new id}"""
    keep = list(keep)
    if not keep or any(type(old_id) is not int for old_id in keep) or keep != sorted(set(keep)):
        raise ValueError("trim_tokenizer: keep must list at least one id, as distinct integers in ascending order")
    known = set(vocabulary.values())
    for old_id in keep:
        if old_id not in known:
            raise ValueError(f"trim_tokenizer: keep has the id {old_id}; the tokenizer has 0..{max(known)}")
    return {old_id: new_id for new_id, old_id in enumerate(keep)}


def _edit(path: Path, trim: Callable[[Any, Mapping[int, int]], Any], new_ids: Mapping[int, int]) -> None:
    data = trim(json.loads(path.read_text(encoding="utf-8")), new_ids)
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def _trim_vocabulary(vocab: Mapping[str, int], new_ids: Mapping[int, int]) -> dict[str, int]:
    return {token: new_ids[old_id] for token, old_id in vocab.items() if old_id in new_ids}


def _trim_config(config: dict[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    if "added_tokens_decoder" in config:
        added = config["added_tokens_decoder"].items()
        config["added_tokens_decoder"] = {str(new_ids[int(n)]): token for n, token in added if int(n) in new_ids}
    return config


def _trim_backend(data: dict[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """The content of tokenizer.json (https://huggingface.co/docs/tokenizers), trimmed."""
    model = data["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for old_id, entry in enumerate(model["vocab"]) if old_id in new_ids]
        if model["unk_id"] is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
    else:
        vocab = model["vocab"] = _trim_vocabulary(model["vocab"], new_ids)
        if model["type"] == "BPE":
            model["merges"] = [[*pair] for pair, piece in merges(model) if {*pair, piece} <= vocab.keys()]
    data["added_tokens"] = [
        token | {"id": new_ids[token["id"]]} for token in data["added_tokens"] if token["id"] in new_ids
    ]
    for processor in _processors(data["post_processor"]):
        for special in processor.get("special_tokens", {}).values():
            special["ids"] = [new_ids[old_id] for old_id in special["ids"]]
        for end in ("sep", "cls"):
            if end in processor:
                processor[end][1] = new_ids[processor[end][1]]
    if data["padding"]:
        data["padding"]["pad_id"] = new_ids[data["padding"]["pad_id"]]
    return data


def merges(model: Mapping[str, Any]) -> list[tuple[tuple[str, str], str]]:
    """((left, right), merged piece) of each merge rule of a BPE model, in order."""
    prefix = len(model["continuing_subword_prefix"] or "")
    return [((left, right), left + right[prefix:]) for left, right in model["merges"]]


def _processors(processor: Any) -> list[Any]:
    """The basic post-processors of `processor`, which may be a sequence or None."""
    if processor is None:
        return []
    if "processors" not in processor:
        return [processor]
    return [inner for part in processor["processors"] for inner in _processors(part)]


def _check_new_ids(old: Any, new: Any, new_ids: Mapping[int, int]) -> None:
    trimmed = f"the trimmed {type(new).__name__}"
    for old_id, new_id in new_ids.items():
        token, actual = old.convert_ids_to_tokens(old_id), new.convert_ids_to_tokens(new_id)
        if token != actual:
            raise ValueError(
                f"trim_tokenizer: {token!r} should get the id {new_id}, but {trimmed} gives it to {actual!r}, because added "
                "tokens lie between other tokens"
            )
    if len(new) != len(new_ids):
        raise ValueError(f"trim_tokenizer: {trimmed} has {len(new)} tokens, but keep has {len(new_ids)}")
