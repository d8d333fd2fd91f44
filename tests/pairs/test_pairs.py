"""CONTRIBUTING.md, 7: every pair of methods works, or is refused in one line."""

import re
from dataclasses import replace

import pytest
from refused import kept, title
from support.cases import ALL, Case, leads, pairs, pairs_of_modes
from support.generation import generation_problems
from support.models import (
    build_anew,
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
from support.parametrize import over
from support.training import training_step

from hf_freeze import make_variant
from hf_freeze.analysis.accounting import stored_bytes
from hf_freeze.methods.order import needs_config
from hf_freeze.methods.registry import METHODS

REFUSED = kept()
DRAWN = list(pairs())
ORDER = [method.example.name for method in METHODS.values()]
# A pair that was drawn where nothing is generated generates where something is.
GENERATING = {pair.names: pair for pair in pairs(lambda case: case.generates)}


@over([*DRAWN, *pairs_of_modes()])
def test_a_pair_works_or_is_refused(case: Case, tmp_path):
    first, second = case.methods
    try:
        model = build_anew(case)
    except ValueError as error:
        message = str(error)
    else:
        message = None
    refused = case.architecture.model_type in REFUSED.get(title(case.methods), [])
    assert (message is not None) == refused, f"{case.id}: {message or 'no longer refused'}"  # by refused.txt
    if message is not None:
        assert re.fullmatch(".+", message), message  # one line
        in_turn = build_anew(replace(case, methods=(first,)))
        with pytest.raises(ValueError, match=r"\A.+\Z"):  # one after the other is no way around it
            make_variant(in_turn, [second])
        if first.facts.finalizable:
            check_after_finalize(finished(in_turn), second, case, tmp_path, works="or finalize() before" in message)
        return
    batch = case.batch()
    if ALL or in_turn_too(case):
        check_in_turn(build_anew(replace(case, methods=(first,))), second, model, batch)
    merged = merge_or_none(model)
    assert merged is None or differences(outputs(merged, batch), outputs(model, batch), 1e-5) == []
    finalizable = any(method.facts.finalizable for method in case.methods)
    assert model.finalizable == finalizable
    if any(trainability(model).values()):
        training_step(model, batch)
    # One save a pair: of two that come in both orders, in training in the one and after it in the other.
    after = finalizable and ORDER.index(first.name) < ORDER.index(second.name)
    if ALL or not after:
        reloaded = check_opened(model, case, tmp_path / "trained", batch)
    if finalizable:
        finished(model)
        if any(trainability(model).values()):
            training_step(model, batch)
        if ALL or after:
            reloaded = check_opened(model, case, tmp_path / "finalized", batch)
    if case.generates:
        assert generation_problems(reloaded.eval(), batch, widths=(1,), tokens=3, apart=False) == []


@over(GENERATING[pair.names] for pair in DRAWN if not pair.generates and pair.names in GENERATING)
def test_a_pair_generates(case: Case):
    try:
        model = build_anew(case)
    except ValueError:
        drawn = next(pair for pair in DRAWN if pair.names == case.names)
        with pytest.raises(ValueError, match=r"\A.+\Z"):  # refused where nothing is generated, too
            build_anew(drawn)
        return
    assert generation_problems(model, case.batch(), widths=(1,), tokens=3, apart=False) == []


def in_turn_too(pair: Case) -> bool:
    """Of the pairs in one order a third, so that each method is the first in some and the second in others. A refusal is in turn
    for every pair, and what a method converts is a variant at once too: that of the methods before it."""
    first, second = (ORDER.index(method.name) for method in pair.methods)
    return leads(first, second) and (first + 2 * second) % 3 == 0


def check_in_turn(in_turn, second, model, batch):
    if needs_config(second, in_turn.methods):
        with pytest.raises(ValueError, match=rf"\Amethod '{second.name}': its blocks train from scratch.*\Z"):
            make_variant(in_turn, [second])
        return
    in_turn = make_variant(in_turn, [second])
    assert in_turn.config.methods == model.config.methods
    if not second.facts.from_scratch:  # else its blocks are drawn again
        assert differences(outputs(in_turn, batch), outputs(model, batch)) == []
    assert trainability(in_turn) == trainability(model)


def check_after_finalize(in_turn, second, case, folder, *, works):
    """That `second` can be applied to the finalized model if the message of the refusal says so, and only then."""
    if not works:
        first = case.methods[0]
        gone = first.facts.refers_to - in_turn.methods[0].facts.refers_to  # gates that all stayed open name no layer
        if second.facts.renumbers not in gone or type(second) is type(first):
            with pytest.raises(ValueError, match=r"\A.+\Z"):
                make_variant(in_turn, [second])
            return
    model = make_variant(in_turn, [second])
    merged = merge_or_none(model)
    assert merged is None or differences(outputs(merged, case.batch()), outputs(model, case.batch()), 1e-5) == []
    check_opened(model, case, folder, case.batch())


def check_opened(model, pair, folder, batch):
    model.save_pretrained(folder)
    assert file_sizes(folder)[0] == stored_bytes(model)
    reloaded, info = reload(pair, folder)
    grads = trainability_before_training(model)
    assert reload_problems(reloaded, info, outputs(model, batch), grads, batch) == []
    return reloaded
