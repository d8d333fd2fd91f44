"""`merge(uneven=True)`: a native model of unequal layers where transformers reads their sizes, elsewhere a refusal of one line.

No family of transformers 5.23 reads the number of heads or neurons of a layer (tests/families/test_per_layer_config.py says when
one does). The way for such families is tested on a Llama whose layers get the config of their own, as those of Gemma 4 do.
"""

import json

import pytest
import torch
from support.recipes import cli, one_line_error
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.llama import modeling_llama

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES

pytestmark = pytest.mark.skipif(
    not hasattr(PreTrainedConfig, "per_layer_config"), reason="transformers has no such setting yet"
)
IDS = torch.tensor([[5, 9, 3, 7, 6, 8]])
HEADS = methods.HeadPruning(heads={"decoder.0.self": [2, 3]})
WIDTHS = methods.FFNPruning(keep={"decoder.1.ffn": [0, 2, 3, 5, 8]})


@pytest.fixture
def llama():
    """A Llama of two layers, in eval mode, with four heads in groups of two."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
    return LlamaForCausalLM(LlamaConfig(**ARCHITECTURES["llama"].tiny | sizes)).eval()


@pytest.fixture
def reads_sizes(monkeypatch):
    """Llama's layers get the config of their own, as a later version of transformers may have it."""

    class Layer(modeling_llama.LlamaDecoderLayer):
        def __init__(self, config, layer_idx):
            super().__init__(config.per_layer_config[layer_idx], layer_idx)

    def validate_each(config):
        for layer in config.per_layer_config:
            LlamaConfig.validate_architecture(layer)

    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Layer)
    validators = [check for check in LlamaConfig.__class_validators__ if check.__name__ != "validate_architecture"]
    monkeypatch.setattr(LlamaConfig, "__class_validators__", [*validators, validate_each])


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


@pytest.mark.parametrize("chosen", [[HEADS], [WIDTHS], [HEADS, WIDTHS], [WIDTHS, methods.LowRank(rank=2)]], ids=str)
def test_unequal_layers_open_in_transformers(chosen, llama, reads_sizes, tmp_path):
    variant = make_variant(llama, chosen).eval()
    uneven, padded = variant.merge(uneven=True), variant.merge()
    assert type(uneven) is LlamaForCausalLM
    assert uneven.num_parameters() < padded.num_parameters()
    uneven.save_pretrained(tmp_path)
    overrides = json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    expected = {"0": heads if HEADS in chosen else {}, "1": {"intermediate_size": 5} if WIDTHS in chosen else {}}
    assert overrides == {layer: sizes for layer, sizes in expected.items() if sizes}
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(loaded), logits(uneven))
    torch.testing.assert_close(logits(uneven), logits(variant), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits(uneven), logits(padded), rtol=1e-5, atol=1e-6)
    settings = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **settings), padded.generate(IDS, **settings))


def test_the_command_writes_it(llama, reads_sizes, tmp_path):
    variant = make_variant(llama, [HEADS, WIDTHS]).eval()
    variant.save_pretrained(tmp_path / "variant")
    cli("merge", tmp_path / "variant", tmp_path / "out", "--uneven")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.model.layers[1].mlp.up_proj.weight.shape == (5, 16)
    torch.testing.assert_close(logits(loaded), logits(variant), rtol=1e-5, atol=1e-6)


def test_what_the_family_refuses_is_said(llama, reads_sizes):
    """Three heads of four, of a hidden size of 16, in a family that reads them."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**ARCHITECTURES["llama"].tiny | sizes))
    variant = make_variant(model, [methods.HeadPruning(heads={"decoder.0.self": [1]})])
    message = r"LlamaForCausalLM refuses these sizes: .*The hidden size \(16\) is not a multiple of the number of attention heads"
    with pytest.raises(ValueError, match=message):
        variant.merge(uneven=True)


def test_equal_layers_need_no_such_setting(llama):
    """The field of all layers holds their size, and the family need not read any other."""
    for chosen in ([methods.FFNPruning(width=6)], [methods.Freeze(ffn="frozen")]):
        variant = make_variant(llama, chosen)
        uneven, plain = variant.merge(uneven=True), variant.merge()
        assert uneven.config.to_dict() == plain.config.to_dict()
        assert "per_layer_config" not in uneven.config.to_dict()
        assert torch.equal(logits(uneven), logits(plain))


def bert(chosen):
    return make_variant(BertForMaskedLM(BertConfig(**ARCHITECTURES["bert"].tiny)), chosen)


REFUSED = {  # name -> (makes a variant, what the error says)
    "neurons": (
        lambda _: bert([methods.FFNPruning(keep={"encoder.0.ffn": [0, 1]})]),
        r"BertForMaskedLM of transformers [\d.]+ does not read intermediate_size of a layer",
    ),
    "heads": (
        lambda _: bert([methods.HeadPruning(heads={"encoder.0.self": [0]})]),
        r"BertForMaskedLM of transformers [\d.]+ does not read num_attention_heads of a layer",
    ),
    "both": (
        lambda llama: make_variant(llama, [HEADS, WIDTHS]),
        r"LlamaForCausalLM .* does not read intermediate_size, num_attention_heads, num_key_value_heads of a layer",
    ),
    "no heads": (
        lambda llama: make_variant(llama, [methods.HeadPruning(heads={"decoder.1.self": [0, 1, 2, 3]})]),
        "'decoder.1.self' has lost all its heads, and a native model keeps one",
    ),
    "two stacks": (
        lambda _: make_variant(
            MarianMTModel(MarianConfig(**ARCHITECTURES["marian"].tiny)),
            [methods.FFNPruning(keep={"decoder.0.ffn": [0, 1]})],
        ),
        "per_layer_config numbers the layers of one stack, and marian has 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_in_one_line(name, llama, tmp_path):
    make, message = REFUSED[name]
    variant = make(llama)
    advice = (
        "; without uneven, merge() fills the layers up with zeros, or save the variant itself, which hf_freeze opens"
    )
    with pytest.raises(ValueError, match=rf"^merge\(uneven=True\): {message}") as error:
        variant.merge(uneven=True)
    assert str(error.value).endswith(advice)
    assert "\n" not in str(error.value)
    assert type(variant.merge()) is variant.native_class, "a refusal changes nothing"
    variant.save_pretrained(tmp_path / "variant")
    assert "merge(uneven=True): " in one_line_error("merge", tmp_path / "variant", tmp_path / "out", "--uneven")
    assert not (tmp_path / "out").exists()
