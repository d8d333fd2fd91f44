"""Reads files that may be compressed: the content decides, not the name."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

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
    with open(path, "rb") as file:
        start = file.read(16)
    name = next((name for name, (magic, _) in _FORMATS.items() if start.startswith(magic)), None)
    if name == "bzip2" and start[4:10] != b"1AY&SY":  # text may begin with BZh
        name = None
    if name is None:
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


def read_bytes(path: str | Path) -> bytes:
    """The whole content of a file, with the errors of `read_pieces`."""
    return b"".join(read_pieces(path))


def fault(error: Exception) -> str:
    """What is wrong with parsed JSON: the field that is missing, or what the error says."""
    return f"no field {error}" if isinstance(error, KeyError) else str(error)
