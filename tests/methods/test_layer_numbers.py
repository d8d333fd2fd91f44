"""What a native class derives from the number of a layer, when methods give its layers other numbers."""

import pytest
import torch
from support.models import add_noise, differences, outputs
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods import (
    FFNPruning,
    Freeze,
    HeadMask,
    HeadPruning,
    LayerDrop,
    LayerSelection,
    LayerSharing,
    LowRank,
    Theseus,
)

GPT2 = ARCHITECTURES["gpt2"]
BATCH = GPT2.tiny_inputs("feature-extraction")
SECOND_HALF = LayerSelection(keep={"decoder": [2, 3]})
LISTS = {
    "selection": [LayerSelection(keep={"decoder": [1, 3]})],
    "selection by share": [LayerSelection(share=0.5)],
    "selection after LayerDrop": [LayerDrop(p=0.5), SECOND_HALF],
    "selection twice": [LayerSelection(keep={"decoder": [1, 2, 3]}), LayerSelection(keep={"decoder": [1, 2]})],
    "sharing of a deeper stack": [LayerSharing(depth={"decoder": 7})],
    "sharing of a shallower stack": [LayerSharing(groups=2, start="middle", depth={"decoder": 2})],
    "sharing after selection": [SECOND_HALF, LayerSharing(depth={"decoder": 3})],
    "Theseus": [Theseus(train="all")],
    "Theseus after selection": [LayerSelection(keep={"decoder": [1, 3]}), Theseus(init="alternate")],
    "head pruning": [SECOND_HALF, HeadPruning(heads={"decoder.0.self": [0], "decoder.1.self": [0, 1]})],
    "head mask": [SECOND_HALF, HeadMask(heads={"decoder.0.self": [1]})],
    "low rank": [SECOND_HALF, LowRank(components=["attention", "ffn"], rank=3)],
    "random attention": [SECOND_HALF, Freeze(attention="random", seed=3)],
    "pruned neurons": [FFNPruning(width=12), SECOND_HALF],
}


def inverse_scaled(**fields):
    """A GPT-2 of four layers, each of which divides its scores by its number."""
    config = AutoConfig.for_model(
        "gpt2", **GPT2.tiny | {"n_layer": 4, "scale_attn_by_inverse_layer_idx": True} | fields
    )
    torch.manual_seed(1)
    model = add_noise(AutoModelForCausalLM.from_config(config), GPT2)
    with torch.no_grad():  # large scores, so that their scale matters
        for name, parameter in model.named_parameters():
            if "attn.c_attn" in name:
                parameter *= 3
    return model.eval()


@pytest.mark.parametrize("name", LISTS)
def test_a_merged_model_computes_the_same_with_new_numbers(name, tmp_path):
    variant = make_variant(inverse_scaled(), LISTS[name]).eval()
    merged = variant.merge()
    assert type(merged) is GPT2LMHeadModel
    assert differences(outputs(merged, BATCH), outputs(variant, BATCH), 1e-5) == []
    merged.save_pretrained(tmp_path)
    reloaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert differences(outputs(reloaded, BATCH), outputs(merged, BATCH)) == []


@pytest.mark.parametrize("fields", [{}, {"scale_attn_weights": False}, {"add_cross_attention": True}], ids=str)
def test_selected_layers_compute_what_they_did(fields):
    model = inverse_scaled(use_cache=False, **fields)
    batch = BATCH | ({"encoder_hidden_states": torch.randn(2, 4, 16)} if "add_cross_attention" in fields else {})
    variant = make_variant(model, [LayerSelection(keep={"decoder": [1, 3]})])
    merged = variant.merge()
    model.transformer.h = nn.ModuleList([model.transformer.h[1], model.transformer.h[3]])
    expected = outputs(model, batch)
    assert differences(outputs(variant, batch), expected) == []
    assert differences(outputs(merged, batch), expected, 1e-5) == []


def test_reordered_attention_keeps_its_scale_too():
    model = inverse_scaled(reorder_and_upcast_attn=True)
    variant = make_variant(model, [SECOND_HALF]).eval()
    merged = variant.merge()
    for either in (variant, merged):
        either.set_attn_implementation("eager")
    assert differences(outputs(merged, BATCH), outputs(variant, BATCH), 1e-5) == []


def test_a_successor_starts_as_the_layer_that_it_copies():
    variant = make_variant(inverse_scaled(), [Theseus(init="alternate")]).eval()
    hidden_states = torch.randn(2, 5, 16)
    for layer in variant.transformer.h:
        expected = layer.predecessor[0](hidden_states)
        torch.testing.assert_close(layer(hidden_states), expected, rtol=1e-5, atol=1e-5)


def test_a_finalized_successor_is_merged_as_it_is():
    variant = make_variant(inverse_scaled(), [Theseus(init="alternate")]).eval()
    expected = outputs(variant, BATCH)
    variant.finalize()
    assert differences(outputs(variant, BATCH), expected) == []
    assert differences(outputs(variant.merge(), BATCH), expected, 1e-5) == []


def test_a_successor_that_cannot_take_over_the_scale_is_refused():
    with pytest.raises(ValueError, match=r"'attn\.c_attn' is a LowRank.*; put Theseus first, or use init='first'"):
        make_variant(inverse_scaled(), [LowRank(components=["attention"], rank=3), Theseus(init="alternate")])


SWITCHES = [{"scale_attn_by_inverse_layer_idx": True}, {"reorder_and_upcast_attn": True}, {"add_cross_attention": True}]
DERIVED = {"layer_idx", "scaling"}  # what surgery and merge() look after


@pytest.mark.parametrize("fields", [{}, *SWITCHES, {"is_decoder": True, "add_cross_attention": True}], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda architecture: architecture.model_type)
def test_nothing_else_depends_on_the_number_of_a_layer(architecture, fields):
    config = AutoConfig.for_model(architecture.model_type)
    if not all(hasattr(config, name) for name in fields) or (
        "is_decoder" not in fields and config.model_type == "bert"
    ):
        fields = {}
    deep = {stack.depth: 3 for stack in architecture.stacks.values()}
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny | deep | fields)
    base = AUTO_CLASSES[architecture.tasks[0]].from_config(config).base_model
    for stack in architecture.stacks.values():
        first, *others = (dict(base.get_submodule(stack.layers.format(n)).named_modules()) for n in range(3))
        for other in others:
            assert first.keys() == other.keys()
            differ = {
                field
                for name, module in first.items()
                for field, value in vars(module).items()
                if isinstance(value, int | float | str | None) and value != vars(other[name])[field]
            }
            assert differ <= DERIVED
