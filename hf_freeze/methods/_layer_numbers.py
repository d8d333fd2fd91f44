"""Settings that name layers by number, after a later method has given the layers new numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

from hf_freeze.architectures.base import Architecture
from hf_freeze.methods.parts import Kept


def renumbered_layers(layers: Mapping[str, list[int]], kept: Kept) -> dict[str, list[int]]:
    """A setting `layers`, such as `{"encoder": [0, 1]}`, with the new numbers; layers that are gone are left out."""
    return {
        stack: [new for new, old in enumerate(kept[stack]) if old in numbers] if stack in kept else numbers
        for stack, numbers in layers.items()
    }


def renumbered_names(settings: Mapping[str, Any], architecture: Architecture, kept: Kept) -> dict[str, Any]:
    """A dict from names with a layer number, such as "encoder.0.self" or "encoder.layers.0.fc1", to settings, with the new names;
    those of layers that are gone are left out."""
    return {new: value for name, value in settings.items() for new in _new_names(name, architecture, kept)}


def _new_names(name: str, architecture: Architecture, kept: Kept) -> Iterator[str]:
    block = name.split(".")
    if block[0] in architecture.stacks and block[1].isdecimal():
        stack, number, layers = block[0], int(block[1]), f"{block[0]}.{{}}"
    else:
        stack, number = architecture.layer_of(f"{name}.weight")  # type: ignore[misc]
        layers = architecture.stacks[stack].layers
    rest = name.removeprefix(layers.format(number))
    for new, old in enumerate(kept.get(stack, range(number + 1))):
        if old == number:
            yield layers.format(new) + rest
