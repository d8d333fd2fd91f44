"""Scores of heads against gates by autograd and finite differences; choosing heads by them."""

import pytest
import torch
from support.cases import BASELINES, MODEL, Case
from support.models import native
from support.processes import two_processes
from transformers.pytorch_utils import Conv1D

from hf_freeze import make_variant
from hf_freeze.analysis import head_importance, select_heads
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import Freeze, HeadPruning

CASES = [
    Case(case.architecture, task, MODEL, ())
    for case in BASELINES
    for task in case.architecture.tasks
    if task in ("seq2seq-lm", "causal-lm", "masked-lm", "sequence-classification")
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
MARIAN = next(case for case in CASES if case.architecture.model_type == "marian")


def summed_loss(case, model, batch):
    """Over the labels, from the logits."""
    logits, labels = model(**batch).logits.double(), batch["labels"]
    if case.task == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def gated(case, model, gates):
    """Multiply the context of head n at token t of row b by `gates[attention][b, t, n]`, 1 everywhere, made where missing."""

    def hook(name, heads):
        def multiply(module, arguments):
            (context,) = arguments
            if name not in gates:
                gates[name] = torch.ones(*context.shape[:-1], heads, requires_grad=True)
            split = context.unflatten(-1, (heads, -1))
            return ((split * gates[name][..., None]).flatten(-2),)

        return multiply

    for name, attention in case.architecture.attentions(model.config).items():
        output = model.base_model.get_submodule(attention.o)
        output.register_forward_pre_hook(hook(name, attention.head_count(model.config)))
    return model


def gate_gradients(case, batch):
    """attention -> (B, T, N)"""
    gates = {}
    model = gated(case, native(case).eval(), gates)
    summed_loss(case, model, batch).backward()
    return {name: gate.grad.double() for name, gate in gates.items()}


def tokens(case, batch, name):
    if case.task == "seq2seq-lm" and name.startswith("decoder"):
        return batch["labels"] != -100
    return batch["attention_mask"].bool()


def expected_scores(case, batch, reduction):
    found = {}
    for name, gradient in gate_gradients(case, batch).items():
        mask = tokens(case, batch, name)
        gradient = gradient * mask[..., None]
        if reduction == "per_token":
            found[name] = gradient.abs().sum((0, 1)) / mask.sum()
        elif reduction == "per_example":
            found[name] = gradient.sum(1).abs().mean(0)
        else:
            found[name] = gradient.sum((0, 1)).abs()
    return found


def close(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name].float(), rtol=tolerance, atol=tolerance)


@every_case
@pytest.mark.parametrize("reduction", ["per_token", "per_example", "per_batch"])
def test_scores_are_those_of_gates(case, reduction):
    model = native(case).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = head_importance(model, [case.batch()], reduction=reduction, normalize="none")
    close(found, expected_scores(case, case.batch(), reduction))
    normalized = head_importance(model, [case.batch()], reduction=reduction)
    close(normalized, {name: score / score.norm() for name, score in found.items()})
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@every_case
def test_gates_by_finite_differences(case):
    """Two heads at two tokens, by hand."""
    batch, step = case.batch(), 1e-3
    gradients = gate_gradients(case, batch)
    gates = {}
    model = gated(case, native(case).eval().double(), gates)
    with torch.no_grad():
        model(**batch)
        for name in (next(iter(gates)), list(gates)[-1]):
            for place in ((0, 0, 0), (1, 1, 1)):
                losses = []
                for sign in (1, -1):
                    gates[name] = torch.ones_like(gates[name]).double()
                    gates[name][place] += sign * step
                    losses.append(float(summed_loss(case, model, batch)))
                gates[name] = torch.ones_like(gates[name])
                slope = (losses[0] - losses[1]) / (2 * step)
                assert slope == pytest.approx(float(gradients[name][place]), rel=1e-3, abs=1e-4)


@every_case
@pytest.mark.parametrize("reduction", ["per_token", "per_example"])
def test_scores_do_not_depend_on_the_batches(case, reduction):
    """One batch of two sentences, or each alone without its padding."""
    batch = case.batch()
    alone = []
    for row in range(2):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        length = int(one["attention_mask"].sum())
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            if name in one:
                one[name] = one[name][:, :length]
        if one["labels"].ndim == 2:
            one["labels"] = one["labels"][
                :, : int((one["labels"] != -100).sum()) if case.task == "seq2seq-lm" else length
            ]
        alone.append(one)
    model = native(case)
    close(
        head_importance(model, alone, reduction=reduction, normalize="none"),
        head_importance(model, [batch], reduction=reduction, normalize="none"),
    )


def test_frozen_parts_and_lost_heads_are_no_obstacle():
    model = make_variant(native(MARIAN), [Freeze(embeddings="frozen", attention="frozen", ffn="frozen", norm="frozen")])
    close(head_importance(model, [MARIAN.batch()]), head_importance(native(MARIAN), [MARIAN.batch()]))
    pruned = make_variant(native(MARIAN), [HeadPruning(heads={"encoder.0.self": [0, 1], "decoder.1.cross": [0]})])
    found = head_importance(pruned, [MARIAN.batch()])
    assert "encoder.0.self" not in found
    assert found["decoder.1.cross"].shape == (1,)


