"""Reads files that may be gzipped."""

import gzip
import zlib
from pathlib import Path

_GZIP_MAGIC = b"\x1f\x8b"


def read_bytes(path: str | Path) -> bytes:
    """The content of a file, decompressed if it is gzipped; the content decides, not the file name.

    Raises FileNotFoundError, and ValueError for a damaged gzip file.
    """
    data = Path(path).read_bytes()
    if not data.startswith(_GZIP_MAGIC):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip file: {error}") from error
