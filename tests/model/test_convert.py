"""`hf-freeze convert`: the files are those of `make_variant`, whatever stops it in between, and no whole model is in memory."""

import json
import os
import shutil

import pytest
import torch
from families.contract import tiny_config
from safetensors.torch import load_file, save_file
from support.cases import BASELINES, once, plain
from support.models import native
from support.parametrize import over
from support.recipes import cli, one_line_error
from transformers import AutoModelForCausalLM, modeling_utils

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import LowRankLinear
from hf_freeze.methods import Freeze, HeadPruning, LowRank
from hf_freeze.methods.registry import method_to_dict
from hf_freeze.model import convert as module
from hf_freeze.model import paging
from hf_freeze.model.convert import convert

METHODS = [LowRank(rank=3), Freeze(attention="random", embeddings="frozen"), HeadPruning(share=0.5)]
CASES = once(lambda case: case.from_model and bool(case.methods)) + BASELINES


@pytest.fixture(autouse=True)
def every_tensor_in_a_file(monkeypatch):
    monkeypatch.setattr(paging, "_SMALL", 1)


@pytest.fixture
def source(tmp_path):
    native(plain(ARCHITECTURES["llama"])).save_pretrained(tmp_path / "source", max_shard_size="6KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 3
    return tmp_path / "source"


def contents(folder):
    """Of a converted model: the weights and settings."""
    weights = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    settings = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return weights, settings


def assert_same(one, other):
    (weights, settings), (others, other_settings) = contents(one), contents(other)
    assert settings == other_settings
    assert weights.keys() == others.keys()
    for name, tensors in weights.items():
        assert tensors.keys() == others[name].keys()
        assert all(torch.equal(value, others[name][key]) for key, value in tensors.items()), name


def expected(source, methods, folder):
    model = module.load_model(source)
    make_variant(model, methods).save_pretrained(folder, max_shard_size="6KB")
    return folder


@over(CASES)
def test_the_files_are_those_of_make_variant(case, tmp_path):
    native(case).save_pretrained(tmp_path / "source", max_shard_size="6KB")
    out = convert(tmp_path / "source", tmp_path / "out", case.methods, max_shard_size="6KB")
    assert_same(out, expected(tmp_path / "source", list(case.methods), tmp_path / "expected"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out", "source"]


def test_a_variant_is_converted_on(source, tmp_path):
    first = convert(source, tmp_path / "first", METHODS[:2], max_shard_size="6KB")
    out = convert(first, tmp_path / "out", METHODS[2:], max_shard_size="6KB")
    assert_same(out, expected(tmp_path / "first", METHODS[2:], tmp_path / "expected"))


def test_a_family_whose_files_have_other_names_than_its_model(tmp_path):
    """transformers makes one tensor of all experts when it loads a Mixtral."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config("mixtral")).save_pretrained(tmp_path / "source", max_shard_size="20KB")
    methods = [LowRank(rank=2, components=["attention"])]
    out = convert(tmp_path / "source", tmp_path / "out", methods, max_shard_size="6KB")
    assert_same(out, expected(tmp_path / "source", methods, tmp_path / "expected"))


def test_what_is_made_lies_in_files(source, tmp_path, monkeypatch):
    """When it is saved, no tensor of the model is in memory of the process."""
    kept = module.make_variant
    seen = []

    def make(*args, **options):
        variant = kept(*args, **options)
        if variant.device.type != "meta":
            ranges = paging._file_ranges()
            outside = [
                name
                for name, tensor in variant.state_dict().items()
                if not any(start <= tensor.data_ptr() < end for start, end in ranges)
            ]
            seen.append(outside)
        return variant

    monkeypatch.setattr(module, "make_variant", make)
    convert(source, tmp_path / "out", METHODS, max_shard_size="6KB")
    assert seen == [[]]


# -- stopped -------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("stop", [1, 3, 5, "saving", "renaming"])
def test_after_a_kill_the_same_call_goes_on(stop, source, tmp_path, monkeypatch):
    """In the conversion of a linear, between two shards, and before the folder gets its name."""
    wanted = expected(source, METHODS, tmp_path / "expected")
    fill, calls = LowRankLinear.fill, []

    def counted(module, weight):
        calls.append(module)
        if len(calls) == stop:
            os._exit(7)
        return fill(module, weight)

    def exit_at_second(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            os._exit(7)

    child = os.fork()
    if child == 0:
        if stop == "saving":
            modeling_utils.safe_save_file = exit_at_second
        elif stop == "renaming":
            module.os.replace = lambda *args: os._exit(7) if args[1] == tmp_path / "out" else os.rename(*args)
        else:
            LowRankLinear.fill = counted
        convert(source, tmp_path / "out", METHODS, max_shard_size="6KB")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(LowRankLinear, "fill", lambda module, weight: (calls.append(module), fill(module, weight)))
    out = convert(source, tmp_path / "out", METHODS, max_shard_size="6KB")
    assert_same(out, wanted)
    linears = sum(isinstance(linear, LowRankLinear) for linear in module.load_model(out).modules())
    assert len(calls) == (linears - (stop - 1) if isinstance(stop, int) else 0)


def test_another_conversion_is_not_gone_on_with(source, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(paging.os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left on device"):
            convert(source, tmp_path / "out", METHODS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.convert", "source"]
    with pytest.raises(ValueError, match=r"\.out\.convert was left by a conversion with another methods: run that"):
        convert(source, tmp_path / "out", METHODS[:1])
    convert(source, tmp_path / "out", METHODS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_no_room_is_said_before_it_starts(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(OSError, match=r"has 0\.0 GB left, and the conversion needs up to"):
        convert(source, tmp_path / "out", METHODS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# -- a source that is not whole ------------------------------------------------------------------------------------------------


def shards(source):
    return sorted(source.glob("*.safetensors"))


def damage_missing(source):
    shards(source)[1].unlink()


def damage_truncated(source):
    path = shards(source)[1]
    path.write_bytes(path.read_bytes()[:-8])


def damage_header(source):
    shards(source)[1].write_bytes(b"\xff" * 100)


def damage_lying_index(source):
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = min(index["weight_map"])
    others = {*index["weight_map"].values()} - {index["weight_map"][name]}
    index["weight_map"][name] = min(others)
    path.write_text(json.dumps(index))


def damage_index(source):
    (source / "model.safetensors.index.json").write_text("{")


def damage_other_model(source):
    path = shards(source)[1]
    save_file({name: torch.zeros(2, 3) for name in load_file(path)}, path, {"format": "pt"})


def damage_less(source):
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = max(name for name in index["weight_map"] if "layers" in name)
    shard = source / index["weight_map"].pop(name)
    path.write_text(json.dumps(index))
    save_file(
        {key: value for key, value in load_file(shard).items() if key != name} or {"x": torch.zeros(1)},
        shard,
        {"format": "pt"},
    )
    if not {key for key, place in index["weight_map"].items() if place == shard.name}:
        shard.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, r"the index names 'model-00002-of-\d+\.safetensors', which is missing"),
        (damage_truncated, r"model-00002-of-\d+\.safetensors has \d+ bytes, but its header says \d+: it is truncated"),
        (damage_header, r"is truncated or no safetensors file: its header is longer than the file"),
        (damage_lying_index, r"the index says that '\S+' is in '\S+', but it is not"),
        (damage_index, r"is no index of shards"),
        (damage_other_model, r"'\S+' has the shape \[2, 3\], but the config says \[.*\]: another model's shard"),
        (damage_less, r"lacks 1 tensors of its config, such as '\S+'"),
    ],
)
def test_a_source_that_is_not_whole_is_one_line(damage, message, source, tmp_path):
    damage(source)
    with pytest.raises((ValueError, OSError), match=message):
        convert(source, tmp_path / "out", METHODS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_command(source, tmp_path):
    (tmp_path / "methods.yaml").write_text(json.dumps([method_to_dict(method) for method in METHODS]))
    command = ["convert", source, tmp_path / "out", "--methods", tmp_path / "methods.yaml"]
    printed = cli(*command, "--max-shard-size", "6KB").output
    assert f"Written: {tmp_path / 'out'} (" in printed
    assert_same(tmp_path / "out", expected(source, METHODS, tmp_path / "expected"))
    assert "exists already" in one_line_error(*command)
    command[2] = tmp_path / "other"
    assert "write a number and one of" in one_line_error(*command, "--max-shard-size", "6kilo")
    (tmp_path / "methods.yaml").write_text("low_rank")
    assert "must hold a list of methods" in one_line_error(*command)
    (tmp_path / "methods.yaml").write_text("- {method: low_rank, rank: 0}")
    assert "rank=0" in one_line_error(*command)
    assert "nowhere is no file with methods" in one_line_error(*command[:4], tmp_path / "nowhere")
    (tmp_path / "methods.yaml").write_text("- {method: low_rank, rank: 3}")
    command[1] = tmp_path / "nothing"
    assert "nothing is no folder with a model" in one_line_error(*command)
