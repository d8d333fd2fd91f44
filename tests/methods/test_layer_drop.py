"""LayerDrop: which layers run in a step of training, beside what else, and the shallower models that are taken from it."""

import copy
import math
import pickle
from fractions import Fraction
from itertools import chain, product

import numpy as np
import pytest
import torch
from support.cases import native_config
from support.models import differences, outputs, perturbed
from support.training import objective
from test_theseus import (
    MARIAN,
    check_independent,
    deep_config,
    deep_model,
    each_architecture,
    in_training,
    layers_of,
    put_layers,
    successors,
)
from transformers import AutoConfig, TrainerControl, TrainerState, TrainingArguments

from hf_freeze import VariantCallback, analysis, make_variant
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.layer_forward import Replaced, Skipped
from hf_freeze.methods import Freeze, LayerDrop, Theseus

ALL = 1 - 1e-9  # a probability with which every layer is left out


def dropped(model, architecture=MARIAN, stacks=None):
    """Whether each layer is left out now, by stack."""
    return {
        stack: [Skipped.of(layer).active for layer in layers_of(model, architecture, stack)]
        for stack in stacks or architecture.stacks
    }


def without(native, architecture, gone):
    """The native model without these layers, and the layers that it has."""
    by_hand = copy.deepcopy(native)
    for stack, out in gone.items():
        layers = layers_of(by_hand, architecture, stack)
        put_layers(by_hand, architecture, stack, [layer for layer, left in zip(layers, out, strict=True) if not left])
    return by_hand


def draws_of(model, steps, total=5000):
    return torch.tensor([(model.advance(step, total), [*chain(*dropped(model).values())])[1] for step in steps])


def on_meta(*methods, config=None):
    with torch.device("meta"):
        return make_variant(config or deep_config(MARIAN), list(methods), task="seq2seq-lm")


# -- what runs ---------------------------------------------------------------------------------------------------------------


@each_architecture
def test_a_step_computes_and_learns_as_a_model_without_the_layers(architecture):
    native, batch = deep_model(architecture)
    variant = make_variant(native, [LayerDrop(p=0.5, seed=1)])
    patterns = []
    for step in range(6):
        variant.advance(step, 6)
        assert differences(outputs(variant, batch), outputs(native, batch)) == []
        gone = dropped(variant, architecture)
        patterns.append(str(gone))
        by_hand = without(native, architecture, gone)
        assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []
        variant.zero_grad()
        objective(variant, batch).backward()
        objective(by_hand, batch).backward()
        for stack, out in gone.items():
            left = iter(layers_of(by_hand, architecture, stack))
            for layer, skipped in zip(layers_of(variant, architecture, stack), out, strict=True):
                expected = {} if skipped else dict(next(left).named_parameters())
                for name, parameter in layer.named_parameters():
                    assert (parameter.grad is None) == (skipped or expected[name].grad is None), name
                    if parameter.grad is not None:
                        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-7)
    assert len(set(patterns)) > 3


@each_architecture
def test_all_layers_may_be_left_out(architecture):
    native, batch = deep_model(architecture)
    variant = make_variant(native, [LayerDrop(p=ALL)])
    variant.advance(0, 1)
    by_hand = without(native, architecture, dict.fromkeys(architecture.stacks, [True] * 4))
    assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []
    assert differences(in_training(variant, batch), in_training(native, batch)) != []
    objective(variant, batch).backward()


def test_so_they_may_where_only_layers_before_them_are_trained():
    """The loss then has no gradient, though the encoder's states have one."""
    native, batch = deep_model(MARIAN)
    rest = Freeze(embeddings="frozen", norm="frozen", head="frozen")
    variant = make_variant(native, [rest, LayerDrop(p=ALL, stacks=["decoder"])])
    variant.advance(0, 1)
    variant.train()(**batch).loss.backward()


def test_stacks_limit_it():
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p=ALL, stacks=["decoder"])])
    variant.advance(0, 1)
    by_hand = without(native, MARIAN, {"decoder": [True] * 4})
    assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []


def test_without_a_probability_it_needs_no_schedule():
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p=0)])
    assert not variant.scheduled
    assert not variant.skips
    variant.train()(**batch).loss.backward()  # where LayerDrop(p=.2) is refused without a callback
    assert differences(in_training(variant, batch), in_training(native, batch)) == []
    with pytest.raises(ValueError, match=r"the methods \['layer_drop'\] follow the progress of training"):
        make_variant(native, [LayerDrop(p=0.2)]).train()(**batch)


