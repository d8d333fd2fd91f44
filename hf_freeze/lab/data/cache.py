"""Folders of what takes long to compute, below the cache of `datasets` (`HF_DATASETS_CACHE`), named by a digest of what it was
computed from. A folder appears in one move, when it is whole."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets.config
import pyarrow as pa
from datasets.utils import tqdm
from filelock import FileLock

from hf_freeze.io import sync, whole_folder

_FORMAT = 3  # to be raised where the files in the folders change


def cache_root() -> Path:
    root = Path(datasets.config.HF_DATASETS_CACHE) / "hf_freeze"
    root.mkdir(parents=True, exist_ok=True)
    return root


def cached_folder(kind: str, key: Any, write: Callable[[Path], object]) -> Path:
    """The folder of `kind` and `key` (plain data). Where it is not there, `write` fills it, in one process at a time; the others
    wait. What a killed process has left is removed."""
    digest = hashlib.sha256(json.dumps([_FORMAT, kind, key], sort_keys=True).encode()).hexdigest()[:20]
    folder = cache_root() / f"{kind}-{digest}"
    if not folder.exists():
        with FileLock(f"{folder}.lock"):
            if not folder.exists():  # another process may have written it
                with whole_folder(folder) as part:
                    write(part)
                    for file in part.iterdir():
                        sync(file)
    return folder


def stamp(path: str | Path) -> list[Any]:
    """Path, size and time of a file: they change if another file is written under its name."""
    path = Path(path).resolve()
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def write_tables(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for table in tables:
            writer.write_table(table)


def open_tables(path: Path) -> datasets.Dataset:
    """The memory-mapped rows of an Arrow file in a folder of the cache."""
    data = datasets.Dataset.from_file(str(path))
    # The fingerprint that `datasets` would give depends on when the file was written.
    return datasets.Dataset(data.data, info=data.info, fingerprint=path.parent.name)


def cached_rows(key: Any, schema: pa.Schema, tables: Callable[[], Iterator[pa.Table]]) -> datasets.Dataset:
    """A data set of this schema, memory-mapped; `tables` is called where the cache does not hold it."""

    def counted() -> Iterator[pa.Table]:
        with tqdm(desc="Reading", unit=" rows", delay=2) as bar:  # seconds, after which it is shown
            for table in tables():
                yield table
                bar.update(len(table))

    folder = cached_folder("text", key, lambda part: write_tables(part / "rows.arrow", schema, counted()))
    return open_tables(folder / "rows.arrow")
