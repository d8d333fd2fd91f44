"""What `hf-freeze diff` says of two models, against differences made by hand."""

import copy
import math

import pytest
import torch
from support.cases import BASELINES, once
from support.models import build
from support.small import small_config
from typer.testing import CliRunner

from hf_freeze import make_variant, methods
from hf_freeze.analysis.diff import CHANGED, FIRST, RESIZED, SAME, SECOND, compare
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.cli import app

(MARIAN,) = (case for case in BASELINES if case.architecture.model_type == "marian")
FC1, QUERY = "model.encoder.layers.0.fc1.weight", "model.decoder.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("case", once() + once(finalized=True), ids=lambda case: case.id)
def test_a_model_is_as_it_is(case):
    model = build(case)
    found = compare(model, copy.deepcopy(model))
    assert found.settings == []
    assert {each.kind for each in found.tensors} == {SAME}
    assert all(relative == 0 for _, relative in found.by_component().values())


def test_the_description_of_a_derived_family_is_no_setting():
    native = AUTO_CLASSES["masked-lm"].from_config(small_config("roberta"))
    names = [name for name, _, _ in compare(native, make_variant(native, [methods.LowRank(rank=2)])).settings]
    assert "low_rank.rank" in names
    assert "description" not in names


def test_differences_made_by_hand():
    one, other = build(MARIAN), build(MARIAN)
    with torch.no_grad():
        other.get_parameter(FC1)[0, 0] += 3
        other.get_parameter(FC1)[1, 1] -= 4
    found = compare(one, other)
    (changed,) = (each for each in found.tensors if each.kind != SAME)
    assert (changed.name, changed.component, changed.kind) == (FC1, "ffn", CHANGED)
    assert changed.distance == pytest.approx(5, rel=1e-6)
    assert changed.largest == pytest.approx(4, rel=1e-6)
    assert changed.relative == pytest.approx(5 / one.get_parameter(FC1).double().norm().item(), rel=1e-6)
    ffn = [p.double() for n, p in one.named_parameters() if ".fc" in n]
    kinds, relative = found.by_component()["ffn"]
    assert kinds[CHANGED] == 1
    assert relative == pytest.approx(5 / math.hypot(*(p.norm().item() for p in ffn)), rel=1e-6)
    assert found.by_component()["attention"][1] == 0


def test_methods_and_shapes():
    one = build(MARIAN)
    other = make_variant(one, [methods.LowRank(rank=2, components=["attention"]), methods.FFNPruning(width=4)])
    other.config.dropout = 0.5
    found = compare(one, other)
    settings = {name: (a, b) for name, a, b in found.settings}
    assert settings["dropout"] == (one.config.dropout, 0.5)
    assert settings["low_rank"] == (None, "applied")
    assert settings["low_rank.rank"] == (None, 2)
    assert settings["ffn_pruning.width"] == (None, 4)
    kinds = {each.name: each for each in found.tensors}
    assert {each.kind for each in found.tensors if each.component == "attention"} == {
        SAME,
        CHANGED,
        SECOND,
    }  # biases, linears
    assert {each.kind for each in compare(other, one).tensors if each.component == "attention"} == {
        SAME,
        CHANGED,
        FIRST,
    }
    assert kinds[FC1].kind == RESIZED
    assert {each.kind for each in found.tensors if each.component == "embeddings"} == {SAME}


LAYERS = [
    methods.LowRank(rank=2),
    methods.TensorTrain(rank=2),
    methods.Tucker(rank=2),
    methods.MagnitudePruning(sparsity=0.5),
    methods.Quantize(scheme="int8", components=["ffn", "attention", "embeddings"]),
]


