"""Every method beside Freeze, in both orders: what Freeze holds is none of the method's business, and the other way round."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.cases import ALL, MODEL, name_of, once, seeds, sources
from support.models import (
    add_noise,
    build,
    differences,
    finished,
    native,
    outputs,
    reload,
    reload_problems,
    seeded_names,
    snapshot,
    trainability,
    trainability_before_training,
)
from support.training import training_step

from hf_freeze import make_variant
from hf_freeze.architectures.base import base_name, canonical_parameters, is_of_predecessor
from hf_freeze.methods import Freeze

# Each method in one place: a case without methods, of rotating architectures and configs.
CELLS = [
    (case.methods[0], replace(case, methods=(), source=MODEL))
    for case in once(lambda case: bool(case.methods) and case.task == case.architecture.tasks[0])
]


def over(cells):
    ids = [f"{place.architecture.model_type}-{place.config}-{name_of(method)}" for method, place in cells]
    return pytest.mark.parametrize(("method", "place"), cells, ids=ids)


every_cell = over(CELLS)
every_finalizable = over([(method, place) for method, place in CELLS if method.facts.finalizable])
orders = pytest.mark.parametrize("order", [1, -1], ids=["method, freeze", "freeze, method"])


def case_of(place, *methods):
    return replace(place, methods=methods, source=sources(methods)[0])


def parameters_of(model, *components):
    """Names of the parameters of these components, except those that have ties or are gone when training ends."""
    return [
        name
        for name, _ in canonical_parameters(model)
        if model.architecture.component(base_name(model, name)) in components and not is_of_predecessor(name)
    ]


def depths(architecture):
    """The config fields that hold numbers of layers."""
    return {stack.depth for stack in architecture.stacks.values()}


def left_alone(method, place):
    """Attention, or the FFNs where the method changes the attentions, at once or when training ends: what has the shapes of the
    backbone, where it is at all."""
    if "attention" in method.facts.cuts:
        return "ffn"
    backbone = {name: p.shape for name, p in canonical_parameters(native(case_of(place)))}
    model = build(case_of(place, method))
    here = parameters_of(model, "attention")
    return "attention" if all(model.get_parameter(name).shape == backbone.get(name) for name in here) else "ffn"


@every_cell
@orders
def test_what_the_method_leaves_alone_may_be_random(method, place, order, tmp_path):
    """A component from a seed and the table frozen, the method on the rest: reloads bit-equal, and nothing seeded is stored."""
    component = left_alone(method, place)
    freeze = Freeze(**{component: "random"}, embeddings="frozen", seed=11)
    case = case_of(place, *[method, freeze][::order])
    model = build(case)
    matrices = [
        name for name in parameters_of(model, component) if not trainability(model)[name] and name.endswith("weight")
    ]
    assert set(matrices) <= seeded_names(model)
    assert not any(trainability(model)[name] for name in parameters_of(model, component, "embeddings"))
    alone = build(case_of(place, freeze))
    if not seeds(method, component) and not method.facts.from_scratch:  # whose blocks have other shapes
        left = {name: p.shape for name, p in canonical_parameters(model)}  # layers may be gone, or one with others
        whole = {name: p.shape for name, p in canonical_parameters(alone)}
        expected = {name: d for name, d in alone.seeded_tensors.items() if left.get(name) == whole[name]}
        assert expected
        if order == -1 and method.config_changes(place.architecture, native(case).config).keys() & depths(
            place.architecture
        ):
            # Kept layers have new numbers, and the values of their old ones.
            assert model.seeded_tensors.keys() >= expected.keys()
            assert set(model.seeded_tensors.values()) <= set(alone.seeded_tensors.values())
        else:
            assert model.seeded_tensors.items() >= expected.items()
    states = ["made", "trained"] + ["finalized", "trained on"] * method.facts.finalizable
    for state in states:
        if state == "finalized":
            finished(model)
        elif state != "made" and any(trainability(model).values()):
            before = snapshot(model)
            training_step(model, case.batch())
            frozen = [name for name, trainable in trainability(model).items() if not trainable]
            assert all(torch.equal(model.get_parameter(name), before[name]) for name in frozen)
        if not ALL and state in ("made", "finalized"):  # which what is trained after it implies, on any method
            continue
        folder = tmp_path / state
        model.save_pretrained(folder)
        assert not load_file(folder / "model.safetensors").keys() & seeded_names(model)
        reloaded, info = reload(case, folder)
        grads, expected = trainability_before_training(model), outputs(model, case.batch())
        assert reload_problems(reloaded, info, expected, grads, case.batch()) == []
        digests = json.loads((folder / "config.json").read_text())["digests"]
        assert digests.keys() == {base_name(model, name) for name in model.seeded_tensors}


@every_finalizable
@orders
def test_what_is_frozen_stays_frozen_after_finalize(method, place, order, tmp_path):
    """Also what the method itself holds: its values, whatever module they are in."""
    case = case_of(place, *[method, Freeze(ffn="frozen", norm="frozen")][::order])
    model = build(case)
    add_noise(model, place.architecture)
    for state in ("made", "finalized", "reloaded"):
        if state == "finalized":
            if case.scheduled:  # what a schedule had not done yet would be done now
                model.advance(1, 1)
            # Products of smaller matrices add up in another order: that they are the same is seen in double precision.
            compared = copy.deepcopy(model).double() if method.facts.cuts else model
            expected = outputs(compared, case.batch())
            compared.finalize()
            assert differences(outputs(compared, case.batch()), expected, 1e-6) == []
            if compared is not model:
                model.finalize()
        if state == "reloaded":
            model.save_pretrained(tmp_path)
            model, _ = reload(case, tmp_path)
        held = parameters_of(model, "ffn", "norm")
        before = snapshot(model)
        assert not any(trainability(model)[name] for name in held), state
        training_step(model, case.batch())
        for name, trainable in trainability(model).items():
            left_out = state == "made" and case.skips and model.get_parameter(name).grad is None
            assert torch.equal(model.get_parameter(name), before[name]) == (left_out or not trainable), (state, name)


@every_finalizable
def test_a_finalized_variant_takes_another_freeze(method, place, tmp_path):
    case = case_of(place, method)
    model = finished(build(case))
    expected = outputs(model, case.batch())
    further = make_variant(model, [Freeze(attention="frozen")])
    assert differences(outputs(further, case.batch()), expected) == []
    assert not further.finalizable
    assert [m["method"] for m in further.config.methods] == [method.name, "freeze"]
    assert not any(trainability(further)[name] for name in parameters_of(further, "attention"))
    others = parameters_of(further, "ffn", "norm", "embeddings")
    assert all(trainability(further)[name] == trainability(model)[name] for name in others)
    further.save_pretrained(tmp_path)
    reloaded, info = reload(case, tmp_path)
    assert reload_problems(reloaded, info, expected, trainability(further), case.batch()) == []


@every_finalizable
def test_finalize_in_the_middle_of_a_phase(method, place):
    """What is frozen for a while is so after it as well, and thaws in time."""
    model = make_variant(native(case_of(place)), [method, Freeze(attention="frozen", end=0.5)])
    model.advance(1, 4)
    model.finalize()
    assert model.scheduled
    attention = parameters_of(model, "attention")
    assert not any(trainability(model)[name] for name in attention)
    model.advance(2, 4)
    assert all(trainability(model)[name] for name in attention)
    model.rewind()
    assert all(trainability(model)[name] for name in attention)
