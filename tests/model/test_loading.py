"""Variants load as native models do: onto a device by `device_map`, in another `dtype`, and from several files."""

import json

import pytest
import torch
from support.cases import once
from support.models import build, differences, outputs, reload, reload_problems, trainability

from hf_freeze.architectures.registry import ARCHITECTURES

CHOSEN = once() + once(finalized=True)
assert {case.architecture.model_type for case in CHOSEN} == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CHOSEN, ids=[case.id for case in CHOSEN])
def test_shards_device_map_and_dtype(case, tmp_path):
    model, batch = build(case), case.batch()
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert not set(index["weight_map"]) & set(model.seeded_tensors)
    for device_map in ("cpu", "auto"):
        loaded, info = case.auto_class.from_pretrained(tmp_path, device_map=device_map, output_loading_info=True)
        assert reload_problems(loaded, info, outputs(model, batch), trainability(model), batch) == []
    loaded, _ = reload(case, tmp_path)
    low = case.auto_class.from_pretrained(tmp_path, device_map="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    cast = loaded.bfloat16().state_dict()
    assert all(torch.equal(value, cast[name]) for name, value in low.state_dict().items())
    for (
        name,
        buffer,
    ) in low.named_buffers():  # rotary frequencies, which are not stored, stay in fp32 when a model is loaded
        owner, _, attribute = name.rpartition(".")
        setattr(loaded.get_submodule(owner), attribute, buffer)
    batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
    assert differences(outputs(low, batch), outputs(loaded, batch)) == []
