"""FFNPruning of experts whose matrices lie in one parameter, as in most mixtures: what it keeps, and what it merges to."""

import copy

import pytest
import torch
from families.contract import native_model, tiny_config
from safetensors.torch import load_file
from support.models import differences
from support.training import training_step
from transformers import AutoModelForCausalLM

from hf_freeze import count_parameters, make_variant, multiply_adds
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.methods import FFNPruning, Freeze, LayerSelection
from hf_freeze.methods.registry import method_from_dict, method_to_dict

FAMILIES = ("mixtral", "qwen3_moe")  # the field of its width is that of dense FFNs, or one of experts
KEPT = 16


@pytest.fixture(scope="module", params=FAMILIES)
def backbone(request):
    return native_model(tiny_config(request.param), "causal-lm")


@pytest.fixture(scope="module")
def batch(backbone):
    return architecture_of(backbone.config).tiny_inputs("causal-lm")


def experts_of(model):
    return [layer.mlp.experts for layer in model.base_model.layers]


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(**batch).logits


def largest(experts, count):
    """For each expert, the neurons of the largest product of norms, one by one."""
    chosen = []
    for before, after in zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True):
        gate, up = before.chunk(2)
        scores = [(float(gate[n].norm() * up[n].norm() * after[:, n].norm()), n) for n in range(after.shape[1])]
        chosen.append(sorted(n for _, n in sorted(scores, reverse=True)[:count]))
    return chosen


def zeroed(backbone, kept, layers):
    """The backbone, whose other neurons give nothing to the outputs."""
    model = copy.deepcopy(backbone)
    for number in layers:
        experts = experts_of(model)[number]
        for expert, neurons in enumerate(kept[number]):
            gone = sorted(set(range(experts.down_proj.shape[2])) - set(neurons))
            with torch.no_grad():
                experts.down_proj[expert][:, gone] = 0
    return model


def test_keeps_the_largest_neurons_of_each_expert(backbone, batch):
    variant = make_variant(backbone, [FFNPruning(expert_width=KEPT)])
    kept = [largest(experts, KEPT) for experts in experts_of(backbone)]
    assert len({tuple(neurons) for lists in kept for neurons in lists}) > 1
    torch.testing.assert_close(logits(variant, batch), logits(zeroed(backbone, kept, [0, 1]), batch))
    experts = experts_of(backbone)[0]
    count, hidden, width = experts.down_proj.shape
    gone = 2 * 3 * count * (width - KEPT) * hidden  # in two layers, in three matrices
    assert count_parameters(backbone).total - count_parameters(variant).total == gone
    chosen = backbone.config.num_experts_per_tok  # experts of a token
    saved = multiply_adds(backbone).forward - multiply_adds(variant).forward
    assert saved == pytest.approx(gone / count * chosen)


def test_keep_is_a_list_for_each_expert(backbone, batch):
    count, width = experts_of(backbone)[0].down_proj.shape[0], experts_of(backbone)[0].down_proj.shape[2]
    kept = [
        sorted(torch.randperm(width, generator=torch.Generator().manual_seed(e))[:8].tolist()) for e in range(count)
    ]
    method = FFNPruning(keep={"decoder.1.experts": kept})
    assert method_from_dict(method_to_dict(method)) == method
    variant = make_variant(backbone, [method])
    torch.testing.assert_close(logits(variant, batch), logits(zeroed(backbone, {1: kept}, [1]), batch))


@pytest.mark.parametrize("layers", [None, {"decoder": [1]}], ids=["all layers", "one layer"])
def test_merges_to_a_native_model(backbone, batch, layers):
    variant = make_variant(backbone, [FFNPruning(expert_width=KEPT, layers=layers)])
    native = variant.merge()
    assert type(native) is type(backbone)
    torch.testing.assert_close(logits(native, batch), logits(variant, batch))
    width = experts_of(backbone)[0].down_proj.shape[2] if layers else KEPT
    assert {experts.down_proj.shape[2] for experts in experts_of(native)} == {width}
    field = "moe_intermediate_size" if backbone.config.model_type == "qwen3_moe" else "intermediate_size"
    assert getattr(native.config, field) == width
    type(native)(native.config).load_state_dict(native.state_dict())


def test_random_experts_stay_out_of_the_file(backbone, batch, tmp_path):
    methods = [Freeze(ffn="random", seed=3), LayerSelection(keep={"decoder": [1]}), FFNPruning(expert_width=KEPT)]
    variant = make_variant(backbone, methods)
    random = make_variant(backbone, methods[:2])
    assert variant.methods[2].keep == {"decoder.0.experts": largest(experts_of(random)[0], KEPT)}
    variant.save_pretrained(tmp_path)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "experts" in name]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert differences(reloaded.state_dict(), variant.state_dict()) == []
    torch.testing.assert_close(logits(reloaded, batch), logits(variant, batch))


def test_trains(backbone, batch):
    variant = make_variant(backbone, [FFNPruning(expert_width=KEPT)])
    before = experts_of(variant)[0].down_proj.detach().clone()
    training_step(variant, batch)
    assert not torch.equal(before, experts_of(variant)[0].down_proj)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_of_experts_computes_the_same(backbone, batch, implementation):
    variant = make_variant(backbone, [FFNPruning(expert_width=8)])
    expected = logits(variant, batch)
    variant.set_experts_implementation(implementation)
    torch.testing.assert_close(logits(variant, batch), expected)


def test_width_is_for_dense_ffns_and_expert_width_for_experts():
    model = native_model(tiny_config("deepseek_v2"), "causal-lm")
    blocks = list(architecture_of(model.config).experts(model.config))
    assert blocks
    variant = make_variant(model, [FFNPruning(width=24)])
    assert [e.down_proj.shape for e in experts_in(variant)] == [e.down_proj.shape for e in experts_in(model)]
    variant = make_variant(model, [FFNPruning(width=24, expert_width=8)])
    assert {e.down_proj.shape[2] for e in experts_in(variant)} == {8}


def experts_in(model):
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


WRONG = {
    "width": ({"width": 16}, r"width=16\): the FFNs of this \w+ are experts: give expert_width"),
    "no multiple": ({"expert_width": 12}, "12 neurons of each expert: must be a multiple of 8"),
    "too many": ({"expert_width": 4096}, r"expert_width=4096\) of 'decoder.0.experts': must be in 1..\d+"),
    "one list": ({"keep": {"decoder.0.experts": list(range(8))}}, "must be a list for each expert"),
    "too few lists": (
        {"keep": {"decoder.0.experts": [list(range(8))]}},
        "1 lists for 'decoder.0.experts': it has 4 experts",
    ),
    "uneven": ({"keep": {"decoder.0.experts": [list(range(8)), list(range(16))]}}, "as many for each"),
    "far": (
        {"keep": {"decoder.0.experts": [[*range(7), 999]] * 4}},
        r"neuron 999 of 'decoder.0.experts': must be in 0..",
    ),
    "unknown": ({"keep": {"decoder.9.experts": [list(range(8))]}}, "no FFN 'decoder.9.experts' in"),
    "both": ({"keep": {"decoder.0.experts": [[0]]}, "expert_width": 8}, "give one of them"),
}


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=list(WRONG))
def test_wrong_settings(backbone, settings, message):
    with pytest.raises(ValueError, match=message):
        make_variant(backbone, [FFNPruning(**settings)])


def test_dense_models_have_no_experts():
    with pytest.raises(ValueError, match=r"expert_width=8\): llama has no experts"):
        make_variant(tiny_config("llama"), [FFNPruning(expert_width=8)], task="causal-lm")
