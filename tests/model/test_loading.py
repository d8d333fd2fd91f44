"""Variants load as native models do: onto a device by `device_map`, in another `dtype`, and from several files."""

import json
import re

import accelerate
import pytest
import torch
import transformers
from packaging.version import Version
from support.cases import once, plain
from support.models import build, differences, native, outputs, reload_problems, trainability
from transformers import AutoModelForCausalLM

from hf_freeze import make_variant
from hf_freeze.architectures.base import full_name
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import Freeze, LayerSharing, LowRank

CHOSEN = once() + once(finalized=True)
assert {case.architecture.model_type for case in CHOSEN} == set(ARCHITECTURES)
MIXES_TIED = Version(transformers.__version__) < Version("5.13") or Version(accelerate.__version__) < Version("1.15")


@pytest.mark.parametrize("case", CHOSEN, ids=[case.id for case in CHOSEN])
def test_shards_device_map_and_dtype(case, tmp_path):
    model, batch = build(case), case.batch()
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert not set(index["weight_map"]) & set(model.seeded_tensors)
    expected = outputs(model, batch)
    for device_map in ("auto", None):
        loaded, info = case.auto_class.from_pretrained(tmp_path, device_map=device_map, output_loading_info=True)
        assert reload_problems(loaded, info, expected, trainability(model), batch) == []
    low = case.auto_class.from_pretrained(tmp_path, device_map="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    cast = loaded.bfloat16().state_dict()
    assert all(torch.equal(value, cast[name]) for name, value in low.state_dict().items())
    # Rotary frequencies, which are not stored, stay in fp32 when a model is loaded.
    for name, buffer in low.named_buffers():
        owner, _, attribute = name.rpartition(".")
        setattr(loaded.get_submodule(owner), attribute, buffer)
    batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
    assert differences(outputs(low, batch), outputs(loaded, batch)) == []


def test_merging_keeps_the_dtype_of_what_is_not_stored(tmp_path):
    """Rotary frequencies rounded to bf16 would give other logits."""
    case = plain(ARCHITECTURES["llama"])
    make_variant(native(case), [Freeze(ffn="random")]).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    merged = model.merge()
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in merged.buffers()} == {torch.float32}
    assert differences(outputs(merged, case.batch()), outputs(model, case.batch())) == []


def test_a_model_with_layers_on_the_disk_is_not_merged(tmp_path):
    model = make_variant(native(plain(ARCHITECTURES["llama"])), [LowRank(rank=2)])
    offloaded = with_layers_on_disk(model, AutoModelForCausalLM, model.architecture, tmp_path)
    with pytest.raises(
        ValueError, match="that device_map has put elsewhere: load it without, or see `hf-freeze merge`"
    ):
        offloaded.merge()


def with_layers_on_disk(model, auto_class, architecture, folder):
    """Saved and opened again, so that accelerate reads the layers from the disk at each call."""
    model.save_pretrained(folder)
    stacks = tuple(full_name(model, stack.layers.removesuffix(".{}")) for stack in architecture.stacks.values())
    owners = {name.rpartition(".")[0] for name in model.state_dict()}
    places = {name: "disk" if name.startswith(stacks) else "cpu" for name in owners}
    return auto_class.from_pretrained(folder, device_map=places, offload_folder=folder / "offload").eval()


@pytest.mark.parametrize("case", CHOSEN, ids=[case.id for case in CHOSEN])
def test_layers_on_the_disk(case, tmp_path, request):
    """accelerate reads what is stored from the checkpoint, and what is seeded from the folder that it was generated into."""
    if MIXES_TIED and any(isinstance(method, LayerSharing) for method in case.methods):
        request.applymarker(pytest.mark.xfail(strict=True, reason="one tied tensor on the disk is taken for another"))
    model, batch = build(case).eval(), case.batch()
    expected = outputs(model, batch)
    try:
        offloaded = with_layers_on_disk(model, case.auto_class, model.architecture, tmp_path / "variant")
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error)[:40])):
            with_layers_on_disk(native(case), case.auto_class, case.architecture, tmp_path / "native")
        pytest.skip("accelerate cannot offload the native model (Marian, transformers 5.23)")
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    assert differences(outputs(offloaded, batch), expected, 1e-6) == []


def test_generated_layers_need_a_folder_on_the_disk(tmp_path):
    model = native(plain(ARCHITECTURES["llama"]))
    make_variant(model, [Freeze(ffn="random")]).save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    with pytest.raises(ValueError, match="provide an `offload_folder`"):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places)
