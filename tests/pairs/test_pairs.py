"""CONTRIBUTING.md, 7: every ordered pair of methods works, or is refused in one line."""

import copy
import re
from dataclasses import replace

import pytest
from support.cases import pairs
from support.generation import generation_problems
from support.models import (
    build,
    differences,
    file_sizes,
    finished,
    merge_or_none,
    outputs,
    reload,
    reload_problems,
    trainability,
    trainability_before_training,
)
from support.training import training_step

from hf_freeze import make_variant
from hf_freeze.analysis.accounting import stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES

PAIRS = [pair for architecture in ARCHITECTURES.values() for pair in pairs(architecture)]
assert PAIRS


def _in_turn(found):
    """Of the pairs, one architecture for each two methods, in rotation."""
    by_methods = {}
    for pair in found:
        by_methods.setdefault(tuple(method.name for method in pair.methods), []).append(pair.id)
    return {ids[number % len(ids)] for number, ids in enumerate(by_methods.values())}


# What takes longest is done with each pair once: in turn, merging, opening it before it is trained, and generating.
OPENED = _in_turn(PAIRS)
GENERATED = _in_turn([pair for pair in PAIRS if pair.native_class.can_generate()])


@pytest.mark.parametrize("pair", PAIRS, ids=[pair.id for pair in PAIRS])
def test_a_pair_works_or_is_refused(pair, tmp_path):
    first, second = pair.methods
    try:
        model = build(pair)
    except ValueError as error:
        message = str(error)
    else:
        message = None
    if message is not None:
        assert re.fullmatch(".+", message), message  # one line
        in_turn = build(replace(pair, methods=(first,)))
        for one in [in_turn] + [finished(copy.deepcopy(in_turn))] * first.finalizable:
            with pytest.raises(ValueError, match=r"\A.+\Z"):  # one after the other is no way around it
                make_variant(one, [second])
        return
    batch = pair.batch()
    expected = outputs(model, batch)
    if pair.id in OPENED:
        check_in_turn(build(replace(pair, methods=(first,))), second, model, batch)
        merged = merge_or_none(model)
        assert merged is None or differences(outputs(merged, batch), expected, 1e-5) == []
    finalizable = any(method.finalizable for method in pair.methods)
    assert model.finalizable == finalizable
    for step in range(3 if finalizable else 2):
        folder = tmp_path / str(step)
        if step == 2:
            finished(model)
        if step or pair.id in OPENED:
            reloaded = check_opened(model, pair, folder, batch)
        if any(trainability(model).values()):
            training_step(model, batch)
    if pair.id in GENERATED:
        assert generation_problems(reloaded.eval(), batch) == []


def check_in_turn(in_turn, second, model, batch):
    if second.from_scratch:
        with pytest.raises(ValueError, match=rf"\Amethod '{second.name}': its blocks train from scratch.*\Z"):
            make_variant(in_turn, [second])
        return
    in_turn = make_variant(in_turn, [second])
    assert in_turn.config.methods == model.config.methods
    assert differences(outputs(in_turn, batch), outputs(model, batch)) == []
    assert trainability(in_turn) == trainability(model)


def check_opened(model, pair, folder, batch):
    model.save_pretrained(folder)
    assert file_sizes(folder)[0] == stored_bytes(model)
    reloaded, info = reload(pair, folder)
    grads = trainability_before_training(model)
    assert reload_problems(reloaded, info, outputs(model, batch), grads, batch) == []
    return reloaded
