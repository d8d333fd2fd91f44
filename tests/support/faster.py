"""What other libraries do slowly, and tests a million times: done faster in the process of the tests, with the same results."""

import copy
import functools
import logging
from types import SimpleNamespace
from typing import Any

import torch
from _pytest.logging import catching_logs
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding as MarianPositions

try:
    from transformers.integrations.heterogeneity.configuration_utils import HeterogeneousConfigMixin as _Above
except ImportError:  # of earlier versions
    _Above = PreTrainedConfig  # type: ignore[misc]

_COPIES: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
_ATOMS = frozenset(kind for kind, how in _COPIES.items() if how is copy._deepcopy_atomic)  # type: ignore[attr-defined]
_PLAIN = frozenset((bool, int, float, str, type(None)))

_field_of_transformers = PreTrainedConfig.__getattribute__
_setting_of_torch = nn.Module.__setattr__
_create_weight = MarianPositions.create_weight


@functools.cache
def _positions_of_transformers(*size: int) -> torch.Tensor:
    return _create_weight(SimpleNamespace(weight=torch.empty(size)))  # a module would draw, and move the random state


def install() -> None:
    PreTrainedConfig.__getattribute__ = _field
    _COPIES.update({dict: _copied_dict, list: _copied_list})
    nn.Module.__setattr__ = _set_attribute
    MarianPositions.create_weight = _positions
    if hasattr(catching_logs, "attached_loggers"):  # earlier versions of pytest only handle the root
        catching_logs.__enter__ = _attached


def _field(config: Any, name: str) -> Any:
    """transformers runs two functions in Python for each field that is read."""
    get = super(_Above, config).__getattribute__
    if "_heterogeneity_spec" in get("__dict__"):
        return _field_of_transformers(config, name)
    return get(get("attribute_map").get(name, name))


def _copied_dict(value: dict[Any, Any], memo: dict[int, Any], copied: Any = copy.deepcopy) -> dict[Any, Any]:
    """Configs are nested dicts of numbers and words, each of which Python looks up in the memo."""
    memo[id(value)] = result = {}
    for key, each in value.items():
        key = key if type(key) in _ATOMS else copied(key, memo)
        result[key] = each if type(each) in _ATOMS else copied(each, memo)
    return result


def _copied_list(value: list[Any], memo: dict[int, Any], copied: Any = copy.deepcopy) -> list[Any]:
    memo[id(value)] = result = []
    for each in value:
        result.append(each if type(each) in _ATOMS else copied(each, memo))
    return result


def _set_attribute(module: Any, name: str, value: Any) -> None:
    """torch first looks whether a number or a word is a parameter, a module or a buffer."""
    own = module.__dict__
    plain = type(value) in _PLAIN and "_buffers" in own
    if plain and not any(name in own[held] for held in ("_parameters", "_modules", "_buffers")):
        object.__setattr__(module, name, value)
    else:
        _setting_of_torch(module, name, value)


def _positions(module: Any) -> torch.Tensor:
    """transformers computes Marian's sinusoids one by one, twice for each model."""
    with torch.device("cpu"):
        return _positions_of_transformers(*module.weight.shape).to(module.weight.dtype, copy=True)


def _attached(logs: Any) -> Any:
    """Six times a test, pytest asks each of 3,000 loggers whether it hands on what it gets."""
    root = logging.root
    if logs.level is not None:
        logs.handler.setLevel(logs.level)
        logs.orig_level = root.level
        root.setLevel(min(root.level, logs.level))
    for logger in (root, *_apart(len(root.manager.loggerDict))):
        logger.addHandler(logs.handler)
        logs.attached_loggers.append(logger)
    return logs.handler


@functools.cache
def _apart(number: int) -> list[logging.Logger]:
    """The loggers that hand nothing on to the root, when there are `number`."""
    loggers = logging.root.manager.loggerDict.values()
    return [logger for logger in loggers if isinstance(logger, logging.Logger) and not logger.propagate]
