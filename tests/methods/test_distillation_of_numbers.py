"""Distillation of regression, whose outputs are numbers: the squared error of the teacher's. The sums are written out here."""

import pytest
import torch
from support.cases import native_config
from transformers import AutoModelForSequenceClassification

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import Distillation

BATCH = {"input_ids": torch.tensor([[5, 9, 3, 7], [8, 4, 1, 6], [2, 2, 9, 5]])}
SETTINGS = [
    {"num_labels": 1},
    {"num_labels": 1, "problem_type": "regression"},
    {"num_labels": 3, "problem_type": "regression"},
]


def models(seeds, kind="bert", **changes):
    """Native models without dropout whose outputs differ."""
    for seed in seeds:
        torch.manual_seed(seed)
        config = native_config(ARCHITECTURES[kind])
        for name, value in changes.items():
            setattr(config, name, value)
        model = AutoModelForSequenceClassification.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        yield model


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("changes", SETTINGS, ids=["one number", "said so", "three numbers"])
def test_numbers_are_learnt_by_their_squared_error(changes, temperature, kind):
    """(1 - alpha) · that of the labels + alpha · that of the teacher, each a mean over examples and outputs; no temperature."""
    student, teacher = models((1, 2), kind, **changes)
    labels = torch.tensor([[0.5, 1.0, -2.0], [3.0, 0.0, 1.0], [-1.0, 2.0, 0.25]])[:, : changes["num_labels"]]
    with torch.no_grad():
        outputs, taught = (model(**BATCH).logits.tolist() for model in (student, teacher))

    def error(targets):
        pairs = [(a, b) for one, other in zip(outputs, targets, strict=True) for a, b in zip(one, other, strict=True)]
        return sum((a - b) ** 2 for a, b in pairs) / len(pairs)

    variant = make_variant(student, [Distillation(teacher=teacher, alpha=0.25, temperature=temperature)]).train()
    result = variant(**BATCH, labels=labels)
    assert error(taught) > 0.01, "a vacuous case"
    assert result.auxiliary_loss.item() == pytest.approx(0.25 * error(taught), rel=1e-5)
    assert result.loss.item() == pytest.approx(0.75 * error(labels.tolist()) + 0.25 * error(taught), rel=1e-5)


def test_the_gradient_of_a_number_is_twice_the_difference():
    """And a student that gives what the teacher gives has nothing to learn from it."""
    student, teacher = models((1, 2), num_labels=1)
    variant = make_variant(student, [Distillation(teacher=teacher, alpha=1.0)]).train()
    result = variant(**BATCH, labels=torch.zeros(3, 1))
    result.logits.retain_grad()
    result.loss.backward()
    expected = 2 * (result.logits.detach() - teacher(**BATCH).logits.detach()) / 3
    torch.testing.assert_close(result.logits.grad, expected)
    same = make_variant(next(models((1,), num_labels=1)), [Distillation(teacher=student, alpha=1.0)]).train()
    assert same(**BATCH, labels=torch.zeros(3, 1)).loss.item() == pytest.approx(0, abs=1e-10)
