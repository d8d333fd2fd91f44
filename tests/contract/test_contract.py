"""What holds (CONTRIBUTING.md) for every method x every architecture that it supports, whatever they are.

Each test enumerates the registries (contract_cases.py); "baseline" is a variant without methods.
"""

import copy
import functools
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract_cases import CASES
from safetensors.torch import load_file, save_file
from support.cases import MODEL, Case, native_config, supports
from support.generation import generation_problems
from support.models import (
    add_noise,
    build,
    differences,
    file_sizes,
    finished,
    is_scheduled,
    merge_or_none,
    native,
    outputs,
    reload,
    reload_problems,
    seeded_names,
    snapshot,
    trainability,
    trainability_before_training,
)
from support.processes import two_processes
from support.training import (
    BATCH_ROWS,
    begin_training,
    gradients,
    objective,
    plain_update,
    sgd_step_of_trainer,
    stack,
    training_rows,
    training_step,
    without_noise,
)
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_freeze import make_variant
from hf_freeze.analysis.accounting import count_parameters, multiply_adds, stored_bytes
from hf_freeze.architectures.base import base_name, canonical_parameters
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods.parts import Schedule
from hf_freeze.methods.registry import METHODS, method_from_dict, method_to_dict
from hf_freeze.seeded.tensor import digest
from hf_freeze.training import label_smoothed_loss

TESTS = Path(__file__).parent


def over(cases):
    cases = list(cases)
    assert cases, "no case: this test would pass without testing anything"
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


every_case = over(CASES)
every_thorough = over(case for case in CASES if case.thorough)
every_trained = over(case for case in CASES if case.of_first_source)
every_config = over(case for case in CASES if case.source != MODEL)
every_source = over(case for case in CASES if case.thorough or case.source != MODEL)
every_with_loss = over(case for case in CASES if case.trained_by_trainer)
every_generator = over(case for case in CASES if case.thorough and case.native_class.can_generate())
every_decoder = over(case for case in CASES if case.thorough and "decoder" in case.architecture.stacks)
every_finalizable = over(case for case in CASES if case.thorough and case.finalizable)
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
every_backbone = over(case for case in CASES if case.source == MODEL and not case.methods)
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


# -- the registries ----------------------------------------------------------------------------------------------------------


@every_method
def test_a_method_is_json(method):
    assert method_from_dict(json.loads(json.dumps(method_to_dict(method.example)))) == method.example


@every_architecture
def test_an_unsupported_method_is_refused(architecture):
    for method in METHODS.values():
        if not supports(method, architecture):
            with pytest.raises(ValueError, match=f"{method.name!r} does not support {architecture.model_type!r}"):
                make_variant(native_config(architecture), [method.example], task=architecture.tasks[0])


@every_architecture
def test_a_tiny_batch_can_show_what_the_contract_asks(architecture):
    for task in architecture.tasks:
        batch = architecture.tiny_inputs(task)
        lengths = batch["attention_mask"].sum(1).tolist()
        assert len(lengths) == 2
        assert lengths[0] != lengths[1]
        assert not batch["attention_mask"].all()
        if "labels" in batch and batch["labels"].ndim == 2:
            counts = (batch["labels"] != -100).sum(1)
            assert counts[0] != counts[1], "rows with equally many labels do not show a wrong loss scaling"


@every_backbone
def test_each_parameter_is_described_once(case):
    architecture, model = case.architecture, native(case)
    for name, _ in canonical_parameters(model):
        name = base_name(model, name)
        matched = architecture.matches(name)
        assert len(matched) <= 1, f"{name} is {matched}"
        assert len(matched) == 1 or architecture.layer_of(name) is None, f"{name} lies in a layer but in no component"
    kinds = {"Embedding": ("embeddings", "constant"), "Norm": ("norm",)}
    for module_name, module in model.base_model.named_modules():
        for kind, components in kinds.items():
            if kind in type(module).__name__ and hasattr(module, "weight"):
                assert architecture.component(f"{module_name}.weight") in components, module_name


