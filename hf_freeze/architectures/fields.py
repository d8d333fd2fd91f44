"""What the integers of a config mean, found by changing one of them and looking at what moves in the model on `meta`."""

import copy
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from hf_freeze.architectures.base import Architecture, Stack, read
from hf_freeze.architectures.roles import EXPERT_OUTPUT
from hf_freeze.architectures.shrink import EXPERT_COUNTS, TABLE_WIDTHS, integer_fields, sizes_in

Shapes = dict[str, tuple[int, ...]]


def with_fields(architecture: Architecture, config: Any) -> Architecture:
    """The description of the model of a small `config`, with the config fields of depths, widths and vocabulary filled in.

    A field that cannot be found stays empty, and `refusals` say so.
    """
    fields = _Fields(config, architecture)
    refusals = dict(architecture.refusals)
    stacks = {}
    for name, stack in architecture.stacks.items():
        expert_count, expert_axes = fields.expert_count(stack)
        depth, lists = fields.depth(stack)
        if depth is None:
            refusals.setdefault("layers", f"{name}: no field of the config holds the number of its layers")
        stacks[name] = replace(
            stack,
            depth=depth or "",
            per_layer=lists,
            width=fields.width(stack),
            expert_width=fields.expert_width(stack),
            expert_count=expert_count,
            expert_axes=expert_axes,
        )
    vocabulary = {table: fields.moving(f"{table}.weight", axes=(0,)) for table in architecture.token_tables}
    if not all(vocabulary.values()) or not vocabulary:
        refusals.setdefault("vocabulary", "no field of the config holds the number of its tokens")
    tables = {table: field for table, field in vocabulary.items() if field is not None}
    return replace(architecture, stacks=stacks, token_tables=tables, refusals=refusals)


def change(config: Any, **changes: Any) -> Any:
    """A config of the same class with other values; a dotted name lies in a nested config."""
    data = config.to_dict()  # which is a copy
    for name, value in changes.items():
        *path, last = name.split(".")
        inner = data
        for part in path:
            inner = inner[part]
        inner[last] = value
    return type(config).from_dict(data)


def hidden_sizes(config: Any, field: str, value: int) -> dict[str, int]:
    """The config fields to set for `value` hidden channels: `field`, and those of token tables that are as wide by now."""
    sizes = dict(integer_fields(config.to_dict()))
    path = field.rpartition(".")[0]
    widths = [f"{path}.{name}" if path else name for name in TABLE_WIDTHS]
    return {name: value for name in (field, *widths) if name in sizes and sizes[name] == sizes[field]}


def per_layer_fields(config: Any, depth_field: str) -> tuple[str, ...]:
    """The fields that hold a list with an entry for each layer of the stack whose depth is in `depth_field`."""
    path, _, _ = depth_field.rpartition(".")
    data = config.to_dict()
    for part in filter(None, path.split(".")):
        data = data[part]
    depth = data.get(depth_field.rpartition(".")[2])
    prefix = f"{path}." if path else ""
    return tuple(
        f"{prefix}{name}"
        for name, value in data.items()
        if isinstance(value, list | tuple)
        and len(value) == depth
        and not name.endswith(("_ids", "token_id", "architectures"))
    )


def multiples_of(config: Any, depth_field: str) -> tuple[str, ...]:
    """The other fields that hold a number of layers, by their names, and equal the depth or a multiple of it."""
    depth, data = config.to_dict().get(depth_field), config.to_dict()
    names = sizes_in(config).get("layers", ())
    return tuple(name for name in names if depth and name != depth_field and data[name] % depth == 0)


def shapes_of_config(config: Any, **changes: Any) -> Shapes:
    """Name -> shape of each parameter of the model with other values for some fields; empty if transformers cannot build it."""
    model = _built(config, **changes)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}


def _built(config: Any, **changes: Any) -> Any:
    """The model on `meta`; one without anything if transformers cannot build it."""
    try:
        changed = change(config, **changes) if changes else copy.deepcopy(config)  # some classes change it
        with torch.device("meta"):
            return AutoModel.from_config(changed)
    except Exception:  # whatever the native classes raise for a config that they refuse or cannot build
        return nn.Module()


