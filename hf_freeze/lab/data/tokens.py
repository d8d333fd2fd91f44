"""Token ids of a data set: computed once in parallel, and kept in memory-mapped Arrow files of the cache beside their lengths."""

import functools
import hashlib
import json
import mmap
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import torch.utils.data
from datasets.utils import tqdm
from transformers import PreTrainedTokenizerFast

from hf_freeze.data.tokenization import check_ids, train_tokenizer
from hf_freeze.lab.data.cache import cached_folder, open_tables, write_tables

Progress = Callable[[int, int], None]
"""A function that receives the number of rows that are done, and of all rows."""
IDS = pa.list_(pa.int32())
_ROWS = 1000  # tokenised at a time
_RESIDENT = 1 << 29  # bytes of mapped files that count as memory of the process, before their pages are given back
_AROUND = 1 << 16  # bytes that Linux maps around every row
_ROWS_PER_PROCESS = 10_000  # for fewer, starting a process takes longer


class TokenDataset(torch.utils.data.Dataset):
    """Examples in a memory-mapped Arrow file. `lengths`: of each column of ids, int32 (N,), memory-mapped too, so that batches
    are planned without reading the ids. `largest`: the largest id. `digest`: of all ids, wherever they come from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "facts.json").read_text())
        self.lengths = {column: np.load(folder / f"{column}.npy", mmap_mode="r") for column in facts["columns"]}
        self.largest: int = facts["largest"]
        self.digest: str = facts["digest"]
        with (folder / "rows.arrow").open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        table = pa.Table.from_batches(_batches(self._map))
        self._columns = {column: _Column(table.column(column)) for column in table.column_names}
        self._releases = len(self._map) > _RESIDENT and hasattr(mmap, "MADV_DONTNEED")
        self._taken = 0

    @functools.cached_property
    def rows(self) -> datasets.Dataset:
        return open_tables(self.folder / "rows.arrow")

    def __reduce__(self) -> Any:  # for the workers of a DataLoader: they map the files themselves
        return TokenDataset, (self.folder,)

    def __len__(self) -> int:
        return len(next(iter(self.lengths.values())))

    def __getitem__(self, index: Any) -> Any:
        """One example, some, or a column."""
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """As `datasets` gives them, without making a table of them first: a quarter less time."""
        columns = {name: column.take(indices) for name, column in self._columns.items()}
        self._taken += len(indices)
        if self._releases and self._taken >= _RESIDENT // _AROUND:
            self._taken = 0
            self._map.madvise(mmap.MADV_DONTNEED)
        return [dict(zip(columns, ids, strict=True)) for ids in zip(*columns.values(), strict=True)]

    def check_ids(self, vocab_size: int) -> None:
        """Raise ValueError for a token id outside the vocabulary; ids are read only where there is one."""
        if self.largest >= vocab_size:
            for column in self.lengths:
                check_ids(self.rows[column], vocab_size)


def _batches(mapped: mmap.mmap) -> Iterator[pa.RecordBatch]:
    for number, batch in enumerate(pa.ipc.open_stream(pa.py_buffer(mapped))):
        if number % 1000 == 999 and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)  # the header of a batch makes Linux map most of it
        yield batch


class _Column:
    """The lists of a column, by number."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.chunks = [(chunk.offsets.to_numpy(), chunk.values.to_numpy()) for chunk in column.chunks]
        self.starts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])

    def take(self, indices: list[int]) -> list[list[int]]:
        which = np.searchsorted(self.starts, indices, side="right") - 1
        lists = []
        for chunk, row in zip(which.tolist(), (indices - self.starts[which]).tolist(), strict=True):
            offsets, values = self.chunks[chunk]
            lists.append(values[offsets[row] : offsets[row + 1]].tolist())
        return lists


def is_in_memory(split: datasets.Dataset) -> bool:
    """Small data, such as the built-in corpus, need no cache."""
    return not split.cache_files


