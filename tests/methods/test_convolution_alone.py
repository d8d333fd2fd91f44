"""LiteTransformer without attention: sizes, formulas, caches, and what other methods find."""

import pytest
import torch
from support.formulas import by_formulas
from support.models import differences, outputs, trainability
from support.training import training_step
from test_lite_transformer import (
    TASK,
    batch_of,
    check_steps,
    config_of,
    every_backbone,
    every_cache,
    made,
    marian_config,
)

from hf_freeze import count_parameters, make_variant
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.long_short import ConvolutionAlone
from hf_freeze.methods import Freeze, HeadPruning, LayerSharing, LiteTransformer, Theseus


def convolutions(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, ConvolutionAlone)}


@pytest.mark.parametrize("conv", ["dynamic", "lightweight"])
def test_numbers_of_parameters(conv):
    """All H channels are expanded, convolved and projected; the FFN has H neurons; cross-attentions stay."""
    d, taps = 200, 2 * (3 + 7 + 15 + 31 + 31 + 31)
    with torch.device("meta"):
        model = make_variant(marian_config(d), [LiteTransformer(conv=conv, attention=False)], task="seq2seq-lm")
    linear = d * d + d
    expanding, kernels = (2 * linear, d * 4 * taps) if conv == "dynamic" else (linear, 4 * taps)
    expected = {
        "attention": 12 * (expanding + linear) + kernels + 6 * 4 * linear,
        "ffn": 12 * 2 * linear,
        "norm": (6 * 2 + 6 * 3) * 2 * d,
        "embeddings": 1000 * d,
        "head": 0,
    }
    assert {name: count.total for name, count in count_parameters(model).by_component.items()} == expected


@every_backbone
@pytest.mark.parametrize("conv", ["dynamic", "lightweight"])
@torch.no_grad()
def test_all_channels_are_convolved(name, conv):
    model, calls = made(name, conv=conv, kernels=[3, 7], attention=False, heads=7), []
    for module in convolutions(model).values():
        module.register_forward_hook(
            lambda module, args, kwargs, y: calls.append((module, kwargs.get("hidden_states", *args[:1]), y[0])),
            with_kwargs=True,
        )
    model(**batch_of(name))
    assert [module.conv.taps for module, _, _ in calls] == ([3, 7, 3, 7] if name == "marian" else [3, 7])
    assert [module.conv.causal for module, _, _ in calls] == ([False] * 2 if name == "marian" else []) + [True] * 2
    for module, x, found in calls:
        mask = batch_of(name)["attention_mask"].bool() if x.shape[1] == 5 else torch.ones(x.shape[:2], dtype=torch.bool)
        torch.testing.assert_close(found[mask], by_formulas(module.conv, x, mask)[mask], rtol=1e-4, atol=1e-5)


@every_backbone
@every_cache
@pytest.mark.parametrize(
    "settings", [{}, {"kernels": [31, 15], "conv": "lightweight"}, {"kernels": [1, 7], "conv_heads": 12}], ids=str
)
def test_every_step_is_that_of_the_whole(name, kind, settings):
    check_steps(made(name, attention=False, **settings), kind)


@every_backbone
def test_it_trains_and_reloads(name, tmp_path):
    freeze = Freeze(attention="random", seed=4)
    lite = LiteTransformer(kernels=[3, 5], conv_heads=2, attention=False)
    model = make_variant(config_of(name), [lite, freeze], task=TASK[name])
    assert {n for n, _ in model.named_parameters() if ".conv." in n} <= set(model.seeded_tensors)
    training_step(model, batch_of(name))
    model.save_pretrained(tmp_path)
    reloaded = AUTO_CLASSES[TASK[name]].from_pretrained(tmp_path)
    assert differences(outputs(reloaded, batch_of(name)), outputs(model, batch_of(name))) == []
    assert trainability(reloaded) == trainability(model)


def test_other_methods_find_the_attentions_that_are_left():
    model = made("marian", attention=False)
    assert list(model.architecture.attentions(model.config)) == ["decoder.0.cross", "decoder.1.cross"]
    with pytest.raises(ValueError, match=r"no attention 'encoder.0.self' in marian; choose from \['decoder.0.cross'"):
        make_variant(model, [HeadPruning(heads={"encoder.0.self": [0]})])
    shared = make_variant(
        config_of("gpt2"), [made("gpt2", attention=False, kernels=[3, 3]).methods[0], LayerSharing()], task="causal-lm"
    )
    assert len({id(module.conv.project.weight) for module in convolutions(shared).values()}) == 1


def test_convolutions_succeed_trained_attentions():
    """In Theseus: the old layers keep their attentions until they are gone."""
    trained = AUTO_CLASSES["seq2seq-lm"].from_config(config_of("marian"))
    lite = LiteTransformer(kernels=[3, 5], conv_heads=2, attention=False)
    model = make_variant(
        trained, [Theseus(successor={"encoder": 2, "decoder": 2}, schedule=("linear", 0.5), steps=0.5), lite]
    )
    training_step(model, batch_of("marian"))
    model.finalize()
    assert len(convolutions(model)) == 4
    check_steps(model.eval(), "dynamic")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "no"}, r"LiteTransformer\(attention='no'\): must be True or False"),
        (
            {"attention": False, "conv_heads": 8},
            r"LiteTransformer\(conv_heads=8\): must divide half of the hidden size 24",
        ),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_variant(config_of("gpt2"), [LiteTransformer(**{"kernels": [3, 5]} | settings)], task="causal-lm")
