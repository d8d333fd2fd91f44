"""A derived description as plain data, for the config of a variant: compact, with a digest, and untrusted when it is read."""

import hashlib
import json
import re
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
        _check_types(Architecture, body)
        architecture = Architecture(
            model_type=model_type,
            tasks=tuple(body["tasks"]),
            stacks={name: _stack(value) for name, value in body["stacks"].items()},
            embeddings=tuple(body["embeddings"]),
            norms=tuple(body["norms"]),
            constants=tuple(body["constants"]),
            token_tables=dict(body["token_tables"]),
            refusals=dict(body["refusals"]),
            hidden=body.get("hidden", ""),  # older descriptions lack it
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


def _stack(data: dict[str, Any]) -> Stack:
    _check_types(Stack, data)
    if re.fullmatch(r"[^{}]*\{\}[^{}]*", data["layers"]) is None:
        raise ValueError(f"layers={data['layers']!r} must have one {{}}, for the number")
    for name in ("neurons", "experts"):
        for part, width in data.get(name, {}).items():
            if not 0 < width <= _LARGEST_WIDTH:
                raise ValueError(f"{name} of {part!r}: {width} is outside 1..{_LARGEST_WIDTH}")
    for tensor, axis in data.get("expert_axes", {}).items():
        if not 0 <= axis <= 2:
            raise ValueError(f"expert_axes of {tensor!r}: {axis} is outside 0..2")
    lists: dict[str, Any] = {
        name: tuple(data.get(name, ()))
        for name in ("ffn", "projections", "mixers", "others", "differ", "per_layer", "scaled", "unread")
    }
    blocks: dict[str, Any] = {
        "attentions": {kind: _attention(value) for kind, value in data["attentions"].items()},
        "absent": {part: tuple(numbers) for part, numbers in data.get("absent", {}).items()},
    }
    settings: dict[str, Any] = {"width": None, "activation": None} | data | lists | blocks
    return Stack(**settings)


def _attention(data: dict[str, Any]) -> Attention:
    _check_types(Attention, data)
    for name in ("heads", "size", "groups"):
        value = data.get(name)
        if value is not None and (type(value) is not int or not 0 < value <= _LARGEST_HEADS):
            raise ValueError(f"{name}={value!r} is outside 1..{_LARGEST_HEADS}")
    if data.get("layout", LAYOUTS[0]) not in LAYOUTS:
        raise ValueError(f"layout={data['layout']!r}: choose from {list(LAYOUTS)}")
    return Attention(**(data | {name: tuple(data.get(name, ())) for name in ("others", "biases", "resizes")}))


def _check_plain(value: Any, depth: int = 0) -> None:
    """Raise ValueError for data that no description holds."""
    if depth > 6 or (isinstance(value, list | dict) and len(value) > _MOST):
        raise ValueError("it is too large")
    if isinstance(value, str) and len(value) > _LONGEST:
        raise ValueError(f"a name of {len(value)} characters; the limit is {_LONGEST}")
    for item in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_plain(item, depth + 1)


def _check_types(described: Any, data: Any) -> None:
    """Raise ValueError unless `data` has values for the fields of this dataclass, of their types, and nothing else."""
    if not isinstance(data, dict):
        raise ValueError(f"{described.__name__.lower()}: a {type(data).__name__} instead of its fields")
    hints, owner = get_type_hints(described), described.__name__.lower()
    for name, value in data.items():
        if name not in hints:
            raise ValueError(f"{owner}: unknown field {name!r}")
        if not _fits(value, hints[name]):
            raise ValueError(f"{owner}: {name} has a value of a wrong type")
    for field in fields(described) if described is not Architecture else ():
        needed = field.default is MISSING and field.default_factory is MISSING and field.name not in _OR_NONE
        if needed and field.name not in data:
            raise ValueError(f"{owner}: it has no {field.name!r}")


def _fits(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is tuple:  # a list in JSON
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    return isinstance(value, dict) if hint in (Stack, Attention) else type(value) is hint


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
