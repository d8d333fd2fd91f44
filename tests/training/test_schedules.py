"""What is frozen for a while: when, in a loop and in the Trainer, resumed, and by two processes."""

import copy
import json
import pickle
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from support.cases import BASELINES
from support.models import add_noise, native, outputs, snapshot, trainability
from support.processes import printed_by, two_processes
from support.schedules import PHASES, STEPS, scheduled_model, trainer
from support.training import objective
from transformers import AutoModelForSeq2SeqLM, Trainer, get_scheduler

from hf_freeze import make_variant, multiply_adds
from hf_freeze.architectures.base import base_name, canonical_parameters
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import Freeze
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import Schedule, frozen_at
from hf_freeze.methods.registry import METHODS, method_from_dict, method_to_dict, register_method
from hf_freeze.training import VariantCallback, parameter_groups

every_backbone = pytest.mark.parametrize("case", BASELINES, ids=[case.architecture.model_type for case in BASELINES])
BATCH = ARCHITECTURES["marian"].tiny_inputs("seq2seq-lm")


def frozen_components(model):
    """The components that are wholly frozen now."""
    trained, all_of_them = set(), set()
    for name, parameter in canonical_parameters(model):
        component = model.architecture.component(base_name(model, name))
        all_of_them.add(component)
        if parameter.requires_grad:
            trained.add(component)
    return all_of_them - trained - {"constant"}


def expected_at(step):
    phases = {"ffn": range(4), "attention": range(5, 9), "embeddings": range(2, 6)}
    return {component for component, steps in phases.items() if step in steps}


# -- Freeze(begin=, end=) ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["begin", "end"])
@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), True, "0.5", [0.5]])
def test_a_share_is_a_number_in_0_to_1(name, value):
    with pytest.raises(ValueError, match=rf"Freeze\({name}=.*\): must be None or a share of training in 0..1"):
        Freeze(ffn="frozen", **{name: value})


@pytest.mark.parametrize("phase", [{"begin": 0.5, "end": 0.5}, {"begin": 0.6, "end": 0.5}, {"begin": 1}, {"end": 0}])
def test_begin_is_below_end(phase):
    with pytest.raises(ValueError, match=r"Freeze\(begin=.*, end=.*\): begin must be below end"):
        Freeze(ffn="frozen", **phase)


@pytest.mark.parametrize("mode", ["random", "diagonal", "zero_diagonal"])
def test_what_is_not_stored_cannot_thaw(mode):
    with pytest.raises(
        ValueError, match=rf"Freeze\(ffn='{mode}', begin=None, end=0.5\): .* cannot be unfrozen; use 'frozen'"
    ):
        Freeze(ffn=mode, end=0.5)
    assert not Freeze(ffn=mode, begin=0, end=1).part(Schedule)


def test_a_schedule_is_json_and_older_configs_are_read():
    for method in (*PHASES, Freeze(ffn="frozen", begin=0, end=1)):
        assert method_from_dict(json.loads(json.dumps(method_to_dict(method)))) == method
    older = {
        name: value for name, value in method_to_dict(Freeze(ffn="frozen")).items() if name not in ("begin", "end")
    }
    assert method_from_dict(older) == Freeze(ffn="frozen")


