"""A derived description as plain data, for the config of a variant: compact, with a digest, and untrusted when it is read."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hf_freeze.architectures.base import Architecture, Attention, Stack, read
from hf_freeze.architectures.blocks import LAYOUTS
from hf_freeze.architectures.examples import example_batch
from hf_freeze.architectures.shrink import sizes_in

_PLAIN = ("tasks", "embeddings", "norms", "constants", "token_tables", "refusals", "hidden")
_OR_NONE = ("width", "activation")  # None if they are not stored
_LONGEST, _MOST = 300, 20_000  # characters of a name, items in a list
_LARGEST_HEADS, _LARGEST_WIDTH = 1 << 12, 1 << 18


def to_data(architecture: Architecture, version: str) -> dict[str, Any]:
    """The description as JSON data. `version`: that of transformers."""
    data = {name: _plain(getattr(architecture, name)) for name in _PLAIN}
    data["stacks"] = {name: _compact(stack) for name, stack in architecture.stacks.items()}
    return {"transformers": version, "digest": _digest(data), **data}


def from_data(data: Any, config: Any) -> Architecture:
    """The description that `to_data` wrote. Raises ValueError for anything else."""
    model_type = config.model_type.removeprefix("hf_freeze_")
    try:
        if not isinstance(data, dict):
            raise ValueError(f"it is a {type(data).__name__}, not a dict")
        _check_plain(data)
        body = {name: value for name, value in data.items() if name not in ("transformers", "digest")}
        if data["digest"] != _digest(body):
            raise ValueError("its digest does not match: it was changed by hand")
        if missing := sorted({*_PLAIN, "stacks"} - {"hidden"} - body.keys()):  # older descriptions lack `hidden`
            raise ValueError(f"it has no {missing[0]!r}")
        architecture = _built(
            Architecture,
            body,
            model_type=model_type,
            sizes=sizes_in(config),
            tiny={},
            tiny_inputs=partial(example_batch, config),
        )
        _check_fields(architecture, config)
        return architecture
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, KeyError):
            reason = f"it has no {error.args[0]!r}"
        else:
            reason = str(error) if type(error) is ValueError else "it has values of wrong types"
        raise ValueError(f"the stored description of {model_type} cannot be read: {reason}") from None


def _compact(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults."""
    data = {}
    for field in fields(value):
        item = getattr(value, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if item != default:
            data[field.name] = _plain(item)
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Attention | Stack):
        return _compact(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _built(described: Any, data: Any, **further: Any) -> Any:
    """An object of this dataclass of `data`, the values of its fields, and of `further` ones. Raises ValueError for an unknown
    field, a field that is missing, and a value of another type or outside its limits."""
    owner = described.__name__.lower()
    hints, values = get_type_hints(described), dict(further)
    for name, value in data.items():
        if name not in hints or name in further:
            raise ValueError(f"{owner}: unknown field {name!r}")
        try:
            values[name] = _value(hints[name], value)
        except TypeError:
            raise ValueError(f"{owner}: {name} has a value of a wrong type") from None
    for field in fields(described):
        if field.name in _OR_NONE:
            values.setdefault(field.name, None)
        elif field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{owner}: it has no {field.name!r}")
    built = described(**values)
    _CHECKS.get(described, lambda _: None)(built)
    return built


def _value(hint: Any, value: Any) -> Any:
    """`value`, of JSON, as this type says. Raises TypeError for a value of another type."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        if type(value) not in parts:
            raise TypeError
        return value
    if kind is tuple and isinstance(value, list):
        return tuple(_value(parts[0], item) for item in value)
    if kind is dict and isinstance(value, dict):
        return {_value(parts[0], name): _value(parts[1], item) for name, item in value.items()}
    if hint in (Stack, Attention) and isinstance(value, dict):
        return _built(hint, value)
    if type(value) is not hint:
        raise TypeError
    return value


def _check_stack(stack: Stack) -> None:
    if re.fullmatch(r"[^{}]*\{\}[^{}]*", stack.layers) is None:
        raise ValueError(f"layers={stack.layers!r} must have one {{}}, for the number")
    for name in ("neurons", "experts"):
        for part, width in getattr(stack, name).items():
            if not 0 < width <= _LARGEST_WIDTH:
                raise ValueError(f"{name} of {part!r}: {width} is outside 1..{_LARGEST_WIDTH}")
    for tensor, axis in stack.expert_axes.items():
        if not 0 <= axis <= 2:
            raise ValueError(f"expert_axes of {tensor!r}: {axis} is outside 0..2")


def _check_attention(attention: Attention) -> None:
    for name in ("heads", "size", "groups"):
        value = getattr(attention, name)
        if value is not None and (type(value) is not int or not 0 < value <= _LARGEST_HEADS):
            raise ValueError(f"{name}={value!r} is outside 1..{_LARGEST_HEADS}")
    if attention.layout not in LAYOUTS:
        raise ValueError(f"layout={attention.layout!r}: choose from {list(LAYOUTS)}")


_CHECKS: dict[Any, Callable[[Any], None]] = {Stack: _check_stack, Attention: _check_attention}


def _check_plain(value: Any, depth: int = 0) -> None:
    """Raise ValueError for data that no description holds."""
    if depth > 6 or (isinstance(value, list | dict) and len(value) > _MOST):
        raise ValueError("it is too large")
    if isinstance(value, str) and len(value) > _LONGEST:
        raise ValueError(f"a name of {len(value)} characters; the limit is {_LONGEST}")
    for item in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_plain(item, depth + 1)


def _check_fields(architecture: Architecture, config: Any) -> None:
    """Raise ValueError for a name of a config field that the config does not have."""
    stacks = architecture.stacks.values()
    counts = [*(stack.depth for stack in stacks), *architecture.token_tables.values()]
    counts += [architecture.hidden] if architecture.hidden else []
    counts += [stack.expert_count for stack in stacks if stack.expert_count]
    others = [name for stack in stacks for name in (stack.width, stack.expert_width, *stack.per_layer, *stack.scaled)]
    others += [attention.switch for stack in stacks for attention in stack.attentions.values()]
    for name in filter(None, (*counts, *others)):
        try:
            value = read(config, name)
        except AttributeError:
            raise ValueError(f"it names the config field {name!r}, which the config does not have") from None
        if name in counts and type(value) is not int:
            raise ValueError(f"it takes the config field {name!r} for a number")


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