def test_a_draw_is_a_function_of_the_seed_and_the_step(tmp_path):
    variant = make_variant(deep_model(MARIAN)[0], [LayerDrop(p=0.5, seed=7)])
    expected = draws_of(variant, range(64))
    variant.save_pretrained(tmp_path)
    for other in (AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path), on_meta(LayerDrop(p=0.5, seed=7))):
        assert torch.equal(draws_of(other, range(64)), expected)
    assert torch.equal(draws_of(variant, reversed(range(64)), total=64).flip(0), expected)


def test_draws_come_with_the_probability_and_know_nothing_of_each_other():
    rare = draws_of(on_meta(LayerDrop()), range(2000)).double()
    assert float(rare.mean()) == pytest.approx(0.2, abs=4 * math.sqrt(0.2 * 0.8 / rare.numel()))
    check_independent(*(draws_of(on_meta(LayerDrop(p=0.5, seed=seed)), range(2000)) for seed in (0, 1)))


def saved_and_loaded(model, folder):
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [lambda model, _: copy.deepcopy(model), lambda model, _: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_drops_layers_by_itself(copied, tmp_path):
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p=0.5)])
    variant.advance(1, 9)
    expected = in_training(variant, batch)
    twin = copied(variant, tmp_path)
    assert differences(in_training(twin, batch), expected) == []
    twin.advance(2, 9)
    assert dropped(twin) != dropped(variant)
    by_hand = without(perturbed(twin).merge(), MARIAN, dropped(twin))
    assert differences(in_training(twin, batch), in_training(by_hand, batch)) == []
    assert differences(in_training(variant, batch), expected) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"p": 1}, r"LayerDrop\(p=1\): must be a share of at least 0 and below 1"),
        ({"p": -0.1}, r"LayerDrop\(p=-0\.1\): must be a share"),
        ({"stacks": ["middle"]}, r"no stack 'middle' in marian; choose from \['decoder', 'encoder'\]"),
        ({"stacks": []}, r"stacks=\[\]\): must be None or a list of different stacks"),
        ({"stacks": ["encoder", "encoder"]}, r"must be None or a list of different stacks"),
        ({"stacks": "encoder"}, r"stacks='encoder'\): must be None or a list"),
        ({"seed": -1}, r"LayerDrop\(seed=-1\)"),
    ],
)
def test_settings_that_are_refused(setting, message):
    with pytest.raises(ValueError, match=message) as refused:
        on_meta(LayerDrop(**setting))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_second_one_is_refused_be_it_the_same(seed):
    with pytest.raises(ValueError, match="LayerDrop after 'layer_drop': it can be applied only once"):
        on_meta(LayerDrop(), LayerDrop(seed=seed))
    with pytest.raises(ValueError, match="LayerDrop after 'layer_drop'"), torch.device("meta"):
        make_variant(on_meta(LayerDrop()), [LayerDrop(seed=seed)])


@pytest.mark.parametrize("field", ["encoder_layerdrop", "decoder_layerdrop"])
def test_that_of_the_backbone_is_refused(field):
    config = deep_config(MARIAN)
    setattr(config, field, 0.1)
    with pytest.raises(ValueError, match=rf"the backbone skips layers already, by {field}=0\.1; set that to 0"):
        on_meta(LayerDrop(), config=config)


# -- beside others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [LayerDrop, Theseus])
def test_beside_theseus_a_module_is_left_out_or_replaced(first):
    """Before Theseus, LayerDrop leaves out what was there, which the predecessor is a copy of without draws of its own: layers
    of the successor. After it, whole modules."""
    (native, batch), both = deep_model(MARIAN), [LayerDrop(p=0.4, seed=3), Theseus(seed=4)]
    variant = perturbed(make_variant(native, both if first is LayerDrop else both[::-1]))
    seen = set()
    for step in range(10):
        variant.advance(step, 10)
        by_hand = copy.deepcopy(native)
        for stack in MARIAN.stacks:
            former, new, layers = layers_of(by_hand, MARIAN, stack), successors(variant, native, MARIAN, stack), []
            for number, module in enumerate(layers_of(variant, MARIAN, stack)):
                former_runs, out = Replaced.of(module).active, Skipped.of(module).active
                seen.add((former_runs, out))
                if former_runs and (first is LayerDrop or not out):
                    layers += former[2 * number : 2 * number + 2]
                elif not out:
                    layers.append(new[number])
            put_layers(by_hand, MARIAN, stack, layers)
        assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []
    assert len(seen) == 4
    variant.finalize()
    plain = variant.merge()
    for step in range(4):
        variant.advance(step, 10)
        by_hand = without(plain, MARIAN, dropped(variant))
        assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []
    assert variant.config.encoder_layers == 2