def test_when_a_freeze_is_active():
    whole, middle = Freeze(ffn="frozen", begin=0, end=1), Freeze(ffn="frozen", begin=0.25, end=0.5)
    assert whole.part(Schedule) is None
    assert all(frozen_at(whole, progress) for progress in (None, 0, 0.5, 1))
    assert [frozen_at(middle, progress) for progress in (None, 0, 0.25, 0.49, 0.5, 1)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    to_the_end = Freeze(ffn="frozen", begin=0.5, end=1)
    assert [frozen_at(to_the_end, progress) for progress in (None, 0, 0.5, 1)] == [False, False, True, True]


# -- a loop of one's own -----------------------------------------------------------------------------------------------------


@every_backbone
def test_a_phase_freezes_and_thaws(case):
    """AdamW with weight decay, made before the first step over what is trainable then, moves what is not frozen, only."""
    model = make_variant(native(case), PHASES)
    assert trainability(model) == trainability(make_variant(native(case), []))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    add_noise(model, case.architecture)  # a bias whose gradient is zero moves by weight decay alone
    model.train()
    for step in range(STEPS):
        model.advance(step, STEPS)
        assert model.progress == step / STEPS
        assert frozen_components(model) == expected_at(step)
        before = snapshot(model)
        objective(model, case.batch()).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            component = case.architecture.component(base_name(model, name))
            frozen = component == "constant" or component in expected_at(step)
            assert torch.equal(parameter, before[name]) == frozen, f"{name} in step {step}"
            assert (parameter.grad is None) == frozen, f"{name} in step {step}"
            assert frozen or id(parameter) in held
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # a gradient of zeros must not be left to a frozen parameter
    model.rewind()
    assert model.progress is None
    assert frozen_components(model) == set()


def test_the_state_is_a_function_of_the_step():
    jumping, walking = scheduled_model(), scheduled_model()
    for step in range(STEPS + 1):
        walking.advance(step, STEPS)
        for other in (7, 0, step):
            jumping.advance(other, STEPS)
        assert trainability(jumping) == trainability(walking)
        assert frozen_components(walking) == expected_at(step)


@pytest.mark.parametrize(
    ("step", "total", "message"),
    [
        (-1, 5, r"advance\(step=-1\): must be an integer of at least 0"),
        (True, 5, r"advance\(step=True\)"),
        (0.5, 5, r"advance\(step=0.5\)"),
        (0, 0, r"advance\(total_steps=0\): must be an integer of at least 1"),
        (0, None, r"advance\(total_steps=None\)"),
        (6, 5, r"advance\(step=6\): must be in 0\.\.5, the total_steps"),
    ],
)
def test_steps_that_make_no_sense_are_refused(step, total, message):
    for phases in (PHASES, []):
        model = scheduled_model(phases=phases)
        with pytest.raises(ValueError, match=message):
            model.advance(step, total)
        assert model.progress is None


def test_training_without_a_callback_is_refused():
    model = scheduled_model()
    with pytest.raises(ValueError, match=r"\['freeze', 'freeze', 'freeze'\] .*VariantCallback.* model\.advance"):
        model.train()(**BATCH)
    with torch.no_grad():
        model(**BATCH)
    model.eval()(**BATCH).loss.backward()  # gradients of a finished model: importance, saliency
    model.advance(0, 1)
    model.train()(**BATCH)
    model.rewind()
    with pytest.raises(ValueError, match="VariantCallback"):
        model(**BATCH)
    scheduled_model(phases=[Freeze(ffn="frozen")]).train()(**BATCH)


def test_a_freeze_of_all_that_is_left_is_refused():
    parts = {"embeddings": "frozen", "attention": "frozen", "norm": "frozen", "head": "frozen"}
    model = scheduled_model(phases=[Freeze(**parts), Freeze(ffn="frozen", begin=0.5)])
    model.advance(3, 8)
    with pytest.raises(
        ValueError, match=r"nothing is left to train at progress 0\.5: 'model\..*' and everything else is frozen"
    ):
        model.advance(4, 8)


def test_what_somebody_else_froze_stays_frozen():
    model = scheduled_model()
    name = "model.encoder.layers.0.fc1.weight"
    model.get_parameter(name).requires_grad_(False)
    for step in range(STEPS):
        model.advance(step, STEPS)
        assert not model.get_parameter(name).requires_grad
    assert model.get_parameter("model.encoder.layers.0.fc2.weight").requires_grad
    assert name not in model.frozen_for_a_while()
    model.rewind()
    model.requires_grad_(False)
    model.advance(0, STEPS)
    model.rewind()
    assert not any(trainability(model).values())


def test_a_step_within_a_phase_looks_at_no_parameter(monkeypatch):
    model = scheduled_model()
    walks = []
    walk = type(model).named_parameters
    monkeypatch.setattr(
        type(model), "named_parameters", lambda *args, **kwargs: walks.append(1) or walk(*args, **kwargs)
    )
    counts = []
    for step in range(8000):
        before = len(walks)
        model.advance(step, 8000)
        if len(walks) > before:
            counts.append(step)
    assert counts == [0, 2000, 4000, 5000, 6000]


@pytest.mark.parametrize("order", [1, -1])
def test_a_scheduled_freeze_beside_a_random_one(order, tmp_path):
    phases = [Freeze(ffn="frozen", end=0.5), Freeze(attention="random", ffn="random", layers={"encoder": [0]}, seed=4)]
    model = scheduled_model(phases=phases[::order])
    seeded = dict(model.seeded_tensors)
    assert seeded
    plain = make_variant(model.config, [], task="seq2seq-lm", seed=1)
    for step, ffn in ((0, True), (4, False)):
        model.advance(step, STEPS)
        assert not any(model.get_parameter(name).requires_grad for name in seeded)
        assert model.get_parameter("model.decoder.layers.0.fc1.weight").requires_grad != ffn
        assert model.get_parameter("model.encoder.layers.1.self_attn.q_proj.weight").requires_grad
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert again.seeded_tensors == seeded
    assert torch.equal(outputs(again, BATCH)["logits"], outputs(model, BATCH)["logits"])
    assert trainability(again) == trainability(plain)


def test_two_schedules_of_one_component_freeze_in_either():
    model = scheduled_model(phases=[Freeze(ffn="frozen", end=0.25), Freeze(ffn="frozen", begin=0.125, end=0.5)])
    found = []
    for step in range(STEPS):
        model.advance(step, STEPS)
        found.append(frozen_components(model) == {"ffn"})
    assert found == [True] * 4 + [False] * 4


# -- saving and copying ------------------------------------------------------------------------------------------------------


def test_saved_in_a_phase_it_opens_as_before_training(tmp_path):
    model = scheduled_model()
    before = trainability(model)
    model.save_pretrained(tmp_path / "before")
    model.advance(3, STEPS)
    model.save_pretrained(tmp_path / "during")
    config = (tmp_path / "during" / "config.json").read_text()
    assert config == (tmp_path / "before" / "config.json").read_text()
    reloaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "during")
    assert reloaded.progress is None
    assert trainability(reloaded) == before
    assert torch.equal(outputs(reloaded, BATCH)["logits"], outputs(model, BATCH)["logits"])
    reloaded.advance(3, STEPS)
    assert trainability(reloaded) == trainability(model)
    appended = make_variant(model, [Freeze(norm="frozen")])
    assert appended.progress is None
    assert frozen_components(appended) == {"norm"}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_by_itself(copied):
    model = scheduled_model()
    model.advance(3, STEPS)
    twin = copied(model)
    assert twin.progress == model.progress
    assert trainability(twin) == trainability(model)
    twin.advance(4, STEPS)
    assert frozen_components(twin) == expected_at(4)
    assert frozen_components(model) == expected_at(3)


