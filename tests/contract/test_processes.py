"""Invariants 1, 6 and 8 (CONTRIBUTING.md) in other processes: one that opens what this one saved, and two that train together.

A new process imports for seconds, so each test gives its children all of its cases.
"""

import inspect
import json

import pytest
from safetensors.torch import save_file
from support.cases import ALL, Case, once, once_on_each_architecture
from support.models import build, merge_or_none, outputs, trainability_before_training
from support.processes import run_child, two_processes
from support.training import training_step
from transformers.trainer_pt_utils import LabelSmoother

ONCE = once() + once(finalized=True)
ELSEWHERE = [
    case
    for case in once_on_each_architecture() + once_on_each_architecture(finalized=True)
    if case.id not in {case.id for case in ONCE}
]


@pytest.mark.parametrize("cases", [ONCE, *[ELSEWHERE] * ALL], ids=["once", *["on the other architectures"] * ALL])
def test_a_new_process_opens_the_same_models(cases, tmp_path):
    """Invariants 1 and 6, for every method after a training step, under another global seed; the architectures by turns.

    Of every architecture, `test_a_saved_variant_reloads_bit_equal` says so within this process."""
    manifest = {"merged": [], "saved": []}

    def enter(kind, model, case: Case, expected):
        folder = tmp_path / kind / case.id
        model.save_pretrained(folder)
        save_file(case.batch(), folder / "batch.safetensors")
        save_file({k: v.contiguous() for k, v in expected.items()}, folder / "expected.safetensors")
        native_class = f"{case.native_class.__module__}.{case.native_class.__name__}"
        entry = {"id": case.id, "folder": str(folder), "auto_class": case.auto_class.__name__}
        requires_grad = trainability_before_training(model)
        manifest[kind].append(entry | {"requires_grad": requires_grad, "native_class": native_class})

    for case in cases:
        model = build(case)
        training_step(model, case.batch())
        expected = outputs(model, case.batch())
        enter("saved", model, case, expected)
        # Of every architecture, `test_merged_is_a_native_model` says that native classes hold all of it.
        merged = merge_or_none(model) if ALL or cases is ONCE else None
        if merged is not None:
            enter("merged", merged, case, expected)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest))
    result = run_child("reload", path)
    assert result["problems"] == []
    assert len(manifest["saved"]) == len(cases)
    assert len(manifest["merged"]) > len(cases) / 2 or cases is ELSEWHERE
    assert result["opened"] == len(manifest["merged"]) + len(manifest["saved"])


@pytest.mark.skipif(
    "num_items_in_batch" not in inspect.signature(LabelSmoother.__call__).parameters,
    reason="this version of transformers averages over accumulated batches",
)
def test_two_processes_give_the_update_of_one(tmp_path):
    """One group of two processes opens and trains every method, as `test_accumulated_batches_give_the_update_of_one` does."""
    cases = once(lambda case: case.has_loss)
    for case in cases:
        build(case).save_pretrained(tmp_path / case.id)
    for result in two_processes("contract", tmp_path):
        assert result["problems"] == []
        assert result["trained"] == len(cases)
