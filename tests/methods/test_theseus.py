"""Theseus: what runs in each step of training, which module it is by which draw, what is trained, and what is left of it."""

import copy
import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from support.deep import deep_config, deep_model, each_architecture, layers_of, put_layers
from support.generation import generation_problems
from support.models import differences, outputs, perturbed, snapshot
from support.schedules import rows
from support.small import small_config
from support.training import objective
from transformers import AutoModelForSeq2SeqLM, Trainer, TrainerCallback, TrainingArguments

from hf_freeze import VariantCallback, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.layer_forward import Replaced
from hf_freeze.methods import LayerSelection, LowRank, Theseus
from hf_freeze.methods.parts import Schedule

MARIAN = ARCHITECTURES["marian"]
NEVER = 1e-9  # a rate at which every module stays its predecessor
# The layers of each stack, and the successor; of the last one the decoder stays whole.
each_case = pytest.mark.parametrize(
    ("architecture", "depth", "successor"),
    [(architecture, 4, None) for architecture in ARCHITECTURES.values()] + [(MARIAN, 6, {"encoder": 2})],
    ids=[*ARCHITECTURES, "marian-encoder-2-of-6"],
)


def own_state(layer):
    return {name: value for name, value in layer.state_dict().items() if not name.startswith("predecessor.")}


def successors(variant, native, architecture, stack):
    """Native layers with the weights of the variant's."""
    modules = layers_of(variant, architecture, stack)
    made = copy.deepcopy(layers_of(native, architecture, stack)[: len(modules)])
    for layer, module in zip(made, modules, strict=True):
        layer.load_state_dict(own_state(module))
    return made


def in_training(model, batch):
    """Every tensor that the forward returns in training mode, of a model without dropout."""
    with torch.no_grad():
        return {name: value for name, value in model.train()(**batch).items() if torch.is_tensor(value)}


def drawn(model, architecture=MARIAN, stacks=None):
    """Whether each module is its successor now."""
    layers = [layer for stack in stacks or architecture.stacks for layer in layers_of(model, architecture, stack)]
    return [not Replaced.of(layer).active for layer in layers]


def draws_of(model, steps, total=5000):
    return torch.tensor([(model.advance(step, total), drawn(model))[1] for step in steps])


def on_meta(*methods):
    with torch.device("meta"):
        return make_variant(deep_config(MARIAN), list(methods), task="seq2seq-lm")


# -- what runs ---------------------------------------------------------------------------------------------------------------


@each_case
def test_training_sees_the_backbone_or_its_first_layers_where_all_draws_are_alike(architecture, depth, successor):
    native, batch = deep_model(architecture, depth)
    first = {stack: [*range(count)] for stack, count in (successor or dict.fromkeys(architecture.stacks, 2)).items()}
    for rate, expected in ((NEVER, native), (1, make_variant(native, [LayerSelection(keep=first)]))):
        variant = make_variant(native, [Theseus(successor=successor, rate=rate)])
        variant.advance(0, 1)
        assert set(drawn(variant, architecture, successor)) == {rate == 1}
        if rate == NEVER:
            perturbed(variant)  # the successor, which must not matter
        assert differences(in_training(variant, batch), in_training(expected, batch)) == []


@pytest.mark.parametrize("model_type", ["t5", "longt5"])
def test_predecessors_hand_on_the_position_bias_of_the_first_layer(model_type):
    """T5's layers return the biases of both attentions; LongT5's return the weights of each after its bias."""
    config = small_config(model_type, num_layers=4, num_decoder_layers=4, dropout_rate=0.0)
    torch.manual_seed(0)
    native = perturbed(AutoModelForSeq2SeqLM.from_config(config))
    variant = make_variant(native, [Theseus(rate=NEVER)])
    variant.advance(0, 1)
    batch = MARIAN.tiny_inputs("seq2seq-lm")
    assert torch.allclose(variant.train()(**batch).logits, native.train()(**batch).logits, atol=1e-5)


