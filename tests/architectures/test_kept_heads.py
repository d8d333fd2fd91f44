"""A pruned head is one whose rows and columns are zero, in families whose attentions get something for all heads.

Which rows these are is written down here, from the source of transformers, and not asked of hf_freeze.
"""

import copy
import functools
import pickle

import pytest
import torch
from support.small import small_config
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_freeze import make_variant
from hf_freeze.architectures.examples import example_batch
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.methods import HeadPruning

SIZE, HEADS = 8, 4  # of every small model
PLAIN = {  # attention -> the module that holds its linears, for the families whose layers have one
    "t5": {
        "encoder.{}.self": "encoder.block.{}.layer.0.SelfAttention",
        "decoder.{}.self": "decoder.block.{}.layer.0.SelfAttention",
        "decoder.{}.cross": "decoder.block.{}.layer.1.EncDecAttention",
    },
    "mpnet": {"encoder.{}.self": "encoder.layer.{}.attention.attn"},
    "bloom": {"decoder.{}.self": "h.{}.self_attention"},
    "falcon": {"decoder.{}.self": "h.{}.self_attention"},
    "olmo2": {"decoder.{}.self": "layers.{}.self_attn"},
    "phi3": {"decoder.{}.self": "layers.{}.self_attn"},
}


def in_three(*linears):
    """Linears of their own for queries, keys and values -> the blocks of SIZE rows that heads and their groups have there."""
    return lambda heads, groups, shared: dict(zip(linears, (heads, shared, shared), strict=True))


def one_after_the_other(heads, groups, shared):
    """Phi-3: all queries, all keys, all values."""
    return {"qkv_proj": [*heads, *(HEADS + s for s in shared), *(HEADS + groups + s for s in shared)]}


def head_by_head(heads, groups, shared):
    """BLOOM: query, key and value of the first head, then those of the next."""
    return {"query_key_value": [3 * head + place for head in heads for place in range(3)]}


