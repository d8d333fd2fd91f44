"""Invariants 1 and 4 (CONTRIBUTING.md): what a file holds, and that a loaded variant is the one that was saved."""

import copy
import json
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import ALL, BASE, MODEL, Case, covering, native_config, once, once_on_each_architecture
from support.models import (
    build,
    differences,
    file_sizes,
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
from support.parametrize import over
from support.training import training_step

from hf_freeze import make_variant
from hf_freeze.analysis.accounting import count_parameters, stored_bytes
from hf_freeze.architectures.base import base_name, canonical_parameters
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.seeded.tensor import digest

# What a file holds: every method once on each architecture and once more, with configs, tasks and sources by turns; every config
# without methods. Every pair of methods is reloaded too, and `test_merged_is_a_native_model` has every method on every config.
SAVED = [
    *once_on_each_architecture(),
    *once(lambda case: case.config != BASE),
    *once_on_each_architecture(finalized=True),
    *covering(lambda case: not case.methods),
]
every_cell = over(covering() if ALL else {case.id: case for case in SAVED}.values())


@every_cell
def test_a_saved_variant_reloads_bit_equal(case: Case, saved):
    variant = saved(case)
    reloaded, info = reload(case, variant.folder)
    expected = outputs(variant.model, case.batch())
    assert reload_problems(reloaded, info, expected, trainability_before_training(variant.model), case.batch()) == []


@every_cell
def test_the_file_holds_what_is_counted_and_nothing_seeded(case: Case, saved):
    model, folder = saved(case).model, saved(case).folder
    tensors, header = file_sizes(folder)
    assert tensors == stored_bytes(model)
    assert header <= 64 * 1024
    written = load_file(folder / "model.safetensors")
    seeded = seeded_names(model)
    assert not written.keys() & seeded
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in written.items())
    # Everything else is there, under one of its names.
    stored = {state[name].data_ptr() for name in written}
    constants = {name for name in state if case.architecture.component(base_name(model, name)) == "constant"}
    assert all(state[name].data_ptr() in stored for name in state.keys() - seeded - constants)
    parameters = dict(canonical_parameters(model))
    counts = count_parameters(model)
    # Quantised weights are buffers, of fewer numbers than they stand for.
    packed = {id(module.packed): module.weight_count for module in model.modules() if hasattr(module, "weight_count")}
    assert counts.stored == sum(packed.values()) + sum(
        p.numel() for name, p in parameters.items() if name not in seeded | constants
    )
    assert counts.trainable == sum(p.numel() for p in parameters.values() if p.requires_grad)
    config = json.loads((folder / "config.json").read_text())
    expected = {base_name(model, name): digest(model.get_parameter(name)) for name in model.seeded_tensors}
    assert config["digests"] == expected


@over(once_on_each_architecture() + once_on_each_architecture(finalized=True))
def test_meta_builds_the_same_structure(case: Case):
    """Of every cell, `test_a_saved_variant_reloads_bit_equal` says so too: loading builds on meta."""
    real = build(case)
    with torch.device("meta"):
        if case.finalized:
            meta = make_variant(real.config, [], task=case.task)
        elif case.source == MODEL:
            meta = make_variant(case.native_class(native_config(case.architecture, case.config)), list(case.methods))
        else:
            init = case.source.removeprefix("init_")
            config = native_config(case.architecture, case.config)
            meta = make_variant(config, list(case.methods), task=case.task, init=init)
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    assert trainability(meta) == trainability(real)
    assert {n: p.shape for n, p in meta.named_parameters()} | {n: p.shape for n, p in real.named_parameters()} == {
        n: p.shape for n, p in meta.named_parameters()
    }
    assert meta.seeded_tensors == real.seeded_tensors
    assert count_parameters(meta) == count_parameters(real)
    assert stored_bytes(meta) == stored_bytes(real)


@over(covering(lambda case: case.from_model and not case.methods and not case.finalized))
def test_a_baseline_has_the_keys_of_its_backbone(case: Case, saved, tmp_path):
    model = native(case)
    model.save_pretrained(tmp_path)
    variant, backbone = (load_file(folder / "model.safetensors") for folder in (saved(case).folder, tmp_path))
    constants = {n for n in backbone if case.architecture.component(base_name(model, n)) == "constant"}
    assert variant.keys() == backbone.keys() - constants


@over(once_on_each_architecture(lambda case: case.config == BASE))
def test_the_file_shrinks_iff_declared(case: Case):
    """Of the first config, which examples are made for. `test_the_file_holds_what_is_counted...` compares counts and files."""
    shrinks = stored_bytes(finished(build(case))) < stored_bytes(build(replace(case, methods=())))
    assert shrinks == any(method.facts.shrinks for method in case.methods)


