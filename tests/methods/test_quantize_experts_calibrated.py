"""Quantize(components=["experts"]): the matrices of a mixture that lie in one parameter, as integers."""

import copy
import functools

import pytest
import torch
from safetensors.torch import load_file
from support.experts import seen_by_experts
from support.models import perturbed
from support.small import small_config
from transformers import AutoModelForCausalLM

from hf_freeze import analysis, count_parameters, make_variant
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.methods import FFNPruning, Freeze, LayerSelection, Quantize
from hf_freeze.solvers.moments import Moments, loss
from hf_freeze.solvers.rounding import Symmetric, gptq

NAMES = ("gate_up_proj", "down_proj")
METHODS = {
    "int8": Quantize(components=["experts"], weights="int8"),
    "int4": Quantize(components=["experts"], weights="int4", granularity="group-64"),
}


@functools.cache
def model_of(model_type="mixtral", **changes):
    """The hidden size is above that of a group."""
    torch.manual_seed(0)
    return perturbed(AutoModelForCausalLM.from_config(small_config(model_type, **changes))).eval()


def texts(rows=40, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, 60, (rows, 12), generator=generator)}]


def logits(model):
    with torch.no_grad():
        return model.eval()(**texts(4, seed=2)[0]).logits


def experts_of(model):
    return [model.base_model.get_submodule(name) for name in architecture_for(model).experts(model.config).values()]


def nearest(matrix, levels, group):
    """Each group of 64 columns of a row, or each whole row, on its own grid, one after another."""
    result = torch.empty_like(matrix)
    for row, out in zip(matrix, result, strict=True):
        for start in range(0, len(row), group or len(row)):
            part = row[start : start + (group or len(row))]
            step = part.abs().max() / levels
            out[start : start + len(part)] = (part / step).round().clamp(-levels, levels) * step
    return result


