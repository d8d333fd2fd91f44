"""What is lost without each head: against HeadMask, one head at a time."""

import json

import numpy as np
import pytest
import torch
from support.models import native
from support.parametrize import by_turns
from test_head_importance import CASES, MARIAN, summed_loss

from hf_freeze import make_variant
from hf_freeze.analysis import head_ablation, head_ablation_tests, select_heads
from hf_freeze.analysis.significance import enough_replicates
from hf_freeze.methods import HeadMask, HeadPruning

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def mean_loss(case, model, batch):
    """Over the labels."""
    with torch.no_grad():
        labels = batch["labels"][:, 1:] if case.task == "causal-lm" else batch["labels"]
        return float(summed_loss(case, model.eval(), batch)) / int((labels != -100).sum())


def heads_of(case):
    config = native(case).config
    return {name: a.head_count(config) for name, a in case.architecture.attentions(config).items()}


def expected(case, keep_one, batch):
    whole, found = mean_loss(case, native(case), batch), {}
    for name, count in heads_of(case).items():
        losses = []
        for head in range(count):
            masked = [other for other in range(count) if other != head] if keep_one else [head]
            losses.append(mean_loss(case, make_variant(native(case), [HeadMask(heads={name: masked})]), batch) - whole)
        found[name] = torch.tensor(losses)
    return found


@by_turns(pytest.mark.parametrize("keep_one", [False, True]), every_case)
def test_the_loss_rises_as_with_a_mask(case, keep_one):
    """Over two batches of unlike sizes, the mean is that of one batch of all."""
    batch = case.batch()
    parts = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(2)]
    model = native(case).train()
    found = head_ablation(model, parts, keep_one=keep_one)
    wanted = expected(case, keep_one, batch)
    assert found.keys() == wanted.keys()
    for name, rises in found.items():
        torch.testing.assert_close(rises, wanted[name], rtol=1e-4, atol=1e-5)
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_before_a_head_are_not_run_again():
    model, runs = native(MARIAN), []
    for stack, layers in (("encoder", model.model.encoder.layers), ("decoder", model.model.decoder.layers)):
        for number, layer in enumerate(layers):
            layer.fc1.register_forward_hook(lambda *_, place=(stack, number): runs.append(place))
    head_ablation(model, [MARIAN.batch()])
    # Once for the whole, and once for each of the two heads of its own attentions and of those before.
    counts = {place: runs.count(place) for place in runs}
    assert counts == {("encoder", 0): 3, ("encoder", 1): 5, ("decoder", 0): 9, ("decoder", 1): 13}


def test_scores_are_of_the_users_own(tmp_path):
    """Called once for the whole model and once for each head; a broken measurement goes on where it was."""
    batch, calls = MARIAN.batch(), []

    def score(model):
        calls.append(model.training)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return -mean_loss(MARIAN, model, batch)

    path = tmp_path / "heads.jsonl"
    with pytest.raises(KeyboardInterrupt):
        head_ablation(native(MARIAN), evaluate=score, path=path)
    found = head_ablation(native(MARIAN), evaluate=score, path=path)
    assert calls == [False] * (1 + 12 + 1)
    for name, rises in expected(MARIAN, False, batch).items():
        torch.testing.assert_close(found[name], rises, rtol=1e-4, atol=1e-5)
    again = head_ablation(native(MARIAN), evaluate=score, path=path)
    assert len(calls) == 14
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert len(path.read_text().splitlines()) == 1 + 13
    assert json.loads(path.read_text().splitlines()[0])["keep_one"] is False
    other = make_variant(native(MARIAN), [HeadMask(heads={"encoder.0.self": [0]})])
    for arguments in ({"model": other}, {"keep_one": True}):
        with pytest.raises(
            ValueError, match=r"heads\.jsonl is of another measurement: .*give another path, or delete it"
        ):
            head_ablation(arguments.pop("model", native(MARIAN)), evaluate=score, path=path, **arguments)


def test_single_heads_count_where_chance_alone_would_rarely_do_as_much(tmp_path):
    """Of 200 items, the h-th head spoils 4 h when it is removed. All draws without one of m spoiled items have no
    difference: p = 2 (1 - m / 200)^200, times the number of heads that have this p or a larger one (Holm)."""
    spoiled = iter(range(0, 100, 4))

    def evaluate(_):
        right = np.arange(200) >= next(spoiled)
        return float(right.mean()), np.stack([right, np.ones(200)], axis=1)

    path = tmp_path / "heads.jsonl"
    drops = head_ablation(native(MARIAN), evaluate=evaluate, path=path)
    tests = head_ablation_tests(path, lambda sums: sums[..., 0] / sums[..., 1])
    assert {name: len(values) for name, values in tests.items()} == heads_of(MARIAN)
    flat = [test for values in tests.values() for test in values]
    assert -np.array([test.difference for test in flat]) == pytest.approx(torch.cat(list(drops.values())).numpy())
    exact = [2 * (1 - 4 * head / 200) ** 200 for head in range(1, 13)]
    corrected = [min(1, p * (12 - place)) for p, place in zip(exact, range(11, -1, -1), strict=True)]
    assert enough_replicates(30, 0.01) == 12_000
    for test, p in zip(flat, corrected, strict=True):
        assert test.p_corrected == pytest.approx(p, rel=0.4, abs=0.006), test.row
    assert [test.p_corrected < 0.01 for test in flat] == [p < 0.01 for p in corrected] == [False] + [True] * 11


def test_heads_without_items_are_not_tested(tmp_path):
    path = tmp_path / "heads.jsonl"
    head_ablation(native(MARIAN), evaluate=lambda _: 1.0, path=path)
    with pytest.raises(ValueError, match=r"heads\.jsonl has no items of a test set.*return \(score, items\)"):
        head_ablation_tests(path, np.sum)


def test_the_order_of_an_oracle():
    found = head_ablation(native(MARIAN), [MARIAN.batch()])
    least = min((float(value), name, head) for name, rises in found.items() for head, value in enumerate(rises))
    assert select_heads(found, count=1) == HeadPruning(heads={least[1]: [least[2]]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give one of data and evaluate"),
        ({"data": [MARIAN.batch()], "evaluate": len}, "give one of data and evaluate"),
        ({"data": [MARIAN.batch()], "path": "x"}, r"path='x'\): only works with evaluate"),
        ({"data": []}, "the dataloader is empty"),
        (
            {"data": [{"input_ids": torch.ones(1, 2).long(), "decoder_input_ids": torch.ones(1, 2).long()}]},
            "head_ablation needs a loss",
        ),
        ({"evaluate": lambda _: "good"}, "evaluate returned 'good'; it must be a finite number"),
        ({"evaluate": lambda _: float("nan")}, "evaluate returned nan"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        head_ablation(native(MARIAN), **arguments)