@each_case
def test_a_step_computes_and_learns_as_the_mixture_of_both(architecture, depth, successor):
    """Against a native model whose layers are those drawn: all outputs, and the gradients of the successor."""
    native, batch = deep_model(architecture, depth)
    variant, mixtures = perturbed(make_variant(native, [Theseus(successor=successor, seed=2)])), 0
    for step in range(6):
        variant.advance(step, 6)
        mixed, taught, left_out = copy.deepcopy(native), [], []
        for stack in successor or architecture.stacks:
            former, new = layers_of(mixed, architecture, stack), successors(variant, native, architecture, stack)
            each, layers = len(former) // len(new), []
            for number, module in enumerate(layers_of(variant, architecture, stack)):
                if Replaced.of(module).active:
                    layers += former[number * each : (number + 1) * each]
                    left_out.append(module)
                else:
                    layers.append(new[number])
                    taught.append((module, new[number]))
            put_layers(mixed, architecture, stack, layers)
        assert differences(in_training(variant, batch), in_training(mixed, batch)) == []
        if not taught:
            continue
        mixtures += bool(left_out)
        variant.zero_grad()
        objective(variant, batch).backward()
        objective(mixed, batch).backward()
        assert all(p.grad is None for module in left_out for p in module.parameters())
        for module, layer in taught:
            for name, parameter in layer.named_parameters():
                torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-7)
    assert mixtures, "no step had both"


@each_architecture
def test_evaluation_runs_the_successor_whatever_was_drawn(architecture):
    native, batch = deep_model(architecture)
    variant, by_hand = perturbed(make_variant(native, [Theseus(rate=NEVER)])), copy.deepcopy(native)
    for stack in architecture.stacks:
        put_layers(by_hand, architecture, stack, successors(variant, native, architecture, stack))
    expected = outputs(by_hand, batch)
    variant.advance(0, 1)
    assert differences(outputs(variant, batch), expected) == []
    assert differences(in_training(variant, batch), expected) != [], "nothing was drawn"
    if architecture.tasks[0] in ("causal-lm", "seq2seq-lm"):
        assert generation_problems(variant, batch) == []


@each_architecture
def test_a_step_may_leave_out_all_that_is_trained(architecture):
    """Its loss must still have a gradient, or `backward` is an error: one of zero, for one parameter."""
    native, batch = deep_model(architecture)
    variant = make_variant(native, [Theseus(rate=NEVER)])
    variant.advance(0, 1)
    objective(variant.train(), batch).backward()
    reached = [p.grad for p in variant.parameters() if p.grad is not None]
    assert len(reached) <= 1
    assert not any(grad.any() for grad in reached)


@pytest.mark.parametrize("task", ["question-answering", "feature-extraction"])
def test_so_it_may_where_the_loss_is_computed_outside(task):
    bert = ARCHITECTURES["bert"]
    variant = make_variant(deep_config(bert), [Theseus(rate=NEVER)], task=task)
    variant.advance(0, 1)
    variant.train()(**bert.tiny_inputs("feature-extraction"))[0].sum().backward()
    assert [name for name, p in variant.named_parameters() if p.grad is not None and p.grad.any()] == []
    variant.eval()(**bert.tiny_inputs("feature-extraction"))[0].square().sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in variant.parameters())  # what is served has one


@each_architecture
@pytest.mark.parametrize(("init", "sources"), [("first", [0, 1]), ("alternate", [0, 2])])
@pytest.mark.parametrize("fresh", [False, True], ids=["trained", "fresh"])
def test_the_successor_starts_as_layers_of_the_predecessor(architecture, init, sources, fresh):
    native = deep_model(architecture)[0]
    source, drawing = (native.config, {"task": architecture.tasks[0], "seed": 3}) if fresh else (native, {})
    variant = make_variant(source, [Theseus(init=init)], **drawing)
    for stack in architecture.stacks:
        modules = layers_of(variant, architecture, stack)
        former = [own_state(layer) for module in modules for layer in module.predecessor]
        expected = former if fresh else [layer.state_dict() for layer in layers_of(native, architecture, stack)]
        assert [differences(*pair) for pair in zip(former, expected, strict=True)] == [[]] * 4
        assert all(differences(*pair) for pair in itertools.combinations(former, 2)), "two are alike"
        for module, number in zip(modules, sources, strict=True):
            assert differences(own_state(module), expected[number]) == []