@pytest.mark.parametrize("method", LAYERS, ids=lambda method: method.name)
@pytest.mark.parametrize("model_type", ["marian", "gpt2"])  # nn.Linear and Conv1D
def test_a_weight_that_is_computed_is_compared_with_a_dense_one(method, model_type):
    if isinstance(method, methods.Quantize):
        pytest.importorskip("bitsandbytes")
    one = build(next(case for case in BASELINES if case.architecture.model_type == model_type))
    other = make_variant(one, [method])
    if isinstance(method, methods.MagnitudePruning):
        other.finalize()
    found = compare(one, other)
    dense = dict(other.merge().named_parameters())
    changed = [each for each in found.tensors if each.kind == CHANGED]
    assert {each.component for each in changed} >= set(method.components)
    for each in changed:
        distance = (dense[each.name] - one.get_parameter(each.name)).double().norm().item()
        assert each.distance == pytest.approx(distance, rel=1e-5)
    for component in method.components:
        norms = [
            one.get_parameter(t.name).double().norm() for t in found.tensors if t.component == component and t.norm
        ]
        parts = [each.distance for each in changed if each.component == component]
        assert found.by_component()[component][1] == pytest.approx(math.hypot(*parts) / math.hypot(*norms), rel=1e-6)
    again = compare(other, copy.deepcopy(other))
    assert {each.kind for each in again.tensors} == {SAME}
    assert {each.name for each in changed} <= {each.name for each in again.tensors if not each.factor}


def test_what_factors_make_is_counted_once():
    one = make_variant(build(MARIAN), [methods.LowRank(rank=2)])
    other = copy.deepcopy(one)
    layer = other.get_submodule(FC1.removesuffix(".weight"))
    with torch.no_grad():
        next(p for name, p in layer.named_parameters() if name != "bias").mul_(2)
    found = compare(one, other)
    weight, factor = sorted((each for each in found.tensors if each.kind == CHANGED), key=lambda each: each.factor)
    assert (weight.name, weight.factor, factor.factor) == (FC1, False, True)
    assert weight.relative == pytest.approx(1, rel=1e-6)
    assert found.by_component()["ffn"][0][CHANGED] == 2
    ffn = [each.norm for each in found.tensors if each.component == "ffn" and not each.factor]
    assert found.by_component()["ffn"][1] == pytest.approx(weight.distance / math.hypot(*ffn), rel=1e-6)


def test_a_zero_that_is_none_any_more_is_infinitely_far():
    one, other = build(MARIAN), build(MARIAN)
    with torch.no_grad():
        one.get_parameter(QUERY).zero_()
    assert next(each for each in compare(one, other).tensors if each.name == QUERY).relative == math.inf


def test_a_parameter_is_compared_with_a_buffer_of_its_name():
    variant = make_variant(
        small_config("marian"), [methods.Freeze(ffn="random", seed=1)], task="seq2seq-lm", init="marian"
    )
    bias = variant.get_parameter("final_logits_bias")
    torch.nn.init.normal_(bias)
    merged = variant.merge()
    assert dict(merged.named_buffers()).keys() >= {"final_logits_bias"}
    (found,) = [tensor for tensor in compare(variant, merged).tensors if tensor.name == "final_logits_bias"]
    assert (found.kind, found.norm) == (SAME, pytest.approx(bias.norm().item()))
    merged.final_logits_bias += 1
    assert {tensor.name for tensor in compare(variant, merged).tensors if tensor.kind != SAME} == {"final_logits_bias"}


def test_other_architectures_are_refused():
    bert = next(case for case in BASELINES if case.architecture.model_type == "bert")
    with pytest.raises(ValueError, match="cannot compare 'marian' with 'bert'"):
        compare(build(MARIAN), build(bert))


def test_on_the_command_line(tmp_path):
    one, other = build(MARIAN), build(MARIAN)
    with torch.no_grad():
        other.get_parameter(FC1).add_(1)
    one.save_pretrained(tmp_path / "a")
    make_variant(other, [methods.Freeze(attention="random", seed=4)]).save_pretrained(tmp_path / "b")
    done = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--top", "3"])
    assert done.exit_code == 0, done.output
    for part in ("freeze.attention: None -> random", "ffn", "more: --top"):
        assert part in done.output
    same = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "a")])
    assert "All tensors are bit-equal." in same.output
    wrong = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "none")])
    assert wrong.exit_code == 2
    assert "Error:" in wrong.output
