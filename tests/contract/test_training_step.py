"""Invariants 2 and 8 (CONTRIBUTING.md): what a training step changes, and the ways to train."""

import copy
import inspect

import pytest
import torch
from support.cases import ALL, BASELINES, Case, covering, once, once_on_each_architecture
from support.models import build, differences, snapshot, trainability
from support.parametrize import over
from support.training import (
    BATCH_ROWS,
    begin_training,
    gradients,
    inputs_only,
    objective,
    plain_update,
    sgd_step_of_trainer,
    stack,
    training_rows,
    training_step,
    unreached_natively,
    without_noise,
)
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_freeze.architectures.base import base_name
from hf_freeze.training import label_smoothed_loss

# One step of each method on each architecture, and of every config without methods. Other ways to train take each method in one
# place: what they share with that step is not of a method.
STEPS = [
    *once_on_each_architecture(),
    *once_on_each_architecture(finalized=True),
    *covering(lambda case: not case.methods),
]
OTHER_WAYS = [*(once_on_each_architecture() if ALL else once()), *once(finalized=True), *BASELINES]


def over_each(cases: list[Case]):
    return over({case.id: case for case in cases}.values())


def check_reached(case: Case, model, reached: set[str]):
    """All trainable parameters have a gradient, and no others; except those that a step or the native model leaves out."""
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    trainable -= unreached_natively(case)
    assert reached <= trainable if case.skips else reached == trainable, reached ^ trainable
    assert reached or not trainable


@over_each(covering() if ALL else STEPS)
def test_a_step_changes_what_is_trainable_and_nothing_else(case: Case, saved):
    trained, before = saved(case).model, saved(case).before
    check_reached(case, trained, saved(case).reached)
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in saved(case).reached), name
    for name, definition in trained.seeded_tensors.items():
        assert torch.equal(trained.get_parameter(name), definition.generate()), name
    assert any(trainability(trained).values())
    if not case.methods:
        constant = {n for n in before if case.architecture.component(base_name(trained, n)) == "constant"}
        assert trainability(trained) == {name: name not in constant for name in before}


@over(once() + once(finalized=True))
def test_further_steps_train_what_one_has_left_out(case: Case, saved):
    model, before = copy.deepcopy(saved(case).model), saved(case).before
    # What methods add to the loss was in the first step, or the second is refused.
    for step in range(16 if case.skips else 1):
        training_step(model, case.batch(), step, 16)
    for name, parameter in model.named_parameters():
        left_out = not parameter.requires_grad or name in unreached_natively(case)
        assert torch.equal(parameter, before[name]) == left_out, name


# Of what declares nothing random, each method once.
@over(
    once_on_each_architecture(lambda case: case.stochastic or not case.methods)
    + once(lambda case: not case.stochastic)
    + once(finalized=True)
)
def test_training_is_random_iff_declared(case: Case):
    model = build(case)

    def values(seed, training):
        begin_training(model).train(training)
        torch.manual_seed(seed)
        return {name: value.detach() for name, value in model(**case.batch()).items() if torch.is_tensor(value)}

    assert differences(values(1, False), values(2, False)) == []
    assert differences(values(1, True), values(1, True)) == []
    assert (differences(values(1, True), values(2, True)) != []) == case.stochastic
    with without_noise(case):
        assert differences(values(1, True), values(2, True)) == [], "without_noise does not know this draw"