# -- which is drawn, and how often -------------------------------------------------------------------------------------------


def test_a_draw_is_a_function_of_the_seed_and_the_step(tmp_path):
    variant = make_variant(deep_model(MARIAN)[0], [Theseus(seed=7)])
    expected = draws_of(variant, range(64))
    variant.save_pretrained(tmp_path)
    reloaded = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    for other in (copy.deepcopy(variant), reloaded, on_meta(Theseus(seed=7, init="alternate"))):
        assert torch.equal(draws_of(other, range(64)), expected)
    assert torch.equal(draws_of(variant, reversed(range(64)), total=64).flip(0), expected)


def test_the_order_of_the_stacks_changes_no_draw():
    """A config that is opened has its keys sorted."""
    orders = [{"encoder": 2, "decoder": 2}, {"decoder": 2, "encoder": 2}]
    one, other = (draws_of(on_meta(Theseus(successor=order)), range(64)) for order in orders)
    assert torch.equal(one, other)


def check_independent(one, other):
    """(steps, draws) of probability 1/2 under two seeds: of draws, steps and seeds; to four standard deviations."""
    steps, count = one.shape
    pairs = [(one[:, i], one[:, j]) for i, j in itertools.combinations(range(count), 2)]
    pairs += [(one[:-1, i], one[1:, i]) for i in range(count)] + [(one[:, i], other[:, i]) for i in range(count)]
    for first, second in pairs:
        assert float((first == second).double().mean()) == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / steps))


def test_draws_come_at_the_rate_and_know_nothing_of_each_other():
    rare = draws_of(on_meta(Theseus(rate=0.3)), range(2000)).double()
    assert float(rare.mean()) == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / rare.numel()))
    check_independent(*(draws_of(on_meta(Theseus(seed=seed)), range(2000)) for seed in (0, 1)))


def test_draws_follow_the_schedule():
    found = draws_of(on_meta(Theseus(schedule=("linear", 0.0))), range(2000), total=2000).double().chunk(4)
    assert [float(part.mean()) for part in found] == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.04)
    model = on_meta(Theseus(schedule=("cubic", 0), steps=20))
    assert not draws_of(model, [0], total=40).any()
    assert draws_of(model, range(20, 40), total=40).all()


def rates(settings, total, steps):
    return [Theseus(**settings).part(Schedule).values(step, total)["replacing rate"] for step in steps]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rate": 0.3, "steps": 5}, [0.3] * 5 + [1] * 3),
        ({"rate": 0.3, "steps": 0.25}, [0.3] * 2 + [1] * 6),
        ({"rate": 0.3}, [0.3] * 8),
        ({}, [0.5] * 8),
        ({"steps": 1}, [0.5] + [1] * 7),
        ({"schedule": ("linear", 0.25, 0.125)}, [0.125, 0.375, 0.625, 0.875] + [1] * 4),
        ({"schedule": ("linear", 0.2), "steps": 4}, [0.2, 0.4, 0.6, 0.8] + [1] * 4),
        ({"schedule": ("cosine", 0.2), "steps": 0.5}, [0.2, 0.317157, 0.6, 0.882843] + [1] * 4),
        ({"schedule": ["cubic", 0.2], "steps": 4}, [0.2, 0.6625, 0.9, 0.9875] + [1] * 4),
    ],
)
def test_the_rate_of_each_of_eight_steps(settings, expected):
    assert rates(settings, 8, range(8)) == pytest.approx(expected)


def test_the_ends_of_schedules():
    for shape in ("linear", "cosine", "cubic"):  # without steps, that of training
        found = rates({"schedule": (shape, 0.1)}, 10, range(11))
        assert (found[0], found[10]) == (0.1, 1)
        assert all(one < other for one, other in itertools.pairwise(found))
    # On MRPC the paper reaches 1 after about 1167 steps.
    assert rates({"schedule": ("linear", 0.0006, 0.3)}, 2000, (1166, 1167)) == [pytest.approx(0.9996), 1]