def test_the_effect_of_heads_can_be_measured_in_training():
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p=0.5)])
    variant.advance(1, 9)
    expected, found = in_training(variant, batch), analysis.head_ablation(variant, [batch])
    assert differences(found, analysis.head_ablation(native, [batch])) == []
    assert variant.training
    assert differences(in_training(variant, batch), expected) == []
    variant.advance(2, 9)
    assert differences(in_training(variant, batch), in_training(without(native, MARIAN, dropped(variant)), batch)) == []


@pytest.mark.parametrize(("find_unused", "refused"), [(None, False), (False, True), (True, False)])
def test_two_processes_must_look_for_what_has_no_gradient(find_unused, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda _: 2))
    settings = {"use_cpu": True, "report_to": "none", "ddp_find_unused_parameters": find_unused}
    arguments = TrainingArguments(output_dir=str(tmp_path), **settings)
    for method, left_out in ((LayerDrop(), True), (LayerDrop(p=0), False), (Theseus(), True)):
        begin = VariantCallback().on_train_begin
        state, control, model = TrainerState(max_steps=9), TrainerControl(), on_meta(method)
        if refused and left_out:
            message = "layers are left out in some steps, but with 2 processes .*ddp_find_unused_parameters=True"
            with pytest.raises(ValueError, match=message):
                begin(arguments, state, control, model=model)
        else:
            begin(arguments, state, control, model=model)
            assert model.progress == 0


# -- the shallower models ----------------------------------------------------------------------------------------------------


def kept(depth, count):
    config = native_config(MARIAN)
    config.encoder_layers = depth
    return analysis.extract_depth(config, {"encoder": count}).keep["encoder"]


def test_the_depths_of_the_paper():
    assert kept(6, 3) == [0, 2, 4]
    assert kept(12, 8) == [0, 1, 3, 4, 6, 7, 9, 10]
    assert kept(12, 5) == [0, 3, 6, 8, 11]
    for depth, count in product(range(1, 17), repeat=2):
        if count > depth:
            continue
        every = math.floor(1 / (1 - Fraction(count, depth))) if count < depth else depth + 1
        expected = [layer - 1 for layer in range(1, depth + 1) if layer % every]
        if len(expected) != count:  # then at even distances; a half is rounded up
            expected = np.floor(np.linspace(0, depth - 1, count) + 0.5 + 1e-9).astype(int).tolist()
        assert kept(depth, count) == expected


@each_architecture
def test_the_extracted_model_is_the_trained_one_without_the_layers(architecture):
    native, batch = deep_model(architecture)
    variant = make_variant(native, [LayerDrop(p=0.5)])
    variant.advance(1, 9)
    choice = analysis.extract_depth(variant, dict.fromkeys(architecture.stacks, 2))
    gone = dict.fromkeys(architecture.stacks, [False, True] * 2)
    shallow = make_variant(variant, [choice])
    expected = outputs(without(native, architecture, gone), batch)
    assert differences(outputs(shallow, batch), expected) == []
    assert differences(outputs(shallow.merge(), batch), expected) == []
    whole = make_variant(variant, [analysis.extract_depth(variant, dict.fromkeys(architecture.stacks, 4))])
    assert differences(outputs(whole, batch), outputs(native, batch)) == []


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (torch.nn.Linear(1, 1), {"encoder": 2}, "extract_depth: Linear is neither a transformers model nor a config"),
        (AutoConfig.for_model("squeezebert"), {"encoder": 2}, "squeezebert: no list of layers with linears"),
        (None, {}, r"layers=\{\}\): must be a dict from stacks to numbers"),
        (None, 3, r"layers=3\): must be a dict from stacks to numbers"),
        (None, {"middle": 2}, r"no stack 'middle' in marian; choose from \['decoder', 'encoder'\]"),
        (None, {"decoder": 2, "encoder": 5}, r"\{'encoder': 5\}\): must be an integer in 1\.\.4, its layers"),
        (None, {"encoder": 0}, r"\{'encoder': 0\}\): must be an integer in 1\.\.4"),
        (None, {"encoder": 2.0}, r"\{'encoder': 2\.0\}\): must be an integer in 1\.\.4"),
    ],
)
def test_depths_that_are_refused(model, layers, message):
    with pytest.raises(ValueError, match=message):
        analysis.extract_depth(model or deep_config(MARIAN), layers)
