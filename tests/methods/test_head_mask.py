"""HeadMask: its gates mask what HeadPruning removes, are trained or not, and say what to remove."""

import pytest
import torch
from support.cases import BASELINES
from support.models import differences, native, outputs
from support.training import training_step

from hf_freeze import make_variant
from hf_freeze.analysis import head_gates, head_importance, select_heads
from hf_freeze.methods import HeadMask, HeadPruning, LowRank

every_backbone = pytest.mark.parametrize("case", BASELINES, ids=[case.architecture.model_type for case in BASELINES])
MARIAN = next(case for case in BASELINES if case.architecture.model_type == "marian")


def some_heads(case):
    """The first group of heads of each attention."""
    config = native(case).config
    return {name: list(range(a.group_size(config))) for name, a in case.architecture.attentions(config).items()}


@every_backbone
def test_masked_is_pruned(case):
    heads = some_heads(case)
    masked = make_variant(native(case), [HeadMask(heads=heads)])
    pruned = make_variant(native(case), [HeadPruning(heads=heads)])
    expected = outputs(pruned, case.batch())
    assert differences(outputs(masked, case.batch()), expected, 1e-5) == []
    assert differences(outputs(masked.merge(), case.batch()), expected, 1e-5) == []
    for name, gates in head_gates(masked).items():
        assert gates.tolist() == [float(head not in heads[name]) for head in range(gates.numel())]


@every_backbone
@pytest.mark.parametrize("trainable", [True, False])
def test_gates_are_trained_or_stay(case, trainable, tmp_path):
    model = make_variant(native(case), [HeadMask(heads=some_heads(case), trainable=trainable)])
    before = head_gates(model)
    training_step(model, case.batch())
    after = head_gates(model)
    assert all(torch.equal(before[name], after[name]) != trainable for name in before)
    model.save_pretrained(tmp_path)
    reopened = case.auto_class.from_pretrained(tmp_path)
    assert all(torch.equal(after[name], gates) for name, gates in head_gates(reopened).items())
    assert differences(outputs(model.merge(), case.batch()), outputs(model, case.batch()), 1e-5) == []


@every_backbone
def test_the_gradient_of_a_gate_is_the_score_of_its_head(case):
    """|Σ g| over a batch, the loss a mean over its labels."""
    model = make_variant(native(case), [HeadMask()]).eval()
    batch = case.batch()
    model(**batch).loss.backward()
    scores = head_importance(native(case), [batch], reduction="per_batch")
    for name, attention in case.architecture.attentions(model.config).items():
        gradient = model.base_model.get_submodule(attention.o).gates.grad.abs()
        torch.testing.assert_close(gradient / gradient.norm(), scores[name], rtol=1e-4, atol=1e-5)


def test_what_gates_have_learnt_is_removed():
    """Training against one head closes its gate, and select_heads finds it."""
    model = make_variant(native(MARIAN), [HeadMask()])
    gates = model.model.encoder.layers[1].self_attn.out_proj.gates
    optimizer = torch.optim.SGD([gates], lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        gates[1].square().backward()
        optimizer.step()
    assert select_heads(head_gates(model), count=1) == HeadPruning(heads={"encoder.1.self": [1]})


def test_layers_limits_it():
    model = make_variant(native(MARIAN), [HeadMask(layers={"decoder": [1]})])
    assert list(head_gates(model)) == ["decoder.1.self", "decoder.1.cross"]


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (lambda: [HeadMask(heads={})], r"HeadMask\(heads=\{\}\): must be a dict"),
        (lambda: [HeadMask(heads={"encoder.0.self": [1, 0]})], "in ascending order"),
        (lambda: [HeadMask(trainable=1)], r"HeadMask\(trainable=1\): must be True or False"),
        (
            lambda: [HeadMask(heads={"encoder.0.cross": [0]})],
            r"no attention 'encoder\.0\.cross' in marian; choose from",
        ),
        (lambda: [HeadMask(heads={"encoder.0.self": [2]})], r"head 2 of 'encoder\.0\.self': must be in 0\.\.1"),
        (lambda: [HeadMask(layers={"encoder": []})], "names no layer"),
        (
            lambda: [HeadMask(heads={"encoder.0.self": [0]}, layers={"encoder": [1]})],
            "'encoder.0.self' lies in none of these layers",
        ),
        (lambda: [LowRank(rank=2, components=["attention"]), HeadMask()], "is a LowRankLinear already"),
        (lambda: [HeadPruning(heads={"encoder.0.self": [0, 1]}), HeadMask()], "an earlier method has removed"),
    ],
)
def test_what_does_not_fit_is_refused(methods, message):
    with pytest.raises(ValueError, match=message):
        make_variant(native(MARIAN), methods())


def test_the_gates_of_other_layers_stay():
    first = make_variant(native(MARIAN), [HeadMask(layers={"encoder": [0]})])
    learnt = head_gates(first)["encoder.0.self"].fill_(0.3)
    first.base_model.encoder.layers[0].self_attn.out_proj.gates.data.copy_(learnt)
    gates = head_gates(make_variant(first, [HeadMask(layers={"encoder": [1]})]))
    assert torch.equal(gates["encoder.0.self"], learnt)
    assert set(gates["encoder.1.self"].tolist()) == {1}


def test_a_model_without_gates_has_none_to_read():
    with pytest.raises(ValueError, match="this MarianMTModel has no gates: apply HeadMask first"):
        head_gates(native(MARIAN))