def test_rounding_makes_no_end_late():
    """(1 - .7) / .1 is above 3 in floating point, .55 · 100 above 55."""
    assert rates({"schedule": ("linear", 0.1, 0.7)}, 3, (0, 3)) == pytest.approx([0.7, 1])
    assert rates({"rate": 0.3, "steps": 0.55}, 100, (54, 55)) == [0.3, 1]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"rate": 0.5, "steps": 11}, 11),
        ({"schedule": ("cubic", 0.3), "steps": 11}, 11),
        ({"schedule": ("linear", 0.05, 0.3)}, 14),
    ],
)
def test_a_schedule_that_does_not_end_in_training_is_refused_in_its_first_step(settings, steps):
    model = on_meta(Theseus(**settings))
    model.advance(0, steps)
    with pytest.raises(ValueError, match=f"only successors run after {steps} steps, but training has {steps - 1}; .*"):
        model.advance(0, steps - 1)


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"successor": {"middle": 2}}, r"no stack 'middle' in marian; choose from \['decoder', 'encoder'\]"),
        (
            {"successor": {"encoder": 3}},
            r"\{'encoder': 3\}\): the 4 layers .* as many or fewer; choose from \[1, 2, 4\]",
        ),
        ({"successor": {"encoder": 8}}, r"\{'encoder': 8\}\): .*choose from \[1, 2, 4\]"),
        ({"successor": {}}, r"successor=\{\}\): must be None, or a dict from stacks to layers"),
        ({"rate": 0}, r"rate=0\): must be a share in \(0, 1\]"),
        ({"rate": 1.5}, r"rate=1\.5\): must be a share"),
        ({"rate": 0.5, "schedule": ("linear", 0.3)}, r"rate=0\.5, schedule=\('linear', 0\.3\)\): give one of them"),
        ({"steps": 0}, r"steps=0\): must be None, a number of steps of at least 1, or a share of training"),
        ({"schedule": ("square", 0.3)}, r"must be \('linear', k, b\), or one of \['linear', 'cosine', 'cubic'\] with"),
        ({"schedule": ("cosine", 0.1, 0.3)}, r"must be \('linear', k, b\)"),
        ({"schedule": ("linear", "0.3")}, r"must be \('linear', k, b\)"),
        ({"schedule": ("cubic", 1)}, r"it starts at b=1, which must be in 0 <= b < 1"),
        ({"schedule": ("linear", 0, 0.3)}, r"k=0 must be above 0, or the rate never reaches 1"),
        ({"schedule": ("linear", 0.1, 0.3), "steps": 5}, "k determines the number of steps; leave steps out"),
        ({"init": "last"}, r"init='last'\): choose from \['first', 'alternate'\]"),
        ({"train": "predecessor"}, r"train='predecessor'\): choose from \['successor', 'all'\]"),
        ({"finalized": True}, r"finalized=True\): only finalize\(\) may set it"),
    ],
)
def test_settings_that_are_refused(setting, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_variant(deep_config(MARIAN), [Theseus(**setting)], task="seq2seq-lm")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (LowRank(rank=2, layers={"encoder": [3]}), "after 'low_rank', which names layers by number.* put Theseus"),
        (
            Theseus(successor={"encoder": 2}),
            r"after 'theseus': it can be applied only once; .* finalize\(\) and merge\(\)",
        ),
        (
            Theseus(successor={"decoder": 2}),
            r"after 'theseus': it can be applied only once; .* finalize\(\) and merge\(\)",
        ),
    ],
)
def test_methods_that_it_would_give_other_layers(before, message):
    with pytest.raises(ValueError, match=f"Theseus {message}") as refused:
        on_meta(before, Theseus(successor={"decoder": 2}))
    assert "\n" not in str(refused.value)


