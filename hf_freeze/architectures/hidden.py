"""The hidden channels of a family: found on a small model (`channels.py`), and proved to be removable there."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoModel, initialization

from hf_freeze.architectures.base import full_name, set_fields
from hf_freeze.architectures.channel_search import Finder, Places
from hf_freeze.architectures.channels import (
    ChannelMap,
    NotFound,
    pattern_of,
    reads,
    set_sizes_around,
    sizes_outside_attention,
    tensors_in,
    thin,
)
from hf_freeze.architectures.describe import first_line
from hf_freeze.architectures.examples import masks_for
from hf_freeze.architectures.fields import change, hidden_sizes
from hf_freeze.architectures.probe import Probe, adds_one, difference, on_cpu, tie
from hf_freeze.architectures.roles import stacks_of
from hf_freeze.architectures.shrink import HEAD_SIZE, config_key, integer_fields, shrink
from hf_freeze.architectures.tasks import AUTO_CLASSES, native_classes
from hf_freeze.compat.transformers import mapped_class, quiet

T = TypeVar("T")

_SAME = 2e-4
_MOST_PARAMETERS = 50_000_000  # of a small model; those of nearly all families are below a million
_MOST_UNKNOWN = 4  # parameters that are tried both as readers and as writers
_MORE = "the native class derives more from {} than sizes, such as a scale"
_KNOWN: dict[Any, Any] = {}  # what was found, or why nothing was


def channels_of(model: Any) -> ChannelMap:
    """The channels of a native model or a variant, as its native class makes them. Raises NotFound."""
    return _found(*_small_of(model))[1]


def _small_of(model: Any) -> tuple[Any, Any]:
    """The native class of a model, and the config of the small model of this class."""
    config = getattr(model.config, "native_before_methods", model.config)
    return getattr(type(model), "native_class", type(model)), shrink(config)


def _once(key: Any, find: Callable[[], T]) -> T:
    """What `find()` gives, or the NotFound that it raises; it is called once in a process for each key."""
    if key not in _KNOWN:
        with quiet(), torch.random.fork_rng(devices=[]), on_cpu():
            try:
                _KNOWN[key] = find()
            except NotFound as error:
                _KNOWN[key] = NotFound(*error.args)  # without the frames of its traceback
    if isinstance(_KNOWN[key], NotFound):
        raise _KNOWN[key]
    return _KNOWN[key]


def _found(native_class: Any, small: Any) -> tuple[Probe, ChannelMap]:
    """The small model of a class, and its channels."""

    def find() -> tuple[Probe, ChannelMap]:
        task = next((task for task, cls in native_classes(type(small)).items() if cls is native_class), None)
        try:
            probe = Probe(small, task or "feature-extraction")
            count = probe.model.num_parameters()
            if count > _MOST_PARAMETERS:  # the search keeps all that its modules compute
                raise NotFound(f"its small model has {count:,} parameters, above {_MOST_PARAMETERS:,}")
            masks = masks_for(small, probe.model)
            with suppress(Exception):  # whatever the native forward raises for inputs that it does not take
                probe.run(**masks)
                probe.inputs |= masks
            with closing(Finder(probe.model, probe.inputs, stacks_of(probe.model))) as finder:
                flipped = finder.find()
                _check_idle(probe, finder.idle(flipped), flipped)
            return probe, _with_sizes(probe, finder.channels(flipped))
        except Exception as error:  # whatever the native forward raises
            raise NotFound(first_line(error)) from error

    return _once((native_class.__name__, config_key(small)), find)


def _check_idle(probe: Probe, idle: Iterable[Places], flipped: Iterable[Places]) -> None:
    """Raise NotFound for dimensions that do not matter, as a mask token for a classifier, unless the base model tells."""
    base = mapped_class(AUTO_CLASSES["feature-extraction"], type(probe.config))
    for unit in idle:
        axes = {} if type(probe.model) is base else _found(base, probe.config)[1].axes
        for name, axis in unit:
            known = axes.get(pattern_of(probe.model, name).removeprefix(f"{probe.model.base_model_prefix}."))
            if known is None or (axis in known) != (unit in flipped):
                raise NotFound(f"{name!r} does not matter for the outputs on small inputs")


def _with_sizes(probe: Probe, channels: ChannelMap) -> ChannelMap:
    """With the `sizes` outside attention, if the forward does not run as long as they are as before."""
    size = _size(probe.model, channels)
    try:
        _outputs(thinned(probe.model, channels, range(size // 2)), probe.inputs)
    except Exception:  # whatever the native forward raises for other shapes
        return replace(channels, sizes=sizes_outside_attention(probe.model, channels, size))
    return channels


def prove(probe: Probe, config: Any) -> str:
    """The config field that holds the number of hidden channels of the base model of `probe`, whose channels can be removed: a
    model whose channels come in equal pairs computes the same with one of each. Raises NotFound with the reason otherwise."""
    probe, channels = _found(type(probe.model), config)
    field = _field(config, channels)
    size = _size(probe.model, channels)
    half = list(range(size // 2))
    unknown = _unknown(probe.model, channels)
    if len(unknown) > _MOST_UNKNOWN:
        raise NotFound(f"{len(unknown)} of its parameters may read or write the states")
    reason = "a model with channels in pairs computes something else than with one of each"
    for choice in product((True, False), repeat=len(unknown)):
        reads = channels.reads | {place for place, is_read in zip(unknown, choice, strict=True) if is_read}
        paired = copy.deepcopy(probe.model)
        _pair(paired, replace(channels, reads=reads), size)
        expected = _outputs(paired, probe.inputs)
        narrow = thinned(paired, channels, half)
        try:
            same = _alike(_outputs(narrow, probe.inputs), expected)
        except Exception as error:  # whatever the native forward raises for other shapes
            raise NotFound(f"its forward does not run with fewer channels ({first_line(error, 90)})") from error
        if same:
            break
    else:
        raise NotFound(reason)
    if _reads_config(narrow, field, len(half), probe.inputs, expected):
        raise NotFound(f"its forward reads {field} from the config")
    return field


def _reads_config(narrow: Any, field: str, size: int, inputs: dict[str, Any], expected: list[torch.Tensor]) -> bool:
    """Whether a narrow model computes something else than `expected`, or fails, once its configs hold its own size."""
    _set_everywhere(narrow, field, size)
    try:
        return not _alike(_outputs(narrow, inputs), expected)
    except Exception:  # whatever the native forward raises
        return True


def check_head(model: Any, field: str) -> None:
    """Raise NotFound where models like `model` read the hidden size from the config as they run, such as for a scale of the
    logits: `prove` runs the base model alone."""
    native_class, small = _small_of(model)

    def check() -> None:
        probe, channels = _found(native_class, small)
        left = _size(probe.model, channels) // 4
        try:
            narrow = thinned(probe.model, channels, range(left))
            expected = _outputs(narrow, probe.inputs)
        except Exception as error:  # whatever the native forward raises for other shapes
            reason = f"does not run with fewer channels ({first_line(error, 90)})"
            raise NotFound(f"the forward of {native_class.__name__} {reason}") from error
        if _reads_config(narrow, field, left, probe.inputs, expected):
            raise NotFound(f"the forward of {native_class.__name__} reads {field} from the config")

    _once(("head", native_class.__name__, config_key(small), field), check)


def thinned(model: Any, channels: ChannelMap, index: Sequence[int]) -> Any:
    """A copy of a native `model` with the channels `index`."""
    narrow = copy.deepcopy(model)
    set_sizes_around(narrow, channels, _size(model, channels), len(index))
    for module, axes in places_in(narrow, channels):
        thin(module, axes, index)
    tie(narrow)
    return narrow


def places_in(model: nn.Module, channels: ChannelMap) -> Iterator[tuple[nn.Module, dict[str, tuple[int, ...]]]]:
    """(module, its parameters and buffers with their axes along the channels) of each module of a native model that has some."""
    for name, module in model.named_modules():
        prefix = pattern_of(model, name)
        own = {
            n: channels.axes.get(f"{prefix}.{n}" if prefix else n, ()) for n in (*module._parameters, *module._buffers)
        }
        if any(own.values()):
            yield module, {n: axes for n, axes in own.items() if axes}


def _size(model: nn.Module, channels: ChannelMap) -> int:
    module, axes = next(iter(places_in(model, channels)))
    name, (axis, *_) = next(iter(axes.items()))
    return getattr(module, name).shape[axis]


def _outputs(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return [t.clone() for t in tensors_in(dict(model(**copy.deepcopy(inputs)))) if t.is_floating_point()]


def _alike(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether outputs are the same, of the channels that are left."""
    return len(actual) == len(expected) and all(
        difference(x, y[..., : x.shape[-1]]) < _SAME for x, y in zip(actual, expected, strict=True)
    )


