"""CONTRIBUTING's worked examples: each block is one new file, which the registries find and the contract holds for."""

import importlib.util
import sys

import pytest
from support import ROOT
from support.cases import BASE, Case, native_config, plain
from support.models import (
    build,
    differences,
    file_sizes,
    finished,
    merge_or_none,
    native,
    outputs,
    reload,
    reload_problems,
    snapshot,
    trainability_before_training,
)
from support.pages import blocks_of, is_worked_example
from support.training import changed_though_frozen, training_step

from hf_freeze import make_variant, stored_bytes
from hf_freeze.architectures.base import base_name, canonical_parameters
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods.registry import METHODS

EXAMPLES = [block for block in blocks_of(ROOT / "CONTRIBUTING.md") if is_worked_example(block)]
BACKBONES = list(ARCHITECTURES)


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """write_module(room) -> the example for this room as a module, registered until the end of the test."""
    registries = [(registry, dict(registry)) for registry in (METHODS, ARCHITECTURES)]

    def write(room):
        (block,) = (block for block in EXAMPLES if f"from hf_freeze.{room}.registry" in block.code)
        path = tmp_path / f"example_of_{room}.py"
        path.write_text(block.code, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    yield write
    for registry, before in registries:
        registry.clear()
        registry.update(before)


def check_contract(case: Case, folder) -> None:
    """Invariants 1 to 4 and 6 of CONTRIBUTING.md, at their smallest."""
    expected, batch = outputs(native(case), case.batch()), case.batch()
    assert (differences(outputs(build(case), batch), expected, 1e-6) == []) == case.exact or case.stochastic
    model = build(case)
    before = snapshot(model)
    training_step(model, batch)
    assert changed_though_frozen(model, before) == []
    model.save_pretrained(folder)
    assert file_sizes(folder)[0] == stored_bytes(model)
    reloaded, info = reload(case, folder)
    assert reload_problems(reloaded, info, outputs(model, batch), trainability_before_training(model), batch) == []
    merged = merge_or_none(finished(model))
    assert merged is None or differences(outputs(merged, batch), outputs(model, batch), 1e-5) == []


def test_contributing_has_both_examples():
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("model_type", BACKBONES)
def test_the_method_holds_the_contract(model_type, write_module, tmp_path):
    method = write_module("methods").FreezeNorms
    architecture = ARCHITECTURES[model_type]
    check_contract(plain(architecture, method()), tmp_path / "saved")
    stack = next(iter(architecture.stacks))
    for layers in (None, {stack: [0]}):
        model = make_variant(native_config(architecture), [method(layers=layers)], task=architecture.tasks[0])
        for name, parameter in canonical_parameters(model):
            name = base_name(model, name)
            if architecture.component(name) == "norm":
                chosen = layers is None or architecture.layer_of(name) == (stack, 0)
                assert parameter.requires_grad == (not chosen), name
    with pytest.raises(ValueError, match="no stack 'middle' in"):
        make_variant(native_config(architecture), [method(layers={"middle": [0]})], task=architecture.tasks[0])


def test_the_architecture_holds_the_contract_with_every_method(write_module, tmp_path):
    architecture = write_module("architectures").OPT
    model = native(plain(architecture))
    for name, _ in canonical_parameters(model):
        components = architecture.matches(base_name(model, name))
        assert len(components) == 1 or name.startswith("lm_head"), f"{name} is {components}"
    supported = [method.example for method in METHODS.values() if method.refusal(architecture) is None]
    for number, methods in enumerate([(), *((example,) for example in supported)]):
        for config in architecture.tiny_configs if not methods else [BASE]:
            check_contract(plain(architecture, *methods, config=config), tmp_path / f"{number}-{config}")
