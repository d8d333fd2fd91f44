"""VariationalDropout: the term of the loss, and what noise removes."""

import copy
import math

import pytest
import torch
from support.models import differences, outputs, trainability
from support.schedules import scheduled_model, trainer
from support.sparse import BATCH, RAMP, WARM_UP, layers_of, sparsity, zeros
from torch.nn import functional
from transformers import AutoModelForSeq2SeqLM

from hf_freeze.methods import Freeze, VariationalDropout
from hf_freeze.training import label_smoothed_loss

# -- the term of the loss ----------------------------------------------------------------------------------------------------


def divergence(model):
    """Σ KL in nats, Molchanov et al., equation 14, in fp64."""
    total = 0.0
    for module in layers_of(model):
        theta, log_sigma = (p.detach().double() for p in (module.weight, module.log_sigma))
        log_alpha = (2 * log_sigma - torch.log(theta.square() + 1e-30)).clamp(-10, 10)
        gate = 1 / (1 + torch.exp(-(1.87320 + 1.48695 * log_alpha)))
        total += float((0.63576 - 0.63576 * gate + 0.5 * torch.log1p(torch.exp(-log_alpha))).sum())
    return total


def test_the_term_warms_up_and_is_divided_by_the_labels_of_an_epoch():
    model = scheduled_model(phases=[WARM_UP])
    whole = divergence(model) / 30
    for step, weight in ((0, 0), (1, 0.25), (2, 0.5), (4, 1), (7, 1)):
        model.advance(step, 8)
        result = model.train()(**BATCH)
        assert result["auxiliary_loss"].item() == pytest.approx(weight * whole, rel=1e-4)
        native_loss = functional.cross_entropy(result.logits.flatten(0, 1), BATCH["labels"].flatten())
        assert result.loss.item() == pytest.approx(native_loss.item() + weight * whole, rel=1e-5)
        result.loss.backward()


def test_the_term_counts_once_in_accumulated_batches(monkeypatch):
    """By the native mean over everything, by shares with `num_items_in_batch`, and with a loss outside."""
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    model = scheduled_model(phases=[WARM_UP]).train()
    model.advance(3, 8)

    def gradients(*losses):
        for loss in losses:
            loss().backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    parts = [{name: value[k : k + 1] for name, value in BATCH.items()} for k in range(2)]
    items = int((BATCH["labels"] != -100).sum())
    loss = label_smoothed_loss(0.0)
    labels = [batch["labels"] for batch in (BATCH, *parts)]
    expected = gradients(lambda: model(**BATCH).loss)
    assert any("log_sigma" in name and value.abs().max() > 0 for name, value in expected.items())
    for found in (
        gradients(*[lambda part=part: model(**part, num_items_in_batch=items).loss for part in parts]),
        gradients(lambda: loss(model(**BATCH), labels[0])),
        gradients(*[lambda part=part: loss(model(**part), part["labels"], items) for part in parts]),
    ):
        assert differences(found, expected, 1e-5) == []


def test_the_term_is_there_in_training_only():
    model = scheduled_model(phases=[WARM_UP])
    model.advance(4, 8)
    assert "auxiliary_loss" not in model.eval()(**BATCH)
    with torch.no_grad():
        assert "auxiliary_loss" not in model.train()(**BATCH)
    assert "auxiliary_loss" in model(**BATCH)
    assert "auxiliary_loss" not in scheduled_model(phases=[RAMP, Freeze(norm="frozen")]).eval()(**BATCH)
    with pytest.raises(ValueError, match="needs return_dict=True"):
        model(**BATCH, return_dict=False)
    assert isinstance(model.eval()(**BATCH, return_dict=False), tuple)
    model.train().finalize()
    assert "auxiliary_loss" not in model(**BATCH)


