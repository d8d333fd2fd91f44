"""What the models of an exported folder share: its files, its tokenizer, the batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hf_freeze.runtime.folders import read_json
from hf_freeze.runtime.sessions import SESSIONS, Session
from hf_freeze.runtime.shortlists import DECODER, FILE, Shortlist
from hf_freeze.runtime.tokenizing import Encoded, Tokenizer, check_texts, fitted, open_tokenizer, padded

BATCH = 32
_Row = TypeVar("_Row")


@dataclass
class Parts:
    """An exported folder, opened. `config`: of the model that was exported; `positions`: of its encoder and decoder;
    `shortlist`: of a translator, whose decoder computes its tokens alone."""

    folder: Path
    sessions: dict[str, Session]
    tokenizer: Tokenizer
    config: dict[str, Any]
    positions: dict[str, int | None]
    shortlist: Shortlist | None = None

    @classmethod
    def open(cls, folder: Path, mark: Mapping[str, Any], *, use_shortlist: bool = True, **options: Any) -> "Parts":
        """Raises ValueError for a missing part, a file that cannot be opened, and a model that reads no text."""
        names = ("encoder", "decoder") if mark["task"] == "seq2seq-lm" else ("model",)
        ending, session, _ = SESSIONS[mark["format"]]
        shortlist = Shortlist.load(folder / FILE) if use_shortlist and (folder / FILE).is_file() else None
        files = {name: folder / f"{name}{ending}" for name in names}
        if shortlist is not None:
            files["decoder"] = folder / f"{DECODER}{ending}"
        for path in files.values():
            if not path.is_file():
                raise ValueError(f"{folder} lacks the part {path.stem}; export it again")
        sessions = {name: session(path, **options) for name, path in files.items()}
        reads = list(sessions[names[0]].shapes)
        if "input_ids" not in reads:
            raise ValueError(f"{folder} reads {', '.join(reads)}, and this runtime texts: open it with transformers")
        config = read_json(folder / "config.json").get("exported") or {}
        return cls(folder, sessions, open_tokenizer(folder), config, mark["max_positions"], shortlist)


class Model:
    """A model that reads texts and does not generate. `folder`, `task`; `parts`: what it is made of."""

    def __init__(self, parts: Parts, task: str) -> None:
        self.parts, self.task, self.folder = parts, task, parts.folder
        self._tokenizer, self._session = parts.tokenizer, next(iter(parts.sessions.values()))
        limits = [limit for limit in (parts.positions["encoder"], parts.tokenizer.longest) if limit]
        self._limit = min(limits)

    def token_ids(self, texts: Sequence[str], *, truncation: bool = False) -> list[list[int]]:
        """The ids of each text, with special tokens. Raises ValueError for an input that is not text, and one that is too long
        without `truncation`."""
        return [row.ids for row in self._rows(texts, truncation)]

    def outputs(
        self, texts: Sequence[str], *, truncation: bool = False, batch_size: int = BATCH
    ) -> list[dict[str, np.ndarray]]:
        """What the model computes for each text, by name, such as "logits" (C,) or "last_hidden_state" (T, D). Raises ValueError
        as `token_ids` does."""
        rows = self._rows(texts, truncation)
        found = dict(self._outputs(rows, batch_size))
        return [found[i] for i in range(len(rows))]

    def _rows(self, texts: Sequence[str], truncation: bool) -> list[Encoded]:
        return fitted(self._tokenizer, check_texts(texts), self._limit, truncation)

    def _outputs(self, rows: Sequence[Encoded], batch_size: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """(number of the row, its outputs without those of padding), in batches of similar lengths."""
        for chosen in batches(rows, lambda row: len(row.ids), batch_size):
            found = self._session(padded([rows[i] for i in chosen], self._tokenizer.pad))
            for place, i in enumerate(chosen):
                length = len(rows[i].ids)
                yield i, {n: v[place, :length] if v.ndim > 2 or _is_span(n) else v[place] for n, v in found.items()}


def _is_span(name: str) -> bool:
    return name in ("start_logits", "end_logits")


def batches(rows: Sequence[_Row], length: Callable[[_Row], int], size: int) -> Iterator[list[int]]:
    """The numbers of the rows, `size` at a time; sorted by length if there are more, since similar ones need little padding.
    Raises ValueError for a size below 1."""
    if size < 1:
        raise ValueError(f"batch_size={size}: must be at least 1")
    order = list(range(len(rows)))
    if len(rows) > size:
        order.sort(key=lambda i: length(rows[i]))
    yield from (order[begin : begin + size] for begin in range(0, len(order), size))


def one_or_all(inputs: Any, answers: Callable[[list[Any]], Any]) -> Any:
    """The answer to a text, or the answers to a list of them."""
    if isinstance(inputs, str | bytes | Mapping) or not hasattr(inputs, "__iter__"):
        return answers([inputs])[0]
    return answers(list(inputs))
