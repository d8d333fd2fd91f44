"""Models of several layers, and what replaces their layers by hand."""

import pytest
import torch

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from support.cases import native_config
from support.models import add_noise

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))


def deep_config(architecture, depth=4):
    config = native_config(architecture)
    for stack in architecture.stacks.values():
        setattr(config, stack.depth, depth)
    return config


def deep_model(architecture, depth=4):
    """A native model as if trained, of so many layers in each stack; with its batch."""
    task, config = architecture.tasks[0], deep_config(architecture, depth)
    return add_noise(AUTO_CLASSES[task].from_config(config), architecture).eval(), architecture.tiny_inputs(task)


def layers_of(model, architecture, stack):
    return list(model.base_model.get_submodule(architecture.stacks[stack].layers.removesuffix(".{}")))


def put_layers(native, architecture, stack, layers):
    """Make a native model consist of these, by hand."""
    layers = torch.nn.ModuleList(layers)
    native.base_model.set_submodule(architecture.stacks[stack].layers.removesuffix(".{}"), layers)
    setattr(native.config, architecture.stacks[stack].depth, len(layers))
    native.config.use_cache = False  # in which the layers would have other places
