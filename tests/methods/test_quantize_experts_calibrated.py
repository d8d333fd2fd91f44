"""Quantize(components=["experts"]) with a calibration: each expert is rounded by GPTQ for the tokens that it gets."""

import copy
import functools

import pytest
import torch
from support.experts import seen_by_experts
from support.models import perturbed
from support.small import small_config
from transformers import AutoModelForCausalLM

from hf_freeze import analysis, count_parameters, make_variant
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.layers.quantized_factors import QuantizedFactor
from hf_freeze.methods import FFNPruning, Quantize
from hf_freeze.solvers.moments import Moments, loss
from hf_freeze.solvers.rounding import Symmetric, gptq

NAMES = ("gate_up_proj", "down_proj")
METHOD = Quantize(components=["experts"], weights="int4", granularity="group-64")


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


def test_gptq_by_the_tokens_of_each_expert():
    """The first matrices of the first mixture, whose inputs rounding has not changed yet."""
    model, batches = model_of(), texts()
    variant = make_variant(model, [METHOD], calibration=batches)
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
                loss(matrix, each, moments) for each in (getattr(found, name)[number], expected, nearest(matrix, 7, 64))
            )
            assert own < 1.1 * best < plain
    assert all(after <= before for before, after in variant.calibration_report.errors.values())
    assert len(variant.calibration_report.errors) == 2 * 2 * 4


def test_a_calibration_is_worth_it():
    model = model_of()
    plain, calibrated = (make_variant(model, [METHOD], calibration=each) for each in (None, texts(200)))
    one, other = ((logits(each) - logits(model)).norm() for each in (plain, calibrated))
    assert other < 0.85 * one


def test_a_saved_calibration_knows_the_last_matrices():
    model = model_of()
    variant = make_variant(model, [METHOD], calibration=analysis.calibrate(model, texts()))
    assert {name.split(".")[-2] for name in variant.calibration_report.errors} == {"down_proj"}


def test_an_expert_without_tokens_goes_to_the_nearest():
    model = copy.deepcopy(model_of(num_experts_per_tok=1))
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.mlp.gate.weight[2] = layer.mlp.gate.weight[:2].mean(0)
    with pytest.warns(UserWarning, match=r"cut as without: 'layers.0.mlp.experts': 2; 'layers.1.mlp.experts': 2$"):
        calibrated = make_variant(model, [METHOD], calibration=texts())
    plain = make_variant(model, [METHOD])
    for one, other in zip(experts_of(plain), experts_of(calibrated), strict=True):
        for name in NAMES:
            same = [torch.equal(*pair) for pair in zip(getattr(one, name), getattr(other, name), strict=True)]
            assert same == [False, False, True, False]


def test_a_forward_computes_the_dense_weights_once(monkeypatch):
    """The native forward reads the parameters for each expert."""
    variant = make_variant(model_of(), [METHOD])
    variant.set_experts_implementation("eager")
    part, calls = QuantizedFactor.part, []
    monkeypatch.setattr(QuantizedFactor, "part", lambda self: calls.append(1) or part(self))
    logits(variant)
    assert len(calls) == 2 * 2


def test_what_else_sees_rounded_experts():
    model = model_of()
    variant = make_variant(model, [METHOD])
    expected = logits(variant)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        variant.set_experts_implementation(implementation)
        torch.testing.assert_close(logits(variant), expected)
    assert count_parameters(variant).by_component["ffn"].total == count_parameters(model).by_component["ffn"].total
    assert not [name for name in analysis.calibrate(variant, texts(2)).moments if "experts" in name]
    with pytest.raises(ValueError, match=r"another method has already changed the matrices of 'layers.0.mlp.experts'"):
        make_variant(variant, [FFNPruning(experts=3)])
    fewer = make_variant(model, [FFNPruning(experts=3), METHOD])
    assert torch.equal(logits(fewer.merge()), logits(fewer))
