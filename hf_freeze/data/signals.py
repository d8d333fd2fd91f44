"""Reads images and sounds from files, for models of vision and speech."""

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SOUNDS = (".wav",)


def read_image(path: str | Path) -> np.ndarray:
    """(height, width, 3) uint8. Raises FileNotFoundError, and ValueError for a file that is no image."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return np.array(image.convert("RGB"))
    except UnidentifiedImageError:
        raise ValueError(f"{path}: not an image") from None


def read_sound(path: str | Path, rate: int) -> np.ndarray:
    """(samples,) float32 from -1 to 1, the mean over the channels of a WAV file of 8, 16 or 32 bits.

    Raises FileNotFoundError, and ValueError for another file and for another number of samples a second than `rate`.
    """
    try:
        with wave.open(str(path), "rb") as file:
            own, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path}: not a WAV file of integers: {error}") from None
    if own != rate:
        raise ValueError(
            f"{path}: {own} samples a second, and the model hears {rate}; resample it, as with ffmpeg -ar {rate}"
        )
    kinds: dict[int, str] = {1: "u1", 2: "<i2", 4: "<i4"}
    if width not in kinds:
        raise ValueError(f"{path}: {8 * width} bits a sample; choose 8, 16 or 32")
    samples = np.frombuffer(data, kinds[width]).reshape(-1, channels).mean(1)
    return ((samples - 128) / 128 if width == 1 else samples / 2 ** (8 * width - 1)).astype(np.float32)


def kind_of_signals(files: Sequence[Path]) -> str | None:
    """ "images" or "sounds", by the endings of the names; None for other files. Raises ValueError where both are mixed."""
    endings = {file.suffix.lower() for file in files}
    for kind, known in (("images", IMAGES), ("sounds", SOUNDS)):
        if endings & set(known):
            if others := sorted(endings - set(known)):
                raise ValueError(f"files of {kind} among others, which end in {others}: give a folder of one kind")
            return kind
    return None
