"""Parameters of families that no file describes are counted as torch counts them, and each in one component."""

import pytest
import torch
from support.cases import ALL
from support.small import small_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LongformerConfig, LongformerModel

from hf_freeze import count_parameters, make_variant, multiply_adds, stored_bytes
from hf_freeze.analysis import accounting
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods import Freeze, MagnitudePruning

TASKS = {
    "roberta": "masked-lm",
    "t5": "seq2seq-lm",
    "mixtral": "causal-lm",
    "vit": "image-classification",
    "falcon": "causal-lm",
    "bart": "seq2seq-lm",
    "modernbert": "masked-lm",
}
every_family = pytest.mark.parametrize("model_type", TASKS)


def native(model_type):
    return AUTO_CLASSES[TASKS[model_type]].from_config(small_config(model_type))


@every_family
def test_the_total_is_that_of_torch(model_type):
    model = native(model_type)
    count = count_parameters(model)
    expected = sum(parameter.numel() for parameter in model.parameters())  # tied ones once
    assert count.total == count.trainable == count.stored == expected
    assert sum(part.total for part in count.by_component.values()) == expected
    assert stored_bytes(model) == 4 * expected + sum(
        buffer.numel() * buffer.element_size() for name, buffer in model.named_buffers() if name in model.state_dict()
    )


# Of small models: hidden size 32, FFN width 48, 4 heads of 8, 2 layers, 99 tokens.
D, W, V, LAYERS = 32, 48, 99, 2
BY_HAND = {  # family -> component -> parameters
    "roberta": {
        "attention": LAYERS * 4 * (D * D + D),
        "ffn": LAYERS * (2 * D * W + D + W),
        "norm": 2 * D * (1 + 2 * LAYERS),
    },
    "t5": {
        "attention": LAYERS * 3 * 4 * D * D + 2 * 32 * 4,
        "ffn": 2 * LAYERS * 2 * D * W,
        "norm": D * (2 * LAYERS + 3 * LAYERS + 2),
    },
    # 4 experts of gate, up and down, and a router; keys and values have 2 heads.
    "mixtral": {
        "attention": LAYERS * (2 * D * D + 2 * D * D // 2),
        "ffn": LAYERS * (4 * 3 * D * W + 4 * D),
        "norm": D * (1 + 2 * LAYERS),
    },
    # A class token, 4 patches of 8 x 8 in 3 colours, 5 positions; norms before each part and at the end.
    "vit": {
        "attention": LAYERS * 4 * (D * D + D),
        "ffn": LAYERS * (2 * D * W + D + W),
        "norm": 2 * D * (1 + 2 * LAYERS),
        "embeddings": D + 5 * D + 3 * 64 * D + D,
    },
}


@pytest.mark.parametrize("model_type", BY_HAND)
def test_components_are_as_counted_by_hand(model_type):
    count = count_parameters(native(model_type)).by_component
    assert {name: count[name].total for name in BY_HAND[model_type]} == BY_HAND[model_type]


@every_family
def test_a_frozen_ffn_is_not_trainable_and_a_random_one_not_stored(model_type):
    model = native(model_type)
    native_count = count_parameters(model)
    variant = make_variant(model, [Freeze(ffn="random")])
    count = count_parameters(variant)
    ffn = count.by_component["ffn"]
    assert count.total == native_count.total
    assert count.total - count.stored == ffn.total - ffn.stored
    assert ffn.trainable == 0
    assert count.trainable == count.total - ffn.total
    assert sum(p.numel() for p in variant.parameters() if p.requires_grad) == count.trainable
    assert 0 < ffn.total - ffn.stored <= ffn.total


@every_family
def test_counting_works_on_meta(model_type):
    with torch.device("meta"):
        on_meta = count_parameters(native(model_type))
    assert on_meta == count_parameters(native(model_type))


LENGTH = 16


@pytest.mark.parametrize("model_type", [name for name in TASKS if name != "vit"])
def test_multiply_adds_are_those_of_the_real_model(model_type):
    model = native(model_type).train()
    counted = multiply_adds(model, length=LENGTH)
    assert sum(part.forward for part in counted.by_component.values()) == pytest.approx(counted.forward)

    model.set_attn_implementation("eager")
    if model_type == "mixtral":
        model.set_experts_implementation("eager")  # a loop over the experts
    ids = torch.arange(5, 5 + LENGTH)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    assert counted.forward == pytest.approx(counter.get_total_flops() / 2 / LENGTH)


def test_products_of_experts_belong_to_the_ffn():
    """Each token passes 2 of 4 experts and the router; gradients of weights and of inputs cost as much again, each."""
    ffn = multiply_adds(native("mixtral"), length=LENGTH).by_component["ffn"]
    assert ffn.forward == LAYERS * (2 * 3 * D * W + 4 * D)
    assert ffn.backward == 2 * ffn.forward


# Why operations of these cannot be counted on meta, or not without care.
CARE = {
    "megatron-bert": "masked-lm",  # the mask is looked at
    "longformer": "masked-lm",  # the same, where transformers does not expect fake tensors
    "nomic_bert": "masked-lm",  # a padding id must be given
    "xlnet": "causal-lm",  # -1 positions
    "diffllama": "causal-lm",  # a value goes into a tensor
    "recurrent_gemma": "causal-lm",  # a state is kept from call to call
    "inkling2_text": "causal-lm",  # fused attention outside the attentions
    "dbrx": "causal-lm",  # experts are chosen by values
    "clip": "feature-extraction",  # a text and an image
    "hubert": "ctc",  # in training, inputs are masked at random
}


def counted_by_torch(model):
    model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch does not count its grouped product
    inputs, tokens = accounting.example_inputs(model, LENGTH)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops() / 2 / tokens


@pytest.mark.parametrize("model_type", CARE if ALL else list(CARE)[::3])
def test_multiply_adds_of_models_that_ask_for_values(model_type):
    model = AUTO_CLASSES[CARE[model_type]].from_config(small_config(model_type)).eval()
    state = torch.get_rng_state()
    counted = multiply_adds(model, length=LENGTH)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(part.forward for part in counted.by_component.values()) == pytest.approx(counted.forward)
    assert counted.backward > counted.forward
    assert counted.forward == pytest.approx(counted_by_torch(model))


def test_only_small_models_are_allocated_for_values(monkeypatch):
    """Those of mixtures whose experts are chosen by values: the error is one line that names the type of model."""
    model = AUTO_CLASSES["causal-lm"].from_config(small_config("dbrx"))
    monkeypatch.setattr(accounting, "SMALL", 10_000)
    with pytest.raises(ValueError, match=r"^dbrx: operations cannot be counted: .*aten.nonzero.*$"):
        multiply_adds(model)


def test_large_models_that_look_at_masks_are_counted_without_values():
    """Longformer of the published widths, whose 64 million parameters stay on meta."""
    config = LongformerConfig(num_hidden_layers=3, attention_window=[64] * 3, pad_token_id=1)
    with torch.device("meta"):
        model = LongformerModel(config)
    counted = multiply_adds(model, length=64)
    assert counted.by_component["ffn"].forward == 3 * 2 * 768 * 3072


def test_a_scheduled_variant_is_counted_where_masks_are_looked_at():
    native = AUTO_CLASSES["masked-lm"].from_config(small_config("megatron-bert"))
    variant = make_variant(native, [MagnitudePruning(sparsity=0.5)])
    assert multiply_adds(variant, length=LENGTH).forward == multiply_adds(native, length=LENGTH).forward