@every_backbone
def test_each_linear_of_a_layer_is_described_once(case):
    architecture, base = case.architecture, native(case).base_model
    described = [(name, c) for c in ("attention", "ffn") for *_, name in architecture.linears(base.config, c)]
    assert len({name for name, _ in described}) == len(described)
    for name, component in described:
        assert base.get_submodule(name).weight.ndim == 2
        assert architecture.component(f"{name}.weight") == component
    linears = {name for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    in_layers = {name for name in linears if architecture.layer_of(name) is not None}
    assert in_layers <= {name for name, _ in described}
    for stack_name, stack_of in architecture.stacks.items():
        assert isinstance(base.get_submodule(f"{stack_of.layers.format(0)}.{stack_of.activation}"), nn.Module)
        prefix = stack_of.layers.format("")
        layers = [name for name, _ in base.named_modules() if name.startswith(prefix) and name[len(prefix) :].isdigit()]
        assert len(layers) == architecture.depths(base.config)[stack_name]


# -- 1: saving and loading ---------------------------------------------------------------------------------------------------


def run_child(command):
    child = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@every_architecture
def test_a_new_process_opens_the_same_model(architecture, tmp_path):
    """Invariants 1 and 6. One child opens every model of an architecture; it takes seconds to start."""
    manifest = {"merged": [], "saved": []}

    def enter(kind, model, case, name, expected):
        folder = tmp_path / kind / name
        model.save_pretrained(folder)
        save_file(case.batch(), folder / "batch.safetensors")
        save_file({k: v.contiguous() for k, v in expected.items()}, folder / "expected.safetensors")
        native_class = f"{case.native_class.__module__}.{case.native_class.__name__}"
        entry = {"id": name, "folder": str(folder), "auto_class": case.auto_class.__name__}
        requires_grad = trainability_before_training(model)
        manifest[kind].append(entry | {"requires_grad": requires_grad, "native_class": native_class})

    cases = [case for case in CASES if case.architecture is architecture]
    for case in cases:
        model = build(case)
        enter("saved", model, case, case.id, outputs(model, case.batch()))
        merged = merge_or_none(model)
        if merged is not None:
            enter("merged", merged, case, case.id, outputs(model, case.batch()))
        training_step(model, case.batch())
        enter("saved", model, case, f"{case.id}-trained", outputs(model, case.batch()))
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest))
    result = run_child([TESTS / "reload_child.py", path])
    assert result["problems"] == []
    assert result["opened"] == len(manifest["merged"]) + len(manifest["saved"]) > 2 * len(cases)


@every_trained
def test_the_base_model_of_a_task_model_holds_the_same_weights(case, tmp_path):
    model = build(case)
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    base = AUTO_CLASSES["feature-extraction"].from_pretrained(tmp_path)
    expected = {base_name(model, name): p for name, p in model.named_parameters()}
    shared = [name for name, _ in base.named_parameters() if name in expected]
    assert len(shared) > len(expected) / 2
    for name in shared:
        assert torch.equal(base.get_parameter(name), expected[name]), name
        assert base.get_parameter(name).requires_grad == expected[name].requires_grad, name


@over(case for case in CASES if case.thorough and case.of_first_source)
def test_opening_in_bf16_rounds_the_same_values(case, tmp_path):
    model = build(case)
    model.save_pretrained(tmp_path / "fp32")
    rounded = case.auto_class.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path / "bf16")  # the digests are of the fp32 values: nothing has changed
    again = case.auto_class.from_pretrained(tmp_path / "bf16")
    for other in (rounded, again):
        assert trainability(other) == trainability(model)
        for name, parameter in model.named_parameters():
            assert torch.equal(other.get_parameter(name), parameter.bfloat16()), name


@every_config
def test_fresh_weights_are_a_function_of_the_seed(case):
    def fresh(seed):
        torch.manual_seed(seed + 100)
        before = torch.get_rng_state()
        arguments = {"task": case.task, "init": case.source.removeprefix("init_"), "seed": seed % 2}
        model = make_variant(native_config(case.architecture), list(case.methods), **arguments)
        assert torch.equal(before, torch.get_rng_state()), "the global random state was moved"
        return snapshot(model), model.seeded_tensors

    (zero, seeded), (one, _), (two, _) = fresh(0), fresh(1), fresh(2)
    assert all(torch.equal(zero[name], two[name]) for name in zero)
    drawn = [name for name, trainable in trainability(build(case)).items() if trainable and zero[name].ndim == 2]
    assert not drawn or not all(torch.equal(zero[name], one[name]) for name in drawn)
    assert all(torch.equal(zero[name], one[name]) for name in seeded)


