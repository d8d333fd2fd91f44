"""MagnitudePruning and VariationalDropout in training: masks under every optimiser, the ramp, without a callback."""

import copy
import math

import pytest
import torch
from support.models import differences, outputs, snapshot
from support.schedules import STEPS, scheduled_model, trainer
from support.sparse import BATCH, RAMP, WARM_UP, WEIGHTS, is_within, layers_of, sparsity, zeros
from transformers import AutoModelForSeq2SeqLM, TrainerCallback

from hf_freeze import make_variant, multiply_adds
from hf_freeze.layers.sparse import SparseLinear
from hf_freeze.methods import Freeze, MagnitudePruning, VariationalDropout

# -- masks and optimisers ----------------------------------------------------------------------------------------------------


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("method", [MagnitudePruning(sparsity=0.5), RAMP], ids=["at once", "ramp"])
def test_the_mask_holds_after_every_step(optimiser, method):
    model = scheduled_model(phases=[method]).train()
    optimizer = OPTIMISERS[optimiser](model.parameters())
    steps = 6 if model.scheduled else 3
    for step in range(steps):
        if model.scheduled:
            model.advance(step, steps)
        before, weights = zeros(model), snapshot(model)
        for module, hidden in zip(layers_of(model), before, strict=True):
            assert int(hidden.sum()) == module.zeros()
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert is_within(before, zeros(model))
        assert [int(z.sum()) for z in before] == [int(z.sum()) for z in zeros(model)]
        for name, parameter in model.named_parameters():
            assert not parameter.requires_grad or ".k_proj.bias" in name or not torch.equal(parameter, weights[name])
        for mode in (True, False) if step % 3 == 2 else ():  # what is behind the mask counts nothing
            model.train(mode)
            with torch.no_grad():
                expected = model(**BATCH).logits
                moved = copy.deepcopy(model)
                for module in layers_of(moved):
                    module.weight[~module.kept_entries()] = math.nan
                assert torch.equal(moved(**BATCH).logits, expected)
        model.train()
    assert sparsity(model) == pytest.approx(0.5 if method is not RAMP else 0.8, abs=1e-3)


class Recording(TrainerCallback):
    def __init__(self):
        self.zeros = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.zeros.append(zeros(model))


def test_the_mask_holds_in_the_trainer(tmp_path):
    model = scheduled_model(phases=[RAMP])
    recording = Recording()
    running = trainer(model, tmp_path, accumulate=1)
    running.add_callback(recording)
    running.train()
    counts = [sum(int(z.sum()) for z in each) for each in recording.zeros]
    assert counts == [expected_count(RAMP, step / STEPS) for step in range(STEPS)]
    assert all(is_within(a, b) for a, b in zip(recording.zeros, recording.zeros[1:], strict=False))
    assert is_within(recording.zeros[-1], zeros(model))
    assert counts[:3] == [0, 0, 0]
    assert counts[-1] == counts[-2] == round(0.8 * WEIGHTS)


# -- the ramp ----------------------------------------------------------------------------------------------------------------


def expected_count(method, progress, weights=WEIGHTS, *, ahead=0.0):
    """Zhu & Gupta's cubic ramp; `ahead`: by this share of the ramp."""
    begin, end = method.begin or 0, 1 if method.end is None else method.end
    done = (progress - begin) / (end - begin)
    done = min(max(done + ahead * (done > 0), 0), 1)
    return round(method.sparsity * (1 - (1 - done) ** 3) * weights)


@pytest.mark.parametrize(
    "method",
    [
        RAMP,
        MagnitudePruning(sparsity=0.9, begin=0.0),
        MagnitudePruning(sparsity=0.6, end=0.5),
        MagnitudePruning(sparsity=0.7, begin=0.5, end=1.0, scope="layer"),
    ],
    ids=["both", "begin", "end", "layer"],
)
def test_the_sparsity_follows_the_cubic_ramp(method):
    model = scheduled_model(phases=[method])
    assert model.scheduled
    assert sparsity(model) == 0
    before = zeros(model)
    for step in range(0, 321, 4):
        model.advance(step, 320)
        now = zeros(model)
        assert is_within(before, now), "what is pruned stays pruned"
        groups = [now] if method.scope == "global" else [[z] for z in now]
        for group in groups:
            weights = sum(z.numel() for z in group)
            least, most = (expected_count(method, step / 320, weights, ahead=ahead) for ahead in (0, 0.01))
            assert least <= sum(int(z.sum()) for z in group) <= most, step
        before = now
    assert sparsity(model) == pytest.approx(method.sparsity, abs=1 / 384)


