"""Reads files that may be compressed: the content decides, not the name. Some kinds are read by `datasets`."""

import bz2
import contextlib
import glob
import gzip
import logging
import lzma
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from hf_freeze.data.cache import cache_root

_PIECE = 1 << 22  # bytes read at a time
_FORMATS: dict[str, tuple[bytes, Any]] = {  # name -> first bytes, what opens a file
    "gzip": (b"\x1f\x8b", gzip.open),
    "bzip2": (b"BZh", bz2.open),
    "xz": (b"\xfd7zXZ\x00", lzma.open),
    "zstd": (b"\x28\xb5\x2f\xfd", lambda path: pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")),
    "lz4": (b"\x04\x22\x4d\x18", lambda path: pa.CompressedInputStream(pa.OSFile(str(path)), "lz4")),
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")  # usual endings of their names


def read_pieces(path: str | Path) -> Iterator[bytes]:
    """The content of a file piece by piece, decompressed if it is gzip, bzip2, xz, zstd or lz4.

    Raises FileNotFoundError, and ValueError for a damaged or truncated compressed file.
    """
    if (name := _packing(path)) is None:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece
        return
    try:
        with _FORMATS[name][1](path) as file:
            while piece := file.read(_PIECE):
                yield piece
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: damaged {name} file: {' '.join(str(error).split())}") from error


def _packing(path: str | Path) -> str | None:
    with open(path, "rb") as file:
        start = file.read(16)
    name = next((name for name, (magic, _) in _FORMATS.items() if start.startswith(magic)), None)
    if name == "bzip2" and start[4:10] != b"1AY&SY":  # text may begin with BZh
        return None
    return name


@contextlib.contextmanager
def unpacked(path: str | Path) -> Iterator[Path]:
    """The file itself or, while it is read, a decompressed copy of it in the cache."""
    if _packing(path) is None:
        yield Path(path).absolute()
        return
    with tempfile.NamedTemporaryFile(dir=cache_root(), prefix="unpacked-") as copy:
        for piece in read_pieces(path):
            copy.write(piece)
        copy.flush()
        yield Path(copy.name)


@contextlib.contextmanager
def by_datasets(path: str | Path, kind: str, **options: Any) -> Iterator[Any]:
    """The rows of a file as an iterable data set, which is read piece by piece and leaves nothing in the cache.

    `kind`: csv, parquet or arrow. Raises FileNotFoundError, and ValueError for a damaged file.
    """
    logger = logging.getLogger(f"datasets.packaged_modules.{kind}.{kind}")
    try:
        logger.disabled = True  # it would print what is raised
        with unpacked(path) as plain, tempfile.TemporaryDirectory(dir=cache_root(), prefix="locks-") as locks:
            files = [glob.escape(str(plain))]
            yield datasets.load_dataset(
                kind, data_files=files, split="train", streaming=True, cache_dir=locks, **options
            )
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: damaged {kind.title()} file: {' '.join(str(error).split())}") from error
    finally:
        logger.disabled = False


def endings(path: str | Path) -> list[str]:
    """The endings of the name without those of a compression."""
    return [ending for ending in Path(path).suffixes if ending not in COMPRESSED]


def found(paths: Iterable[str | Path]) -> list[Path]:
    """The files that these name, in order: files, folders, and patterns such as `reviews/*.csv`. Of a folder, the files in it.

    Raises FileNotFoundError for a folder or a pattern without files; a missing file is noticed where it is read.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += (inside := sorted(file for file in path.iterdir() if file.is_file() and file.name[0] not in "._"))
        elif glob.has_magic(str(path)) and not path.exists():
            files += (
                inside := sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
            )
        else:
            files.append(path)
            continue
        if not inside:
            raise FileNotFoundError(f"{path}: no files")
    return files


def read_bytes(path: str | Path) -> bytes:
    """The whole content of a file, with the errors of `read_pieces`."""
    return b"".join(read_pieces(path))


def fault(error: Exception) -> str:
    """What is wrong with parsed JSON: the field that is missing, or what the error says."""
    return f"no field {error}" if isinstance(error, KeyError) else str(error)