@every_thorough
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_is_equal_and_independent(copied, case):
    model = build(case)
    twin = copied(model)
    assert type(twin) is type(model)
    assert trainability(twin) == trainability(model)
    expected = outputs(model, case.batch())
    assert differences(outputs(twin, case.batch()), expected) == []
    training_step(twin, case.batch())
    assert differences(outputs(twin, case.batch()), expected) != []
    assert differences(outputs(model, case.batch()), expected) == []


@every_source
def test_meta_builds_the_same_structure(case):
    real = build(case)
    with torch.device("meta"):
        if case.finalized:
            meta = make_variant(real.config, [], task=case.task)
        elif case.source == MODEL:
            meta = make_variant(case.native_class(native_config(case.architecture)), list(case.methods))
        else:
            init = case.source.removeprefix("init_")
            meta = make_variant(native_config(case.architecture), list(case.methods), task=case.task, init=init)
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    assert trainability(meta) == trainability(real)
    assert {n: p.shape for n, p in meta.named_parameters()} | {n: p.shape for n, p in real.named_parameters()} == {
        n: p.shape for n, p in meta.named_parameters()
    }
    assert meta.seeded_tensors == real.seeded_tensors
    assert count_parameters(meta) == count_parameters(real)
    assert stored_bytes(meta) == stored_bytes(real)


# -- 2: a training step ------------------------------------------------------------------------------------------------------


def check_reached(case, model):
    """All that is trainable has a gradient, and nothing else; but what a step has left out."""
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert reached <= trainable if case.skips else reached == trainable, reached ^ trainable
    assert reached or not trainable


@every_case
def test_a_step_changes_what_is_trainable_and_nothing_else(case):
    model = build(case)
    # The gradient of some biases is zero but for rounding (a bias of all keys shifts a row of scores, which the softmax
    # cancels), and weight decay keeps a zero at zero. Values away from zero must move, whatever their gradient.
    add_noise(model, case.architecture)
    before = snapshot(model)
    training_step(model, case.batch())
    check_reached(case, model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (parameter.grad is None), name
    if case.skips:  # what one step has left out, another trains
        for step in range(16):
            training_step(model, case.batch(), step, 16)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]) == (not parameter.requires_grad), name
    training_step(model, case.batch())  # what methods add to the loss was in the first one, or this is refused
    for name, definition in model.seeded_tensors.items():
        assert torch.equal(model.get_parameter(name), definition.generate()), name
    assert any(trainability(model).values())
    if not case.methods:
        constant = {n for n in before if case.architecture.component(base_name(model, n)) == "constant"}
        assert trainability(model) == {name: name not in constant for name in before}


# -- 3: the forward and the size ---------------------------------------------------------------------------------------------


@over(case for case in CASES if case.thorough and case.source == MODEL)
def test_the_forward_differs_from_the_backbone_unless_exact(case):
    backbone = native(case)
    config, weights = backbone.config.to_dict(), snapshot(backbone)
    variant = make_variant(backbone, list(case.methods))
    if case.finalized:
        variant.finalize()
    assert backbone.config.to_dict() == config
    actual, expected = outputs(variant, case.batch()), outputs(backbone, case.batch())
    if not case.methods:
        assert differences(actual, expected) == []
    else:
        assert (differences(actual, expected, 1e-5) == []) == case.exact
    assert isinstance(variant, case.native_class)
    # The backbone is as it was, and shares nothing with the variant.
    training_step(variant, case.batch())
    assert all(torch.equal(value, backbone.get_parameter(name)) for name, value in weights.items())
    assert not {p.data_ptr() for p in backbone.parameters()} & {p.data_ptr() for p in variant.parameters()}


