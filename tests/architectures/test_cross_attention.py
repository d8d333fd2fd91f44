"""GPT-2 and BERT with `add_cross_attention=True`: blocks that only some configs have."""

import pytest
import torch
from support.models import add_noise, differences, outputs
from transformers import AutoConfig, DynamicCache, EncoderDecoderCache

from hf_freeze import count_parameters, make_variant, multiply_adds
from hf_freeze.analysis import head_importance, select_heads
from hf_freeze.architectures.base import base_name, canonical_parameters
from hf_freeze.architectures.registry import ARCHITECTURES, architecture_of
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods import Freeze, HeadMask, HeadPruning, LayerSelection, LayerSharing, LowRank, Theseus

WITH_CROSS = {
    "gpt2": ("causal-lm", {"add_cross_attention": True}),
    "bert": ("masked-lm", {"is_decoder": True, "add_cross_attention": True}),
}
STACKS = {"gpt2": "decoder", "bert": "encoder"}


@pytest.fixture(params=WITH_CROSS)
def model(request):
    return with_cross(request.param)


def with_cross(model_type, **fields):
    architecture = ARCHITECTURES[model_type]
    task, switches = WITH_CROSS[model_type]
    config = AutoConfig.for_model(model_type, **architecture.tiny | {"use_cache": False} | switches | fields)
    torch.manual_seed(1)
    return add_noise(AUTO_CLASSES[task].from_config(config), architecture).eval()


def batch_of(model):
    """Two sentences, of 5 and 3 tokens, with the states of 4 and 2 tokens of an encoder."""
    generator = torch.Generator().manual_seed(2)
    task = WITH_CROSS[model.config.model_type.removeprefix("hf_freeze_")][0]
    return architecture_of(model.config).tiny_inputs(task) | {
        "encoder_hidden_states": torch.randn(2, 4, 16, generator=generator),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }


def cross_parameters(model):
    return {name: p for name, p in model.named_parameters() if "crossattention" in name and "LayerNorm" not in name}


def test_every_parameter_of_the_layers_has_its_component(model):
    architecture = architecture_of(model.config)
    for name, _ in canonical_parameters(model):
        components = architecture.matches(base_name(model, name))
        if "crossattention" in name and "LayerNorm" not in name:
            assert components == ["attention"], name
        elif "ln_cross_attn" in name or "crossattention" in name:
            assert components == ["norm"], name


def test_the_blocks_are_there_as_the_config_says(model):
    architecture = architecture_of(model.config)
    stack = STACKS[model.config.model_type]
    assert list(architecture.attentions(model.config)) == [
        f"{stack}.{n}.{kind}" for n in (0, 1) for kind in ("self", "cross")
    ]
    modules = dict(model.base_model.named_modules())
    assert {name for _, _, name in architecture.linears(model.config, "attention")} <= modules.keys()
    plain = AutoConfig.for_model(model.config.model_type, **architecture.tiny)
    assert list(architecture.attentions(plain)) == [f"{stack}.{n}.self" for n in (0, 1)]
    assert not any("cross" in name for _, _, name in architecture.linears(plain, "attention"))


@pytest.mark.parametrize("mode", ["random", "frozen"])
def test_freezing_attention_freezes_it(model, mode):
    variant = make_variant(model, [Freeze(attention=mode)])
    cross = cross_parameters(variant)
    assert cross
    assert not any(parameter.requires_grad for parameter in cross.values())
    assert (cross.keys() <= variant.seeded_tensors.keys()) == (mode == "random")
    assert count_parameters(variant).by_component["head"].total == count_parameters(model).by_component["head"].total


def test_it_is_no_part_of_the_head(model):
    attention = count_parameters(model).by_component["attention"].total
    assert attention == 2 * 2 * 4 * (16 * 16 + 16)  # layers, blocks, linears with biases


