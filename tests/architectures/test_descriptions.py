"""What an architecture's description answers, and which architectures a refusal names."""

import pytest
from transformers import AutoConfig

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import FixedAttention, Theseus


@pytest.mark.parametrize("component", ["embeddings", "norm", "head", "ffm"])
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda architecture: architecture.model_type)
def test_only_attention_and_ffn_have_linears_in_layers(architecture, component):
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny)
    with pytest.raises(ValueError, match=rf"component='{component}' .*: choose from \['ffn', 'attention'\]"):
        architecture.linears(config, component)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_fixed_attention_of_a_decoder_names_who_can_take_it(model_type):
    config = AutoConfig.for_model(model_type, **ARCHITECTURES[model_type].tiny)
    with pytest.raises(ValueError, match=rf"'fixed_attention' .* '{model_type}'; it supports \['bert', 'marian'\]"):
        make_variant(config, [FixedAttention()], task="causal-lm")


def test_theseus_of_one_layer_says_what_to_do():
    config = AutoConfig.for_model("marian", **ARCHITECTURES["marian"].tiny | {"decoder_layers": 1})
    with pytest.raises(
        ValueError, match=r"Theseus: stack 'decoder' has one layer, .*; name other stacks by successor="
    ):
        make_variant(config, [Theseus()], task="seq2seq-lm")
    make_variant(config, [Theseus(successor={"encoder": 1})], task="seq2seq-lm")