@over(case for case in CASES if case.thorough and not case.finalized)
def test_the_file_shrinks_iff_declared(case, tmp_path):
    finished(build(case)).save_pretrained(tmp_path / "variant")
    build(Case(case.architecture, case.task, case.source, ())).save_pretrained(tmp_path / "baseline")
    shrinks = file_sizes(tmp_path / "variant")[0] < file_sizes(tmp_path / "baseline")[0]
    assert shrinks == any(method.shrinks for method in case.methods)


# -- 4: what is stored -------------------------------------------------------------------------------------------------------


@every_case
def test_the_file_holds_what_is_counted_and_nothing_seeded(case, tmp_path):
    model = build(case)
    model.save_pretrained(tmp_path)
    tensors, header = file_sizes(tmp_path)
    assert tensors == stored_bytes(model)
    assert header <= 64 * 1024
    written = load_file(tmp_path / "model.safetensors")
    assert not written.keys() & seeded_names(model)
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in written.items())
    # Everything else is there, under one of its names.
    held = {state[name].data_ptr() for name in written}
    constants = {name for name in state if case.architecture.component(base_name(model, name)) == "constant"}
    assert all(state[name].data_ptr() in held for name in state.keys() - seeded_names(model) - constants)
    parameters = dict(canonical_parameters(model))
    counts = count_parameters(model)
    # Quantised weights are buffers, of fewer numbers than they stand for.
    packed = {id(module.packed): module.weight_count for module in model.modules() if hasattr(module, "weight_count")}
    assert counts.stored == sum(packed.values()) + sum(
        p.numel() for name, p in parameters.items() if name not in seeded_names(model) | constants
    )
    assert counts.trainable == sum(p.numel() for p in parameters.values() if p.requires_grad)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {base_name(model, name): digest(model.get_parameter(name)) for name in model.seeded_tensors}
    assert config["digests"] == expected


@every_backbone
def test_a_baseline_has_the_keys_of_its_backbone(case, tmp_path):
    build(case).save_pretrained(tmp_path / "variant")
    native(case).save_pretrained(tmp_path / "native")
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("variant", "native"))
    constants = {n for n in theirs if case.architecture.component(base_name(native(case), n)) == "constant"}
    assert mine.keys() == theirs.keys() - constants


@over(case for case in CASES if case.seeded)
def test_a_seeded_tensor_without_its_digest_is_refused(case, tmp_path):
    model = build(case)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["digests"].keys() == {base_name(model, name) for name in model.seeded_tensors} != set()
    for name in (min(config["digests"]), max(config["digests"])):
        found = config["digests"][name]
        for digests, message in (
            (config["digests"] | {name: f"{int(found, 16) ^ 1:032x}"}, f"digest mismatch.*{name!r}"),
            ({k: v for k, v in config["digests"].items() if k != name}, f"no digest of {name!r}"),
        ):
            (tmp_path / "config.json").write_text(json.dumps(config | {"digests": digests}))
            with pytest.raises(ValueError, match=message):
                reload(case, tmp_path)
    with torch.no_grad():
        model.get_parameter(next(iter(model.seeded_tensors))).add_(1)
    with pytest.raises(ValueError, match="not stored, but it was changed"):
        model.save_pretrained(tmp_path / "changed")


@every_thorough
def test_a_checkpoint_without_a_stored_tensor_is_refused(case, tmp_path):
    model = build(case)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    kinds = {}  # one trainable and one frozen tensor of each component
    for name, parameter in model.named_parameters():
        if name in weights:
            kinds.setdefault((case.architecture.component(base_name(model, name)), parameter.requires_grad), name)
    assert kinds
    for name in kinds.values():
        save_file({k: v for k, v in weights.items() if k != name}, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"lacks trained tensors.*{name}"):
            reload(case, tmp_path)


# -- what it costs -----------------------------------------------------------------------------------------------------------


@functools.cache
def native_multiply_adds(model_type, task):
    return multiply_adds(AUTO_CLASSES[task].from_config(native_config(ARCHITECTURES[model_type])), length=8)


