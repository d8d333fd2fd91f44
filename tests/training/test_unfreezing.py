"""Gradual unfreezing, and a learning rate for each component."""

import pytest
import torch
from support.cases import BASELINES
from support.models import native, trainability
from support.schedules import PHASES, scheduled_model
from transformers import BertConfig, MarianConfig, SqueezeBertConfig

from hf_freeze import make_variant
from hf_freeze.architectures.base import base_name, canonical_parameters
from hf_freeze.methods import Freeze, HeadMask, LayerDrop
from hf_freeze.training import gradual_unfreezing, parameter_groups

every_backbone = pytest.mark.parametrize("case", BASELINES, ids=[case.architecture.model_type for case in BASELINES])


# -- gradual unfreezing ------------------------------------------------------------------------------------------------------


def test_gradual_unfreezing_goes_from_the_last_layer_down():
    methods = gradual_unfreezing(BertConfig(num_hidden_layers=4), until=0.4)
    layer = {"attention": "frozen", "ffn": "frozen", "norm": "frozen"}
    assert methods == [
        Freeze(**layer, layers={"encoder": [2]}, end=0.1),
        Freeze(**layer, layers={"encoder": [1]}, end=0.2),
        Freeze(**layer, layers={"encoder": [0]}, end=0.3),
        Freeze(embeddings="frozen", end=0.4),
    ]
    marian = gradual_unfreezing(MarianConfig(encoder_layers=2, decoder_layers=1), until=0.6)
    assert [(method.layers, method.end) for method in marian] == [
        ({"encoder": [1]}, 0.2),
        ({"encoder": [0]}, 0.4),
        (None, 0.6),
    ]
    assert gradual_unfreezing(BertConfig(num_hidden_layers=1), until=1) == [Freeze(embeddings="frozen", end=1)]


@every_backbone
def test_a_gradually_unfrozen_model(case):
    model = make_variant(native(case), gradual_unfreezing(native(case), until=0.5))
    layers = sum(case.architecture.depths(model.config).values())
    trained = []
    for step in range(2 * layers + 1):
        model.advance(step, 2 * layers)
        now = {name for name, trainable in trainability(model).items() if trainable}
        assert not trained or now > trained[-1] or (step > layers and now == trained[-1])
        trained.append(now)
    lower = {name for name in trained[-1] if case.architecture.layer_of(base_name(model, name))} - trained[0]
    assert lower
    model.rewind()
    assert trained[layers] == trained[-1] == {name for name, trainable in trainability(model).items() if trainable}
    tables = trained[layers] - trained[layers - 1]
    assert {case.architecture.component(base_name(model, name)) for name in tables if "head" not in name} >= {
        "embeddings"
    }


@pytest.mark.parametrize("until", [0, -1, 1.1, True, "1", float("nan")])
def test_a_share_of_gradual_unfreezing_outside_its_range_is_refused(until):
    with pytest.raises(ValueError, match=r"until=.*: must be a share of training, 0 < until <= 1"):
        gradual_unfreezing(BertConfig(), until=until)


def test_gradual_unfreezing_needs_a_known_backbone():
    with pytest.raises(ValueError, match="squeezebert: no list of layers with linears"):
        gradual_unfreezing(SqueezeBertConfig())
    with pytest.raises(ValueError, match="str is neither a transformers model nor a config"):
        gradual_unfreezing("bert")


# -- parameter groups --------------------------------------------------------------------------------------------------------


@every_backbone
@pytest.mark.parametrize("phase", ["native", "before", "during"])
def test_groups_hold_what_is_trained_at_some_time_once(case, phase):
    model = native(case) if phase == "native" else make_variant(native(case), [*PHASES, Freeze(norm="frozen")])
    if phase == "during":
        model.advance(0, 1)
    groups = parameter_groups(model, {"embeddings": 0.5, "ffn": 0.0}, lr=0.1, weight_decay=0.01)
    rates = {"embeddings": 0.5, "ffn": 0.0}
    names = {id(parameter): name for name, parameter in canonical_parameters(model)}
    found = {}
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert name not in found
            found[name] = group
    for name, parameter in canonical_parameters(model):
        component = case.architecture.component(base_name(model, name))
        if component == "constant" or (component == "norm" and phase != "native"):
            assert name not in found
            continue
        group = found.pop(name)
        assert group["component"] == component
        assert group["lr"] == rates.get(component, 0.1)
        decays = parameter.ndim > 1 and not name.endswith("bias")
        assert group["weight_decay"] == (0.01 if decays else 0.0), name
    assert found == {}
    assert [group["lr"] for group in torch.optim.AdamW(groups).param_groups] == [group["lr"] for group in groups]
    assert {group["lr"] for group in parameter_groups(model, lr=0.1)} == {0.1}


@every_backbone
def test_what_decides_what_is_kept_has_a_rate_of_its_own(case):
    model = make_variant(native(case), [HeadMask(), LayerDrop(learned=True)])
    groups = parameter_groups(model, {"gates": 0.5}, lr=0.1, weight_decay=0.01)
    (gates,) = (group for group in groups if group["component"] == "gates")
    assert (gates["lr"], gates["weight_decay"]) == (0.5, 0.0)
    expected = {name for name, _ in model.named_parameters() if name.endswith((".gates", ".layer_drop.score"))}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(parameter)] for parameter in gates["params"]} == expected
    assert {group["lr"] for group in groups if group is not gates} == {0.1}
    assert "gates" not in {group["component"] for group in parameter_groups(model, lr=0.1)}


@pytest.mark.parametrize(
    ("rates", "arguments", "message"),
    [
        (
            {"ffns": 0.1},
            {},
            r"unknown component 'ffns'; choose from \['embeddings', 'attention', 'ffn', 'norm', 'head', 'successor', 'gates'\]",
        ),
        ({"constant": 0.1}, {}, "unknown component 'constant'"),
        ({"ffn": -0.1}, {}, r"learning_rates\['ffn'\]=-0\.1: must be a number of at least 0"),
        ({"ffn": "0.1"}, {}, r"learning_rates\['ffn'\]='0\.1'"),
        ({}, {"lr": float("nan")}, "lr=nan: must be a number of at least 0"),
        ({}, {"weight_decay": True}, "weight_decay=True: must be a number of at least 0"),
        ({"successor": 0.1}, {}, "'successor' has nothing to train in this VariantMarianMTModel"),
        ({"norm": 0.1}, {}, "'norm' has nothing to train in this VariantMarianMTModel"),
    ],
)
def test_groups_that_make_no_sense_are_refused(rates, arguments, message):
    model = scheduled_model(phases=[*PHASES, Freeze(norm="frozen")])
    with pytest.raises(ValueError, match=message):
        parameter_groups(model, rates, **({"lr": 0.1} | arguments))
