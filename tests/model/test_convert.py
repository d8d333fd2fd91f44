"""`hf-freeze convert` and `merge`: the files are those of `make_variant` and of `merge()`, whatever stops it in between, and no
whole model is in memory."""

import gc
import json
import os
import shutil

import pytest
import torch
from families.contract import tiny_config
from safetensors.torch import load_file, save_file
from support.cases import ALL, BASELINES, once, plain
from support.conversions import ended_with, exit_at
from support.models import build, merge_or_none, native
from support.parametrize import over
from support.recipes import cli, one_line_error
from transformers import AutoModelForCausalLM, modeling_utils

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import LowRankLinear
from hf_freeze.methods import FFNPruning, Freeze, HeadPruning, LayerSharing, LowRank, Quantize
from hf_freeze.methods.registry import method_to_dict
from hf_freeze.model import convert as module
from hf_freeze.model import paging
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.convert import convert, merge

METHODS = [LowRank(rank=3), Freeze(attention="random", embeddings="frozen"), HeadPruning(share=0.5)]
CASES = once(lambda case: case.from_model and bool(case.methods)) + BASELINES
VARIANTS = once(lambda case: bool(case.methods))


@pytest.fixture(autouse=True)
def every_tensor_in_a_file(monkeypatch):
    monkeypatch.setattr(paging, "_SMALL", 1)


@pytest.fixture
def source(tmp_path):
    native(plain(ARCHITECTURES["llama"])).save_pretrained(tmp_path / "source", max_shard_size="6KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 3
    return tmp_path / "source"


@pytest.fixture
def variant(source, tmp_path):
    """A folder with one."""
    make_variant(module.load_model(source), METHODS).save_pretrained(tmp_path / "variant", max_shard_size="2KB")
    assert len(list((tmp_path / "variant").glob("*.safetensors"))) > 3
    shutil.rmtree(source)
    return tmp_path / "variant"


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


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (METHODS[:2], METHODS[2:]),
        (
            [HeadPruning(share=0.5), FFNPruning(width=8)],
            [LowRank(rank=3, components=["attention"]), Freeze(ffn="random")],
        ),
        ([Freeze(ffn="random", embeddings="random")], [HeadPruning(share=0.5), FFNPruning(width=8)]),
        ([Quantize(scheme="int8", components=["ffn"])], [HeadPruning(share=0.5), Freeze(norm="frozen")]),
        ([LowRank(rank=3, components=["attention"]), LayerSharing(start="middle")], [Freeze(attention="frozen")]),
        ([LowRank(rank=3)], []),
    ],
    ids=lambda methods: "+".join(method.name for method in methods) or "nothing",
)
def test_a_variant_is_converted_on(first, then, source, tmp_path):
    """The values of what is seeded are taken by the heads and neurons that stay."""
    between = convert(source, tmp_path / "between", first, max_shard_size="6KB")
    out = convert(between, tmp_path / "out", then, max_shard_size="6KB")
    assert_same(out, expected(between, then, tmp_path / "expected"))
    in_memory = make_variant(make_variant(module.load_model(source), first), then)
    loaded = module.load_model(out).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in in_memory.state_dict().items())