def base_model_reads_it(case: Case):
    """Natively, `LlamaModel` does not find its weights in a file of `LlamaForQuestionAnswering`, which has another prefix."""
    base = replace(case, task="feature-extraction").native_class
    return case.task != "feature-extraction" and case.native_class.base_model_prefix == base.base_model_prefix


@over(once_on_each_architecture(base_model_reads_it) if ALL else once(base_model_reads_it))
def test_the_base_model_of_a_task_model_holds_the_same_weights(case: Case, saved):
    model = saved(case).model
    torch.manual_seed(99)
    base = AUTO_CLASSES["feature-extraction"].from_pretrained(saved(case).folder)
    expected = {base_name(model, name): p for name, p in model.named_parameters()}
    grads = {base_name(model, name): grad for name, grad in trainability_before_training(model).items()}
    shared = [name for name, _ in base.named_parameters() if name in expected]
    assert len(shared) > len(expected) / 2
    for name in shared:
        assert torch.equal(base.get_parameter(name), expected[name]), name
        assert base.get_parameter(name).requires_grad == grads[name], name


@over(once() + once(finalized=True))
def test_opening_in_bf16_rounds_the_same_values(case: Case, saved, tmp_path):
    model = saved(case).model
    rounded = case.auto_class.from_pretrained(saved(case).folder, dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path)  # the digests are of the fp32 values: nothing has changed
    again = case.auto_class.from_pretrained(tmp_path)
    for other in (rounded, again):
        assert trainability(other) == trainability_before_training(model)
        for name, parameter in model.named_parameters():
            assert torch.equal(other.get_parameter(name), parameter.bfloat16()), name


@over(once(lambda case: not case.from_model))
def test_fresh_weights_are_a_function_of_the_seed(case: Case):
    def fresh(seed):
        torch.manual_seed(seed + 100)
        before = torch.get_rng_state()
        arguments = {"task": case.task, "init": case.source.removeprefix("init_"), "seed": seed % 2}
        model = make_variant(native_config(case.architecture, case.config), list(case.methods), **arguments)
        assert torch.equal(before, torch.get_rng_state()), "the global random state was moved"
        return snapshot(model), model.seeded_tensors

    (zero, seeded), (one, _), (two, _) = fresh(0), fresh(1), fresh(2)
    assert all(torch.equal(zero[name], two[name]) for name in zero)
    drawn = [name for name, trainable in trainability(build(case)).items() if trainable and zero[name].ndim == 2]
    assert not drawn or not all(torch.equal(zero[name], one[name]) for name in drawn)
    assert all(torch.equal(zero[name], one[name]) for name in seeded)


@over(once() + once(finalized=True))
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_is_equal_and_independent(copied, case: Case):
    model = build(case)
    twin = copied(model)
    assert type(twin) is type(model)
    assert trainability(twin) == trainability(model)
    expected = outputs(model, case.batch())
    assert differences(outputs(twin, case.batch()), expected) == []
    training_step(twin, case.batch())
    assert differences(outputs(twin, case.batch()), expected) != []
    assert differences(outputs(model, case.batch()), expected) == []


@over(once(lambda case: case.seeded))
def test_a_seeded_tensor_without_its_digest_is_refused(case: Case, saved, tmp_path):
    model = copy.deepcopy(saved(case).model)
    shutil.copytree(saved(case).folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["digests"].keys() == {base_name(model, name) for name in model.seeded_tensors} != set()
    for name in (min(config["digests"]), max(config["digests"])):
        value = config["digests"][name]
        for digests, message in (
            (config["digests"] | {name: f"{int(value, 16) ^ 1:032x}"}, f"digest mismatch.*{name!r}"),
            ({k: v for k, v in config["digests"].items() if k != name}, f"no digest of {name!r}"),
        ):
            (tmp_path / "config.json").write_text(json.dumps(config | {"digests": digests}))
            with pytest.raises(ValueError, match=message):
                reload(case, tmp_path)
    with torch.no_grad():
        model.get_parameter(next(iter(model.seeded_tensors))).add_(1)
    with pytest.raises(ValueError, match="not stored, but it was changed"):
        model.save_pretrained(tmp_path / "changed")


@over(once() + once(finalized=True))
def test_a_checkpoint_without_a_stored_tensor_is_refused(case: Case, saved, tmp_path):
    model = saved(case).model
    shutil.copytree(saved(case).folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    # Older safetensors write in place, into the file that these tensors are still read from.
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    kinds = {}  # one trainable and one frozen tensor of each component
    for name, parameter in model.named_parameters():
        if name in weights:
            kinds.setdefault((case.architecture.component(base_name(model, name)), parameter.requires_grad), name)
    assert kinds
    for name in kinds.values():
        save_file({k: v for k, v in weights.items() if k != name}, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"lacks trained tensors.*{name}"):
            reload(case, tmp_path)