METHODS = {  # of a model whose stack has this name
    "random": lambda stack: [Freeze(attention="random", seed=3)],
    "all frozen": lambda stack: [Freeze(attention="frozen", norm="frozen", ffn="diagonal")],
    "heads by share": lambda stack: [HeadPruning(share=0.5)],
    "low rank": lambda stack: [LowRank(components=["attention"], rank=3)],
    "head mask": lambda stack: [HeadMask()],
    "selection": lambda stack: [LayerSelection(share=0.5)],
    "sharing": lambda stack: [LayerSharing(norms="separate", depth={stack: 3})],
    "Theseus": lambda stack: [Theseus(train="all")],
    "cross heads": lambda stack: [HeadPruning(heads={f"{stack}.1.cross": [0]})],
    "no cross heads": lambda stack: [HeadPruning(heads={f"{stack}.0.cross": [0, 1], f"{stack}.1.self": [1]})],
    "no heads": lambda stack: [
        HeadPruning(heads={f"{stack}.{layer}.{kind}": [0, 1] for layer in (0, 1) for kind in ("self", "cross")})
    ],
    "mask after pruning": lambda stack: [
        HeadPruning(heads={f"{stack}.0.cross": [1]}),
        HeadMask(heads={f"{stack}.1.cross": [0]}),
    ],
}


def methods_for(model, name):
    return METHODS[name](STACKS[model.config.model_type])


@pytest.mark.parametrize("name", METHODS)
def test_methods_reach_it_save_it_and_merge_it(model, name, tmp_path):
    batch = batch_of(model)
    variant = make_variant(model, methods_for(model, name)).eval()
    expected = outputs(variant, batch)
    variant.save_pretrained(tmp_path)
    task = WITH_CROSS[model.config.model_type][0]
    reloaded, info = AUTO_CLASSES[task].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert differences(outputs(reloaded, batch), expected) == []
    assert {n: p.requires_grad for n, p in reloaded.named_parameters()} == {
        n: p.requires_grad for n, p in variant.named_parameters()
    }
    merged = variant.merge()
    assert type(merged) is type(model)
    assert differences(outputs(merged, batch), expected, 1e-5) == []


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_a_pruned_head_is_one_that_gives_nothing(model, kind):
    """As a head whose part of the output projection is zero."""
    stack, batch = STACKS[model.config.model_type], batch_of(model)
    pruned = make_variant(model, [HeadPruning(heads={f"{stack}.1.{kind}": [1]})])
    masked = make_variant(model, [HeadMask(heads={f"{stack}.1.{kind}": [1]})])
    expected = outputs(model, batch)
    assert differences(outputs(pruned, batch), outputs(masked, batch), 1e-5) == []
    assert differences(outputs(pruned, batch), expected, 1e-5) != []


@pytest.mark.parametrize("name", ["heads by share", "no cross heads", "no heads", "sharing"])
def test_a_cache_changes_nothing(model, name):
    variant = make_variant(model, methods_for(model, name)).eval()
    batch = {
        n: value for n, value in batch_of(model).items() if n not in ("labels", "attention_mask", "token_type_ids")
    }
    batch["input_ids"] = batch["input_ids"][:1].expand(2, -1)
    with torch.no_grad():
        base = variant.base_model
        whole = base(**batch, use_cache=False).last_hidden_state
        ids, cache, parts = batch.pop("input_ids"), EncoderDecoderCache(DynamicCache(), DynamicCache()), []
        for start, end in ((0, 3), (3, 4), (4, 5)):
            result = base(ids[:, start:end], **batch, past_key_values=cache, use_cache=True)
            parts.append(result.last_hidden_state)
            assert result.past_key_values.get_seq_length() == end
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_heads_are_scored_and_products_counted(model):
    batch = batch_of(model)
    scores = head_importance(model, [batch])
    stack = STACKS[model.config.model_type]
    assert f"{stack}.0.cross" in scores
    assert isinstance(select_heads(scores, count=2), HeadPruning)
    without = {n: value for n, value in batch.items() if not n.startswith("encoder_")}
    with pytest.raises(ValueError, match=f"no batch has reached '{stack}.0.cross'"):
        head_importance(model, [without])
    switches = {"add_cross_attention": False}
    plain = type(model)(type(model.config)(**model.config.to_dict() | switches))
    assert multiply_adds(model, length=4).forward - multiply_adds(plain, length=4).forward >= 2 * 4 * 16 * 16
