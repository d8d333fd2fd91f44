"""Lexical shortlists: for the tokens of a source text, the target tokens that its translation may need (Jean et al., 2015,
https://arxiv.org/abs/1412.2007; Kim et al., 2019, https://aclanthology.org/D19-5632). `analysis.shortlist` computes them.

Shapes: S source tokens and V target tokens of the vocabulary, A tokens that are always in.
"""

import io
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from hf_freeze.io import write_whole

FILE = "shortlist.npz"  # in an exported folder, beside the decoder that takes TOKENS
DECODER = "decoder_shortlist"
TOKENS = "tokens"


@dataclass(frozen=True, kw_only=True)
class Shortlist:
    """`always` (A,): the target tokens of every text. `targets[starts[i] : starts[i + 1]]`: those of source token i, the most
    probable first; `starts` is (S + 1,). All are int64.

    Raises ValueError for arrays that do not fit each other.
    """

    always: np.ndarray
    starts: np.ndarray
    targets: np.ndarray

    def __post_init__(self) -> None:
        arrays = (self.always, self.starts, self.targets)
        if any(array.ndim != 1 or array.dtype != np.int64 for array in arrays):
            raise ValueError("a shortlist has three arrays of int64 with one axis: always, starts and targets")
        is_rising = len(self.starts) > 1 and self.starts[0] == 0 and (np.diff(self.starts) >= 0).all()
        if not is_rising or self.starts[-1] != len(self.targets) or any((ids < 0).any() for ids in arrays):
            raise ValueError(
                f"this shortlist is damaged: its {len(self.starts)} starts must rise from 0 to {len(self.targets)}, which is the "
                "number of its targets, and no id may be below 0; compute it again"
            )

    @property
    def largest(self) -> int:
        """The highest target token."""
        return int(np.concatenate([self.always, self.targets]).max(initial=-1))

    def tokens(self, ids: Iterable[int] | np.ndarray, special: Sequence[int] = ()) -> np.ndarray:
        """The target tokens for texts with the source tokens `ids`, of any shape, and `special` ones: int64, in ascending order.

        Raises ValueError for an id that is not in 0..S-1.
        """
        sources = np.unique(np.asarray(ids, dtype=np.int64))
        if len(sources) and not 0 <= sources[0] <= sources[-1] < len(self.starts) - 1:
            wrong = sources[0] if sources[0] < 0 else sources[-1]
            raise ValueError(f"the shortlist has source tokens 0..{len(self.starts) - 2}, and not {wrong}")
        own = (self.targets[self.starts[i] : self.starts[i + 1]] for i in sources)
        return np.unique(np.concatenate([self.always, np.array(special, dtype=np.int64), *own]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file of NumPy, such as "shortlist.npz"."""
        content = io.BytesIO()
        np.savez_compressed(content, **vars(self))
        write_whole(Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Shortlist":
        """Read a file that `save` has written. Raises ValueError for a missing file and for any other one."""
        try:
            with np.load(path) as arrays:  # refuses pickled objects
                found = {field.name: arrays[field.name] for field in fields(cls)}
        except (OSError, ValueError, KeyError, IndexError, AttributeError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is no shortlist; write one with analysis.shortlist(...).save(path)") from error
        return cls(**found)