def test_a_loss_outside_that_forgets_the_term_is_refused_at_the_second_step():
    model = scheduled_model(phases=[WARM_UP]).train()
    model.advance(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = BATCH | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(BATCH["labels"])}
    labels = inputs.pop("labels")

    def step(loss):
        loss(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def forgetful(result):
        assert result.get("loss") is None
        return functional.cross_entropy(result.logits.flatten(0, 1), labels.flatten())

    step(forgetful)
    with pytest.raises(
        ValueError, match=r"\['variational_dropout'\] add a term .* must add outputs\['auxiliary_loss'\]"
    ):
        step(forgetful)
    for _ in range(3):
        step(lambda result: forgetful(result) + result["auxiliary_loss"])
        step(lambda result: label_smoothed_loss(0.1)(result, labels))
    # Looking is no step: a forward without a backward, and a copy, change nothing.
    model(**inputs)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(**inputs)["auxiliary_loss"].backward()
        one.zero_grad()
    step(lambda result: forgetful(result) + result["auxiliary_loss"])


def test_what_is_loaded_after_a_look_is_no_step():
    model = scheduled_model(phases=[WARM_UP]).train()
    model.advance(4, 8)
    state = copy.deepcopy(model.state_dict())
    model(**BATCH)
    model.load_state_dict(state)
    torch.manual_seed(0)  # of the noise
    loss = model(**BATCH).loss
    loss.backward()
    unlooked = scheduled_model(phases=[WARM_UP]).train()
    unlooked.advance(4, 8)
    unlooked.load_state_dict(state)
    torch.manual_seed(0)
    torch.testing.assert_close(loss, unlooked(**BATCH).loss)


def test_the_weight_of_the_kl_term():
    def added(**settings):
        model = scheduled_model(phases=[VariationalDropout(**settings)]).train()
        if settings.get("warmup") != 0:
            model.advance(1, 8)  # β = 1/4 of the warm-up over half of the training
        return model(**BATCH)["auxiliary_loss"].item()

    once = added(training_size=10, warmup=0.0)
    assert once > 0
    assert added(training_size=10, warmup=0.0, kl_weight=0.25) == pytest.approx(once / 4)
    assert added(kl_lambda=0.1, warmup=0.0) == pytest.approx(once)
    assert added(kl_lambda=0.1, warmup=0.5) == pytest.approx(once / 4)
    assert added(kl_lambda=0, warmup=0.0) == 0


def test_training_needs_the_number_of_labels():
    model = scheduled_model(phases=[VariationalDropout(warmup=0.0)])
    outputs(model, BATCH)
    with pytest.raises(
        ValueError, match=r"VariationalDropout\(training_size=None\): training needs the number of labels"
    ):
        model.train()(**BATCH)
    model.finalize()
    model.train()(**BATCH).loss.backward()


def test_bf16_training_by_the_trainer(tmp_path):
    model = scheduled_model(phases=[WARM_UP])
    running = trainer(model, tmp_path, bf16=True, max_steps=3, logging_steps=1)
    running.train()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


# -- what finalize leaves ----------------------------------------------------------------------------------------------------


def test_variational_dropout_drops_what_is_noise():
    model = scheduled_model(phases=[VariationalDropout(training_size=9, threshold=1.0, warmup=0.0)])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in layers_of(model):
            module.log_sigma.copy_(torch.randn(module.log_sigma.shape, generator=generator) - 2)
    expected = [2 * m.log_sigma - m.weight.square().log() >= 1 for m in layers_of(model)]
    assert all(torch.equal(z, e) for z, e in zip(zeros(model), expected, strict=True))
    assert 0.1 < sparsity(model) < 0.9
    logits = outputs(model, BATCH)
    model.finalize()
    assert all(torch.equal(z, e) for z, e in zip(zeros(model), expected, strict=True))
    assert differences(outputs(model, BATCH), logits, 1e-6) == []
    assert "variational_dropout" in {m["method"] for m in model.config.methods}


@pytest.mark.parametrize("threshold", [-1e9, 1e9])
def test_all_or_nothing_may_be_left(threshold, tmp_path):
    model = scheduled_model(phases=[VariationalDropout(training_size=9, threshold=threshold)])
    model.finalize()
    assert sparsity(model) == (1 if threshold < 0 else 0)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert differences(outputs(again, BATCH), outputs(model, BATCH)) == []
    again.train()(**BATCH).loss.backward()
    assert trainability(again) == trainability(model)


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"training_size": 0}, r"VariationalDropout\(training_size=0\): must be an integer of at least 1"),
        ({"training_size": -5}, "training_size=-5"),
        ({"training_size": True}, "training_size=True"),
        ({"training_size": 10.0}, "training_size=10.0"),
        ({"threshold": math.inf}, r"VariationalDropout\(threshold=inf\): must be a number in -1e\+09\.\.1e\+09"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"threshold": "3"}, "threshold='3'"),
        ({"log_sigma": -math.inf}, r"VariationalDropout\(log_sigma=-inf\): must be a number in -40\.\.40"),
        ({"log_sigma": -(2**70)}, "log_sigma=-1180591620717411303424"),
        ({"log_sigma": None}, "log_sigma=None"),
        ({"log_sigma": True}, "log_sigma=True"),
        ({"warmup": -0.1}, r"VariationalDropout\(warmup=-0.1\): must be a share in 0\.\.1"),
        ({"warmup": 1.1}, "warmup=1.1"),
        ({"warmup": True}, "warmup=True"),
        ({"warmup": None}, "warmup=None"),
        ({"kl_weight": -1}, r"VariationalDropout\(kl_weight=-1\): must be a number in 0\.\.1e\+09"),
        ({"kl_lambda": "1"}, r"VariationalDropout\(kl_lambda='1'\): must be a number in 0\.\.1e\+09"),
        (
            {"kl_lambda": 0.1},
            r"kl_lambda=0\.1\): stands for kl_weight / training_size; leave out training_size=9",
        ),
        ({"kl_lambda": 0.1, "training_size": None, "kl_weight": 2}, r"leave out training_size=None and kl_weight=2"),
    ],
)
def test_a_dropout_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        VariationalDropout(**({"training_size": 9} | arguments))
