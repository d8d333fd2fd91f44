"""Freeze of parts of attentions: self- and cross-attention apart, and queries, keys, values and outputs apart."""

import pytest
import torch
from safetensors.torch import load_file
from support.deep import deep_config, deep_model
from support.models import differences, outputs
from support.training import training_step

from hf_freeze import count_parameters, make_variant
from hf_freeze.architectures.base import base_name
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods import Freeze, HeadPruning, LayerSharing, LowRank

MARIAN = ARCHITECTURES["marian"]


def frozen_parts(model):
    """What is frozen in layers, as "stack.linear", and all of its layers alike."""
    names = {}
    for name, parameter in model.named_parameters():
        stack, *rest = base_name(model, name).split(".layers.")
        if rest:
            linear = rest[0].split(".", 1)[1].rpartition(".")[0]
            names.setdefault((stack, linear), set()).add(parameter.requires_grad)
    assert all(len(found) == 1 for found in names.values())
    return {f"{stack}.{linear}" for (stack, linear), found in names.items() if found == {False}}


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
SELF = {f"{stack}.self_attn.{name}" for stack in ("encoder", "decoder") for name in PROJECTIONS}
CROSS = {f"decoder.encoder_attn.{name}" for name in PROJECTIONS}


@pytest.mark.parametrize("mode", ["frozen", "random"])
@pytest.mark.parametrize(
    ("parts", "layers", "expected"),
    [
        (["self"], None, SELF),
        (["cross"], None, CROSS),
        (["q"], None, {name for name in SELF | CROSS if name.endswith(".q_proj")}),
        (["cross.k", "cross.v"], None, {f"decoder.encoder_attn.{name}" for name in ("k_proj", "v_proj")}),
        (["self.o"], {"encoder": [0, 1, 2, 3]}, {"encoder.self_attn.out_proj"}),
    ],
)
def test_only_these_parts_are_frozen(parts, layers, expected, mode, tmp_path):
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [Freeze(attention=dict.fromkeys(parts, mode), layers=layers, seed=3)])
    assert frozen_parts(variant) == expected
    seeded = {base_name(variant, name) for name in variant.seeded_tensors}
    assert {name.split(".layers.")[1].split(".", 1)[1].rpartition(".")[0] for name in seeded} == (
        {name.partition(".")[2] for name in expected} if mode == "random" else set()
    )
    before = {name: p.clone() for name, p in variant.named_parameters()}
    training_step(variant, batch)
    for name, parameter in variant.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, before[name]), name
    variant.save_pretrained(tmp_path)
    assert not load_file(tmp_path / "model.safetensors").keys() & variant.seeded_tensors.keys()
    loaded, info = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert differences(outputs(loaded.eval(), batch), outputs(variant.eval(), batch)) == []
    assert frozen_parts(loaded) == expected


def test_parts_in_several_modes_are_as_the_whole_in_one():
    native, batch = deep_model(MARIAN)
    whole = make_variant(native, [Freeze(attention="random", seed=3)])
    parts = make_variant(native, [Freeze(attention={"self": "random", "cross": "random"}, seed=3)])
    assert whole.seeded_tensors == parts.seeded_tensors
    mixed = make_variant(
        native, [Freeze(attention={"q": "random", "k": "frozen", "v": "diagonal", "self.o": "trainable"})]
    )
    assert frozen_parts(mixed) == {name for name in SELF | CROSS if not name.endswith("out_proj")}
    layer = mixed.model.encoder.layers[1].self_attn
    assert torch.equal(layer.v_proj.weight, torch.eye(16))
    assert torch.equal(layer.k_proj.weight, native.model.encoder.layers[1].self_attn.k_proj.weight)
    assert differences(outputs(mixed, batch), outputs(native, batch)) != []


@pytest.mark.parametrize("family", [name for name in ARCHITECTURES if name != "marian"])
def test_every_family_has_self_attention(family):
    architecture = ARCHITECTURES[family]
    native, _ = deep_model(architecture)
    whole = make_variant(native, [Freeze(attention="random", seed=1)])
    parts = make_variant(native, [Freeze(attention={"self": "random"}, seed=1)])
    assert count_parameters(whole).stored == count_parameters(parts).stored
    assert whole.seeded_tensors == parts.seeded_tensors


def test_one_matrix_has_one_mode():
    config = deep_config(ARCHITECTURES["gpt2"])
    for attention in ({"q": "random", "k": "random", "v": "random"}, {"o": "random"}):
        assert make_variant(config, [Freeze(attention=attention)], task="causal-lm").seeded_tensors
    message = (
        r"attention=\{'q': 'random'\}\): q, k, v of 'self' are one matrix in gpt2, 'attn.c_attn'; give all of them one"
    )
    with pytest.raises(ValueError, match=message):
        make_variant(config, [Freeze(attention={"q": "random"})], task="causal-lm")


def test_beside_other_methods():
    native, _ = deep_model(MARIAN)
    random = Freeze(attention={"cross": "random"}, seed=2)
    cut = make_variant(native, [random, HeadPruning(heads={"decoder.0.cross": [1], "encoder.0.self": [0]})])
    assert cut.model.decoder.layers[0].encoder_attn.q_proj.out_features == 8
    assert {name.split(".")[4] for name in cut.seeded_tensors} == {"encoder_attn"}
    shared = make_variant(native, [LayerSharing(components=["cross"]), random])
    assert {name.split(".layers.")[1].split(".")[0] for name in shared.seeded_tensors} == {"0"}
    factors = LowRank(rank=3, components=["attention"], layers={"encoder": [0]})
    make_variant(native, [factors, random])
    with pytest.raises(ValueError, match="only the matrices of plain linears can be drawn"):
        make_variant(native, [factors, Freeze(attention={"self": "random"})])


def test_for_a_part_of_training():
    native, _ = deep_model(MARIAN)
    variant = make_variant(native, [Freeze(attention={"q": "frozen"}, end=0.5)])
    variant.advance(0, 10)
    assert frozen_parts(variant) == {name for name in SELF | CROSS if name.endswith(".q_proj")}
    assert variant.methods[0].parts[0].values(0, 10) == {"parts of attention frozen": 1.0}
    variant.advance(5, 10)
    assert frozen_parts(variant) == set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": {}}, r"Freeze\(attention=\{\}\): must be a mode, or a dict such as \{'cross': 'random'\}"),
        (
            {"attention": {"q": "shared"}},
            r"Freeze\(attention\['q'\]='shared'\): choose from \['trainable', 'frozen', 'redrawn', 'random'",
        ),
        (
            {"attention": {"x": "frozen"}},
            r"no part 'x' in the layers of marian; choose from \['self', 'cross', 'q', 'k', 'v', 'o'\]",
        ),
        ({"attention": {"self": "frozen", "q": "random"}}, r"'self' and 'q' both name 'self.q'; leave one of them out"),
        ({"attention": {"cross": "frozen"}, "layers": {"encoder": [0]}}, r"no part 'cross' in the layers of marian"),
        ({"attention": {"q": "random"}, "end": 0.5}, "weights that a seed regenerates are not stored"),
        ({"ffn": {"q": "random"}}, r"Freeze\(ffn=\{'q': 'random'\}\): choose from"),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_variant(deep_config(MARIAN), [Freeze(**settings)], task="seq2seq-lm")
    assert "\n" not in str(refused.value)