def with_experts(model, change):
    """The model with `change(matrix)` in the place of each matrix of an expert."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for matrix in (matrix for module in experts_of(model) for each in module.parameters() for matrix in each):
            matrix.copy_(change(matrix.clone()))
    return model


@pytest.mark.parametrize("model_type", ["mixtral", "glm4_moe", "nemotron_h"])  # with, and without gates
@pytest.mark.parametrize("weights", METHODS)
def test_each_matrix_goes_to_its_nearest_integers(model_type, weights, tmp_path):
    model = model_of(model_type)
    variant = make_variant(model, [METHODS[weights]])
    levels, group = (127, None) if weights == "int8" else (7, 64)
    before = logits(variant)
    by_hand = with_experts(model, lambda matrix: nearest(matrix, levels, group))
    torch.testing.assert_close(before, logits(by_hand), rtol=1e-4, atol=1e-5)
    variant.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), before)
    assert torch.equal(logits(variant.merge()), before)
    stored = load_file(tmp_path / "model.safetensors")
    whole = sum(parameter.numel() for module in experts_of(model) for parameter in module.parameters())
    packed = sum(value.nbytes for name, value in stored.items() if "experts" in name and name.endswith("proj.packed"))
    assert packed == whole / (1 if weights == "int8" else 2)
    assert count_parameters(variant).total == count_parameters(model).total
    assert count_parameters(variant).by_component["ffn"].total == count_parameters(model).by_component["ffn"].total


def test_gptq_by_the_tokens_of_each_expert():
    """The first matrices of the first mixture, whose inputs rounding has not changed yet."""
    model, batches = model_of(), texts()
    variant = make_variant(model, [METHODS["int4"]], calibration=batches)
    seen = seen_by_experts(model, batches, "layers.0.mlp.experts")
    states: list[torch.Tensor] = []
    handle = experts_of(model)[0].register_forward_pre_hook(
        lambda module, args: states.append(args[0].detach().double())
    )
    model(**batches[0])
    handle.remove()
    found = experts_of(variant)[0]
    for number, each in enumerate(seen):
        shares = (each.factors.square() / each.factors.square().sum())[:, None]
        for name, x in (("gate_up_proj", states[0][each.tokens]), ("down_proj", each.x)):
            moments = Moments((x.T @ (shares * x)).float(), (shares * x).sum(0).float(), len(x))
            matrix = experts_of(model)[0].get_parameter(name)[number].detach()
            expected = gptq(matrix, None, moments, Symmetric(7), group=64).weight()
            own, best, plain = (
                loss(matrix, each, moments) for each in (found.dense(name)[number], expected, nearest(matrix, 7, 64))
            )
            assert own < 1.1 * best < plain
    assert all(after <= before for before, after in variant.calibration_report.errors.values())
    assert len(variant.calibration_report.errors) == 2 * 2 * 4


def test_a_calibration_is_worth_it():
    model = model_of()
    plain, calibrated = (make_variant(model, [METHODS["int4"]], calibration=each) for each in (None, texts(200)))
    one, other = ((logits(each) - logits(model)).norm() for each in (plain, calibrated))
    assert other < 0.85 * one


def test_a_saved_calibration_knows_the_last_matrices():
    model = model_of()
    variant = make_variant(model, [METHODS["int4"]], calibration=analysis.calibrate(model, texts()))
    assert {name.split(".")[-2] for name in variant.calibration_report.errors} == {"down_proj"}


def test_an_expert_without_tokens_goes_to_the_nearest():
    model = copy.deepcopy(model_of(num_experts_per_tok=1))
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.mlp.gate.weight[2] = layer.mlp.gate.weight[:2].mean(0)
    with pytest.warns(UserWarning, match=r"cut as without: 'layers.0.mlp.experts': 2; 'layers.1.mlp.experts': 2$"):
        calibrated = make_variant(model, [METHODS["int4"]], calibration=texts())
    plain = make_variant(model, [METHODS["int4"]])
    for one, other in zip(experts_of(plain), experts_of(calibrated), strict=True):
        for name in NAMES:
            same = [torch.equal(*pair) for pair in zip(one.dense(name), other.dense(name), strict=True)]
            assert same == [False, False, True, False]


def test_every_implementation_and_training():
    variant = make_variant(model_of(), [METHODS["int8"]])
    expected = logits(variant)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        variant.set_experts_implementation(implementation)
        torch.testing.assert_close(logits(variant), expected)
    ids = texts(2)[0]["input_ids"]
    variant.train()(input_ids=ids, labels=ids).loss.backward()
    assert variant.base_model.layers[0].mlp.gate.weight.grad.norm() > 0
    assert torch.equal(logits(copy.deepcopy(variant)), logits(variant))


def test_with_other_methods():
    model = model_of()
    methods = [
        FFNPruning(experts=3),
        Quantize(components=["experts", "attention"], weights="int8", layers={"decoder": [1]}),
    ]
    variant = make_variant(model, [*methods, LayerSelection(keep={"decoder": [1]})])
    assert experts_of(variant)[0].dense("down_proj").shape[0] == 3
    assert torch.equal(logits(variant.merge()), logits(variant))
    quantized = make_variant(model, [METHODS["int8"]])
    for method in (FFNPruning(experts=3), FFNPruning(expert_width=8), METHODS["int4"]):
        with pytest.raises(
            ValueError, match=r"'layers.0.mlp.experts' is a IntegerExperts already, which another method made"
        ):
            make_variant(quantized, [method])
    with pytest.raises(ValueError, match=r"'freeze' draws 'model.layers.0.mlp.experts.gate_up_proj' from a seed"):
        make_variant(model, [Freeze(ffn="random"), METHODS["int8"]])


def test_a_config():
    variant = make_variant(small_config("mixtral"), [METHODS["int4"]], task="causal-lm")
    assert torch.equal(logits(variant.merge()), logits(variant))


@pytest.mark.parametrize("settings", [{"scheme": "nf4"}, {"train": True}, {"activations": "int8"}], ids=str)
def test_integers_alone(settings):
    settings = settings if "scheme" in settings else {"weights": "int8"} | settings
    with pytest.raises(
        ValueError, match=r"the matrices of experts are stored as integers, not trained .*: give weights= one"
    ):
        Quantize(components=["experts"], **settings)


def test_a_model_without_experts():
    with pytest.raises(
        ValueError, match=r"llama has no experts with matrices in one parameter, in these layers; leave 'exp"
    ):
        make_variant(small_config("llama"), [METHODS["int8"]], task="causal-lm")
