"""Reads the lines of text files, plain or compressed."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from hf_freeze.data.files import opened

_HINT = "save the file as UTF-8 (in a spreadsheet: CSV UTF-8)"


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file, plain or compressed (detected by content), without surrounding white space.

    Raises FileNotFoundError; ValueError with file and line for an empty line, a NUL byte (binary data) or bytes that are not
    UTF-8; ValueError for an empty file or a damaged compressed file.
    """
    return list(full_lines(path))


def read_documents(path: str | Path) -> list[str]:
    """The documents of a text file, separated by empty lines; the lines of a document are joined by newlines.

    Raises the errors of `read_lines` except for empty lines, and ValueError if all lines are empty.
    """
    return list(documents(path))


def full_lines(path: str | Path) -> Iterator[str]:
    """As `read_lines`."""
    for number, line in enumerate(_stripped(path), 1):
        if not line:
            raise ValueError(f"{path}, line {number}: empty line")
        yield line


def filled_lines(path: str | Path) -> Iterator[str]:
    """As `full_lines`, without the empty lines. Raises ValueError if all lines are empty."""
    return _any(path, (line for line in _stripped(path) if line))


def documents(path: str | Path) -> Iterator[str]:
    """As `read_documents`."""
    return _any(path, ("\n".join(lines) for is_text, lines in groupby(_stripped(path), bool) if is_text))


def _any(path: str | Path, texts: Iterator[str]) -> Iterator[str]:
    first = next(texts, None)
    if first is None:
        raise ValueError(f"{path}: all lines are empty")
    yield first
    yield from texts


def _stripped(path: str | Path) -> Iterator[str]:
    return (line.strip() for line in decoded_lines(path))


def decoded_lines(path: str | Path) -> Iterator[str]:
    """The lines with their ends, without a byte-order mark. Only a newline ends a line: others, which `str.splitlines` knows,
    occur within the lines of one side of parallel text.

    Raises ValueError for an empty file and, with file and line, for a NUL byte (binary data) or bytes that are not UTF-8.
    """
    number = 0
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if b"\x00" in line:
                raise ValueError(f"{path}, line {number}: binary data (a NUL byte), not text; {_HINT}")
            try:
                yield line.decode().removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                fault = f"not UTF-8 ({error.reason} at byte {error.start})"
                raise ValueError(f"{path}, line {number}: {fault}; {_HINT}") from error
    if not number:
        raise ValueError(f"{path}: the file is empty")


UNITS = {"lines": full_lines, "filled lines": filled_lines, "documents": documents}