@every_thorough
def test_multiply_adds_are_those_of_the_components(case):
    model = build(case)
    cost = multiply_adds(model, length=8)
    native_cost = native_multiply_adds(case.architecture.model_type, case.task)
    for direction in ("forward", "backward"):
        parts = {name: getattr(part, direction) for name, part in cost.by_component.items()}
        assert sum(parts.values()) == pytest.approx(getattr(cost, direction))
        assert all(part >= 0 for part in parts.values())
    assert cost.forward > 0
    # Score products have no weights: backward they cost the same, whatever the linears became.
    untouched = [
        name
        for name in cost.by_component
        if cost.by_component[name].forward == native_cost.by_component[name].forward and all_trained(model, name)
    ]
    assert untouched
    for name in untouched:
        backward, whole = (each.by_component[name].backward for each in (cost, native_cost))
        if all_trained(model, "embeddings"):
            assert backward == pytest.approx(whole), name
        else:  # nothing below the first layer needs a gradient of its input
            assert backward <= whole * (1 + 1e-6), name
    twin = copy.deepcopy(model).to("meta")
    assert multiply_adds(twin, length=8) == cost


def all_trained(model, component):
    counts = count_parameters(model).by_component[component]
    return counts.trainable == counts.total


# -- 5: generating, and who sees what ----------------------------------------------------------------------------------------


@every_generator
def test_generate_is_the_same_with_a_cache_and_with_padding(case):
    assert generation_problems(build(case), case.batch()) == []


def inputs_only(model, batch):
    """The batch without labels; a decoder that would be fed by labels gets its tokens all the same."""
    inputs = {name: value for name, value in batch.items() if name == "input_ids" or "mask" in name or "_ids" in name}
    if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return inputs


@every_thorough
def test_padding_does_not_change_a_row(case):
    model = build(case)
    inputs = inputs_only(model, case.batch())
    together = outputs(model, inputs)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        trimmed = {
            name: value[row : row + 1] if name.startswith("decoder_") else value[row : row + 1][:, mask]
            for name, value in inputs.items()
        }
        alone = outputs(model, trimmed)
        # What is per input token is longer in the batch; its padding is at the end.
        cut = {n: v[row : row + 1, : alone[n].shape[1]] for n, v in together.items()}
        assert differences(alone, cut, 1e-4) == []


@every_thorough
def test_a_sentence_does_not_see_another(case):
    model = build(case)
    inputs = inputs_only(model, case.batch())
    expected = outputs(model, inputs)
    for row in range(2):
        perturbed = {name: value.clone() for name, value in inputs.items()}
        first = int(inputs["attention_mask"][row].sum()) - 1  # the end of the sentence stays
        perturbed["input_ids"][row, :first] = perturbed["input_ids"][row, :first].flip(0) + 10
        actual = outputs(model, perturbed)
        assert differences({n: v[row] for n, v in actual.items()}, {n: v[row] for n, v in expected.items()}, 1e-3) != []
        assert (
            differences({n: v[1 - row] for n, v in actual.items()}, {n: v[1 - row] for n, v in expected.items()}, 1e-6)
            == []
        )


@every_decoder
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_decoder_does_not_see_the_future(attention, case):
    model = build(case)
    model.set_attn_implementation(attention)
    inputs = inputs_only(model, case.batch())
    fed = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    expected = outputs(model, inputs)
    tokens = inputs[fed].shape[:2]
    aligned = [n for n, v in expected.items() if v.shape[:2] == tokens and not n.startswith("encoder_")]
    if not aligned:
        assert not AUTO_CLASSES[case.task].__name__.endswith("LM")
        pytest.skip("this task has one output a sentence")
    for position in range(1, tokens[1]):
        perturbed = inputs | {fed: inputs[fed].clone()}
        perturbed[fed][0, position] += 10
        actual = outputs(model, perturbed)
        for name in aligned:
            torch.testing.assert_close(actual[name][:, :position], expected[name][:, :position], rtol=0, atol=1e-6)
            assert not torch.allclose(actual[name][0, position], expected[name][0, position], atol=1e-3), name


# -- 6: merging --------------------------------------------------------------------------------------------------------------


