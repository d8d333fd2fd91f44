"""Theseus with successors of another kind than the layers that they replace: factors, fixed attention, convolutions."""

import pytest
import torch
from safetensors.torch import load_file
from support.cases import native_config
from support.models import add_noise, differences, outputs, snapshot
from support.training import objective

from hf_freeze import make_variant
from hf_freeze.architectures.base import base_name, is_of_predecessor
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.convolution import KernelConvolution
from hf_freeze.methods import (
    DeLighT,
    FFNPruning,
    FixedAttention,
    HeadPruning,
    LiteTransformer,
    LowRank,
    TensorTrain,
    Theseus,
)
from hf_freeze.training import parameter_groups

MARIAN, BERT, GPT2 = (ARCHITECTURES[name] for name in ("marian", "bert", "gpt2"))
NEVER = 1e-9  # a rate at which every module stays its predecessor
DEPTH = 2
LITE = LiteTransformer(kernels=[3, 5], heads=2, conv_heads=2)
SUCCESSORS = {
    "factors": (MARIAN, LowRank(components=["ffn", "attention"], rank=3)),
    "tensor trains": (BERT, TensorTrain(rank=2)),
    "fixed attention": (MARIAN, FixedAttention(patterns=[2])),
    "fixed attention of BERT": (BERT, FixedAttention(patterns=[2])),
    "convolutions": (MARIAN, LITE),
    "convolutions of GPT-2": (GPT2, LITE),
    "fewer heads": (GPT2, HeadPruning(share=0.5)),
    "fewer neurons": (BERT, FFNPruning(width=7)),
}
each_successor = pytest.mark.parametrize(("architecture", "method"), SUCCESSORS.values(), ids=SUCCESSORS)


def trained(architecture):
    task, config = architecture.tasks[0], native_config(architecture)
    for stack in architecture.stacks.values():
        setattr(config, stack.depth, DEPTH)
    return add_noise(AUTO_CLASSES[task].from_config(config), architecture).eval(), architecture.tiny_inputs(task)


def theseus(architecture, **settings):
    return Theseus(successor=dict.fromkeys(architecture.stacks, DEPTH), **settings)


@each_successor
def test_predecessors_stay_whole_and_successors_are_of_the_new_kind(architecture, method):
    native, batch = trained(architecture)
    model = make_variant(native, [theseus(architecture, rate=NEVER), method])
    model.advance(0, 10)
    with torch.no_grad():
        as_before = {name: value for name, value in model.train()(**batch).items() if torch.is_tensor(value)}
        expected = {name: value for name, value in native.train()(**batch).items() if torch.is_tensor(value)}
    assert differences(as_before, expected, 1e-5) == []
    # In eval mode the successor runs. What it keeps of trained weights is what the method keeps of them without Theseus.
    if not method.facts.from_scratch:
        assert differences(outputs(model, batch), outputs(make_variant(native, [method]), batch), 1e-5) == []
    else:
        assert any(isinstance(module, KernelConvolution) for module in model.modules())
        assert differences(outputs(model, batch), outputs(native, batch)) != []


@each_successor
def test_it_learns_and_reloads_with_and_without_predecessors(architecture, method, tmp_path):
    native, batch = trained(architecture)
    model = make_variant(native, [theseus(architecture, rate=0.9), method])
    model.advance(0, 10)
    before = snapshot(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    objective(model.train(), batch).backward()
    optimizer.step()
    changed = {name for name, value in snapshot(model).items() if not torch.equal(value, before[name])}
    assert changed
    assert all(
        architecture.layer_of(base_name(model, name)) is not None and not is_of_predecessor(name) for name in changed
    )
    for step in ("with", "without"):
        if step == "without":
            model.rewind()
            model.finalize()
            assert not any(map(is_of_predecessor, model.state_dict()))
        model.save_pretrained(tmp_path / step)
        reloaded = type(model).from_pretrained(tmp_path / step)
        assert differences(outputs(reloaded, batch), outputs(model, batch)) == []
    assert not any(map(is_of_predecessor, load_file(tmp_path / "without" / "model.safetensors")))


@pytest.mark.parametrize("method", [HeadPruning(share=0.5), FFNPruning(width=7), FixedAttention(patterns=[2]), LITE])
def test_fresh_weights_take_them_too(method):
    native, batch = trained(MARIAN)
    model = make_variant(native.config, [theseus(MARIAN), method], task=MARIAN.tasks[0])
    assert all(value.isfinite().all() for value in outputs(model, batch).values())


def test_convolutions_are_drawn_from_the_seed():
    native, _ = trained(MARIAN)
    one, same, other = (make_variant(native, [theseus(MARIAN), LITE], seed=seed) for seed in (1, 1, 2))
    name = next(name for name, _ in one.named_parameters() if ".conv." in name and name.endswith("weight"))
    assert torch.equal(one.get_parameter(name), same.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
    name = "model.encoder.layers.0.fc1.weight"
    assert one.get_parameter(name).shape != native.get_parameter(name).shape
    assert 0 < one.get_parameter(name).abs().max() < 1


def test_a_successor_has_a_learning_rate_of_its_own():
    native, _ = trained(MARIAN)
    model = make_variant(native, [Theseus(successor={"encoder": 1}, train="all"), LowRank(rank=2)])
    groups = parameter_groups(model, {"successor": 0.5, "ffn": 0.25}, lr=0.1)
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        rate = 0.5 if "encoder.layers.0." in name else 0.25 if ".fc" in name else 0.1
        assert rates.get(id(parameter)) == (rate if parameter.requires_grad else None), name
    with pytest.raises(ValueError, match="'successor' has nothing to train"):
        parameter_groups(native, {"successor": 0.5}, lr=0.1)


def test_what_cannot_succeed_is_refused():
    native, _ = trained(MARIAN)
    with pytest.raises(ValueError, match=r"'lite_transformer': .* not a model or a name, or put Theseus before it"):
        make_variant(native, [LITE])
    with pytest.raises(ValueError, match=r"'delight': its blocks train from scratch and cannot take over"):
        make_variant(native, [theseus(MARIAN), DeLighT()])
    finalized = make_variant(native, [theseus(MARIAN)])
    finalized.finalize()
    with pytest.raises(ValueError, match="'lite_transformer': its blocks train from scratch"):
        make_variant(finalized, [LITE])
    with pytest.raises(ValueError, match=r"the 2 layers of that stack must be divided equally .* choose from \[1, 2\]"):
        make_variant(native, [Theseus(successor={"encoder": 3})])
