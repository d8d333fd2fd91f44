"""Configs whose fields contradict each other are refused in one line, before anything is built."""

import json

import pytest
from support.cases import ALL
from support.small import small_config
from transformers import AutoConfig, AutoModelForCausalLM

from hf_freeze import make_variant
from hf_freeze.architectures.derive import derive
from hf_freeze.architectures.published import default_config
from hf_freeze.architectures.shrink import shrink
from hf_freeze.methods import Freeze, HeadPruning
from hf_freeze.model.loading import empty_model

FREEZE = [Freeze(ffn="frozen")]
OTHER_DEPTH = r"^qwen3 config: `num_hidden_layers` \(5\) must be equal to the number of `layer_types` \(2\)[^\n]*$"


@pytest.fixture
def config():
    """Two layers, each with its type."""
    return small_config("qwen3")


def test_a_depth_assigned_to_a_config_is_refused(config):
    config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=OTHER_DEPTH):
        make_variant(config, FREEZE, task="causal-lm")


def test_a_depth_assigned_to_the_config_of_a_model_is_refused(config):
    model = AutoModelForCausalLM.from_config(config)
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=OTHER_DEPTH):
        make_variant(model, FREEZE)


def test_a_depth_assigned_to_the_config_of_a_variant_is_refused(config):
    variant = make_variant(config, FREEZE, task="causal-lm")
    variant.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=OTHER_DEPTH):
        make_variant(variant, FREEZE)


def test_a_depth_in_a_file_edited_by_hand_is_refused(config, tmp_path):
    make_variant(config, FREEZE, task="causal-lm").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 5}))
    with pytest.raises(ValueError, match=OTHER_DEPTH):
        empty_model(tmp_path)


def test_a_list_that_transformers_does_not_check_is_refused(tmp_path):
    make_variant(small_config("smollm3"), FREEZE, task="causal-lm").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"no_rope_layers": [1]}))
    expected = r"^smollm3 config: no_rope_layers must have an entry for each of 3 layers \(num_hidden_layers\), not 1$"
    with pytest.raises(ValueError, match=expected):
        AutoConfig.from_pretrained(tmp_path)


def test_a_contradiction_in_a_nested_config_is_refused():
    config = small_config("gemma3")
    config.text_config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=r"^gemma3_text config: `num_hidden_layers` \(5\) must be equal[^\n]*$"):
        derive(config)


@pytest.mark.parametrize("model_type", ["mistral", "llama"], ids=["derived", "by hand"])
def test_heads_that_cannot_share_keys_and_values_evenly_are_refused(model_type):
    config = AutoConfig.for_model(
        model_type, hidden_size=32, num_attention_heads=4, num_key_value_heads=3, num_hidden_layers=2, vocab_size=99
    )
    expected = rf"^{model_type} config: num_attention_heads=4 is no multiple of num_key_value_heads=3[^\n]*$"
    with pytest.raises(ValueError, match=expected):
        make_variant(config, [HeadPruning(share=0.5)], task="causal-lm")


@pytest.mark.parametrize(
    "model_type", ["roberta", "qwen3", "falcon", "deepseek_v3", "jetmoe", "clip", *["seamless_m4t"] * ALL]
)
def test_a_config_as_published_is_not_refused(model_type):
    derive(shrink(default_config(model_type)))
