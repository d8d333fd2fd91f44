"""Reads the lines of text files, plain or compressed, a few megabytes at a time."""

from collections.abc import Iterator
from pathlib import Path

from hf_freeze.data.files import read_pieces

Lines = tuple[int, list[str]]  # the number of the first line, counted from 1, and some lines


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file, plain or compressed (detected by content), without surrounding white space.

    Raises FileNotFoundError; ValueError with file and line for an empty line, a NUL byte (binary data) or bytes that are not
    UTF-8; ValueError for an empty file or a damaged compressed file.
    """
    return [line for lines in full_lines(path) for line in lines]


def read_documents(path: str | Path) -> list[str]:
    """The documents of a text file, separated by empty lines; the lines of a document are joined by newlines.

    Raises the errors of `read_lines` except for empty lines, and ValueError if all lines are empty.
    """
    return [document for documents in iterate_documents(path) for document in documents]


def full_lines(path: str | Path) -> Iterator[list[str]]:
    """As `read_lines`, some lines at a time."""
    for first, lines in iterate_lines(path):
        if "" in lines:
            raise ValueError(f"{path}, line {first + lines.index('')}: empty line")
        yield lines


def filled_lines(path: str | Path) -> Iterator[list[str]]:
    """As `full_lines`, without the empty lines. Raises ValueError if all lines are empty."""
    is_empty = True
    for _, lines in iterate_lines(path):
        filled = [line for line in lines if line]
        is_empty = is_empty and not filled
        yield filled
    if is_empty:
        raise ValueError(f"{path}: all lines are empty")


def iterate_documents(path: str | Path) -> Iterator[list[str]]:
    """As `read_documents`, some documents at a time."""
    document: list[str] = []
    any_text = False
    for _, lines in iterate_lines(path):
        documents = []
        for line in lines:
            if line:
                document.append(line)
            elif document:
                documents.append("\n".join(document))
                document = []
        any_text = any_text or bool(documents)
        yield documents
    if document:
        yield ["\n".join(document)]
    elif not any_text:
        raise ValueError(f"{path}: all lines are empty")


def iterate_lines(path: str | Path) -> Iterator[Lines]:
    """The lines without surrounding white space. Only a newline ends a line: others, which `str.splitlines` knows, occur within
    the lines of one side of parallel text."""
    for first, text in decoded_blocks(path):
        yield first, [line.removeprefix("\ufeff").strip() for line in text.split("\n")]


def line_blocks(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The number of the first line, and the bytes of some whole lines without the last newline. Raises ValueError for an empty
    file."""
    number, rest, is_empty = 1, b"", True
    for piece in read_pieces(path):
        is_empty = False
        whole, newline, end = piece.rpartition(b"\n")
        if not newline:
            rest += piece
            continue
        block = rest + whole
        yield number, block
        number += block.count(b"\n") + 1
        rest = end
    if is_empty:
        raise ValueError(f"{path}: the file is empty")
    if rest:
        yield number, rest


def decoded_blocks(path: str | Path) -> Iterator[tuple[int, str]]:
    """As `line_blocks`, decoded, without a byte-order mark. Raises ValueError with file and line for a NUL byte (binary data) or
    bytes that are not UTF-8."""
    for first, block in line_blocks(path):
        try:
            text = block.decode("utf-8-sig" if first == 1 else "utf-8")
            if "\x00" not in text:
                yield first, text
                continue
        except UnicodeDecodeError:
            pass
        # Slowly, to find the line; those before it may be wrong too.
        for number, line in enumerate(block.split(b"\n"), first):
            if b"\x00" in line:
                raise ValueError(f"{path}, line {number}: binary data (a NUL byte), not text")
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error
