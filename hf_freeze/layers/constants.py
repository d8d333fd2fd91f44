"""Constants that a native class computes, such as sinusoidal positions, in a module that keeps some of their channels."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.channels import thin
from hf_freeze.compat.transformers import is_initialized, mark_initialized

_KEPT = "_hf_freeze_kept"  # (channels, constant -> its axis and native shape, native settings); few modules have it


def thin_constants(
    module: Any, axes: Mapping[str, Sequence[int]], constants: Sequence[str], index: Sequence[int]
) -> None:
    """As `thin`, and from then on `whole` lets the native class compute `constants` in their native shape."""
    before = dict(vars(module))
    shapes = {name: (axes[name][0], tuple(getattr(module, name).shape)) for name in constants}
    thin(module, axes, index)
    settings = {name: before[name] for name, value in vars(module).items() if before.get(name) is not value}
    settings = {name: value for name, value in settings.items() if isinstance(value, int | tuple)}
    setattr(module, _KEPT, (tuple(index), shapes, settings))


@contextmanager
def native_shapes(module: Any) -> Iterator[None]:
    """Inside, the constants of a module have their native shapes; then the kept channels of what was computed are taken."""
    kept_constants = vars(module).pop(_KEPT, None)  # so that it acts once
    if kept_constants is None:
        yield
        return
    index, shapes, settings = kept_constants
    owners = {name: module._parameters if name in module._parameters else module._buffers for name in shapes}
    shapes = {name: shape for name, shape in shapes.items() if not is_initialized(owners[name][name])}
    left = {name: owners[name][name] for name in shapes}
    narrow = {name: getattr(module, name) for name in settings}
    for name, (_, shape) in shapes.items():
        empty = torch.empty(shape, dtype=left[name].dtype, device=left[name].device)
        owners[name][name] = nn.Parameter(empty, False) if isinstance(left[name], nn.Parameter) else empty
    vars(module).update(settings)
    yield
    vars(module).update(narrow | {_KEPT: kept_constants})
    for name, (axis, _) in shapes.items():
        computed = owners[name][name].detach()
        owners[name][name] = left[name]
        kept = torch.tensor(index, dtype=torch.long, device=computed.device)
        left[name].data = computed.index_select(axis, kept).to(left[name])
        mark_initialized([left[name]])
