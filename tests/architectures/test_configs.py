"""Default configs that transformers cannot build, and small configs whose fields must fit together."""

import json

import pytest
import torch
from support.small import small_config
from transformers import AutoConfig, AutoModel

from hf_freeze.architectures.derive import base_model, derive
from hf_freeze.architectures.describe import NotDerived
from hf_freeze.architectures.families import families_page
from hf_freeze.architectures.probe import Probe, fill_with_noise
from hf_freeze.architectures.published import PUBLISHED, default_config
from hf_freeze.architectures.shrink import shrink
from hf_freeze.model.loading import config_of_type_or_model


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_a_default_config_is_completed_only_where_it_must_be(model_type: str) -> None:
    with pytest.raises(NotDerived, match=f"{model_type}: (its small model does not run|transformers cannot build it)"):
        derive(AutoConfig.for_model(model_type))

    Probe(shrink(default_config(model_type)))  # runs
    assert config_of_type_or_model(model_type).to_dict() == default_config(model_type).to_dict()


def test_the_page_says_what_was_completed() -> None:
    unknown = {"understood": False, "reason": "not tried"}

    page = families_page({"ministral": unknown, "bert": unknown, "granitemoehybrid": unknown})

    assert "- ministral: `head_dim=128`\n" in page
    assert "`layer_types=[40 entries of 'linear_attention' and 'full_attention']`" in page
    assert "- bert:" not in page
    assert "completed" not in families_page({"bert": unknown})


# Model type, and fields that must have these values for its small model to run.
FITTING = {
    "falcon_h1": {"num_hidden_layers": 3, "mlp_multipliers": [1.0, 1.0], "mamba_n_heads": 8, "mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0, "expert_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["attention", "recurrent"]},
    "bamba": {"attn_layer_indices": [0], "mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoehybrid": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "kimi_linear": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "mistral4": {"head_dim": 16, "qk_rope_head_dim": 8},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "hidden_size": 32},
    "dinov2": {"stage_names": ["stem", "stage1", "stage2"], "out_features": ["stage2"]},
    "zaya": {"num_experts_per_tok": 1},
}


@pytest.mark.parametrize("model_type", FITTING)
def test_fields_of_a_small_config_fit_together(model_type: str) -> None:
    small = shrink(default_config(model_type))

    data = json.loads(json.dumps(small.to_dict()))
    assert {name: data[name] for name in FITTING[model_type]} == FITTING[model_type]
    Probe(small)  # runs


def test_linears_beside_a_convolution_are_no_ffn() -> None:
    (stack,) = derive(default_config("recurrent_gemma")).stacks.values()

    assert stack.ffn == ("mlp_block.gate_proj", "mlp_block.up_proj", "mlp_block.down_proj")
    assert "temporal_block.linear_x.*" in stack.others


def test_an_ffn_whose_matrices_lie_in_modules_of_their_own_is_found_beside_another() -> None:
    architecture = derive(default_config("xmod"))
    stack = architecture.stacks["encoder"]

    adapter = [f"output.adapter_modules.en_XX.dense{number}" for number in (1, 2)]
    assert stack.ffns_in(0) == [adapter, ["intermediate.dense", "output.dense"]]
    assert "neurons" not in architecture.refusals


def test_a_list_for_each_layer_of_one_stack_is_not_one_of_another_that_is_as_deep() -> None:
    config = AutoConfig.for_model("led", attention_window=[16] * 12)

    stacks = derive(config).stacks

    assert (stacks["encoder"].depth, stacks["encoder"].per_layer) == ("encoder_layers", ("attention_window",))
    assert (stacks["decoder"].depth, stacks["decoder"].per_layer) == ("decoder_layers", ())


def test_what_a_native_class_writes_into_its_config_does_not_reach_the_config_of_the_caller() -> None:
    config = shrink(AutoConfig.for_model("led"))
    before = config.to_dict()

    Probe(config)
    base_model(config)

    assert config.to_dict() == before
    assert type(config.attention_window) is int  # the model makes a list of it


def test_a_norm_whose_scale_is_fixed_keeps_it() -> None:
    """Falcon Mamba has norms of states, whose scale of 1 is a buffer."""
    model = AutoModel.from_config(small_config("falcon_mamba"))
    fill_with_noise(model)
    fixed = [buffer for name, buffer in model.named_buffers() if name.endswith(".weight")]
    assert fixed
    assert all(torch.equal(buffer, torch.ones_like(buffer)) for buffer in fixed)