def test_a_phase_survives_a_resized_table():
    model = scheduled_model()
    model.advance(3, STEPS)
    model.resize_token_embeddings(44)
    assert frozen_components(model) == expected_at(3)
    model.advance(7, STEPS)
    assert frozen_components(model) == expected_at(7)


def test_on_meta_and_its_cost():
    with torch.device("meta"):
        model = scheduled_model()
    backward = []
    for step in (0, 4, 7):
        model.advance(step, STEPS)
        assert frozen_components(model) == expected_at(step)
        backward.append(multiply_adds(model).by_component["ffn"].backward)
    model.rewind()
    assert backward[0] < backward[1] == backward[2] == multiply_adds(model).by_component["ffn"].backward


# -- other methods -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ramp():
    """A method that only scales a buffer-like attribute with the progress."""
    before = dict(METHODS)

    @register_method("toy_ramp", example={})
    @dataclass(frozen=True, kw_only=True)
    class ToyRamp(Method):
        top: float = 1.0

        @property
        def parts(self):
            return (Ramp(self.top),) if self.top > 0 else ()

    @dataclass(frozen=True)
    class Ramp(Schedule):
        top: float

        def advance(self, model, architecture, step, total_steps):
            assert architecture is model.architecture
            assert (step / total_steps, total_steps) == (model.progress, STEPS)
            model.rates = [*getattr(model, "rates", []), self.top * step / total_steps]

    yield ToyRamp
    METHODS.clear()
    METHODS.update(before)


def test_a_method_is_told_the_progress_of_every_step(ramp, tmp_path):
    model = scheduled_model(phases=[ramp(top=2.0), ramp(top=0.0), Freeze(norm="frozen")])
    assert model.scheduled
    assert model.frozen_for_a_while() == []
    trainer(model, tmp_path).train()
    assert model.rates == [2 * step / STEPS for step in (0, *range(STEPS))]  # at the start, then before every step
    assert not scheduled_model(phases=[ramp(top=0.0)]).scheduled


