"""Removes pieces from a sentencepiece model, the bytes of a `.spm` file.

The model is a protocol buffer (sentencepiece_model.proto of https://github.com/google/sentencepiece); only three of its fields
matter here. sentencepiece itself cannot write a changed model, and reading it by its schema would require protobuf.
"""

from collections.abc import Collection, Iterator

_PIECES, _TRAINER, _SELF_TEST = 1, 2, 4  # fields of the model
_PIECE, _TYPE = 1, 3  # fields of a piece
_MODEL_TYPE = 3  # field of the trainer's settings
_NORMAL = 1  # the type of ordinary pieces, neither special nor bytes
_UNIGRAM = 1
_VARINT, _BYTES, _FIXED32 = 0, 2, 5  # wire types; the schema has no doubles


def keep_pieces(model: bytes, pieces: Collection[str]) -> bytes:
    """The model with only these pieces and all special ones.

    Raises ValueError unless it is a Unigram model: in BPE, longer pieces are merged from shorter ones.
    """
    out = bytearray()
    for field, value, encoded in _fields(model):
        if field == _TRAINER and isinstance(value, bytes):
            kind = next((v for number, v, _ in _fields(value) if number == _MODEL_TYPE), _UNIGRAM)
            if kind != _UNIGRAM:
                raise ValueError(f"a sentencepiece model of type {kind} cannot be trimmed; Unigram models (type 1) can")
        if field == _PIECES and isinstance(value, bytes):
            parts = {number: v for number, v, _ in _fields(value)}
            name = parts.get(_PIECE, b"")
            if parts.get(_TYPE, _NORMAL) == _NORMAL and isinstance(name, bytes) and name.decode() not in pieces:
                continue
        if field != _SELF_TEST:  # sample segmentations that loading would compare with the trimmed model's
            out += encoded
    return bytes(out)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """(number, value, encoded bytes) of each field of a message."""
    position = 0
    while position < len(message):
        start = position
        key, position = _varint(message, position)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _varint(message, position)
        elif wire in (_BYTES, _FIXED32):
            size, position = _varint(message, position) if wire == _BYTES else (4, position)
            value, position = message[position : position + size], position + size
        else:
            raise ValueError(f"not a sentencepiece model: wire type {wire} at byte {start}")
        if position > len(message):
            raise ValueError(f"not a sentencepiece model: it ends within the field at byte {start}")
        yield field, value, message[start:position]


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """(value, position after it) of an integer in groups of seven bits, lowest first."""
    value = 0
    for number, byte in enumerate(message[position : position + 10]):  # no integer is longer
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, position + number + 1
    raise ValueError("not a sentencepiece model: it ends within an integer")
