"""Invariants 3, 5 and 6 (CONTRIBUTING.md): what a variant computes, who sees what, merging, and what a forward costs."""

import copy
import functools
import itertools
import json

import pytest
import torch
from support.cases import ALL, BASE, BASELINES, PLAIN, Case, covering, native_config, once, once_on_each_architecture
from support.generation import generation_problems
from support.models import build, build_anew, differences, merge_or_none, native, outputs, snapshot
from support.parametrize import over
from support.training import inputs_only, training_step

from hf_freeze import make_variant
from hf_freeze.analysis.accounting import count_parameters, multiply_adds
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.model.weights import no_draws

every_cell = over(covering())


@over(case for case in PLAIN if case.from_model)
def test_the_forward_differs_from_the_backbone_unless_exact(case: Case):
    backbone = native(case)
    config, weights = backbone.config.to_dict(), snapshot(backbone)
    variant = make_variant(backbone, list(case.methods))
    if case.finalized:
        variant.finalize()
    assert backbone.config.to_dict() == config
    actual, expected = outputs(variant, case.batch()), outputs(backbone, case.batch())
    if not case.methods:
        assert differences(actual, expected) == []
    else:
        assert (differences(actual, expected, 1e-5) == []) == case.exact
    assert isinstance(variant, case.native_class)
    # The backbone is as it was, and shares nothing with the variant.
    training_step(variant, case.batch())
    assert all(torch.equal(value, backbone.get_parameter(name)) for name, value in weights.items())
    assert not {p.data_ptr() for p in backbone.parameters()} & {p.data_ptr() for p in variant.parameters()}


@over(covering(lambda case: case.from_model and case.exact))
def test_an_exact_method_is_exact_on_every_config(case: Case):
    tolerance = 1e-5 if case.methods else 0
    assert differences(outputs(build(case), case.batch()), outputs(native(case), case.batch()), tolerance) == []


# -- who sees what -----------------------------------------------------------------------------------------------------------


@over(once_on_each_architecture(lambda case: case.generates) + once(lambda case: case.generates, finalized=True))
def test_generate_is_the_same_with_a_cache_and_with_padding(case: Case):
    assert generation_problems(build(case), case.batch()) == []


@over(once_on_each_architecture() + once_on_each_architecture(finalized=True))
def test_a_sentence_sees_neither_padding_nor_the_others_of_its_batch(case: Case):
    model = build(case)
    inputs = inputs_only(model, case.batch())
    together = outputs(model, inputs)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        mask = mask.view(-1, mask.shape[-1]).any(0)  # of several choices, the longest
        trimmed = {
            name: value[row : row + 1] if name.startswith(("decoder_", "encoder_")) else value[row : row + 1][..., mask]
            for name, value in inputs.items()
        }
        alone = outputs(model, trimmed)
        # An output for each input token is longer in the batch; its padding is at the end.
        cut = {n: v[row : row + 1, : alone[n].shape[1]] for n, v in together.items()}
        assert differences(alone, cut, 1e-4) == [], f"row {row} alone"

        perturbed = inputs | {"input_ids": inputs["input_ids"].clone()}
        last = int(mask.sum()) - 1  # the end of the sentence stays
        perturbed["input_ids"][row, ..., :last] = perturbed["input_ids"][row, ..., :last].flip(-1) + 10
        actual, other = outputs(model, perturbed), 1 - row
        assert differences(_row(actual, row), _row(together, row), 1e-4) != [], f"row {row} perturbed"
        assert differences(_row(actual, other), _row(together, other), 1e-6) == [], (
            f"row {other} beside a perturbed one"
        )


def _row(values, row):
    return {name: value[row] for name, value in values.items()}