# -- the Trainer -------------------------------------------------------------------------------------------------------------


class Recording(Trainer):
    """Keeps the batches, and what is frozen in each step."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        kept = {name: value.clone() for name, value in inputs.items()}
        self.seen = [*getattr(self, "seen", []), (kept, num_items_in_batch, frozen_components(model))]
        return super().training_step(model, inputs, num_items_in_batch)


def test_the_trainer_is_a_loop_with_advance(tmp_path):
    """Bit-equal, with accumulation, clipping, weight decay, and a decaying rate for each component."""
    by_trainer, by_hand = scheduled_model(), scheduled_model()
    start = snapshot(by_trainer)
    running = trainer(by_trainer, tmp_path, made=Recording)
    running.train()
    assert len(running.seen) == 2 * STEPS
    assert [frozen for _, _, frozen in running.seen] == [expected_at(step) for step in range(STEPS) for _ in range(2)]
    assert by_trainer.progress is None, "after training it is as if opened from disk"
    assert frozen_components(by_trainer) == set()

    groups = parameter_groups(by_hand, {"embeddings": 0.002, "ffn": 0.02}, lr=0.01, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    by_hand.train()
    for step in range(STEPS):
        by_hand.advance(step, STEPS)
        for batch, items, _ in running.seen[2 * step : 2 * step + 2]:
            by_hand(**batch, num_items_in_batch=items).loss.backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # The scheduler scales the rate of every group.
        assert [group["lr"] for group in optimizer.param_groups] == [
            group["initial_lr"] * (1 - step / STEPS) for group in groups
        ]
        scheduler.step()
    assert {group["initial_lr"] for group in groups} == {0.002, 0.02, 0.01}
    for name, parameter in by_hand.named_parameters():
        assert torch.equal(by_trainer.get_parameter(name), parameter), name
        component = by_hand.architecture.component(base_name(by_hand, name))
        assert component == "constant" or not torch.equal(parameter, start[name]), name
    ours = running.optimizer.optimizer if hasattr(running.optimizer, "optimizer") else running.optimizer
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_without_the_callback_the_trainer_stops_at_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"pass Trainer\(callbacks=\[VariantCallback\(\)\]\)"):
        trainer(scheduled_model(), tmp_path, callback=False).train()


def test_the_callback_does_nothing_for_other_models(tmp_path):
    model = scheduled_model(phases=[]).merge()
    before = snapshot(model)
    trainer(model, tmp_path, max_steps=1).train()
    assert any(not torch.equal(value, model.get_parameter(name)) for name, value in before.items())


def test_a_second_training_trains_all_again(tmp_path):
    """Also after one that stopped in a phase: the Trainer's own optimizer takes what is trainable when it is made."""
    model = scheduled_model()
    model.advance(7, STEPS)
    running = trainer(model, tmp_path)
    running.optimizer = None
    before = snapshot(model)
    running.train()
    for name, parameter in model.named_parameters():
        if model.architecture.component(base_name(model, name)) == "attention" and not name.endswith("k_proj.bias"):
            assert not torch.equal(parameter, before[name]), name


def test_two_processes_train_as_one(tmp_path):
    model = scheduled_model()
    trainer(model, tmp_path, rows_a_batch=4, accumulate=1, sgd=True).train()
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, tmp_path / "expected.safetensors")
    for result in two_processes("schedule", tmp_path):
        assert result == {"problems": [], "refused": 2}


# -- importing ---------------------------------------------------------------------------------------------------------------


def test_the_callback_is_public_and_imported_when_asked_for():
    import hf_freeze

    assert hf_freeze.VariantCallback is VariantCallback
    with pytest.raises(AttributeError, match="module 'hf_freeze' has no attribute 'Callback'"):
        hf_freeze.Callback  # noqa: B018
    code = (
        "import sys, hf_freeze; light = 'hf_freeze.training' not in sys.modules; "
        "from hf_freeze import VariantCallback; print(light, 'hf_freeze.training' in sys.modules)"
    )
    assert printed_by(code).split() == ["True", "True"]
