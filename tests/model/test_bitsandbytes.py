"""Variants in 4 and 8 bits of bitsandbytes (QLoRA): a saved one that is opened so, and one made of a model that was opened so.

Forwards are in training mode: after one in eval mode, bitsandbytes 0.49 has no gradients on CPUs with bf16, in native models too.
"""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

from hf_freeze import make_variant
from hf_freeze.compat.transformers import is_packed
from hf_freeze.methods import FactorizedEmbedding, FFNPruning, Freeze, LayerSelection, LayerSharing, LowRank, Theseus

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

BITS = {4: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), 8: BitsAndBytesConfig(load_in_8bit=True)}
FREEZE = Freeze(embeddings="frozen", ffn="random")
IDS = torch.tensor([[5, 9, 3, 7, 6, 8]])


@pytest.fixture(scope="module")
def backbones():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(vocab_size=99, num_hidden_layers=4, **sizes)),
        "gpt2": GPT2LMHeadModel(
            GPT2Config(vocab_size=99, n_embd=64, n_layer=4, n_head=4, n_positions=64, **no_dropout)
        ),
    }


def logits(model):
    with torch.no_grad():
        return model.train()(IDS).logits


def packed(model):
    return {name: module for name, module in model.named_modules() if is_packed(module)}


def dense_twin(variant, opened):
    """The dense `variant` with the weights that `opened` holds in 4 or 8 bits."""
    twin = copy.deepcopy(variant)
    for name, module in packed(opened).items():
        linear = twin.get_submodule(name)
        weight = dequantize_bnb_weight(module.weight, getattr(module, "state", None)).float()
        linear.weight.data = (weight if isinstance(linear, torch.nn.Linear) else weight.T).clone()
    return twin


def open_in(folder, bits):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BITS[bits])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("family", "method", "count"),
    [  # the linears that stay in 4 or 8 bits, of 28 (GPT-2: 16)
        ("qwen3", FREEZE, 16),
        ("qwen3", LayerSharing(), 0),
        ("qwen3", LowRank(rank=8, components=["attention"]), 12),
        ("gpt2", FREEZE, 8),
        ("gpt2", LayerSelection(share=0.5), 8),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_saved_variant_is_opened_trained_by_lora_and_opened_again(family, method, count, bits, backbones, tmp_path):
    variant = make_variant(backbones[family], [method])
    variant.save_pretrained(tmp_path / "base")
    opened = open_in(tmp_path / "base", bits)
    assert len(packed(opened)) == count
    torch.testing.assert_close(logits(opened), logits(dense_twin(variant, opened)), atol=0.02, rtol=0.02)
    trained = {name: p.requires_grad for name, p in opened.named_parameters() if not is_packed(p)}
    assert trained.items() <= {name: p.requires_grad for name, p in variant.named_parameters()}.items()
    before = {name: p.clone() for name, p in opened.named_parameters()}
    tuned = peft.get_peft_model(opened, peft.LoraConfig(r=2, init_lora_weights=False))
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.1)
    start = logits(tuned)
    tuned.train()(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    expected = logits(tuned)
    assert not torch.equal(expected, start)
    after = {
        name.replace(".base_layer", ""): p
        for name, p in tuned.get_base_model().named_parameters()
        if "lora" not in name
    }
    assert all(torch.equal(after[name], value) for name, value in before.items())
    tuned.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(open_in(tmp_path / "base", bits), tmp_path / "adapter")
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_variant_of_an_opened_model_keeps_its_packed_linears(family, bits, backbones, tmp_path):
    backbones[family].save_pretrained(tmp_path / "native")
    native = open_in(tmp_path / "native", bits)
    before = logits(native)
    methods = [LayerSelection(keep={"decoder": [0, 3]}), FactorizedEmbedding(rank=16), FREEZE]
    variant = make_variant(native, methods)
    assert len(packed(variant)) == len(packed(native)) / 2 - 2 * (3 if family == "qwen3" else 2)  # the FFNs are seeded
    assert variant.is_quantized
    expected = logits(dense_twin(make_variant(backbones[family], methods), variant))
    torch.testing.assert_close(logits(variant), expected, atol=0.02, rtol=0.02)
    assert torch.equal(logits(native), before)
    variant.save_pretrained(tmp_path / "variant")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "variant")), logits(variant))
    other = make_variant(native, methods, copy=False)
    assert torch.equal(logits(other), logits(variant))
    if family == "qwen3":  # of GPT-2's Conv1D, dequantize() makes nn.Linear, natively too
        torch.testing.assert_close(logits(other.dequantize().merge()), expected, atol=0.02, rtol=0.02)
    with pytest.raises(RuntimeError, match="was used up"):
        native(IDS)
    with pytest.raises(
        ValueError, match=r"\Amerge\(\) of a model that a quantiser has packed: dequantize\(\) it first"
    ):
        variant.merge()


@pytest.mark.parametrize(
    "method", [LowRank(rank=4), FFNPruning(width=64), LayerSharing(), Theseus()], ids=lambda m: m.name
)
def test_methods_that_change_packed_weights_are_refused(method, backbones, tmp_path):
    backbones["qwen3"].save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=rf"\Amethod '{method.name}' changes '.+', which bitsandbytes has packed: .+\Z"
    ):
        make_variant(open_in(tmp_path, 8), [method])


def test_a_model_of_another_quantiser_is_refused(backbones):
    """Its weights are in tensors of other names, which a variant would not find."""
    packed_so = copy.deepcopy(backbones["gpt2"])
    packed_so.is_quantized, packed_so.quantization_method = True, "gptq"
    with pytest.raises(ValueError, match=r"\Ano variant of a model that gptq has packed: make it first, .+\Z"):
        make_variant(packed_so, [])
