"""A derived description as plain data, for the config of a variant: compact, with a digest, and untrusted when it is read."""

import hashlib
import json
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from hf_freeze.architectures.base import Architecture, Attention, Stack
from hf_freeze.architectures.blocks import LAYOUTS
from hf_freeze.architectures.examples import example_batch
from hf_freeze.architectures.shrink import sizes_in

_PLAIN = ("tasks", "embeddings", "norms", "constants", "token_tables", "refusals")
_LONGEST, _MOST = 300, 20_000  # characters of a name, items in a list
_LARGEST_HEADS = 1 << 12


def to_data(architecture: Architecture, version: str) -> dict[str, Any]:
    """The description as JSON data. `version`: that of transformers."""
    data = {name: _plain(getattr(architecture, name)) for name in _PLAIN}
    data["stacks"] = {name: _compact(stack) for name, stack in architecture.stacks.items()}
    return {"transformers": version, "digest": _digest(data), **data}


def from_data(data: Any, config: Any) -> Architecture:
    """The description that `to_data` wrote. Raises ValueError for anything else."""
    model_type = config.model_type.removeprefix("hf_freeze_")
    try:
        _check_plain(data)
        body = {name: value for name, value in data.items() if name not in ("transformers", "digest")}
        if data["digest"] != _digest(body):
            raise ValueError("its digest does not match: it was changed by hand")
        return Architecture(
            model_type=model_type,
            tasks=tuple(body["tasks"]),
            stacks={name: _stack(value) for name, value in body["stacks"].items()},
            embeddings=tuple(body["embeddings"]),
            norms=tuple(body["norms"]),
            constants=tuple(body["constants"]),
            token_tables=dict(body["token_tables"]),
            refusals=dict(body["refusals"]),
            sizes=sizes_in(config),
            tiny={},
            tiny_inputs=partial(example_batch, config),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error) if type(error) is ValueError else repr(error)
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
    lists: dict[str, Any] = {
        name: tuple(data.get(name, ())) for name in ("ffn", "projections", "others", "per_layer", "scaled")
    }
    blocks: dict[str, Any] = {
        "attentions": {kind: _attention(value) for kind, value in data["attentions"].items()},
        "absent": {part: tuple(numbers) for part, numbers in data.get("absent", {}).items()},
    }
    settings: dict[str, Any] = {"width": None, "activation": None} | data | lists | blocks
    return Stack(**settings)


def _attention(data: dict[str, Any]) -> Attention:
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


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
