"""The contract for settings of methods that differ in kind from their examples: they are trained in another way, or end by
`finalize()` where the example does not."""

import sys
from dataclasses import replace
from itertools import product

import pytest
import test_finalize as finalizing
import test_forward as forward
import test_saving as saving
import test_training_step as training
from support import ROOT
from support.cases import ALL, plain
from support.parametrize import over

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import HeadPruning, LayerDrop
from hf_freeze.methods.registry import METHODS

sys.path.insert(0, str(ROOT / "tests" / "pairs"))
import test_pairs as pairs

SETTINGS = [
    LayerDrop(p=0.3, learned=True, seed=10),
    HeadPruning(share=0.5, begin=0.0),
    HeadPruning(penalty=0.1),
    HeadPruning(share=0.5, begin=0.0, end=0.5, scope="global", ramp="linear"),
]
# What `finalize()` leaves is another setting, whose training has tests already.
CHECKS_OF_BOTH = [
    saving.test_a_saved_variant_reloads_bit_equal,
    saving.test_the_file_holds_what_is_counted_and_nothing_seeded,
    saving.test_meta_builds_the_same_structure,
    saving.test_opening_in_bf16_rounds_the_same_values,
    forward.test_merged_is_a_native_model,
    forward.test_a_sentence_sees_neither_padding_nor_the_others_of_its_batch,
    forward.test_multiply_adds_are_those_of_the_components,
]
CHECKS = [
    *CHECKS_OF_BOTH,
    saving.test_the_file_shrinks_iff_declared,
    saving.test_the_base_model_of_a_task_model_holds_the_same_weights,
    training.test_a_step_changes_what_is_trainable_and_nothing_else,
    training.test_further_steps_train_what_one_has_left_out,
    training.test_training_is_random_iff_declared,
    training.test_bf16_autocast,
    training.test_gradient_checkpointing_changes_nothing,
    training.test_accumulated_batches_give_the_update_of_one,
]
ONLY_WITHOUT_NOISE = {  # which gates with a penalty draw, though the example of their method does not
    training.test_training_is_random_iff_declared,
    training.test_accumulated_batches_give_the_update_of_one,
    saving.test_the_file_shrinks_iff_declared,  # all gates are open before training
}


def places(method):
    return [plain(architecture, method) for architecture in ARCHITECTURES.values()]


def rotating(cells, step):
    """All of them, or every so many."""
    return cells if ALL else cells[::step]


CELLS = [
    (check, replace(case, finalized=finalized))
    for method in SETTINGS
    for finalized in (False, True)
    for check in (CHECKS_OF_BOTH if finalized else CHECKS)
    for case in places(method)
    if not (check in ONLY_WITHOUT_NOISE and getattr(method, "penalty", None))
]


@pytest.mark.parametrize(
    ("check", "case"),
    rotating(CELLS, 17),
    ids=[f"{case.id}-{check.__name__.removeprefix('test_')}" for check, case in rotating(CELLS, 17)],
)
def test_it_holds(check, case, request):
    names = check.__code__.co_varnames[: check.__code__.co_argcount]
    check(**{name: case if name == "case" else request.getfixturevalue(name) for name in names})


@over(rotating([case for method in SETTINGS for case in places(method)], 5))
@pytest.mark.parametrize("steps", [0, 2])
def test_finalize_ends_training_at_any_step(steps, case, tmp_path):
    finalizing.test_finalize_ends_training_at_any_step(steps, case, tmp_path)


PAIRS = [
    plain(architecture, *both)
    for number, (method, other) in enumerate(product(SETTINGS[:3], METHODS.values()))
    for order, both in enumerate([(method, other.example), (other.example, method)])
    if not (
        getattr(method, "penalty", None) and other.renumbers
    )  # no gate has closed: what is finalized names no layer
    for architecture in [[a for a in ARCHITECTURES.values() if other.supports(a)][(number + order) % 2]]
]


@over(rotating(PAIRS, 17))
def test_a_pair_works_or_is_refused(case, tmp_path):
    pairs.test_a_pair_works_or_is_refused(case, tmp_path)
