"""Images and labels in idx files, whole and damaged."""

import gzip
import re
import struct

import numpy as np
import pytest

from hf_freeze.lab.data import read_idx, read_images


def idx(array, kind=0x08):
    """The bytes of an idx file."""
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write(path, content):
    path.write_bytes(content)
    return path


IMAGES = np.arange(5 * 3 * 4).reshape(5, 3, 4) % 256
LABELS = np.array([0, 9, 255, 1, 0])


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", ["a", "a.gz"])
@pytest.mark.parametrize("array", [IMAGES, LABELS, np.zeros((2, 3, 1, 2))], ids=["images", "labels", "four axes"])
def test_arrays_are_read(tmp_path, pack, name, array):
    found = read_idx(write(tmp_path / name, pack(idx(array))))
    assert found.dtype == np.uint8
    assert found.shape == array.shape
    assert (found == array).all()


def test_images_come_with_their_labels(tmp_path):
    images, labels = read_images(write(tmp_path / "i", idx(IMAGES)), write(tmp_path / "l", idx(LABELS)))
    assert (images == IMAGES).all()
    assert (labels == LABELS).all()


WHOLE = idx(IMAGES)
BAD = {
    "empty": (b"", "not an idx file: it begins with nothing, not with 00 00"),
    "text": (b"a cat", "not an idx file: it begins with 61 20 63 61, not with 00 00"),
    "damaged gzip": (gzip.compress(WHOLE, mtime=0)[:-9], "damaged gzip file"),
    "spoilt gzip": (gzip.compress(WHOLE, mtime=0)[:20] + b"\xff" * 30, "damaged gzip file"),
    "floats": (idx(IMAGES, kind=0x0D), r"the data type is 0x0d, not 0x08 \(unsigned bytes\)"),
    "no axes": (b"\0\0\x08\0", "it has 0 axes, not one or more"),
    "cut in the header": (WHOLE[:9], "it ends after 9 bytes, within the 16 bytes of its header"),
    "cut": (WHOLE[:-1], r"59 bytes of data, but the header says 5 x 3 x 4 = 60"),
    "too long": (WHOLE + b"\0", "61 bytes of data, but the header says"),
    "absurd": (
        struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**31, 28),
        "0 bytes of data, but the header says 4294967295 x",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_files_are_refused_in_one_line(tmp_path, case):
    content, message = BAD[case]
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/a: .*{message}") as caught:
        read_idx(write(tmp_path / "a", content))
    assert "\n" not in str(caught.value)


def test_images_and_labels_must_fit(tmp_path):
    images, labels = write(tmp_path / "i", idx(IMAGES)), write(tmp_path / "l", idx(LABELS[:-1]))
    with pytest.raises(ValueError, match=r"/i has 5 images, .*/l has 4 labels"):
        read_images(images, labels)
    with pytest.raises(ValueError, match="/l: it has 1 axes, not 3"):
        read_images(labels, images)
    empty = write(tmp_path / "e", idx(np.zeros((0, 3, 4))))
    with pytest.raises(ValueError, match="no images, or images of no pixels: 0 x 3 x 4"):
        read_images(empty, write(tmp_path / "n", idx(np.zeros(0))))
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "nothing")