def tokenise(
    split: datasets.Dataset,
    tokenizer: Any,
    columns: dict[str, str],
    *,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Any:
    """The token ids of some columns of text, `columns` = {"input_ids": "source", "labels": "target"}, truncated to the
    tokenizer's length: a TokenDataset, or a data set in memory if `split` is there.

    The cache names the data, the tokenizer and the settings; another start opens it at once. `processes`: the default is a
    process for each core.
    """
    encode = Encoder(tokenizer, split, next(iter(columns.values())), truncation=True)
    rows = Rows(split, columns, encode, len(tokenizer))
    tables = id_tables(rows, processes, progress)
    return cached_ids("tokens", split, tokenizer, [columns, "truncated"], rows.schema, tables)


def cached_ids(
    kind: str, split: datasets.Dataset, tokenizer: Any, settings: list, schema: pa.Schema, tables: Iterator[pa.Table]
) -> Any:
    """A TokenDataset of `tables`, which the cache keeps and which are computed where it does not; a data set in memory if `split`
    is there. `settings`: what else than the split and the tokenizer decides what is in them."""
    if is_in_memory(split):
        return datasets.Dataset(pa.concat_tables(tables))
    key = [split._fingerprint, tokenizer_key(tokenizer), *settings]
    return TokenDataset(cached_folder(kind, key, lambda folder: write_ids(folder, schema, tables)))


class Encoder:
    """texts -> ids, the same as `tokenizer(texts, truncation=...)["input_ids"]` or, with `end`, those of the text alone with this
    id behind them, if there are any.

    The Rust tokenizer below, asked for ids alone, takes half the time. It is used if it gives the same for the first texts.
    """

    def __init__(
        self, tokenizer: Any, split: datasets.Dataset, column: str, *, truncation: bool = False, end: int | None = None
    ) -> None:
        self.tokenizer, self.end = tokenizer, end
        self.options = {"truncation": truncation, "add_special_tokens": end is None}
        first = split[:100][column]
        # `_plain` sets the truncation of both.
        self.is_fast = hasattr(tokenizer, "backend_tokenizer") and self._plain(first) == self._fast(first)

    def _plain(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, **self.options)["input_ids"]

    def _fast(self, texts: list[str]) -> list[list[int]]:
        encode = self.tokenizer.backend_tokenizer.encode_batch_fast
        return [encoding.ids for encoding in encode(texts, add_special_tokens=self.end is None)]

    def __call__(self, texts: list[str]) -> list[list[int]]:
        found = (self._fast if self.is_fast else self._plain)(texts)
        return found if self.end is None else [[*ids, self.end] if ids else [] for ids in found]


class Rows(torch.utils.data.Dataset):
    """The ids of `_ROWS` rows of text at a time, of 16 bits if `vocabulary` fits in."""

    def __init__(self, split: datasets.Dataset, columns: dict[str, str], encode: Encoder, vocabulary: int) -> None:
        self.split, self.columns, self.encode = split.with_format("arrow"), columns, encode
        kind = pa.list_(pa.uint16()) if vocabulary <= 1 << 16 else IDS
        self.schema = pa.schema([(name, kind) for name in columns])

    def __len__(self) -> int:
        return -(-len(self.split) // _ROWS)

    def __getitem__(self, number: int) -> pa.Table:
        texts: Any = self.split[number * _ROWS : (number + 1) * _ROWS]
        ids = {name: self.encode(texts[column].to_pylist()) for name, column in self.columns.items()}
        return pa.table(ids, self.schema)


def id_tables(rows: Rows, processes: int | None = None, progress: Progress | None = None) -> Iterator[pa.Table]:
    """All of `rows`, in order, computed in parallel if they are on the disk.

    `datasets` could start the processes too, but one of them, which manages the others, would outlive a killed parent.
    """
    total, done, due = len(rows.split), 0, 0.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(processes or cores, -(-total // _ROWS_PER_PROCESS))
    options: Any = {}
    # A daemon may have no processes of its own.
    if processes > 1 and not is_in_memory(rows.split) and not multiprocessing.current_process().daemon:
        # Others than forks import everything anew.
        start = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        options = {"num_workers": processes, "multiprocessing_context": start, "worker_init_fn": _begin}
    # With a generator of its own, it draws nothing from that of the training.
    tables = torch.utils.data.DataLoader(rows, batch_size=None, generator=torch.Generator(), **options)
    with tqdm(total=total, desc="Tokenising", delay=1) as bar:
        for table in tables:
            if progress is not None and time.monotonic() > due:
                progress(done, total)
                due = time.monotonic() + 0.5
            yield table
            done += len(table)
            bar.update(len(table))
    if progress is not None:
        progress(total, total)


def _begin(number: int) -> None:
    """In a process of its own, which ends with its parent, within a table too."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


def write_ids(folder: Path, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    """The rows of a TokenDataset and, so that they are not read again in another start, their lengths, the largest id and a
    digest."""
    write_tables(folder / "rows.arrow", schema, tables)
    rows = open_tables(folder / "rows.arrow")
    largest, sha = 0, hashlib.sha256()
    for column in rows.column_names:
        chunks = rows.data.column(column).chunks
        lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
        np.save(folder / f"{column}.npy", lengths)
        for chunk in chunks:
            ids = chunk.flatten().to_numpy()
            largest = max(largest, int(ids.max(initial=0)))
            sha.update(ids.tobytes())
        sha.update(lengths.tobytes())
    facts = {"columns": rows.column_names, "largest": largest, "digest": sha.hexdigest()}
    (folder / "facts.json").write_text(json.dumps(facts))


def tokenizer_key(tokenizer: Any) -> list[Any]:
    """What decides the ids of a text: the tokenizer's files without its present truncation and padding, and the versions."""
    if hasattr(tokenizer, "backend_tokenizer"):
        content = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    else:
        with tempfile.TemporaryDirectory() as folder:
            files = [
                Path(path) for path in sorted(tokenizer.save_pretrained(folder)) if not path.endswith("config.json")
            ]
            content = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    sha = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return [
        type(tokenizer).__name__,
        sha,
        tokenizer.truncation_side,
        tokenizer.model_max_length,
        tokenizers.__version__,
    ]


class Texts:
    """The texts of some columns, one column after the other, read from the disk in every pass."""

    def __init__(self, split: datasets.Dataset, columns: Sequence[str]) -> None:
        self.split, self.columns = split, columns

    def __iter__(self) -> Iterator[str]:
        for column in self.columns:
            tables: Any = self.split.select_columns([column]).with_format("arrow").iter(_ROWS)
            for table in tables:
                yield from table[column].to_pylist()


def tokenizer_for(texts: Texts, vocab_size: int, kind: str, *, eos: str) -> Any:
    """As `train_tokenizer`; one for data on the disk is kept in the cache."""
    train = functools.partial(train_tokenizer, texts, vocab_size, kind, eos=eos)
    if is_in_memory(texts.split):
        return train()
    key = [texts.split._fingerprint, list(texts.columns), vocab_size, kind, eos, tokenizers.__version__]
    folder = cached_folder("tokenizer", key, lambda part: train().save_pretrained(part))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def lengths_of(dataset: Any, columns: Sequence[str], vocab_size: int) -> list[Any]:
    """The numbers of ids of every example in each of `columns`. Raises ValueError for an id outside the vocabulary."""
    if isinstance(dataset, TokenDataset):
        dataset.check_ids(vocab_size)
        return [dataset.lengths[column] for column in columns]
    for column in columns:
        check_ids(dataset[column], vocab_size)
    return [[len(ids) for ids in dataset[column]] for column in columns]
