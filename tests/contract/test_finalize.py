"""Invariant 9 (CONTRIBUTING.md): `finalize()` ends training at any step, once."""

import json

import pytest
import torch
from support.cases import Case, covering, native_config, once_on_each_architecture
from support.models import (
    build,
    differences,
    file_sizes,
    finished,
    is_scheduled,
    merge_or_none,
    outputs,
    reload,
    reload_problems,
    snapshot,
    trainability,
)
from support.parametrize import over
from support.training import training_step

from hf_freeze import make_variant
from hf_freeze.analysis.accounting import stored_bytes
from hf_freeze.methods.parts import Schedule
from hf_freeze.methods.registry import method_from_dict

every_finalizable = over(once_on_each_architecture(lambda case: case.finalizable))


@every_finalizable
@pytest.mark.parametrize("steps", [0, 2, 4], ids=["before", "during", "after"])
def test_finalize_ends_training_at_any_step(steps, case: Case, tmp_path):
    """What it leaves is a variant like any other: the cases `-finalized` hold all that is in this file."""
    model = build(case)
    for step in range(steps):
        training_step(model, case.batch(), step, 4)
    if is_scheduled(model):
        model.advance(steps, 4)
    batch = case.batch()
    expected, stored, grads = outputs(model, batch), stored_bytes(model), trainability(model)
    merged = merge_or_none(model)
    model.finalize()
    assert not model.finalizable
    assert not any(method.facts.finalizable for method in map(method_from_dict, model.config.methods))
    assert model.scheduled == any(method.part(Schedule) for method in map(method_from_dict, model.config.methods))
    assert model.auxiliary_loss() is None
    with pytest.raises(ValueError, match=r"\Anothing to finalize: .+\Z"):
        model.finalize()
    # What a schedule had not done yet is done now.
    if not case.scheduled or steps == 4:
        assert differences(outputs(model, batch), expected, 1e-6) == []
    assert all(trainable == grads.get(name, trainable) for name, trainable in trainability(model).items())
    assert stored_bytes(model) < stored
    if merged is not None and not case.scheduled:
        after = merge_or_none(model)
        assert differences(dict(after.state_dict()), dict(merged.state_dict()), 1e-6) == []
    model.save_pretrained(tmp_path)
    assert file_sizes(tmp_path)[0] == stored_bytes(model)
    assert json.loads((tmp_path / "config.json").read_text())["methods"] == model.config.methods
    reloaded, info = reload(case, tmp_path)
    assert reload_problems(reloaded, info, outputs(model, batch), trainability(model), batch) == []
    again = make_variant(model, [])
    assert again.config.methods == model.config.methods
    assert differences(outputs(again, batch), outputs(model, batch)) == []


@every_finalizable
def test_a_finalized_variant_trains_on_with_what_is_zero_at_zero(case: Case):
    model = finished(build(case))
    if (merged := merge_or_none(model)) is None:
        pytest.skip("it cannot be merged: what is zero cannot be seen")
    zeros = {name: value == 0 for name, value in merged.state_dict().items()}
    for _ in range(2):
        before = snapshot(model)
        training_step(model, case.batch())
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved
        assert moved <= {name for name, trainable in trainability(model).items() if trainable}
    for name, value in model.merge().state_dict().items():
        assert not value[zeros[name]].any(), name


@over(covering(lambda case: case.from_model and not case.methods))
def test_a_variant_without_anything_to_finalize_says_so(case: Case):
    model = build(case)
    assert not model.finalizable
    with pytest.raises(ValueError, match=r"\Anothing to finalize: .+\Z"):
        model.finalize()


@over(once_on_each_architecture(lambda case: case.finalizable and case.from_model))
def test_nothing_is_finalized_on_meta(case: Case):
    with torch.device("meta"):
        model = make_variant(case.native_class(native_config(case.architecture, case.config)), list(case.methods))
    with pytest.raises(ValueError, match="meta"):
        model.finalize()
    assert model.config.methods == build(case).config.methods
