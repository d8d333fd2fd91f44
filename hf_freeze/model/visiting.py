"""Layers of a model larger than the memory that are on a GPU while they are looked at and converted."""

import torch
from torch import Tensor, nn


def accelerator() -> torch.device | None:
    """The device that layers visit; None where there is none but the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else None


class Visit:
    """Layers whose tensors are copied to a device, until `end`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: list[tuple[nn.Module, str, Tensor]] = []

    def begin(self, layer: nn.Module) -> None:
        for module, name, tensor in _tensors(layer):
            self._own.append((module, name, tensor))
            _set(module, name, tensor.to(self._device, copy=True))

    def end(self, old: nn.Module, new: nn.Module) -> None:
        """The old layer has its own tensors again, and the new one those that it has now, on the CPU: where they are what they
        were, its own ones, which may lie in files."""
        own = {(module, name): tensor for module, name, tensor in self._own}
        self._own.clear()
        for module, name, tensor in _tensors(old):
            _set(module, name, own.get((module, name), tensor))
        for module, name, tensor in _tensors(new) if new is not old else ():
            here, before = tensor.cpu(), own.get((module, name))
            is_same = before is not None and before.shape == here.shape and torch.equal(before, here)
            _set(module, name, before if is_same and before is not None else here)


def _tensors(layer: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """(module, name, values) of all parameters and buffers."""
    return [
        (module, name, tensor.data if isinstance(tensor, nn.Parameter) else tensor)
        for module in layer.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.device.type != "meta"
    ]


def _set(module: nn.Module, name: str, values: Tensor) -> None:
    if (parameter := module._parameters.get(name)) is not None:
        parameter.data = values
    else:
        module._buffers[name] = values
