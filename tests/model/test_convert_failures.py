"""A calibrated conversion that fails: what is said, what is left, and what the same call does then."""

import errno
import json
import os
import re
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support.conversions import FFN, INT4, assert_same, converted, saved_source, texts_of
from support.recipes import one_line_error
from transformers import modeling_utils

from hf_freeze.methods.registry import method_to_dict
from hf_freeze.model import paging
from hf_freeze.model.convert import _sampled_digest
from hf_freeze.model.finished_layers import FinishedLayers
from hf_freeze.model.loading import load_model

needs_allocation = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")


@pytest.fixture(autouse=True)
def every_tensor_in_a_file(monkeypatch):
    monkeypatch.setattr(paging, "_SMALL", 1)


@pytest.fixture
def source(tmp_path):
    return saved_source("llama", tmp_path / "source")


def full_after(files):
    """A `posix_fallocate` for which the disk is full then."""
    allocate, sizes = os.posix_fallocate, []

    def limited(descriptor, offset, size):
        sizes.append(size)
        if len(sizes) > files:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, size)

    return limited


def stopped_after(layers, monkeypatch, source, out, **options):
    """Convert until so many layers are finished; then an error."""
    add, calls = FinishedLayers.add, []

    def failing(*args):
        add(*args)
        calls.append(args)
        if len(calls) == layers:
            raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(FinishedLayers, "add", failing)
        with pytest.raises(RuntimeError, match="stopped"):
            converted(source, out, **options)


def layers_of(run):
    """How many layers a conversion finishes."""
    said = []
    run(said.append)
    return sum(bool(re.match(r"\w+ layer \d", text)) for text in said)


# -- a full disk ---------------------------------------------------------------------------------------------------------------


@needs_allocation
@pytest.mark.parametrize(("methods", "files"), [([FFN], 0), ([FFN], 30), ([FFN], 35), ([INT4], 60)])
def test_a_full_disk_says_what_is_needed_where_and_the_same_call_goes_on(methods, files, source, tmp_path, monkeypatch):
    wanted = converted(source, tmp_path / "expected", methods)
    with monkeypatch.context() as patch:
        patch.setattr(paging.os, "posix_fallocate", full_after(files))
        where = re.escape(str(tmp_path / ".out.part"))
        with pytest.raises(OSError, match=rf"No space left on device: \d+\.\d MB more are needed in {where}$"):
            converted(source, tmp_path / "out", methods)
    assert not (tmp_path / "out").exists()
    assert_same(converted(source, tmp_path / "out", methods), wanted)


def test_a_disk_that_is_full_when_the_result_is_written_is_an_error_of_the_system(source, tmp_path, monkeypatch):
    def full(*args, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(modeling_utils, "safe_save_file", full)
        with pytest.raises(OSError, match=r"\.out\.part/written: .* No space left on device"):
            converted(source, tmp_path / "out")
    assert layers_of(lambda say: converted(source, tmp_path / "out", say=say)) == 0  # all are finished


@needs_allocation
def test_a_full_disk_is_one_line_of_the_command(source, tmp_path, monkeypatch):
    (tmp_path / "methods.json").write_text(json.dumps([method_to_dict(FFN)]))
    (tmp_path / "texts.txt").write_text("\n".join(texts_of(20)))
    monkeypatch.setattr(paging.os, "posix_fallocate", full_after(30))
    command = ["convert", source, tmp_path / "out", "--methods", tmp_path / "methods.json"]
    line = one_line_error(*command, "--texts", tmp_path / "texts.txt")
    assert re.search(r"Error: No space left on device: \d+\.\d MB more are needed in \S*\.out\.part", line)


# -- a source that is damaged, copied again or replaced ------------------------------------------------------------------------


def shard_with(source, name):
    return source / json.loads((source / "model.safetensors.index.json").read_text())["weight_map"][name]


@pytest.mark.parametrize("part", ["mlp.up_proj", "mlp.down_proj", "self_attn.v_proj"])
def test_a_weight_that_is_not_finite_is_one_line_that_names_a_linear(part, source, tmp_path):
    name = f"model.layers.2.{part}.weight"
    path = shard_with(source, name)
    values = load_file(path)
    values[name][3, 5] = float("nan")
    good = path.read_bytes()
    save_file(values, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"^[^\n]*'layers\.2\.mlp\.down_proj'[^\n]*$"):
        converted(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    path.write_bytes(good)
    with pytest.raises(
        ValueError, match=r"\.out\.part was left by a job with another digest: run that one again, or remove"
    ):
        converted(source, tmp_path / "out")
    shutil.rmtree(tmp_path / ".out.part")
    converted(source, tmp_path / "out")


def test_a_shard_that_was_copied_again_is_the_same_source(source, tmp_path, monkeypatch):
    wanted = converted(source, tmp_path / "expected")
    stopped_after(2, monkeypatch, source, tmp_path / "out")
    for path in source.iterdir():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    assert layers_of(lambda say: converted(source, tmp_path / "out", say=say)) == 2
    assert_same(tmp_path / "out", wanted)


def test_shards_of_another_model_are_another_source(source, tmp_path, monkeypatch):
    """Of the same shapes, and with the times of the files that they replace."""
    stopped_after(1, monkeypatch, source, tmp_path / "out")
    model = load_model(source)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    for path in source.glob("*.safetensors"):
        path.rename(path.with_suffix(".old"))
    model.save_pretrained(source, max_shard_size="20KB")
    for path in source.glob("*.old"):
        times = path.stat()
        os.utime(path.with_suffix(".safetensors"), ns=(times.st_atime_ns, times.st_mtime_ns))
        path.unlink()
    with pytest.raises(ValueError, match="was left by a job with another digest"):
        converted(source, tmp_path / "out")


def test_of_large_files_blocks_are_compared(tmp_path):
    path = tmp_path / "large"
    content = bytearray(os.urandom(2**20))
    path.write_bytes(content)
    digests = {_sampled_digest(path)}
    for change in (
        0,
        len(content) - 1,
        (len(content) - 4096) * 31 // 63,
    ):  # its first and last byte, and one of a block
        content[change] ^= 1
        path.write_bytes(content)
        digests.add(_sampled_digest(path))
    path.write_bytes(content + b"0")
    assert len(digests | {_sampled_digest(path)}) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "calibration with texts needs tokenizer="),
        ({"calibration": []}, "calibration is empty: give"),
    ],
)
def test_texts_that_cannot_be_read_are_refused_before_a_folder_is_made(options, message, source, tmp_path):
    with pytest.raises(ValueError, match=message):
        converted(source, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
