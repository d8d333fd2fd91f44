"""A tokenizer of fewer tokens, whose ids are those of a model that `methods.VocabularyTrimming` has trimmed alike."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import MarianTokenizer, PreTrainedTokenizerFast

from hf_freeze.data.sentencepiece_model import keep_pieces

KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel")


def trim_tokenizer(tokenizer: Any, keep: Sequence[int]) -> Any:
    """A tokenizer of the same class with only the tokens of the ids `keep`, numbered 0, 1, … in this order.

        trimming = analysis.choose_vocabulary(tokenizer, texts, coverage=0.999)
        model = make_variant(model, [trimming])
        tokenizer = data.trim_tokenizer(tokenizer, trimming.keep)

    Text of kept pieces is split as before: of BPE, where the pieces that merge into a kept one are kept too, of the others, where
    its single characters are, and `analysis.choose_vocabulary` sees to both. Other text is split into smaller pieces that are
    kept, where there are such. Fast tokenizers of the kinds in `KINDS` can be trimmed, and `MarianTokenizer` with one vocabulary
    for both languages: vocab.json loses its entries and both sentencepiece models lose their pieces, else rare words would become
    unknown instead of several smaller pieces.

    Raises ValueError for a tokenizer of another kind, for ids that it does not have, that are repeated or not in ascending order,
    and without a special token.
    """
    check_kind(tokenizer)
    vocabulary = tokenizer.get_vocab()
    numbers = _numbers(keep, vocabulary)
    needed = {str(tokenizer.convert_ids_to_tokens(token)): token for token in tokenizer.all_special_ids}
    needed |= special_tokens(tokenizer)
    for token, number in needed.items():
        if number not in numbers:
            raise ValueError(f"trim_tokenizer: keep lacks the id {number} of the special token {token!r}")
    folder = Path(tempfile.mkdtemp(prefix="hf_freeze_tokenizer_"))
    try:
        tokenizer.save_pretrained(folder)
        _edit(folder / "tokenizer_config.json", lambda config: _trim_config(config, numbers))
        if isinstance(tokenizer, MarianTokenizer):
            # It reads its models again whenever it is copied or sent to another process: the files stay until the end.
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            _edit(folder / "vocab.json", lambda vocab: _kept(vocab, numbers))
            pieces = {token for token, number in vocabulary.items() if number in numbers}
            for path in folder.glob("*.spm"):
                path.write_bytes(keep_pieces(path.read_bytes(), pieces))
        else:
            _edit(folder / "tokenizer.json", lambda data: _trim_backend(data, numbers))
        trimmed = type(tokenizer).from_pretrained(folder)
    finally:
        if not isinstance(tokenizer, MarianTokenizer):
            shutil.rmtree(folder)
    trimmed.name_or_path = tokenizer.name_or_path
    _check_numbers(tokenizer, trimmed, numbers)
    return trimmed


def check_kind(tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer that cannot be trimmed."""
    what = type(tokenizer).__name__
    if isinstance(tokenizer, MarianTokenizer):
        if not tokenizer.separate_vocabs:
            return
        what += " with two vocabularies"
    elif isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer.backend_tokenizer.model).__name__
        if kind in KINDS:
            return
        what += f" of kind {kind}"
    raise ValueError(
        f"a {what} cannot be trimmed; fast tokenizers of {', '.join(KINDS)} can, and MarianTokenizer with one vocabulary"
    )


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Token -> id of those that it puts in by itself: for what it does not know, as a template or as padding."""
    if isinstance(tokenizer, MarianTokenizer):
        return {}
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model, found = data["model"], {}
    if model["type"] == "Unigram":
        if model["unk_id"] is not None:
            found[model["vocab"][model["unk_id"]][0]] = model["unk_id"]
    elif model["unk_token"] in model["vocab"]:
        found[model["unk_token"]] = model["vocab"][model["unk_token"]]
    for processor in _processors(data["post_processor"]):
        for special in processor.get("special_tokens", {}).values():
            found |= dict(zip(special["tokens"], special["ids"], strict=True))
        found |= dict(processor[end] for end in ("sep", "cls") if end in processor)
    if data["padding"]:
        found[data["padding"]["pad_token"]] = data["padding"]["pad_id"]
    return found


def _numbers(keep: Sequence[int], vocabulary: Mapping[str, int]) -> dict[int, int]:
    """Old id -> new id."""
    keep = list(keep)
    if not keep or any(type(token) is not int for token in keep) or keep != sorted(set(keep)):
        raise ValueError("trim_tokenizer: keep must hold different ids, at least one, as integers in ascending order")
    known = set(vocabulary.values())
    for token in keep:
        if token not in known:
            raise ValueError(f"trim_tokenizer: keep has the id {token}; the tokenizer has 0..{max(known)}")
    return {token: number for number, token in enumerate(keep)}


def _edit(path: Path, change: Any) -> None:
    data = change(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def _kept(vocab: Mapping[str, int], numbers: Mapping[int, int]) -> dict[str, int]:
    return {token: numbers[number] for token, number in vocab.items() if number in numbers}


def _trim_config(config: dict[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    if "added_tokens_decoder" in config:
        old = config["added_tokens_decoder"].items()
        config["added_tokens_decoder"] = {str(numbers[int(n)]): token for n, token in old if int(n) in numbers}
    return config


def _trim_backend(data: dict[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    """tokenizer.json: https://huggingface.co/docs/tokenizers."""
    model = data["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in numbers]
        if model["unk_id"] is not None:
            model["unk_id"] = numbers[model["unk_id"]]
    else:
        vocab = model["vocab"] = _kept(model["vocab"], numbers)
        if model["type"] == "BPE":
            model["merges"] = [[*pair] for pair, piece in merges(model) if {*pair, piece} <= vocab.keys()]
    data["added_tokens"] = [
        token | {"id": numbers[token["id"]]} for token in data["added_tokens"] if token["id"] in numbers
    ]
    for processor in _processors(data["post_processor"]):
        for special in processor.get("special_tokens", {}).values():
            special["ids"] = [numbers[number] for number in special["ids"]]
        for end in ("sep", "cls"):
            if end in processor:
                processor[end][1] = numbers[processor[end][1]]
    if data["padding"]:
        data["padding"]["pad_id"] = numbers[data["padding"]["pad_id"]]
    return data


def merges(model: Mapping[str, Any]) -> list[tuple[tuple[str, str], str]]:
    """((left, right), the piece that they become) of a BPE model, in their order."""
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    prefix = len(model["continuing_subword_prefix"] or "")
    return [((left, right), left + right[prefix:]) for left, right in pairs]


def _processors(processor: Any) -> list[Any]:
    """The post-processors within this one, which may be None."""
    if processor is None:
        return []
    return (
        [inner for each in processor["processors"] for inner in _processors(each)]
        if "processors" in processor
        else [processor]
    )


def _check_numbers(old: Any, new: Any, numbers: Mapping[int, int]) -> None:
    tokens = old.convert_ids_to_tokens(list(numbers))
    for token, number, found in zip(
        tokens, numbers.values(), new.convert_ids_to_tokens(list(numbers.values())), strict=True
    ):
        if token != found:
            raise ValueError(
                f"trim_tokenizer: {token!r} would have the id {number}, but a {type(new).__name__} gives that to {found!r}; "
                "its added tokens lie between others"
            )
    if len(new) != len(numbers):
        raise ValueError(f"trim_tokenizer: a {type(new).__name__} has {len(new)} tokens where {len(numbers)} are kept")
