"""Images and sounds from files, and what is wrong with them, in one line."""

import wave

import numpy as np
import pytest
from PIL import Image

from hf_freeze.data.signals import kind_of_signals, read_image, read_sound


def write_sound(path, samples, width, channels=1, rate=100):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())


@pytest.mark.parametrize("width", [1, 2, 4])
def test_sounds_go_from_minus_one_to_one(width, tmp_path):
    wanted = np.array([0.0, 0.5, -1.0, -0.25])
    samples = wanted * 2 ** (8 * width - 1) + 128 * (width == 1)
    write_sound(tmp_path / "a.wav", samples.astype({1: "u1", 2: "<i2", 4: "<i4"}[width]), width)
    assert read_sound(tmp_path / "a.wav", 100).tolist() == wanted.tolist()
    assert read_sound(tmp_path / "a.wav", 100).dtype == np.float32


def test_channels_are_averaged(tmp_path):
    write_sound(tmp_path / "a.wav", np.array([[0, 8192], [16384, 0]], np.int16), 2, channels=2)
    assert read_sound(tmp_path / "a.wav", 100).tolist() == [0.125, 0.25]


def test_an_image_has_three_channels(tmp_path):
    Image.fromarray(np.array([[0, 255]], np.uint8)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").tolist() == [[[0] * 3, [255] * 3]]


def test_wrong_files(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFFxxxx")
    (tmp_path / "a.png").write_bytes(b"no")
    write_sound(tmp_path / "b.wav", np.zeros(4, np.int16), 2, rate=80)
    with pytest.raises(ValueError, match=r"a\.wav: not a WAV file of integers"):
        read_sound(tmp_path / "a.wav", 100)
    with pytest.raises(ValueError, match=r"b\.wav: 80 samples a second, and the model hears 100; resample it"):
        read_sound(tmp_path / "b.wav", 100)
    with pytest.raises(ValueError, match=r"a\.png: not an image"):
        read_image(tmp_path / "a.png")


def test_the_kind_goes_by_the_names(tmp_path):
    assert kind_of_signals([tmp_path / "a.PNG", tmp_path / "b.jpg"]) == "images"
    assert kind_of_signals([tmp_path / "a.wav"]) == "sounds"
    assert kind_of_signals([tmp_path / "a.txt"]) is None
    with pytest.raises(ValueError, match=r"files of images among others, which end in \['.txt'\]"):
        kind_of_signals([tmp_path / "a.png", tmp_path / "a.txt"])