class _Fields:
    """Finds fields of a small `config`. Each function returns None for a field that it does not find."""

    def __init__(self, config: Any, architecture: Architecture) -> None:
        self._config = config
        self._stacks = architecture.stacks.values()
        self._integers = dict(integer_fields(config.to_dict()))
        self._shapes = shapes_of_config(config)

    def depth(self, stack: Stack) -> tuple[str | None, tuple[str, ...]]:
        """The field that holds the depth, and those that hold a list with an entry for each layer.

        A list that is as long belongs to another stack if the depth does not move with it: LED's windows are those of its
        encoder.
        """
        layers = stack.layers.removesuffix("{}")

        def depth(names: Iterable[str]) -> int:
            return len({name.removeprefix(layers).split(".")[0] for name in names if name.startswith(layers)})

        count = depth(self._shapes)
        candidates = [name for name, value in self._integers.items() if value == count]
        for name in sorted(candidates, key=lambda name: ("layer" not in name, name)):
            for lists in dict.fromkeys((per_layer_fields(self._config, name), ())):
                longer = {n: [*(entries := read(self._config, n)), entries[-1]] for n in lists}
                if depth(shapes_of_config(self._config, **longer, **{name: count + 1})) == count + 1:
                    return name, lists
        return None, ()

    def width(self, stack: Stack) -> str | None:
        """The field that holds the number of neurons."""
        if (
            stack.apart
            or not stack.ffn
            or any(not stack.has(name, number) for name in stack.ffn for number in range(2))
        ):
            return None
        weight = f"{stack.layers.format(0)}.{stack.ffn[-1]}.weight"
        inside = [f"{other.layer_pattern}.{linear}." for other in self._stacks for linear in other.ffn]
        return self._deciding(weight, (0, 1), inside)

    def expert_width(self, stack: Stack) -> str | None:
        """The field that holds the number of neurons of each expert."""
        inside = [f"{other.layer_pattern}.{module}." for other in self._stacks for module in other.experts]
        fields = set()
        for module in stack.experts:
            layer = next(number for number in range(len(self._shapes)) if stack.has(module, number))
            weight = f"{stack.layers.format(layer)}.{module}.{EXPERT_OUTPUT}"
            fields.add(self._deciding(weight, (2,), inside))
        return fields.pop() if len(fields) == 1 else None

    def expert_count(self, stack: Stack) -> tuple[str | None, dict[str, int]]:
        """The field that holds the number of experts, and for each tensor of a layer with an entry for each expert the axis of
        these. None if anything else moves with it, such as a router with more outputs, or if a table names experts by their
        numbers."""
        parents = tuple(f"{module.rpartition('.')[0]}." for module in stack.experts)
        field = next((name for name in self._integers if re.fullmatch(rf"(?:.*\.)?(?:{EXPERT_COUNTS})", name)), None)
        if not parents or field is None:
            return None, {}
        old, new = self._integers[field], self._integers[field] + 9
        before, after = (dict(_tensors(_built(self._config, **{field: count}))) for count in (old, new))
        axes: dict[str, int] = {}
        for name, tensor in before.items():
            inside = re.sub(rf"^{stack.layer_pattern}\.", "", name)
            is_ours = inside != name and inside.startswith(parents)
            if is_ours and not tensor.is_floating_point():
                return None, {}
            shape, other = tuple(tensor.shape), tuple(after[name].shape) if name in after else ()
            if shape == other:
                continue
            moved = [axis for axis, size in enumerate(shape) if other[axis : axis + 1] != (size,)]
            if not is_ours or [(shape[axis], other[axis : axis + 1]) for axis in moved] != [(old, (new,))]:
                return None, {}
            axes[inside] = moved[0]
        matrices = [name for name in axes if name.rpartition(".")[0] in stack.experts]
        return (field, axes) if len(axes) > len(matrices) >= 2 * len(stack.experts) else (None, {})

    def _deciding(self, weight: str, axes: tuple[int, ...], inside: list[str]) -> str | None:
        """The field that decides one dimension of the matrix `weight`, of other tensors only those whose names begin with a
        pattern in `inside`, and any number: some families round it, or give it to experts too. SigLIP has one outside of
        layers."""
        name = self.moving(weight, axes)
        if name is None:
            return None
        after = shapes_of_config(self._config, **{name: 13})
        moved = [tensor for tensor in self._shapes if self._shapes[tensor] != after.get(tensor)]
        alone = all(any(re.match(pattern, tensor) for pattern in inside) for tensor in moved)
        return name if alone and 13 in after.get(weight, ()) else None

    def moving(self, weight: str, axes: tuple[int, ...]) -> str | None:
        """The field that decides one dimension of the matrix `weight` alone, and equals it."""
        before = self._shapes.get(weight)
        if before is None:
            return None
        hidden = getattr(self._config.get_text_config(), "hidden_size", None)
        moves = [0] * (len(before) - 1) + [8]
        for name, value in self._integers.items():
            if value not in {before[axis] for axis in axes} or value == hidden or name.endswith("token_id"):
                continue
            after = shapes_of_config(self._config, **{name: value + 8}).get(weight)
            if after is not None and sorted(a - b for a, b in zip(after, before, strict=True)) == moves:
                return name
        return None


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
