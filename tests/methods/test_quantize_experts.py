"""Quantize of experts whose matrices lie in one parameter: the grid, outputs, files, and what it merges to."""

import copy
import pickle

import pytest
import torch
from families.contract import native_model, tiny_config
from support.parametrize import by_turns
from transformers import AutoModelForCausalLM

from hf_freeze import make_variant
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.methods import FFNPruning, Freeze, Quantize

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3")


def backbone_of(family):
    config = tiny_config(family)
    if family == "deepseek_v3":
        config.first_k_dense_replace = 1  # the second layer has experts
    return native_model(config, "causal-lm")


def logits(model):
    batch = architecture_of(model.config).tiny_inputs("causal-lm")
    with torch.no_grad():
        return model.eval()(**batch).logits


def rounded_rows(matrix, levels, group):
    """Each row, in groups of inputs, to the nearest multiple of its largest |w| / levels."""
    parts = []
    for part in matrix.split(group or matrix.shape[1], dim=1):
        step = part.abs().amax(1, keepdim=True) / levels
        parts.append((part / step).round().clamp(-levels, levels) * step)
    return torch.cat(parts, 1)


def rounded(backbone, levels, group, layers=None):
    """The native model, with the matrices of each expert rounded one by one."""
    model = copy.deepcopy(backbone)
    for number, layer in enumerate(model.base_model.layers):
        if hasattr(layer.mlp, "experts") and (layers is None or number in layers):
            for matrices in layer.mlp.experts.parameters():
                for matrix in matrices.data:
                    matrix.copy_(rounded_rows(matrix, levels, group))
    return model


GRIDS = [("int8", "channel"), ("int4", "channel"), ("int4", "group-64")]
families = pytest.mark.parametrize("family", FAMILIES)
grids = pytest.mark.parametrize("grid", GRIDS, ids="-".join)


@by_turns(families, grids)
def test_each_row_of_each_expert_is_rounded(family, grid, tmp_path):
    backbone, (weights, granularity) = backbone_of(family), grid
    method = Quantize(components=["experts"], weights=weights, granularity=granularity)
    variant = make_variant(backbone, [method])
    expected = rounded(backbone, {"int8": 127, "int4": 7}[weights], None if granularity == "channel" else 64)
    assert not torch.equal(logits(expected), logits(backbone))
    torch.testing.assert_close(logits(variant), logits(expected), rtol=1e-4, atol=1e-5)

    variant.save_pretrained(tmp_path / "variant")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "variant")
    assert torch.equal(logits(loaded), logits(variant))
    assert torch.equal(logits(copy.deepcopy(variant)), logits(variant))
    experts = variant.base_model.layers[-1].mlp.experts
    assert torch.equal(pickle.loads(pickle.dumps(experts)).down_proj, experts.down_proj)

    merged = loaded.merge()
    assert type(merged) is type(backbone)
    assert torch.equal(logits(merged), logits(variant))
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(variant))


def test_layers_and_composition_with_pruned_neurons():
    backbone = native_model(tiny_config("mixtral"), "causal-lm")
    method = Quantize(components=["experts"], weights="int8", layers={"decoder": [1]})
    torch.testing.assert_close(
        logits(make_variant(backbone, [method])), logits(rounded(backbone, 127, None, [1])), rtol=1e-4, atol=1e-5
    )
    pruned = make_variant(backbone, [FFNPruning(expert_width=16)]).merge()
    both = make_variant(backbone, [FFNPruning(expert_width=16), method])
    torch.testing.assert_close(logits(both), logits(rounded(pruned, 127, None, [1])), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"another method has already changed the matrices of 'layers.1.mlp.experts'"):
        make_variant(backbone, [method, FFNPruning(expert_width=16)])
    with pytest.raises(ValueError, match=r"another method has already changed the matrices of 'layers.1.mlp.experts'"):
        make_variant(backbone, [method, method])


@pytest.mark.parametrize(
    "wrong", [{"weights": "int8", "train": True}, {"weights": "int8", "activations": "int8"}, {"scheme": "nf4"}]
)
def test_other_ways_are_refused(wrong):
    with pytest.raises(ValueError, match=r"give weights= one of \['int8', 'int4'\] without train and activations"):
        Quantize(components=["experts"], **wrong)


def test_models_without_experts_and_random_experts_are_refused():
    method = Quantize(components=["experts"], weights="int8")
    with pytest.raises(ValueError, match=r"llama has no experts with matrices in one parameter"):
        make_variant(native_model(tiny_config("llama"), "causal-lm"), [method])
    with pytest.raises(ValueError, match=r"draws '.*experts.*' from a seed"):
        make_variant(native_model(tiny_config("mixtral"), "causal-lm"), [Freeze(ffn="random", seed=1), method])


def test_the_rest_trains():
    backbone = native_model(tiny_config("qwen3_moe"), "causal-lm")
    plain = make_variant(backbone, [Quantize(components=["experts"], weights="int4")])
    ids = {"input_ids": architecture_of(backbone.config).tiny_inputs("causal-lm")["input_ids"]}
    plain.train()(**ids, labels=ids["input_ids"]).loss.backward()
    assert plain.base_model.layers[0].self_attn.q_proj.weight.grad.any()