def test_the_best_head_is_the_one_that_is_used():
    """An output that ignores a head gives it no score."""
    model = native(MARIAN)
    with torch.no_grad():
        output = model.model.encoder.layers[1].self_attn.out_proj
        assert not isinstance(output, Conv1D)
        output.weight[:, :8] = 0
    assert head_importance(model, [MARIAN.batch()])["encoder.1.self"].tolist() == [0, 1]


def test_two_processes_score_what_one_does(tmp_path):
    whole = head_importance(native(MARIAN), [MARIAN.batch()], normalize="none")
    for scores in two_processes("head_importance", tmp_path):
        close({name: torch.tensor(values) for name, values in scores.items()}, whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataloader": []}, "the dataloader is empty"),
        ({"dataloader": [[1]]}, "a batch is a dict of tensors for the forward, not a list"),
        ({"reduction": "sum"}, r"reduction='sum'\): choose from \['per_token', 'per_example', 'per_batch'\]"),
        ({"normalize": "max"}, r"normalize='max'\): choose from \['layer', 'none'\]"),
        ({"model": torch.nn.Linear(1, 1)}, "needs a model with trained weights, not a Linear"),
        (
            {
                "dataloader": [
                    {k: v for k, v in MARIAN.batch().items() if k != "labels"}
                    | {"decoder_input_ids": torch.ones(2, 1).long()}
                ]
            },
            "head_importance needs a loss: batches with labels",
        ),
    ],
)
def test_bad_input_is_refused(arguments, message):
    arguments = {"model": native(MARIAN), "dataloader": [MARIAN.batch()]} | arguments
    with pytest.raises(ValueError, match=message):
        head_importance(arguments.pop("model"), arguments.pop("dataloader"), **arguments)


def test_an_attention_that_never_runs_cannot_be_scored():
    model = native(MARIAN)
    layer = model.model.encoder.layers[1]
    layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ValueError, match=r"no batch has reached 'encoder\.1\.self': it cannot be scored"):
        head_importance(model, [MARIAN.batch()])


# -- choosing --------------------------------------------------------------------------------------------------------------------

SCORES = {"encoder.0.self": torch.tensor([0.1, 0.9, 0.3, 0.4]), "decoder.0.self": torch.tensor([0.2, 0.05, 0.8, 0.7])}


@pytest.mark.parametrize(
    ("arguments", "heads"),
    [
        ({"count": 3}, {"encoder.0.self": [0], "decoder.0.self": [0, 1]}),
        ({"fraction": 0.5}, {"encoder.0.self": [0, 2], "decoder.0.self": [0, 1]}),
        ({"count": 5, "min_heads": 2}, None),
        ({"count": 4, "min_heads": 3}, None),
        ({"count": 2, "min_heads": 3}, {"encoder.0.self": [0], "decoder.0.self": [1]}),
        ({"count": 2, "group_size": 2}, {"decoder.0.self": [0, 1]}),
        ({"fraction": 0.5, "group_size": 2}, {"encoder.0.self": [2, 3], "decoder.0.self": [0, 1]}),
        ({"fraction": 1}, {"encoder.0.self": [0, 1, 2, 3], "decoder.0.self": [0, 1, 2, 3]}),
    ],
)
def test_the_lowest_go_first(arguments, heads):
    if heads is None:
        with pytest.raises(
            ValueError, match=r"select_heads\(count=\d, min_heads=\d\): that is \d heads; must be in 1\.\.\d"
        ):
            select_heads(SCORES, **arguments)
        return
    assert select_heads(SCORES, **arguments) == HeadPruning(heads=heads)


@pytest.mark.parametrize(
    ("scores", "arguments", "message"),
    [
        ({}, {"count": 1}, "no scores"),
        ({"a": torch.ones(2, 2)}, {"count": 1}, r"the scores of 'a' must be finite numbers in a tensor \(heads,\)"),
        ({"a": torch.tensor([float("nan")])}, {"count": 1}, "must be finite numbers"),
        (SCORES, {}, r"fraction=None, count=None\): give one of them"),
        (SCORES, {"fraction": 0.0}, r"fraction=0\.0\): must be a share in \(0, 1\]"),
        (SCORES, {"count": 0}, r"that is 0 heads; must be in 1\.\.8"),
        (SCORES, {"count": 1, "min_heads": -1}, r"min_heads=-1\): must be an integer of at least 0"),
        (SCORES, {"count": 1, "group_size": 3}, r"group_size=3\): must divide the 4 heads of 'encoder\.0\.self'"),
    ],
)
def test_choices_that_make_no_sense_are_refused(scores, arguments, message):
    with pytest.raises(ValueError, match=message):
        select_heads(scores, **arguments)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_what_is_chosen_can_be_removed(architecture):
    case = next(case for case in CASES if case.architecture is architecture)
    model = native(case)
    attention = next(iter(architecture.attentions(model.config).values()))
    scores = head_importance(model, [case.batch()])
    method = select_heads(scores, fraction=0.5, group_size=attention.group_size(model.config))
    assert make_variant(model, [method])(**case.batch()).loss.isfinite()
