"""Layers of several kinds, such as dense ones before mixtures of experts: which config makes the layers that are left.

Fields such as `first_k_dense_replace`, `mlp_only_layers` or `attn_layer_period` say it by number. What they mean is not known
here: values that fit the layers left are tried, and the shapes that the native class then makes on `meta` prove one of them.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from typing import Any

from hf_freeze.architectures.base import Architecture, Stack, read
from hf_freeze.architectures.fields import change, shapes_of_config

_NAMES = re.compile(r"\w*(layer|dense|sparse|step|interval|period|offset|every|block_types)\w*")
_MOST = 200  # values tried one by one, and then several at a time


def tells_kinds(name: str) -> bool:
    """Whether a config field with this name may tell which layers are of which kind."""
    return _NAMES.fullmatch(name.rpartition(".")[2]) is not None


def fields_of_kinds(
    config: Any, architecture: Architecture, kept: dict[str, list[int]], changed: dict[str, Any]
) -> dict[str, Any]:
    """The fields, beside `changed`, that have a native `config` make the layers that are left: of each stack in `kept`, the old
    layers of these numbers, in this order. A stack for which no values are found has none.

    Raises ValueError if caches would then take layers for those of another kind.
    """
    found: dict[str, Any] = {}
    for name, numbers in kept.items():
        stack = architecture.stacks[name]
        if stack.differ or stack.absent:
            found |= _search(config, stack, numbers, changed | found)
    return found


def _search(config: Any, stack: Stack, numbers: Sequence[int], changed: dict[str, Any]) -> dict[str, Any]:
    old = _kinds(config, stack)
    wanted = [old[number] for number in numbers]
    wanted[0] = wanted[0] | {(name, shape) for name, shape in old[0] if name in stack.unread}  # they are moved there
    if (before := _kinds(change(config, **changed), stack)) == wanted:
        return {}
    candidates = list(islice(_candidates(config, stack, numbers, wanted), _MOST))
    # If no config makes these layers, `merge` will say so; caches need only the types of layers.
    of_types = next((v for v in ({}, *candidates) if _has_types(config, stack, numbers, changed | v)), None)
    if of_types is None:
        types = types_of_layers(config, stack)
        raise ValueError(
            f"no config of transformers makes a {config.model_type} of layers of the types {[types[n] for n in numbers]}, in "
            f"this order; keep other layers of {types}"
        )
    tried: list[tuple[bool, dict[str, Any]]] = []
    for values in candidates:
        if (after := _made(config, stack, changed | values)) == wanted:
            return values
        if after:
            tried.append((after == before, values))
    tried.sort(key=lambda one: one[0])  # those that move something first
    several = (chosen for count in (2, 3) for chosen in combinations((values for _, values in tried), count))
    for chosen in islice(several, _MOST):
        values = {name: value for one in chosen for name, value in one.items()}
        if len(values) == sum(map(len, chosen)) and _made(config, stack, changed | values) == wanted:
            return values
    return of_types


def _kinds(config: Any, stack: Stack) -> list[Any]:
    """What tells the kind of each layer: the names and shapes of its parameters."""
    kinds: dict[int, set[Any]] = {}
    for name, shape in shapes_of_config(config).items():
        if match := re.match(rf"{stack.layer_pattern}\.(.+)", name):
            kinds.setdefault(int(match[1]), set()).add((match[2], shape))
    return [kinds[number] for number in sorted(kinds)]


def _made(config: Any, stack: Stack, values: dict[str, Any]) -> list[Any]:
    """The kinds of layers with these values; none if the config class refuses them."""
    try:
        return _kinds(change(config, **values), stack)
    except Exception:  # whatever a config class raises
        return []


def _candidates(config: Any, stack: Stack, numbers: Sequence[int], wanted: list[Any]) -> Iterator[dict[str, Any]]:
    """Values of fields that may tell the kinds `wanted` of the layers `numbers`, the likely ones first."""
    path, _, _ = stack.depth.rpartition(".")
    owner, depth, left = read(config, path) if path else config, read(config, stack.depth), range(len(numbers))
    fields = {name: value for name, value in owner.to_dict().items() if tells_kinds(name)}
    starts = [place for place in left[1:] if wanted[place] != wanted[place - 1]]
    counts = dict.fromkeys((1, len(numbers), *starts, *(place - 1 for place in starts)))
    classes = [[place for place in left if wanted[place] == wanted[first]] for first in (0, *starts)]
    likely: dict[str, list[Any]] = {}
    further: dict[str, list[Any]] = {}
    for name, value in fields.items():
        if type(value) is int and 0 <= value <= depth:  # the first layers, or a period
            likely[name] = [sum(number < value for number in numbers)]
            further[name] = list(counts)
        elif isinstance(value, list | tuple) and all(type(item) is int for item in value):  # numbers of layers
            likely[name] = [[place for place in left if numbers[place] in value]]
            further[name] = classes
        elif isinstance(value, list | tuple) and value:  # kinds that repeat up to the depth
            likely[name] = [[value[number % len(value)] for number in numbers]]
    prefix = f"{path}." if path else ""
    for values in (likely, further):
        for name, items in values.items():
            yield from ({f"{prefix}{name}": item} for item in items if item != fields[name])
        for name in (name for name in fields if name.endswith("_period") and values is likely):
            period, offset = fields[name], fields.get(rest := f"{name.removesuffix('period')}offset")
            chosen = [number % period == offset for number in numbers]
            alike = (
                (p, o) for p in range(1, len(numbers) + 2) for o in range(p) if [i % p == o for i in left] == chosen
            )
            yield from ({f"{prefix}{name}": p, f"{prefix}{rest}": o} for p, o in islice(alike, 1))


def _has_types(config: Any, stack: Stack, numbers: Sequence[int], changed: dict[str, Any]) -> bool:
    """Whether `layer_types`, from which caches are made, has the types of the layers left, or the config has no such list."""
    old = types_of_layers(config, stack)
    try:
        return not old or types_of_layers(change(config, **changed), stack) == [old[number] for number in numbers]
    except Exception:  # whatever a config class raises for values that it refuses
        return False


def types_of_layers(config: Any, stack: Stack) -> list[Any]:
    """The type of each layer, by which it gets a mask and a cache, such as "sliding_attention"; empty if none is told."""
    path, _, _ = stack.depth.rpartition(".")
    types = getattr(read(config, path) if path else config, "layer_types", None) or ()
    return list(types) if len(types) == read(config, stack.depth) else []