@every_thorough
def test_merged_is_a_native_model(case):
    model = build(case)
    expected, weights = outputs(model, case.batch()), snapshot(model)
    merged = merge_or_none(model)
    if merged is None:
        return
    assert type(merged) is case.native_class
    assert differences(outputs(merged, case.batch()), expected, 1e-5) == []
    classes = [type(part) for part in (*merged.modules(), *merged.parameters(), merged.config)]
    assert [cls for cls in classes if cls.__module__.split(".")[0] == "hf_freeze"] == []
    assert "hf_freeze" not in json.dumps(merged.config.to_dict(), default=str)
    # Its own config, since a method may change the native one: the merged model has what that says and nothing else.
    assert merged.state_dict().keys() == case.native_class(copy.deepcopy(merged.config)).state_dict().keys()
    training_step(merged, case.batch())  # the variant is another model
    assert all(torch.equal(weights[name], model.get_parameter(name)) for name in weights)


# -- finalizing --------------------------------------------------------------------------------------------------------------


@every_finalizable
@pytest.mark.parametrize("steps", [0, 2, 4], ids=["before", "during", "after"])
def test_finalize_ends_training_at_any_step(steps, case, tmp_path):
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
    assert not any(method.finalizable for method in map(method_from_dict, model.config.methods))
    assert model.scheduled == any(method.part(Schedule) for method in map(method_from_dict, model.config.methods))
    assert model.auxiliary_loss() is None
    with pytest.raises(ValueError, match=r"\Anothing to finalize: .+\Z"):
        model.finalize()
    # What a schedule had not done yet is done now.
    if not any(method.part(Schedule) for method in case.methods) or steps == 4:
        assert differences(outputs(model, batch), expected, 1e-6) == []
    assert all(trainable == grads.get(name, trainable) for name, trainable in trainability(model).items())
    assert stored_bytes(model) < stored
    if merged is not None and not any(method.part(Schedule) for method in case.methods):
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
def test_a_finalized_variant_trains_on_with_what_is_zero_at_zero(case):
    if merge_or_none(build(case)) is None:
        pytest.skip("it cannot be merged: what is zero cannot be seen")
    model = finished(build(case))
    zeros = {name: value == 0 for name, value in model.merge().state_dict().items()}
    for _ in range(2):
        before = snapshot(model)
        training_step(model, case.batch())
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved
        assert moved <= {name for name, trainable in trainability(model).items() if trainable}
    for name, value in model.merge().state_dict().items():
        assert not value[zeros[name]].any(), name


@every_backbone
def test_a_variant_without_anything_to_finalize_says_so(case):
    model = build(case)
    assert not model.finalizable
    with pytest.raises(ValueError, match=r"\Anothing to finalize: .+\Z"):
        model.finalize()


@every_finalizable
def test_nothing_is_finalized_on_meta(case):
    with torch.device("meta"):
        model = make_variant(case.native_class(native_config(case.architecture)), list(case.methods))
    with pytest.raises(ValueError, match="meta"):
        model.finalize()
    assert model.config.methods == build(case).config.methods


# -- 8: the ways to train ----------------------------------------------------------------------------------------------------


@every_thorough
def test_training_is_random_iff_declared(case):
    model = build(case)

    def values(seed, training):
        begin_training(model).train(training)
        torch.manual_seed(seed)
        return {name: value.detach() for name, value in model(**case.batch()).items() if torch.is_tensor(value)}

    assert differences(values(1, False), values(2, False)) == []
    assert differences(values(1, True), values(1, True)) == []
    assert (differences(values(1, True), values(2, True)) != []) == case.stochastic
    with without_noise(case):
        assert differences(values(1, True), values(2, True)) == [], "without_noise does not know this draw"


