"""Select hidden channels: the columns and rows that read or write the residual stream, in any model that has it."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.base import Architecture, base_name, is_of_predecessor, read, set_fields
from hf_freeze.architectures.channels import NotFound, pattern_of, set_sizes_around, thin
from hf_freeze.architectures.hidden import channels_of, check_head, narrow, rescale
from hf_freeze.compat.transformers import mark_uninitialized
from hf_freeze.layers.constants import thin_constants
from hf_freeze.layers.derived import dense_class, taken
from hf_freeze.layers.factorized_embedding import Factors
from hf_freeze.seeded import Origin
from hf_freeze.surgery.replacing import (
    effective_weight,
    finished,
    is_dense,
    or_finalize,
    put,
    select_features,
    set_values,
)
from hf_freeze.surgery.vocabulary import output_name, token_tables


@dataclass(frozen=True)
class Channels:
    """The channels of one module.

    `name`: its full name. `axes`: its parameters and buffers, as natively, with their axes along the channels. `reads`: whether
    it sums over the channels, as a linear over its inputs; `writes`: whether it writes them, as a linear its outputs, or scales
    them, as a norm. Few do both. `norm`: the norm, by its full name, whose outputs it gets.
    """

    name: str
    axes: dict[str, tuple[int, ...]]
    reads: bool
    writes: bool
    norm: str | None


def channels_in(model: Any, method: str) -> list[Channels]:
    """Every module with hidden channels, in the model's order. `method` asks for them.

    Raises ValueError for a model of which nothing is proved, and if a method has put in a module that cannot lose channels.
    """
    found = channels_of(model)
    native: dict[str, dict[str, tuple[int, ...]]] = {}
    for pattern, axes in found.axes.items():
        module, _, tensor = pattern.rpartition(".")
        native.setdefault(module, {})[tensor] = axes
    modules = dict(model.named_modules())
    patterns = {name: pattern_of(model, name) for name in modules}
    size = hidden_channels(model)
    channels: list[Channels] = []
    inside: tuple[str, ...] = ()  # layers of methods that can lose channels; what is in them is theirs
    for name, module in modules.items():
        if name.startswith(inside or "\n"):
            continue
        pattern = patterns[name]
        axes = {tensor: places for tensor, places in native.get(pattern, {}).items() if places}
        own = module._parameters | module._buffers
        if _is_native(module):  # not all layers have all of it
            axes = {tensor: places for tensor, places in axes.items() if own.get(tensor) is not None}
        if axes and _can_lose(module):
            inside = (*inside, f"{name}.")
        elif (axes and not _is_native(module)) or (
            pattern not in native and any(tensor is not None and size in tensor.shape for tensor in own.values())
        ):
            _refuse(name, module, method)
        if axes:
            places = [
                (f"{pattern}.{tensor}".lstrip("."), axis) for tensor, own_axes in axes.items() for axis in own_axes
            ]
            read = [place in found.reads for place in places]
            norm = found.norms.get(pattern)
            channels.append(Channels(name, axes, any(read), not all(read), _at(norm, name, modules, patterns)))
    return channels


def _can_lose(module: Any) -> bool:
    if isinstance(module, Factors):
        return not hasattr(module, "tails")  # bands have a projection each
    # A table of integers can lose rows, but not channels.
    return getattr(module, "selectable", False) and hasattr(module, "selected") and not is_dense(module)


def _is_native(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.", "transformers."))


def _refuse(name: str, module: nn.Module, method: str) -> None:
    if is_of_predecessor(f"{name}."):
        raise ValueError(
            f"method {method!r}: {name!r} is removed when training ends; put {method!r} first, or finalize() before"
        )
    if _is_native(module):
        raise ValueError(
            f"method {method!r}: {name!r} has no like in the small model on which hidden channels are found"
        )
    raise ValueError(
        f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made, and which cannot lose "
        f"channels; put {method!r} before that method, or merge() first{or_finalize(module)}"
    )


def _at(pattern: str | None, name: str, modules: dict[str, Any], patterns: dict[str, str]) -> str | None:
    """The module of this pattern in the layer of `name`."""
    for number in (part for part in name.split(".") if part.isdigit()) if pattern else ():
        pattern = pattern.replace("*", number, 1)  # type: ignore[union-attr]
    return pattern if pattern in modules else None


def hidden_channels(model: Any) -> int:
    """The number of channels that a model has now. Raises ValueError if its parts have different numbers."""
    axes = channels_of(model).axes
    sizes: dict[int, str] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, Factors) or _can_lose(module):  # their tensors have other shapes
            inside = (*inside, f"{name}.")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not name.startswith(inside or "\n"):
            for axis in axes.get(pattern_of(model, name), ()):
                sizes.setdefault(tensor.shape[axis], name)
    if len(sizes) != 1:
        raise ValueError(f"its parts have hidden states of different sizes: {sizes}")
    return next(iter(sizes))


def keep_channels(model: Any, architecture: Architecture, index: Sequence[int], method: str) -> None:
    """Leave the channels `index`, with arbitrary values. The caller must tie tied parameters again."""
    check_head(model, architecture.hidden_field)
    set_sizes_around(model, channels_of(model), hidden_channels(model), len(index))
    for place in channels_in(model, method):
        module = model.get_submodule(place.name)
        if not _can_lose(module):
            constants = [
                tensor
                for tensor in place.axes
                if tensor in module._non_persistent_buffers_set
                or architecture.component(base_name(model, f"{place.name}.{tensor}")) == "constant"
            ]
            if constants:
                thin_constants(module, place.axes, constants, index)
            else:
                thin(module, place.axes, index)
            mark_uninitialized(module)
        put(model, place.name, _thinner(module, place, index) if _can_lose(module) else module)


def take_channels(model: Any, source: Any, index: Sequence[int], method: str) -> None:
    """Give `model`, which has lost the others, the values of the channels `index` of `source`."""
    for place in channels_in(source, method):
        old = source.get_submodule(place.name)
        new: Any = model.get_submodule(place.name)
        if _can_lose(old):
            put(model, place.name, new := _thinner(old, place, index))
        else:
            for tensor, axes in place.axes.items():
                values = getattr(old, tensor)
                for axis in axes:
                    values = taken(values, axis, index)
                set_values(getattr(new, tensor), values)
            others = (old._parameters | old._buffers).keys() - place.axes.keys()
            for tensor in others:
                if getattr(old, tensor) is not None and getattr(new, tensor).shape == getattr(old, tensor).shape:
                    set_values(getattr(new, tensor), getattr(old, tensor).detach())
        finished(model, new)


def _thinner(module: Any, place: Channels, index: Sequence[int]) -> Any:
    """A copy of the layer of a method with the channels `index`."""
    if isinstance(module, Factors):
        thinner: Any = copy.deepcopy(module)
        thinner.projection = nn.Parameter(taken(module.projection, 1, index), module.projection.requires_grad)
        if hasattr(thinner, "in_features"):
            thinner.in_features = len(index)
        return thinner
    for axis in place.axes["weight"]:
        module = select_features(module, index, outputs=axis == int(dense_class(module) is Conv1D))
    return module


def channel_origins(
    model: Any, architecture: Architecture, index: Sequence[int], method: str, seeded: Iterable[str]
) -> dict[str, Origin]:
    """The origins of the parameters when the channels `index` stay. `seeded`: components that a seed regenerates; raises
    ValueError if one has a parameter that loses channels along two axes."""
    origins: dict[str, Origin] = {}
    for place in channels_in(model, method):
        for tensor, axes in place.axes.items():
            name = base_name(model, f"{place.name}.{tensor}")
            value = getattr(model.get_submodule(place.name), tensor, None)
            if value is None or not isinstance(value, nn.Parameter):
                continue
            if len(axes) > 1 and architecture.component(name) in seeded:
                raise ValueError(
                    f"method {method!r}: {name!r} reads and writes hidden channels, and a seed regenerates it: it cannot lose "
                    f"both at once; put {method!r} first, or leave that component out of Freeze"
                )
            axis = min(axes)
            origins[name] = Origin(name, axis, tuple(index), value.shape[axis])
    return origins


@torch.no_grad()
def channel_magnitudes(model: Any, method: str) -> torch.Tensor:
    """fp32 (channels,): √(w r) of each channel. w sums over all matrices that write it the mean square of their weights for this
    channel, divided by that of the whole matrix; r does so over those that read it. Norms and biases do not count."""
    sums = {True: torch.zeros(hidden_channels(model)), False: torch.zeros(hidden_channels(model))}
    reads = channels_of(model).reads
    for place in channels_in(model, method):
        module = model.get_submodule(place.name)
        pattern = pattern_of(model, place.name)
        for tensor, axes in place.axes.items():
            value = _dense(module, tensor)
            if value is None or value.ndim < 2:
                continue
            for axis in axes:
                squares = value.float().square().mean([a for a in range(value.ndim) if a != axis])
                sums[(f"{pattern}.{tensor}", axis) in reads] += (squares / squares.mean().clamp(min=1e-30)).cpu()
    return (sums[True] * sums[False]).sqrt()


def _dense(module: Any, tensor: str) -> torch.Tensor | None:
    """The values of a native parameter, also if a layer of another method computes them."""
    if tensor == "weight" and _can_lose(module):
        weight = module.dense_weight().detach() if isinstance(module, Factors) else effective_weight(module)
        return weight.T if dense_class(module) is Conv1D else weight
    value = getattr(module, tensor, None)
    return value.detach() if isinstance(value, torch.Tensor) else None


def widen_natively(model: Any, architecture: Architecture, method: str) -> None:
    """Prepare a variant that has lost channels for a native class of its width: set the config fields that would follow, and let
    weights absorb the scales that would. Raises ValueError where no native model computes the same."""
    before, field = model.config.native_before_methods, architecture.hidden_field
    try:
        how = narrow(model, field, architecture.token_tables)
        if how.fields and not architecture.attentions(before):
            raise NotFound("the size of its heads is not known")
    except NotFound as error:
        raise ValueError(f"method {method!r} cannot be merged on {architecture.model_type}: {error}") from None
    found, output = channels_of(model), output_name(model, architecture)
    norm = found.norms.get(pattern_of(model, output)) if output is not None else None
    norms = [name for name, _ in model.named_modules() if norm is not None and pattern_of(model, name) == norm]
    tables, ratio = token_tables(model, architecture), read(before, field) / read(model.config, field)
    rescale(model, how, tables, norms, ratio)
    # a scale that no checkpoint holds: as a native class will make it
    for table in tables.values() if how.tables else ():
        for name in table._non_persistent_buffers_set:
            table._buffers[name] = table._buffers[name] / ratio ** (how.tables / 2)
    path = field.rpartition(".")[0]
    size = next(iter(architecture.attentions(before).values())).head_size(before) if how.fields else 0
    set_fields(model.config, {f"{path}.{name}" if path else name: size for name in how.fields})