# -- what is trained, and what is left ---------------------------------------------------------------------------------------


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@each_architecture
@pytest.mark.parametrize("train", ["successor", "all"])
def test_what_is_trained_stays_so_when_it_is_saved_and_finalized(architecture, train, tmp_path):
    native, stack = deep_model(architecture)[0], next(iter(architecture.stacks))
    variant = make_variant(native, [Theseus(successor={stack: 2}, train=train)])
    expected = trainable(make_variant(native, [LayerSelection(keep={stack: [0, 1]})]))
    if train == "successor":
        place = f"{native.base_model_prefix}.{architecture.stacks[stack].layers.removesuffix('{}')}"
        expected = {name for name in expected if name.startswith(place)}
    for state in ("whole", "finalized"):
        if state == "finalized":
            variant.finalize()
        variant.save_pretrained(tmp_path / state)
        for model in (variant, AUTO_CLASSES[architecture.tasks[0]].from_pretrained(tmp_path / state)):
            assert trainable(model) == expected


@each_architecture
def test_finalized_it_is_a_model_of_the_new_depth(architecture, tmp_path):
    native, batch = deep_model(architecture)
    variant = perturbed(make_variant(native, [Theseus(rate=NEVER)]))
    variant.advance(0, 1)
    expected, models = outputs(variant, batch), {"early": variant.merge()}
    variant.save_pretrained(tmp_path / "whole")
    variant.finalize()
    with pytest.raises(ValueError, match="nothing to finalize"):
        variant.finalize()
    models |= {"finalized": variant, "merged": variant.merge()}
    whole = load_file(tmp_path / "whole" / "model.safetensors").keys()
    for state, model in models.items():
        model.save_pretrained(tmp_path / state)
        left = load_file(tmp_path / state / "model.safetensors").keys()
        assert left == {name for name in whole if "predecessor" not in name} != whole
        config = json.loads((tmp_path / state / "config.json").read_text())
        assert {config[stack.depth] for stack in architecture.stacks.values()} == {2}
        assert (type(model) is type(native)) == (state != "finalized")
        for opened in (model, AUTO_CLASSES[architecture.tasks[0]].from_pretrained(tmp_path / state)):
            assert differences(outputs(opened, batch), expected) == []
    objective(variant.train(), batch).backward()  # it needs no schedule any more, and a last draw is forgotten
    assert differences(in_training(variant, batch), expected) == []


class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def trainer_of(folder, *callbacks):
    """With dropout, and its own AdamW; a checkpoint of every second step."""
    config = deep_config(MARIAN)
    config.dropout = 0.2
    model = make_variant(config, [Theseus(schedule=("linear", 0.3), seed=2)], task="seq2seq-lm", init="marian", seed=1)
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2, "seed": 5}
    settings |= {"learning_rate": 0.01, "weight_decay": 0.1, "use_cpu": True, "report_to": "none"}
    arguments = TrainingArguments(output_dir=str(folder), logging_strategy="no", disable_tqdm=True, **settings)
    return Trainer(model, arguments, train_dataset=rows(), callbacks=[VariantCallback(), *callbacks])


def test_a_killed_run_ends_as_an_undisturbed_one_and_trains_the_successor_alone(tmp_path):
    whole = trainer_of(tmp_path / "whole")
    before, wanted = snapshot(whole.model), trainable(whole.model)
    whole.train()
    after = snapshot(whole.model)
    assert wanted == {name for name in before if ".layers." in name and ".predecessor." not in name}
    for name, value in before.items():  # of a key's bias, the gradient is zero
        assert torch.equal(value, after[name]) == (name not in wanted) or name.endswith("k_proj.bias"), name
    held = {id(p) for group in whole.optimizer.param_groups for p in group["params"]}
    assert held == {id(whole.model.get_parameter(name)) for name in wanted}
    assert len(whole.optimizer.state_dict()["state"]) == len(wanted)

    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path / "killed", Killed()).train()
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {"checkpoint-2", "checkpoint-4"}
    resumed = trainer_of(tmp_path / "killed")
    perturbed(resumed.model)  # or a training from the start would end alike
    resumed.train(resume_from_checkpoint=True)
    assert differences(snapshot(resumed.model), after) == []