@over_each(OTHER_WAYS)
def test_bf16_autocast(case: Case):
    model = build(case)
    expected, _ = gradients(model, case.batch())
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(begin_training(model), case.batch())
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.1, abs=0.01)
    check_reached(case, model, {name for name, p in model.named_parameters() if p.grad is not None})
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@over_each(OTHER_WAYS)
def test_gradient_checkpointing_changes_nothing(case: Case):
    model = build(case)
    model.enable_input_require_grads()  # without which the reentrant kind finds nothing to go back to
    expected_loss, expected = gradients(model, case.batch())
    entered = []
    for stack_of in case.architecture.stacks.values():
        for layer in range(getattr(model.config, stack_of.depth)):
            for part in model.base_model.get_submodule(stack_of.layers.format(layer)).modules():
                if not list(part.children()):  # hooks of the layer itself stay outside the checkpoint
                    part.register_forward_pre_hook(lambda module, _: entered.append(id(module)))
    # Deprecated in transformers 5, under its older name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        entered.clear()
        loss, actual = gradients(model, case.batch())
        assert len(entered) > 1.5 * len(set(entered)), "hardly anything was computed again: nothing was checkpointed"
        # The first forward of the reentrant kind has no gradients: factors then multiply in another order.
        tolerance = 1e-4 if reentrant else 1e-6
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        assert differences(actual, expected, tolerance) == []


# -- the Trainer -------------------------------------------------------------------------------------------------------------

# In older versions the Trainer's label smoothing ignores `num_items_in_batch`. Variants then let the Trainer divide by the number
# of accumulated batches, which is the update of one big batch only where these hold equally many labels.
exact_trainer = pytest.mark.skipif(
    "num_items_in_batch" not in inspect.signature(LabelSmoother.__call__).parameters,
    reason="this version of transformers averages over accumulated batches",
)


@exact_trainer
@over(once(lambda case: case.has_loss))
def test_accumulated_batches_give_the_update_of_one(case: Case, tmp_path):
    rows = training_rows(case)
    with without_noise(case):
        expected = plain_update(build(case), rows)
    for batch_size in (BATCH_ROWS, 1):
        model = build(case)
        before = snapshot(model)
        with without_noise(case):
            sgd_step_of_trainer(model, rows, tmp_path, batch_size=batch_size, accumulate=BATCH_ROWS // batch_size)
        actual = {name: p.detach() for name, p in model.named_parameters()}
        assert differences(actual, expected, 1e-4) == [], f"batches of {batch_size}"
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad or torch.equal(parameter, before[name]), name


@exact_trainer
@over(once(lambda case: case.has_loss and case.generates)[:: 1 if ALL else 2])
def test_accumulated_batches_with_label_smoothing(case: Case, tmp_path):
    rows = training_rows(case)
    batch = stack(rows)
    if build(case).config.is_encoder_decoder:  # smoothing takes the labels away; a collator adds what they would feed
        decoder_inputs = build(case).prepare_decoder_input_ids_from_labels(batch["labels"])
        rows = [row | {"decoder_input_ids": ids} for row, ids in zip(rows, decoder_inputs, strict=True)]
    reference = build(case)
    before = snapshot(reference)
    shift = 0 if reference.config.is_encoder_decoder else 1
    with without_noise(case):
        result = begin_training(reference)(**inputs_only(reference, batch))  # with labels, some methods give no logits
    logits, labels = result.logits[:, : result.logits.shape[1] - shift], batch["labels"][:, shift:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    added = result.get("auxiliary_loss")
    (loss if added is None else result.get("label_weight", 1.0) * loss + added).backward()
    expected = {n: before[n] if p.grad is None else before[n] - p.grad for n, p in reference.named_parameters()}
    # The Trainer's own smoothing knows nothing of what methods add.
    smoothing = {"label_smoothing_factor": 0.1}
    if added is not None:
        with pytest.raises(ValueError, match="must add outputs\\['auxiliary_loss'\\]"):
            sgd_step_of_trainer(build(case), rows, tmp_path, batch_size=1, accumulate=1, max_steps=2, **smoothing)
        smoothing = {"compute_loss_func": label_smoothed_loss(0.1, shift=bool(shift))}
    for batch_size in (BATCH_ROWS, 1):
        model = build(case)
        with without_noise(case):
            sgd_step_of_trainer(
                model, rows, tmp_path, batch_size=batch_size, accumulate=BATCH_ROWS // batch_size, **smoothing
            )
        actual = {name: p.detach() for name, p in model.named_parameters()}
        assert differences(actual, expected, 1e-4) == [], f"batches of {batch_size}"
