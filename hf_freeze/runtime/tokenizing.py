"""Texts to ids and back, as the tokenizer of the exported model does, from the files that it saved.

`tokenizer.json` is read by the package tokenizers. Marian models of the Hub have `source.spm`, `target.spm` and `vocab.json`,
which need the package sentencepiece.
"""

import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.install import how_to_install
from hf_freeze.runtime.folders import read_json

_CLEANED = [(f" {mark}", mark) for mark in ".?!,"] + [(" ' ", "'")]
_CLEANED += [(f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")]


@dataclass
class Encoded:
    """A text, or two, of T tokens. `offsets`: the characters of each token in its text; `sides`: 0 or 1 for the text that it is
    of, None for a special token."""

    ids: list[int]
    types: list[int]
    offsets: list[tuple[int, int]] = field(default_factory=list)
    sides: list[int | None] = field(default_factory=list)


def open_tokenizer(folder: Path) -> "Tokenizer":
    """Raises ValueError for a folder without a tokenizer that can be read, and if the package for it is missing."""
    for kind, name in ((Tokenizer, "tokenizer.json"), (MarianTokenizer, "source.spm")):
        if (folder / name).is_file():
            try:
                return kind(folder)
            except ImportError as error:
                how = "pip install sentencepiece" if error.name == "sentencepiece" else how_to_install("serve")
                raise ValueError(f"{folder / name} needs {error.name}, which is missing; {how}") from error
            except Exception as error:  # tokenizers raises Exception itself
                reason = (str(error).splitlines() or [""])[0][:200]
                raise ValueError(
                    f"the tokenizer of {folder} cannot be read ({reason}); export the model again"
                ) from error
    raise ValueError(
        f"{folder} has neither a tokenizer.json nor a source.spm: open it with transformers, or export a model with a tokenizer "
        "of one of these kinds"
    )


class Tokenizer:
    """`pad`, `eos`, `mask`: the ids of these tokens, or None. `longest`: tokens that the tokenizer gives a text, at most."""

    def __init__(self, folder: Path) -> None:
        self._config = read_json(folder / "tokenizer_config.json")
        self._open(folder)
        self.pad, self.eos, self.mask = (self._special(f"{name}_token") for name in ("pad", "eos", "mask"))
        self.longest = min(int(self._config.get("model_max_length") or 10**9), 10**9)
        self._cleans = bool(self._config.get("clean_up_tokenization_spaces", False))

    def _open(self, folder: Path) -> None:
        import tokenizers

        self.tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def _special(self, name: str) -> int | None:
        token = self._content(name)
        return None if token is None else self.id_of(token)

    def _content(self, name: str) -> str | None:
        token = self._config.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def id_of(self, token: str) -> int | None:
        """None for a token that there is not."""
        return self.tokenizer.token_to_id(token)

    def token_of(self, number: int) -> str:
        """The token with an id."""
        return self.tokenizer.id_to_token(number)

    def encode(self, text: str, second: str | None = None, special: bool = True) -> Encoded:
        """A text, or two as one sequence. `special`: with the tokens that the model wants around them."""
        found = self.tokenizer.encode(text, second, add_special_tokens=special)
        return Encoded(found.ids, found.type_ids, found.offsets, found.sequence_ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids."""
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special)
        return _cleaned(text) if self._cleans and type(self.tokenizer.model).__name__ != "BPE" else text

    def joined(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        decoder = self.tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    @property
    def unknown(self) -> int | None:
        """The id of the unknown token."""
        return self._special("unk_token")


class MarianTokenizer(Tokenizer):
    """The tokenizer of Marian models, which encodes by the pieces of the source and ids of its own. It gives no offsets."""

    def _open(self, folder: Path) -> None:
        import sentencepiece

        self._source: Any = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
        separate = self._config.get("separate_vocabs", False)
        target = sentencepiece.SentencePieceProcessor(model_file=str(folder / "target.spm"))
        self._writes: Any = target if separate else self._source
        self._ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        names = read_json(folder / "target_vocab.json") if separate else self._ids
        self._names = {number: token for token, number in names.items()}
        special = [token for name in ("unk_token", "eos_token", "pad_token") if (token := self._content(name))]
        self._special_tokens = re.compile(f"({'|'.join(map(re.escape, special))})")
        self._skipped = {self._special(name) for name in ("unk_token", "eos_token", "pad_token")}

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def token_of(self, number: int) -> str:
        return self._names[number]

    def encode(self, text: str, second: str | None = None, special: bool = True) -> Encoded:
        tokens: list[str] = []
        for part in filter(None, self._special_tokens.split(text)):
            tokens += [part] if self._special_tokens.fullmatch(part) else self._pieces(part)
        unknown = self._ids[self._content("unk_token") or "<unk>"]
        ids = [self._ids.get(token, unknown) for token in tokens] + [self.eos] * special
        return Encoded(ids, [0] * len(ids))

    def _pieces(self, text: str) -> list[str]:
        code, end = "", text.find("<<")
        if text.startswith(">>") and end != -1:  # the language to translate to
            code, text = text[: end + 2], text[end + 2 :]
        return [code] * bool(code) + self._source.encode(text, out_type=str)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        tokens = [self.token_of(number) for number in ids if not (skip_special and number in self._skipped)]
        text = self._writes.decode_pieces(tokens).replace("▁", " ").strip()
        return _cleaned(text) if self._cleans else text


def _cleaned(text: str) -> str:
    for old, new in _CLEANED:
        text = text.replace(old, new)
    return text


def padded(rows: Sequence[Encoded], pad: int | None, left: bool = False) -> dict[str, np.ndarray]:
    """input_ids, attention_mask, token_type_ids and position_ids, each (B, T), of the longest of the rows."""
    length = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), length), pad or 0, np.int64)
    mask, types = np.zeros_like(ids), np.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(length - len(row.ids), length) if left else slice(len(row.ids))
        ids[number, place], mask[number, place], types[number, place] = row.ids, 1, row.types
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "position_ids": positions}


def check_texts(texts: Sequence[Any]) -> list[str]:
    """Raises ValueError for an input that is not text."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"input {number} must be text (str), not {type(text).__name__}: {reprlib.repr(text)}")
    return list(texts)


def fitted(
    tokenizer: Tokenizer, texts: Sequence[str], limit: int | None, truncation: bool, special: bool = True
) -> list[Encoded]:
    """The texts as tokens. With `truncation`, those beyond `limit` are cut, before the special tokens at the end.

    Raises ValueError for a text that is longer than `limit`, without `truncation`, and for one without tokens."""
    rows = []
    for text in texts:
        row = tokenizer.encode(text, special=special)
        if limit is not None and len(row.ids) > limit:
            if not truncation:
                raise ValueError(
                    f"a text of {len(row.ids)} tokens is longer than the {limit} positions of the model; pass truncation=True to "
                    f"cut it ({reprlib.repr(text)})"
                )
            row = cut(tokenizer, text, limit, special)
        if not row.ids:
            if tokenizer.eos is None and tokenizer.pad is None:
                raise ValueError("cannot encode an empty text: the tokenizer has no eos token and no pad token")
            ends = [end for end in (tokenizer.eos, tokenizer.pad) if end is not None]
            row = Encoded(ends[:1], [0], [(0, 0)], [None])
        rows.append(row)
    return rows


def cut(tokenizer: Tokenizer, text: str, limit: int, special: bool) -> Encoded:
    """At most `limit` tokens of a text, with the special ones."""
    if isinstance(tokenizer, MarianTokenizer):
        row = tokenizer.encode(text, special=special)
        ids = row.ids[: limit - 1] + row.ids[-1:] if special else row.ids[:limit]
        return Encoded(ids, row.types[:limit])
    tokenizer.tokenizer.enable_truncation(limit)
    try:
        return tokenizer.encode(text, special=special)
    finally:
        tokenizer.tokenizer.no_truncation()
