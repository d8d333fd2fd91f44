"""Positions that are sinusoidal are computed, not stored; where somebody has trained them, they are stored."""

import pytest
import torch
from safetensors.torch import load_file
from support.models import differences, file_sizes, outputs, perturbed
from transformers import AutoModel, MarianConfig, MarianMTModel

from hf_freeze import make_variant, methods
from hf_freeze.analysis.accounting import stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES

MARIAN = ARCHITECTURES["marian"]
POSITIONS = ["model.decoder.embed_positions.weight", "model.encoder.embed_positions.weight"]


def marian(trained):
    """With trained positions in these stacks."""
    torch.manual_seed(0)
    model = perturbed(MarianMTModel(MarianConfig(**MARIAN.tiny))).eval()
    with torch.no_grad():
        for stack in trained:
            weight = model.get_parameter(f"model.{stack}.embed_positions.weight")
            weight += 0.3 * torch.randn_like(weight)
    return model


def stored_positions(folder):
    return sorted(name for name in load_file(folder / "model.safetensors") if "embed_positions" in name)


@pytest.mark.parametrize("trained", [("encoder", "decoder"), ("decoder",), ()], ids=["both", "one", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_positions_are_stored(trained, dtype, tmp_path):
    native, batch = marian(trained), MARIAN.tiny_inputs("seq2seq-lm")
    model = make_variant(native, [methods.Freeze(ffn="random", seed=3), methods.HeadPruning(share=0.5)]).to(dtype)
    model.save_pretrained(tmp_path)
    assert stored_positions(tmp_path) == [name for name in POSITIONS if name.split(".")[1] in trained]
    assert file_sizes(tmp_path)[0] == stored_bytes(model)
    reloaded = type(model).from_pretrained(tmp_path)
    assert differences(outputs(reloaded, batch), outputs(model, batch)) == []
    assert not any(reloaded.get_parameter(name).requires_grad for name in POSITIONS)
    base = AutoModel.from_pretrained(tmp_path)
    for name in POSITIONS:
        assert torch.equal(base.get_parameter(name.removeprefix("model.")), model.get_parameter(name))
    again = tmp_path / "again"
    reloaded.save_pretrained(again)
    assert stored_positions(again) == stored_positions(tmp_path)


def test_positions_of_a_state_dict_are_stored(tmp_path):
    """The Trainer passes the weights as a state dict."""
    model = make_variant(marian(()), [methods.Freeze(ffn="random")])
    state = dict(make_variant(marian(("encoder",)), [methods.Freeze(ffn="random")]).state_dict())
    model.save_pretrained(tmp_path, state_dict=state)
    assert stored_positions(tmp_path) == POSITIONS[1:]
    model.save_pretrained(tmp_path)
    assert stored_positions(tmp_path) == []


def test_a_checkpoint_without_positions_computes_them(tmp_path):
    model = make_variant(marian(()), [methods.Freeze(ffn="random")])
    model.save_pretrained(tmp_path)
    computed = MarianMTModel(MarianConfig(**MARIAN.tiny)).state_dict()
    reloaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(reloaded.get_parameter(name), computed[name]) for name in POSITIONS)


def test_a_merged_model_stores_trained_positions_too(tmp_path):
    model, batch = make_variant(marian(("encoder",)), [methods.FFNPruning(width=13)]), MARIAN.tiny_inputs("seq2seq-lm")
    model.merge().save_pretrained(tmp_path)
    native = MarianMTModel.from_pretrained(tmp_path)
    assert differences(outputs(native, batch), outputs(model, batch), 1e-5) == []