def group_by_group(heads, groups, shared):
    """Falcon's newer decoder: the queries of a group, its key, its value."""
    group = HEADS // groups
    queries = [head // group * (group + 2) + head % group for head in heads]
    return {"query_key_value": queries + [s * (group + 2) + group + place for s in shared for place in (0, 1)]}


QKV = {
    "t5": in_three("q", "k", "v"),
    "mpnet": in_three("q", "k", "v"),
    "bloom": head_by_head,
    "falcon": group_by_group,
    "olmo2": in_three("q_proj", "k_proj", "v_proj"),
    "phi3": one_after_the_other,
}
OUTPUT = {"t5": "o", "mpnet": "o", "bloom": "dense", "falcon": "dense", "olmo2": "o_proj", "phi3": "o_proj"}
AUTO = {"t5": ("seq2seq-lm", AutoModelForSeq2SeqLM), "mpnet": ("masked-lm", AutoModelForMaskedLM)}
CAUSAL = ("causal-lm", AutoModelForCausalLM)
CASES = {  # name, which begins with the family -> changes of its config, the number of key and value heads, the removed heads
    "t5": (
        {},
        4,
        {"encoder.0.self": [1], "encoder.1.self": [0, 3], "decoder.0.self": [0, 2], "decoder.1.cross": [1, 2, 3]},
    ),
    "t5 in the decoder alone": ({}, 4, {"decoder.0.self": [3], "decoder.1.self": [0], "decoder.0.cross": [2]}),
    "mpnet": ({}, 4, {"encoder.0.self": [0, 2], "encoder.1.self": [3]}),
    "bloom": ({}, 4, {"decoder.0.self": [2], "decoder.1.self": [0, 1]}),
    "falcon with groups": (
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        2,
        {"decoder.0.self": [0, 1], "decoder.1.self": [2, 3]},
    ),
    "olmo2": ({}, 4, {"decoder.0.self": [0, 3], "decoder.1.self": [1]}),
    "olmo2 with groups": ({"num_key_value_heads": 2}, 2, {"decoder.0.self": [2, 3], "decoder.1.self": [0, 1]}),
    "phi3": ({}, 4, {"decoder.0.self": [1], "decoder.1.self": [0, 2, 3]}),
    "phi3 with groups": ({"num_key_value_heads": 2}, 2, {"decoder.0.self": [0, 1], "decoder.1.self": [2, 3]}),
    "phi3 without an attention": ({}, 4, {"decoder.0.self": [0, 1, 2, 3]}),
}
every_case = pytest.mark.parametrize("name", CASES)


@functools.cache
@torch.no_grad()
def native(name):
    """A model as if trained, and a batch with padding; neither must be changed."""
    family = name.split()[0]
    task, auto_class = AUTO.get(family, CAUSAL)
    config = small_config(family, **CASES[name][0], use_cache=False)
    torch.manual_seed(0)
    model = auto_class.from_config(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model, example_batch(config, task)


def pruned(name):
    model, batch = native(name)
    return make_variant(model, [HeadPruning(heads=CASES[name][2])]).eval(), batch


@torch.no_grad()
def zeroed(name):
    """The native model, with zeros in the place of all that the removed heads have."""
    model = copy.deepcopy(native(name)[0])
    family, (_, groups, removed) = name.split()[0], CASES[name]
    for attention, heads in removed.items():
        stack, number, kind = attention.split(".")
        module = model.base_model.get_submodule(PLAIN[family][f"{stack}.{{}}.{kind}"].format(number))
        shared = sorted({head * groups // HEADS for head in heads})
        for linear, blocks in QKV[family](heads, groups, shared).items():
            for tensor in module.get_submodule(linear).parameters():  # weight and bias
                tensor.unflatten(0, (-1, SIZE))[blocks] = 0
        module.get_submodule(OUTPUT[family]).weight.unflatten(1, (-1, SIZE))[:, heads] = 0
    return model


@torch.no_grad()
def logits(model, batch):
    return model(**batch).logits


@every_case
def test_removed_heads_are_zero_heads(name, tmp_path):
    variant, batch = pruned(name)
    expected, whole = logits(zeroed(name), batch), logits(native(name)[0], batch)
    assert (expected - whole).abs().max() > 1e-2
    actual = logits(variant, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in variant.parameters()) < sum(p.numel() for p in zeroed(name).parameters())
    variant.save_pretrained(tmp_path)
    reloaded, info = AUTO.get(name.split()[0], CAUSAL)[1].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert torch.equal(logits(reloaded.eval(), batch), actual)
    torch.testing.assert_close(logits(variant.merge().eval(), batch), expected, rtol=1e-5, atol=1e-5)


@every_case
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_computes_the_same_on_its_own(name, copied):
    variant, batch = pruned(name)
    before_use = copied(variant)
    expected = logits(variant, batch)
    after_use = copied(variant)
    with torch.no_grad():
        for parameter in variant.parameters():
            parameter.fill_(0.01)
    for model in (before_use, after_use):
        assert torch.equal(logits(model, batch), expected)


@every_case
def test_implementations_of_attention_agree(name):
    variant, batch = pruned(name)
    variant.set_attn_implementation("eager")
    torch.testing.assert_close(logits(variant, batch), logits(zeroed(name), batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name != "mpnet"])
def test_it_generates_with_a_cache_as_the_model_with_zero_heads(name):
    variant, batch = pruned(name)
    inputs = {key: value[:1] for key, value in batch.items() if key in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = zeroed(name).generate(**inputs, **settings).tolist()
    for cache in ({"use_cache": True}, {"use_cache": False}):
        assert variant.generate(**inputs, **settings, **cache).tolist() == expected, cache


@every_case
def test_the_layout_is_proved(name):
    architecture = architecture_of(native(name)[0].config)
    assert "heads" not in architecture.refusals
    _, groups, removed = CASES[name]
    for attention in removed:
        found = architecture.attentions(native(name)[0].config)[attention]
        assert (found.head_count(None), found.key_head_count(None), found.head_size(None)) == (HEADS, groups, SIZE)


@pytest.mark.parametrize("model_type", ["t5", "mpnet", "bloom", "falcon", "olmo2", "qwen3", "albert"])
def test_an_attention_with_more_than_projections_keeps_one_head(model_type):
    """BLOOM's adds the residual, T5's returns its bias to the next layer, Qwen 3's has norms: without heads, that is lost."""
    config = small_config(model_type)
    task, auto_class = AUTO.get(model_type, ("masked-lm", AutoModelForMaskedLM) if model_type == "albert" else CAUSAL)
    attention = next(iter(architecture_of(config).attentions(config)))
    with pytest.raises(ValueError, match=rf"HeadPruning.*{attention}.*no head would be left.*; keep one$"):
        make_variant(auto_class.from_config(config), [HeadPruning(heads={attention: [0, 1, 2, 3]})], task=task)
