"""Reader of idx files, the format of MNIST (LeCun et al., 1998): a magic number, the lengths of the axes, then the bytes.

>>> images, labels = read_idx("train-images-idx3-ubyte.gz"), read_idx("train-labels-idx1-ubyte.gz")
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

_UINT8 = 0x08  # the only type that images and labels come in; 0x09 to 0x0E are wider integers and floats


def read_idx(path: str | Path, dims: int | None = None) -> np.ndarray:
    """The uint8 array in an idx file, plain or gzipped (by content, not by name), read-only.

    `dims`: how many axes it must have; None takes what is there. Raises FileNotFoundError; ValueError, with the path and
    what was found, for a damaged gzip file, another magic number, another type or number of axes, or another length than
    the axes say.
    """
    raw = Path(path).read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip file: {error}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ValueError(f"{path}: not an idx file: it begins with {raw[:4].hex(' ') or 'nothing'}, not with 00 00")
    if raw[2] != _UINT8:
        raise ValueError(f"{path}: the type of its numbers is 0x{raw[2]:02x}, not 0x{_UINT8:02x} (unsigned bytes)")
    axes = raw[3]
    if axes == 0 or dims not in (None, axes):
        raise ValueError(f"{path}: it has {axes} axes, not {dims or 'one or more'}")
    start = 4 + 4 * axes
    if len(raw) < start:
        raise ValueError(f"{path}: it ends after {len(raw)} bytes, within the {start} bytes of its header")
    shape = struct.unpack(f">{axes}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        expected = f"{' x '.join(map(str, shape))} = {math.prod(shape)}"
        raise ValueError(f"{path}: {len(raw) - start} bytes of data, but the header says {expected}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_images(images: str | Path, labels: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images (N, height, width) and their labels (N,), from two idx files.

    Raises what `read_idx` raises, and ValueError where they differ in number (both named) or hold nothing.
    """
    pixels, classes = read_idx(images, dims=3), read_idx(labels, dims=1)
    if len(pixels) != len(classes):
        raise ValueError(f"{images} has {len(pixels)} images, {labels} has {len(classes)} labels")
    if not pixels.size:
        raise ValueError(f"{images}: no images, or images of no pixels: {' x '.join(map(str, pixels.shape))}")
    return pixels, classes