def _unknown(model: nn.Module, channels: ChannelMap) -> list[tuple[str, int]]:
    """The places of which a class does not tell whether they read or write."""
    found = {}
    for name, module in model.named_modules():
        for n in (*module._parameters, *module._buffers):
            pattern = pattern_of(model, f"{name}.{n}" if name else n)
            for axis in channels.axes.get(pattern, ()):
                if reads(module, n, axis) is None:
                    found[pattern, axis] = None
    return list(found)


@torch.no_grad()
def _pair(model: nn.Module, channels: ChannelMap, size: int) -> None:
    """Make the channels of the second half equal to those of the first, and have nothing read them."""
    first = torch.arange(size // 2)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        pattern = pattern_of(model, name)
        for axis in channels.axes.get(pattern, ()):
            half = tensor.index_select(axis, first)
            tensor.copy_(torch.cat([half, half * 0 if (pattern, axis) in channels.reads else half], axis))


def _set_everywhere(model: nn.Module, field: str, value: int) -> None:
    for module in model.modules():
        if hasattr(module, "config"):
            set_fields(module.config, hidden_sizes(module.config, field, value))


def _field(config: Any, channels: ChannelMap) -> str:
    """The field of a small config that all channels of its base model move with. Raises NotFound."""
    sizes = _sizes_on_meta(config, channels)
    if len(set(sizes)) != 1:
        raise NotFound("its hidden channels do not have one size")
    (size,) = set(sizes)
    for name, value in integer_fields(config.to_dict()):
        if value == size and not name.endswith("token_id"):
            with suppress(Exception):  # a config class may refuse the value
                if set(_sizes_on_meta(change(config, **hidden_sizes(config, name, 2 * size)), channels)) == {2 * size}:
                    return name
    raise NotFound("no one field of the config holds the number of all its hidden channels")


def _sizes_on_meta(config: Any, channels: ChannelMap) -> list[int]:
    with torch.device("meta"), initialization.no_init_weights():
        model = AutoModel.from_config(copy.deepcopy(config))
    return [
        getattr(module, name).shape[axis]
        for module, places in places_in(model, channels)
        for name, axes in places.items()
        for axis in axes
        if name in module._parameters
    ]


# -- natively ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Narrow:
    """How a native model of fewer channels, with the same other sizes, comes to compute the same.

    `fields`: config fields that are set to their own values, since they would follow the hidden size: "head_dim". With s the
    square root of (old width / new width), token tables are multiplied by s to the power `tables`, and the norm before the
    output matrix by s to the power `norm`: native classes may scale either by the hidden size. `adds_one`: whether that norm
    keeps its scale less 1.
    """

    fields: dict[str, Any]
    tables: int
    norm: int
    adds_one: bool


def narrow(model: Any, field: str, tables: Iterable[str]) -> Narrow:
    """How models like `model` are merged, proved on a small one. `field`: holds the hidden size; `tables`: token tables, below
    the base model. Raises NotFound with the reason where no native model computes the same."""
    native_class, small = _small_of(model)

    def find() -> Narrow:
        probe, channels = _found(native_class, small)
        how = _narrow(probe, channels, small, field, tables, 2)
        try:
            same = _narrow(probe, channels, small, field, tables, 4) == how
        except NotFound:
            same = False
        if not same:
            raise NotFound(_MORE.format(field))
        return how

    return _once(("narrow", native_class.__name__, config_key(small), field), find)


def _narrow(probe: Probe, channels: ChannelMap, small: Any, field: str, tables: Iterable[str], share: int) -> Narrow:
    """With one of `share` channels. Raises NotFound with the reason."""
    left = _size(probe.model, channels) // share
    smaller = thinned(probe.model, channels, range(left))
    expected, state = _outputs(smaller, probe.inputs), smaller.state_dict()
    native, fields = None, {}
    reason = Exception()
    for fields in ({}, {"head_dim": HEAD_SIZE}):
        try:
            native = Probe(change(small, **hidden_sizes(small, field, left), **fields), probe.task).model
            native.load_state_dict(state)
            break
        except Exception as error:  # whatever the native class raises for this config, or other shapes
            native, reason = None, error
    if native is None:
        if isinstance(reason, RuntimeError):
            name = re.search(r"size mismatch for (\S+):", str(reason))
            what = f" of {name[1]!r}" if name else ""
            raise NotFound(f"the native class derives other sizes{what} from {field} too, such as the size of a head")
        raise NotFound(f"the native class refuses a smaller {field} ({first_line(reason, 90)})")
    names = [full_name(native, table) for table in tables]
    norm = channels.norms.get(pattern_of(native, name)) if (name := _output(native)) else None
    norms = [n for n, _ in native.named_modules() if norm is not None and pattern_of(native, n) == norm]
    one = bool(norms) and adds_one(native.get_submodule(norms[0]))
    for power, norm_power in sorted(product((0, 1, -1, 2, -2), repeat=2), key=lambda pair: sum(map(abs, pair))):
        if norm_power and not norms:
            continue
        native.load_state_dict(state)
        found = Narrow(fields, power, norm_power, one)
        rescale(native, found, names, norms, share)
        if _alike(_outputs(native, probe.inputs), expected):
            return found
    raise NotFound(_MORE.format(field))


def _output(model: Any) -> str | None:
    """The name of the output matrix."""
    output = model.get_output_embeddings()
    return (
        next((name for name, module in model.named_modules() if module is output), None) if output is not None else None
    )


@torch.no_grad()
def rescale(model: Any, how: Narrow, tables: Iterable[str], norms: Iterable[str], ratio: float) -> None:
    """Multiply the tables and norms of these names as `how` says, `ratio` being that of the widths, in new memory."""
    done: dict[int, nn.Parameter] = {}
    for names, power, shift in ((tables, how.tables, 0), (norms, how.norm, int(how.adds_one))):
        factor = ratio ** (power / 2)
        for module in map(model.get_submodule, names if power else ()):
            for name in ("projection", "weight"):  # of factors, the second one
                if (old := module._parameters.get(name)) is not None:
                    if id(old) not in done:
                        done[id(old)] = nn.Parameter((old + shift) * factor - shift, old.requires_grad)
                    module._parameters[name] = done[id(old)]
                    break
    for module in model.modules():  # those that are tied
        for name, parameter in module._parameters.items():
            if id(parameter) in done:
                module._parameters[name] = done[id(parameter)]