def test_most_steps_of_a_ramp_rank_nothing(monkeypatch):
    """A ranking of all weights costs more than a step: there are a hundred of them, however long the training is."""
    model = scheduled_model(phases=[RAMP])
    ranked = []
    kthvalue = torch.Tensor.kthvalue
    monkeypatch.setattr(torch.Tensor, "kthvalue", lambda *args: ranked.append(1) or kthvalue(*args))
    for step in range(1000):
        model.advance(step, 1000)
    assert 50 < len(ranked) <= 100


@pytest.mark.parametrize("step", range(0, 9, 2))
def test_finalize_prunes_to_the_full_sparsity_at_any_step(step):
    model = scheduled_model(phases=[RAMP])
    model.advance(step, 8)
    before = zeros(model)
    model.finalize()
    assert sum(int(z.sum()) for z in zeros(model)) == round(0.8 * WEIGHTS)
    assert is_within(before, zeros(model))
    assert all(isinstance(module, SparseLinear) for module in layers_of(model))
    assert sum(module.nonzeros for module in layers_of(model)) == WEIGHTS - round(0.8 * WEIGHTS)
    assert not model.scheduled
    model.train()(**BATCH).loss.backward()  # nobody needs to advance it any more
    model.advance(0, 3)


@pytest.mark.parametrize("method", [RAMP, WARM_UP])
def test_a_schedule_on_meta(method):
    """Multiply-adds are counted there."""
    with torch.device("meta"):
        model = scheduled_model(phases=[method])
    model.advance(4, 8)
    assert multiply_adds(model, length=8).forward == multiply_adds(scheduled_model(phases=[method]), length=8).forward


def test_a_second_training_keeps_what_was_pruned():
    model = scheduled_model(phases=[RAMP])
    model.advance(8, 8)
    pruned = zeros(model)
    model.rewind()
    model.advance(0, 8)
    assert all(torch.equal(a, b) for a, b in zip(zeros(model), pruned, strict=True))


# -- in the middle of a training ---------------------------------------------------------------------------------------------


def test_a_mask_is_saved_in_the_middle(tmp_path):
    model = scheduled_model(phases=[RAMP])
    model.advance(4, 8)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert 0 < sparsity(again) == sparsity(model) < 0.8
    assert again.finalizable
    assert differences(outputs(again, BATCH), outputs(model, BATCH)) == []
    appended = make_variant(model, [Freeze(norm="frozen")])
    assert all(torch.equal(a, b) for a, b in zip(zeros(appended), zeros(model), strict=True))
    for one in (again, appended):
        one.advance(8, 8)
        model.advance(8, 8)
        assert all(torch.equal(a, b) for a, b in zip(zeros(one), zeros(model), strict=True))


# -- training without telling the progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [RAMP, WARM_UP])
def test_training_without_a_callback_is_refused(method, tmp_path):
    model = scheduled_model(phases=[method])
    with pytest.raises(ValueError, match=rf"\['{method.name}'\] .*VariantCallback.* model\.advance"):
        model.train()(**BATCH)
    with pytest.raises(ValueError, match=r"pass Trainer\(callbacks=\[VariantCallback\(\)\]\)"):
        trainer(model, tmp_path, callback=False).train()
    outputs(model, BATCH)
    model.advance(0, 1)
    model.train()(**BATCH)


def test_what_follows_no_progress_needs_no_callback(tmp_path):
    for method in (MagnitudePruning(sparsity=0.5), VariationalDropout(training_size=30, warmup=0)):
        model = scheduled_model(phases=[method])
        assert not model.scheduled
        trainer(model, tmp_path, callback=False, max_steps=1).train()


def test_one_scheduled_and_one_at_once_end_together():
    model = scheduled_model(
        phases=[
            MagnitudePruning(sparsity=0.5, layers={"encoder": [0, 1]}),
            VariationalDropout(training_size=30, threshold=-6.0, warmup=0.5, layers={"decoder": [0, 1]}),
        ]
    )
    assert model.scheduled
    model.finalize()
    assert not model.scheduled
    assert len(layers_of(model)) == 8
    assert all(isinstance(module, SparseLinear) for module in layers_of(model))
