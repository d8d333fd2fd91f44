"""Reader for idx files, the format of MNIST (LeCun et al., 1998): a magic number, the lengths of the axes, then the data.

images, labels = read_idx("train-images-idx3-ubyte.gz"), read_idx("train-labels-idx1-ubyte.gz")
"""

import math
import struct
from pathlib import Path

import numpy as np

from hf_freeze.data.files import read_bytes

_UINT8 = 0x08  # the only supported type, that of images and labels; 0x09 to 0x0E are other integers and floats


def read_idx(path: str | Path, dims: int | None = None) -> np.ndarray:
    """The uint8 array in an idx file, plain or gzipped (detected by content), read-only.

    `dims`: the required number of axes; None accepts any. Raises FileNotFoundError. Raises ValueError, which names the path and
    the fault, for a damaged gzip file, another magic number, type or number of axes, and if the length of the data does not
    match the axes.
    """
    data = read_bytes(path)
    if len(data) < 4 or data[:2] != b"\0\0":
        raise ValueError(f"{path}: not an idx file: it begins with {data[:4].hex(' ') or 'nothing'}, not with 00 00")
    if data[2] != _UINT8:
        raise ValueError(f"{path}: the data type is 0x{data[2]:02x}, not 0x{_UINT8:02x} (unsigned bytes)")
    axes = data[3]
    if axes == 0 or dims not in (None, axes):
        raise ValueError(f"{path}: it has {axes} axes, not {dims or 'one or more'}")
    start = 4 + 4 * axes
    if len(data) < start:
        raise ValueError(f"{path}: it ends after {len(data)} bytes, within the {start} bytes of its header")
    shape = struct.unpack(f">{axes}I", data[4:start])
    if len(data) - start != math.prod(shape):
        expected = f"{' x '.join(map(str, shape))} = {math.prod(shape)}"
        raise ValueError(f"{path}: {len(data) - start} bytes of data, but the header says {expected}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_images(images: str | Path, labels: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images (N, height, width) and their labels (N,), from two idx files.

    Raises the errors of `read_idx`, and ValueError if the numbers of images and labels differ or there are no images.
    """
    pixels, classes = read_idx(images, dims=3), read_idx(labels, dims=1)
    if len(pixels) != len(classes):
        raise ValueError(f"{images} has {len(pixels)} images, {labels} has {len(classes)} labels")
    if not pixels.size:
        raise ValueError(f"{images}: no images, or images of no pixels: {' x '.join(map(str, pixels.shape))}")
    return pixels, classes
