"""The tokens of a GGUF file: what llama.cpp needs to split texts as a tokenizer of transformers does.

llama.cpp has four kinds of tokenizers: BPE on bytes, as in GPT-2; BPE with bytes for unknown characters, as in Llama 2; Unigram;
and WordPiece. Each is told by `tokenizer.json`. Others are refused: they would split texts otherwise.
"""

import base64
import json
from typing import Any

from hf_freeze.publish.export.folders import require

_OTHER = "choose --format onnx, or use the tokens of the model with another tokenizer"
_LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_LLAMA_3: "llama-bpe", _LLAMA_3.replace("{1,3}", ""): "qwen2"}  # regular expression -> its name in llama.cpp


def add_tokens(writer: Any, tokenizer: Any, model: Any) -> None:
    """Tell the `writer` of a file the tokens of a model. Raises ValueError for a tokenizer that llama.cpp does not have."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"llama.cpp has no {type(tokenizer).__name__}, which has no tokenizer.json; {_OTHER}")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = described["model"]["type"]
    known = {"WordPiece": _add_word_pieces, "Unigram": _add_unigrams, "BPE": _add_pairs}
    if kind not in known:
        raise ValueError(f"llama.cpp has no tokenizer of the type {kind!r}; it has {', '.join(known)}; {_OTHER}")
    size = model.get_input_embeddings().num_embeddings
    known[kind](writer, described, _tokens(tokenizer, size), _types(tokenizer, described, size))
    _add_special(writer, tokenizer, kind)


def _tokens(tokenizer: Any, size: int) -> list[str]:
    """By id; those of the model that the tokenizer lacks get names that no text contains."""
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    return [names.get(i, f"[PAD{i}]") for i in range(size)]


def _types(tokenizer: Any, described: dict[str, Any], size: int) -> list[int]:
    types = require("gguf", "gguf").TokenType
    found = [int(types.UNUSED)] * size
    for token, i in tokenizer.get_vocab().items():
        if i < size:
            is_byte = described["model"].get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
            found[i] = int(types.BYTE if is_byte else types.NORMAL)
    for added in described["added_tokens"]:
        if added["id"] < size:
            found[added["id"]] = int(types.CONTROL if added["special"] else types.USER_DEFINED)
    if (unknown := tokenizer.unk_token_id) is not None and unknown < size:
        found[unknown] = int(types.UNKNOWN)
    return found


def _add_word_pieces(writer: Any, described: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    """llama.cpp marks the starts of words, transformers the other pieces."""
    if not (described["normalizer"] or {}).get("lowercase"):
        raise ValueError(f"llama.cpp makes all letters of WordPiece small, and this tokenizer does not; {_OTHER}")
    control = int(require("gguf", "gguf").TokenType.NORMAL)
    prefix = described["model"]["continuing_subword_prefix"]
    marked = [
        token if kind != control else token.removeprefix(prefix) if token.startswith(prefix) else f"▁{token}"
        for token, kind in zip(tokens, types, strict=True)
    ]
    _add(writer, "bert", "default", marked, types)


def _add_unigrams(writer: Any, described: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    scores = dict(enumerate(score for _, score in described["model"]["vocab"]))
    _add(writer, "t5", "default", tokens, types)
    writer.add_token_scores([scores.get(i, -1e4) for i in range(len(tokens))])
    writer.add_add_space_prefix(_marks_first(described))
    steps = _steps(described["normalizer"], "normalizers")
    kinds = [step["type"] for step in steps]
    writer.add_remove_extra_whitespaces("Strip" in kinds or any(" {2,}" in json.dumps(step) for step in steps))
    charsmap = next((step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled"), None)
    if charsmap:
        writer.add_precompiled_charsmap(base64.b64decode(charsmap))


def _add_pairs(writer: Any, described: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    """BPE, on bytes or on characters."""
    merges = [
        tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in described["model"]["merges"]
    ]
    if described["model"].get("byte_fallback"):
        scores = _scores(described["model"]["vocab"], merges)
        _add(writer, "llama", "default", tokens, types)
        writer.add_token_scores([scores.get(token, float(-len(merges))) for token in tokens])
        writer.add_add_space_prefix(_marks_first(described))
        return
    _add(writer, "gpt2", _split_of(described), tokens, types)
    writer.add_token_merges([" ".join(pair) for pair in merges])


def _scores(vocabulary: dict[str, int], merges: list[tuple[str, ...]]) -> dict[str, float]:
    """Token -> score. Of all neighbours whose characters together are a token, llama.cpp joins those whose token has the highest
    score; transformers joins the pairs that are listed, in their order. Raises ValueError where these differ."""
    pairs: dict[str, list[int]] = {}
    for place, pair in enumerate(merges):
        pairs.setdefault("".join(pair), []).append(place)
    for token, places in pairs.items():
        splits = {(token[:i], token[i:]) for i in range(1, len(token))}
        possible = {split for split in splits if split[0] in vocabulary and split[1] in vocabulary}
        if possible != {merges[place] for place in places} or places[-1] - places[0] >= len(places):
            raise ValueError(
                f"llama.cpp joins any two tokens that make {token!r}, and this tokenizer only some, or others before; {_OTHER}"
            )
    return {token: float(-rank) for rank, token in enumerate(pairs)}


def _split_of(described: dict[str, Any]) -> str:
    """What llama.cpp calls the way in which texts are split into words. Raises ValueError if it has no such way."""
    steps = _steps(described["pre_tokenizer"], "pretokenizers")
    kinds = [step["type"] for step in steps]
    if kinds and kinds[-1] == "ByteLevel" and not steps[-1]["add_prefix_space"]:
        if kinds == ["ByteLevel"] and steps[-1]["use_regex"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[-1]["use_regex"]:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not steps[-1]["use_regex"]:
            pattern = steps[0]["pattern"].get("Regex")
            if pattern in _SPLITS:
                return _SPLITS[pattern]
    raise ValueError(
        f"llama.cpp has no BPE tokenizer that splits words by {', '.join(kinds) or 'nothing'} like this one, and has no bytes "
        f"for unknown characters; it has those of GPT-2, Llama 2 and 3, Qwen 2 and SmolLM; {_OTHER}"
    )


def _marks_first(described: dict[str, Any]) -> bool:
    """Whether the first word is marked like one after a space."""
    prepends = any(step["type"] == "Prepend" for step in _steps(described["normalizer"], "normalizers"))
    marks = [step for step in _steps(described["pre_tokenizer"], "pretokenizers") if step["type"] == "Metaspace"]
    return prepends or any(step.get("prepend_scheme", "always") != "never" for step in marks)


def _steps(described: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if not described:
        return []
    return described[key] if described["type"] == "Sequence" else [described]


def _add(writer: Any, kind: str, split: str, tokens: list[str], types: list[int]) -> None:
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)


def _add_special(writer: Any, tokenizer: Any, kind: str) -> None:
    """Ids of the special tokens, and which of them every text gets."""
    first, last = ("cls", "sep") if kind == "WordPiece" else ("bos", "eos")
    special = {
        "bos": first, "eos": last, "unk": "unk", "sep": "sep", "pad": "pad", "mask": "mask"
    }  # fmt: skip
    ids = {name: getattr(tokenizer, f"{of}_token_id", None) for name, of in special.items()}
    for name, number in ids.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    encoded, plain = (tokenizer("a", add_special_tokens=add).input_ids for add in (True, False))
    before, after = encoded[: encoded.index(plain[0])] if plain else [], encoded[len(encoded) - 1 :]
    writer.add_add_bos_token(before == [ids["bos"]])
    writer.add_add_eos_token(after == [ids["eos"]] and after != plain[-1:])
    if isinstance(getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(tokenizer.chat_template)