@every_thorough
def test_bf16_autocast(case):
    model = build(case)
    expected, _ = gradients(model, case.batch())
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(begin_training(model), case.batch())
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.1, abs=0.01)
    check_reached(case, model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@every_thorough
def test_gradient_checkpointing_changes_nothing(case):
    model = build(case)
    expected_loss, expected = gradients(model, case.batch())
    # Deprecated in transformers 5, under its older name.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    entered = []
    for stack_of in case.architecture.stacks.values():
        for layer in range(getattr(model.config, stack_of.depth)):
            for part in model.base_model.get_submodule(stack_of.layers.format(layer)).modules():
                if not list(part.children()):  # hooks of the layer itself stay outside the checkpoint
                    part.register_forward_pre_hook(lambda module, _: entered.append(id(module)))
    loss, actual = gradients(model, case.batch())
    assert len(entered) > 1.5 * len(set(entered)), "hardly anything was computed again: nothing was checkpointed"
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert differences(actual, expected, 1e-6) == []


# In older versions the Trainer's label smoothing ignores `num_items_in_batch`. Variants then let the Trainer divide by the number
# of accumulated batches, which is the update of one big batch only where these hold equally many labels.
exact_trainer = pytest.mark.skipif(
    "num_items_in_batch" not in inspect.signature(LabelSmoother.__call__).parameters,
    reason="this version of transformers averages over accumulated batches",
)


@exact_trainer
@every_with_loss
def test_accumulated_batches_give_the_update_of_one(case, tmp_path):
    rows = training_rows(case)
    with without_noise(case):
        expected = plain_update(build(case), rows)
    for batch_size in (BATCH_ROWS, 1):
        model = build(case)
        before = snapshot(model)
        with without_noise(case):
            sgd_step_of_trainer(model, rows, tmp_path, batch_size=batch_size, accumulate=BATCH_ROWS // batch_size)
        actual = {name: p.detach() for name, p in model.named_parameters()}
        assert differences(actual, expected, 1e-4) == [], f"batches of {batch_size}"
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad or torch.equal(parameter, before[name]), name


@exact_trainer
@over(case for case in CASES if case.trained_by_trainer and case.native_class.can_generate())
def test_accumulated_batches_with_label_smoothing(case, tmp_path):
    rows = training_rows(case)
    batch = stack(rows)
    if build(case).config.is_encoder_decoder:  # smoothing takes the labels away; a collator adds what they would feed
        decoder_inputs = build(case).prepare_decoder_input_ids_from_labels(batch["labels"])
        rows = [row | {"decoder_input_ids": ids} for row, ids in zip(rows, decoder_inputs, strict=True)]
    reference = build(case)
    before = snapshot(reference)
    shift = 0 if reference.config.is_encoder_decoder else 1
    with without_noise(case):
        result = begin_training(reference)(**inputs_only(reference, batch))  # with labels, some methods give no logits
    logits, labels = result.logits[:, : result.logits.shape[1] - shift], batch["labels"][:, shift:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    added = result.get("auxiliary_loss")
    (loss if added is None else result.get("label_weight", 1.0) * loss + added).backward()
    expected = {n: before[n] if p.grad is None else before[n] - p.grad for n, p in reference.named_parameters()}
    # The Trainer's own smoothing knows nothing of what methods add.
    smoothing = {"label_smoothing_factor": 0.1}
    if added is not None:
        with pytest.raises(ValueError, match="must add outputs\\['auxiliary_loss'\\]"):
            sgd_step_of_trainer(build(case), rows, tmp_path, batch_size=1, accumulate=1, max_steps=2, **smoothing)
        smoothing = {"compute_loss_func": label_smoothed_loss(0.1, shift=bool(shift))}
    for batch_size in (BATCH_ROWS, 1):
        model = build(case)
        with without_noise(case):
            sgd_step_of_trainer(
                model, rows, tmp_path, batch_size=batch_size, accumulate=BATCH_ROWS // batch_size, **smoothing
            )
        actual = {name: p.detach() for name, p in model.named_parameters()}
        assert differences(actual, expected, 1e-4) == [], f"batches of {batch_size}"


@exact_trainer
def test_two_processes_give_the_update_of_one(tmp_path):
    """One group of two processes opens and trains every case (ddp_child.py)."""
    cases = [case for case in CASES if case.trained_by_trainer]
    for case in cases:
        build(case).save_pretrained(tmp_path / case.id)
    for result in two_processes(TESTS / "ddp_child.py", tmp_path):
        assert result["problems"] == []
        assert result["trained"] == len(cases)