@over(VARIANTS)
def test_the_files_are_those_of_merge(case, tmp_path):
    build(case).save_pretrained(tmp_path / "variant", max_shard_size="6KB")
    merged = merge_or_none(module.load_model(tmp_path / "variant"))
    if merged is None:
        with pytest.raises(ValueError, match=rf"\b{case.methods[0].name}\b.+merge"):
            merge(tmp_path / "variant", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["variant"]
        return
    merged.save_pretrained(tmp_path / "expected", max_shard_size="6KB")
    out = merge(tmp_path / "variant", tmp_path / "out", max_shard_size="6KB")
    assert_same(out, tmp_path / "expected")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out", "variant"]


def test_a_family_whose_files_have_other_names_than_its_model(tmp_path):
    """transformers makes one tensor of all experts when it loads a Mixtral."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config("mixtral")).save_pretrained(tmp_path / "source", max_shard_size="20KB")
    methods = [LowRank(rank=2, components=["attention"])]
    out = convert(tmp_path / "source", tmp_path / "out", methods, max_shard_size="6KB")
    assert_same(out, expected(tmp_path / "source", methods, tmp_path / "expected"))


def test_what_is_made_lies_in_files(source, tmp_path, monkeypatch):
    """When it is saved, no tensor of the model is in memory of the process."""
    kept = module.variant_of
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

    monkeypatch.setattr(module, "variant_of", make)
    convert(source, tmp_path / "out", METHODS, max_shard_size="6KB")
    assert seen == [[]]


@pytest.mark.parametrize("methods", [METHODS, [LowRank(rank=3), LayerSharing(start="middle")]], ids=["all", "shared"])
def test_what_is_merged_lies_in_files_layer_by_layer(methods, source, tmp_path, monkeypatch):
    """When a linear is merged, those before it are in files, and when it is saved, the whole model is."""
    first = convert(source, tmp_path / "first", methods, max_shard_size="6KB")
    dense_weight, merge_variant, most, calls, seen = LowRankLinear.dense_weight, VariantMixin.merge, 0, 0, []

    def in_memory(tensors):
        ranges = paging._file_ranges()
        return [t for t in tensors if not any(start <= t.data_ptr() < end for start, end in ranges)]

    def counted(linear):
        nonlocal most, calls
        calls += not linear.down.is_meta
        if not linear.down.is_meta and calls % 10 == 1:  # looking through all objects takes longer than merging
            tensors = [item for item in gc.get_objects() if type(item) is torch.nn.Parameter and not item.is_meta]
            most = max(most, len(in_memory(tensors)))
        return dense_weight(linear)

    def merged(variant, **options):
        native = merge_variant(variant, **options)
        if native.device.type != "meta":
            seen.append(in_memory(native.state_dict().values()))
        return native

    outside = len(
        in_memory([item for item in gc.get_objects() if type(item) is torch.nn.Parameter and not item.is_meta])
    )
    monkeypatch.setattr(LowRankLinear, "dense_weight", counted)
    monkeypatch.setattr(VariantMixin, "merge", merged)
    merge(first, tmp_path / "out", max_shard_size="6KB")
    assert calls > 5
    assert 0 < most <= outside + 2
    assert seen == [[]]


# -- stopped -------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("stop", [*[1] * ALL, 5, "saving", "renaming"])
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


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs fork and posix_fallocate")
@pytest.mark.parametrize("stop", [10, "saving", "renaming"])
def test_after_a_kill_merging_starts_again(stop, variant, tmp_path):
    module.load_model(variant).merge().save_pretrained(tmp_path / "expected", max_shard_size="6KB")

    def killed():
        if stop == "saving":
            modeling_utils.safe_save_file = exit_at(2, modeling_utils.safe_save_file)
        elif stop == "renaming":
            module.os.replace = lambda *args: os._exit(7) if args[1] == tmp_path / "out" else os.rename(*args)
        else:
            paging.os.posix_fallocate = exit_at(stop, os.posix_fallocate)
        merge(variant, tmp_path / "out", max_shard_size="6KB")

    assert ended_with(7, killed)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.part", "expected", "variant"]
    with pytest.raises(ValueError, match=r"\.out\.part was left by a job with another command: run that one again"):
        convert(variant, tmp_path / "out", [])
    assert_same(merge(variant, tmp_path / "out", max_shard_size="6KB"), tmp_path / "expected")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out", "variant"]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs fork and posix_fallocate")
@pytest.mark.parametrize(
    ("method", "stop"),
    [(FFNPruning(width=8), 5), (Freeze(ffn="random"), 2), (Quantize(scheme="int8", components=["ffn"]), 9)],
    ids=lambda value: getattr(value, "name", value),
)
def test_after_a_kill_other_methods_start_again(method, stop, source, tmp_path):
    methods = [method, LowRank(rank=3, components=["attention"])]
    wanted = expected(source, methods, tmp_path / "expected")

    def killed():
        paging.os.posix_fallocate = exit_at(stop, os.posix_fallocate)
        convert(source, tmp_path / "out", methods, max_shard_size="6KB")

    assert ended_with(7, killed)
    assert not (tmp_path / "out").exists()
    assert_same(convert(source, tmp_path / "out", methods, max_shard_size="6KB"), wanted)


def test_another_conversion_is_not_gone_on_with(source, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(paging.os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left on device"):
            convert(source, tmp_path / "out", METHODS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.part", "source"]
    with pytest.raises(ValueError, match=r"\.out\.part was left by a job with another methods: run that"):
        convert(source, tmp_path / "out", METHODS[:1])
    convert(source, tmp_path / "out", METHODS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_no_room_is_said_before_it_starts(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(OSError, match=r"has 0\.0 GB left, and up to \d\.\d GB are needed"):
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
        {key: value.clone() for key, value in load_file(shard).items() if key != name} or {"x": torch.zeros(1)},
        shard,
        {"format": "pt"},
    )
    if not {key for key, place in index["weight_map"].items() if place == shard.name}:
        shard.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, r"the index names 'model-00002-of-\d+\.safetensors', which is missing"),
        (damage_truncated, r"model-00002-of-\d+\.safetensors is truncated or no safetensors file: .*incomplete"),
        (damage_header, r"\.safetensors is truncated or no safetensors file: .*header"),
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


@pytest.mark.parametrize(
    ("damage", "message"), [(damage_missing, "which is missing"), (damage_other_model, "another model's shard")]
)
def test_merging_of_what_is_not_whole_is_one_line(damage, message, variant, tmp_path):
    damage(variant)
    with pytest.raises((ValueError, OSError), match=message):
        merge(variant, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["variant"]


def test_the_command_that_merges(variant, tmp_path, monkeypatch):
    (variant / "tokenizer.json").write_text("{}")
    (variant / "modeling_hf_freeze.py").touch()  # as a variant that was pushed with the code that loads it
    config = json.loads((variant / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_hf_freeze.NativeConfig"}
    (variant / "config.json").write_text(json.dumps(config))
    module.load_model(variant).merge().save_pretrained(tmp_path / "expected", max_shard_size="6KB")
    command = ["merge", variant, tmp_path / "out"]
    printed = cli(*command, "--max-shard-size", "6KB").output
    assert f"Written: {tmp_path / 'out'} (" in printed
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert_same(tmp_path / "out", tmp_path / "expected")
    assert not (tmp_path / "out" / "modeling_hf_freeze.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert "exists already" in one_line_error(*command)
    again = one_line_error("merge", tmp_path / "out", tmp_path / "again")
    assert "holds a native LlamaForCausalLM already: there is nothing to merge" in again
    command[2] = tmp_path / "other"
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 1000))
    assert "has 0.0 GB left, and up to" in one_line_error(*command)
    command[1] = tmp_path / "nothing"
    assert "nothing is no folder with a model" in one_line_error(*command)