def _check_the_future(case: Case, attention: str):
    """One row for each token of the first sentence, in which that token alone is another."""
    model = build(case)
    model.set_attn_implementation(attention)
    inputs = inputs_only(model, case.batch())
    fed = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    expected = outputs(model, inputs)
    tokens = inputs[fed].shape[:2]
    aligned = [n for n, v in expected.items() if v.shape[:2] == tokens and not n.startswith("encoder_")]
    assert aligned
    perturbed = {name: value[:1].repeat_interleave(tokens[1], 0) for name, value in inputs.items()}
    perturbed[fed] += 10 * torch.eye(tokens[1], dtype=torch.long)
    actual = outputs(model, perturbed)
    for name, position in itertools.product(aligned, range(tokens[1])):
        row, unchanged = actual[name][position], expected[name][0]
        # A batch of more rows is rounded otherwise: on an Intel Xeon limited to AVX2 by up to 1.1e-5.
        torch.testing.assert_close(row[:position], unchanged[:position], rtol=0, atol=5e-5)
        # Marian's embeddings are small where nothing scales them: in int8 another token changes the logits by 0.0006.
        assert not torch.allclose(row[position], unchanged[position], atol=1e-4), (name, position)


def has_a_causal_output(case: Case) -> bool:
    return case.causal and case.task != "sequence-classification"  # which has one output for a sentence


@over(once_on_each_architecture(has_a_causal_output))
def test_a_decoder_does_not_see_the_future(case: Case):
    _check_the_future(case, "sdpa")


@over(once(has_a_causal_output))
def test_a_decoder_does_not_see_the_future_in_eager_attention(case: Case):
    _check_the_future(case, "eager")


# -- merging -----------------------------------------------------------------------------------------------------------------


def memory_of(model) -> set[int]:
    """Addresses of all that the tensors of the model lie in."""
    tensors = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@every_cell
def test_merged_is_a_native_model(case: Case):
    model = build_anew(case)
    expected, weights = outputs(model, case.batch()), snapshot(model)
    merged = merge_or_none(model)
    if merged is None:
        return
    assert type(merged) is case.native_class
    assert differences(outputs(merged, case.batch()), expected, 1e-5) == []
    classes = [type(part) for part in (*merged.modules(), *merged.parameters(), merged.config)]
    assert [cls for cls in classes if cls.__module__.split(".")[0] == "hf_freeze"] == []
    assert "hf_freeze" not in json.dumps(merged.config.to_dict(), default=str)
    # Its own config, since a method may change the native one: the merged model has what that says and nothing else.
    with torch.device("meta"), no_draws():
        fresh = case.native_class(copy.deepcopy(merged.config))
    assert merged.state_dict().keys() == fresh.state_dict().keys()
    assert all(torch.equal(weights[name], model.get_parameter(name)) for name in weights)
    assert not memory_of(merged) & memory_of(model)  # the variant is another model


# -- what it costs -----------------------------------------------------------------------------------------------------------


@functools.cache
def native_multiply_adds(model_type, config, task):
    return multiply_adds(AUTO_CLASSES[task].from_config(native_config(ARCHITECTURES[model_type], config)), length=8)


def is_counted(case: Case) -> bool:
    """What other configs and tasks cost, tests/analysis/test_accounting.py writes out by hand; to count their backbones too would
    take most of the time."""
    return ALL or (case.config == BASE and case.task == case.architecture.tasks[0])


@over(once(is_counted) + once(is_counted, finalized=True) + BASELINES)
def test_multiply_adds_are_those_of_the_components(case: Case):
    model = build(case)
    cost = multiply_adds(model, length=8)
    native_cost = native_multiply_adds(case.architecture.model_type, case.config, case.task)
    for direction in ("forward", "backward"):
        parts = {name: getattr(part, direction) for name, part in cost.by_component.items()}
        assert sum(parts.values()) == pytest.approx(getattr(cost, direction))
        assert all(part >= 0 for part in parts.values())
    assert cost.forward > 0
    # Score products have no weights: backward they cost the same, whatever the linears became.
    untouched = [
        name
        for name in cost.by_component
        if cost.by_component[name].forward == native_cost.by_component[name].forward and all_trained(model, name)
    ]
    assert untouched
    for name in untouched:
        backward, whole = (each.by_component[name].backward for each in (cost, native_cost))
        if all_trained(model, "embeddings"):
            assert backward == pytest.approx(whole), name
        else:  # nothing below the first layer needs a gradient of its input
            assert backward <= whole * (1 + 1e-6), name


@over(BASELINES)
def test_multiply_adds_are_the_same_on_meta(case: Case):
    model = build(case)
    assert multiply_adds(copy.deepcopy(model).to("meta"), length=8) == multiply_adds(model, length=8)


def all_trained(model, component):
    counts = count_parameters(model).by_component[component]
    return counts.trainable == counts.total
