"""Opens files that may be compressed: the content decides, not the name."""

import bz2
import contextlib
import glob
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_freeze.install import require

_MAGIC = {  # kind of compression, as Arrow names it -> first bytes
    "gzip": rb"\x1f\x8b",
    "bz2": rb"BZh.1AY&SY",  # text may begin with BZh
    "xz": rb"\xfd7zXZ\x00",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "lz4": rb"\x04\x22\x4d\x18",
}
_STANDARD: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
_BUFFER = 1 << 20  # bytes unpacked at a time
_KINDS = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow"}
_KINDS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "json")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")  # usual endings of their names


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[Any]:
    """The bytes of a file, decompressed if it is gzip, bzip2, xz, zstd or lz4.

    Raises FileNotFoundError; ValueError for a damaged or truncated compressed file; MissingExtra for zstd and lz4 where pyarrow
    is not installed.
    """
    name = packing_of(path)
    if name is None:
        with open(path, "rb") as file:
            yield file
        return
    errors: tuple[type[Exception], ...] = (OSError, EOFError, lzma.LZMAError, zlib.error)
    if name not in _STANDARD:
        require("lab", f"{path}: a {name} file", "pyarrow")
        import pyarrow as pa

        errors += (pa.ArrowInvalid,)
    try:
        standard = _STANDARD.get(name)
        with standard(path) if standard else io.BufferedReader(pa.input_stream(str(path), name), _BUFFER) as file:
            yield file
    except errors as error:
        raise damaged(path, name, error) from error


def packing_of(path: str | Path) -> str | None:
    """The kind of compression, by the first bytes; None for a plain file."""
    with open(path, "rb") as file:
        start = file.read(16)
    return next((name for name, magic in _MAGIC.items() if re.match(magic, start)), None)


def damaged(path: str | Path, kind: str, error: Exception) -> ValueError:
    return ValueError(f"{path}: damaged {kind} file: {' '.join(str(error).split())}")


def endings(path: str | Path) -> list[str]:
    """The endings of the name without those of a compression."""
    return [ending for ending in Path(path).suffixes if ending not in COMPRESSED]


def kind_of(path: str | Path) -> str:
    """`csv`, `tsv`, `json`, `parquet`, `arrow` or, for any other file, `lines`, by the ending of the name without that of a
    compression."""
    return _KINDS.get((endings(path) or [""])[-1].lower(), "lines")


def matching_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files that these name, in order: files, folders, and patterns such as `reviews/*.csv`. Of a folder, the files in it.

    Raises FileNotFoundError for a folder or a pattern without files; a missing file is noticed where it is read.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        pattern = f"{glob.escape(str(path))}/[!_]*" if path.is_dir() else str(path)
        if path.is_file() or not glob.has_magic(pattern):
            files.append(path)
        elif inside := sorted(file for file in map(Path, glob.glob(pattern, recursive=True)) if file.is_file()):
            files += inside
        else:
            raise FileNotFoundError(f"{path}: no files")
    return files


def read_bytes(path: str | Path) -> bytes:
    """The whole content of a file, with the errors of `opened`."""
    with opened(path) as file:
        return file.read()


def fault(error: Exception) -> str:
    """What is wrong with parsed JSON: the field that is missing, or what the error says."""
    return f"no field {error}" if isinstance(error, KeyError) else str(error)
