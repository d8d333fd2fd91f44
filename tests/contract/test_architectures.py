"""What an architecture's description must say, and what is refused before anything is built."""

import json
import re

import pytest
from support.cases import BASE, Case, covering, native_config, plain, supports
from support.models import native
from torch import nn

from hf_freeze import make_variant
from hf_freeze.architectures.base import base_name, canonical_parameters
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods.registry import METHODS, method_from_dict, method_to_dict

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
BACKBONES = covering(lambda case: case.from_model and not case.methods)
every_backbone = pytest.mark.parametrize("case", BACKBONES, ids=[case.id for case in BACKBONES])


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
def test_every_example_fits_some_tiny_configs(architecture):
    """Always the first. A config that does not suit an example is refused in one line, which names the method."""
    for method in METHODS.values():
        if not supports(method, architecture):
            continue
        cases = [plain(architecture, method.example, config=config) for config in architecture.tiny_configs]
        refused = {case.config: case.refusal for case in cases if case.refusal is not None}
        assert BASE not in refused, refused
        assert len(refused) <= len(cases) / 2 + 1, f"{method.name} is hardly tested: {refused}"
        for config, message in refused.items():
            assert re.fullmatch(rf"{type(method.example).__name__}\b.+", message), (config, message)
            with pytest.raises(ValueError, match=re.escape(message)):
                make_variant(native_config(architecture, config), [method.example], task=architecture.tasks[0])


@every_architecture
def test_tiny_configs_differ(architecture):
    """A variant that changes nothing would be tested twice and protect nothing."""
    configs = [native_config(architecture, config).to_dict() for config in architecture.tiny_configs]
    assert all(one != other for number, one in enumerate(configs) for other in configs[:number])


@every_architecture
def test_a_tiny_batch_can_show_what_the_contract_asks(architecture):
    for task in architecture.tasks:
        batch = architecture.tiny_inputs(task)
        lengths = batch["attention_mask"].flatten(1).sum(1).tolist()
        assert len(lengths) == 2
        assert lengths[0] != lengths[1]
        assert not batch["attention_mask"].all()
        if "labels" in batch and batch["labels"].ndim == 2:
            counts = (batch["labels"] != -100).sum(1)
            assert counts[0] != counts[1], "rows with equally many labels do not show a wrong loss scaling"


@every_backbone
def test_each_parameter_is_described_once(case: Case):
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
def test_each_linear_of_a_layer_is_described_once(case: Case):
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
