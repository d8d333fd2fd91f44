"""The values of a variant: fresh draws, and what a seed regenerates."""

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization

from hf_freeze.architectures.base import base_name
from hf_freeze.compat.transformers import draw, mark_initialized
from hf_freeze.layers.factorized_embedding import Factors
from hf_freeze.layers.fused_weight import Fused
from hf_freeze.layers.seeded_weight import Engine, SeededWeight
from hf_freeze.seeded import SeededTensor, digest
from hf_freeze.seeded.tiles import whole_only

ENGINES: dict[str, Engine | None] = {"resident": None, "streamed": Engine(), "fused": Fused()}


@contextlib.contextmanager
def no_draws(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Construct modules, in `dtype` if given, without drawing or tying weights, and without moving the global random state.
    Tensors that are never written take no memory."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), initialization.no_init_weights():
        torch.set_default_dtype(dtype or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def seeded_draws(seed: int | None) -> Iterator[None]:
    """Draw from `seed`, without moving the global random state; None: from that state."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def draw_like_marian(model: Any, fresh: Sequence[nn.Parameter]) -> None:
    """Glorot-uniform matrices, tables U(±sqrt(3/d)); biases 0 and norms 1/0 are native (Bogoychev, 2021)."""
    fresh_ids = {id(parameter) for parameter in fresh}
    for name, weight in model.named_parameters():
        # A layer that computes its weight has parameters of other names, and has drawn them with the variance of the weight.
        if weight.ndim != 2 or id(weight) not in fresh_ids or not name.endswith((".weight", ".projection")):
            continue
        below = base_name(model, name)
        component = model.architecture.component(below)
        if component == "embeddings":
            bound = (3 / weight.shape[1]) ** 0.5
            initialization.uniform_(weight, -bound, bound)
        elif component != "constant":
            outputs = weight.shape[1] // model.architecture.parts(below)
            bound = (6 / (weight.shape[0] + outputs)) ** 0.5
            initialization.uniform_(weight, -bound, bound)
    mark_initialized(fresh)


@torch.no_grad()
def balance_factors(model: Any, fresh: Iterable[nn.Parameter]) -> None:
    """Rescale fresh factors of token tables so that their product has the variance of a dense table."""
    drawn, tied = {id(parameter) for parameter in fresh}, model.all_tied_weights_keys
    for name, module in model.named_modules():
        if isinstance(module, Factors):
            names = [tied.get(n, n) for n in (f"{name}.weight", f"{name}.projection")]
            table, projection = map(model.get_parameter, names)
            if id(projection) not in drawn:
                continue
            gain = module.gain(projection)
            if math.isclose(gain, 1, rel_tol=1e-6):  # balanced before: rounding would move it
                continue
            for parameter, factor in ((table, 1 / gain), (projection, gain)):
                if id(parameter) in drawn:
                    parameter.mul_(factor)
                    drawn.discard(id(parameter))  # two modules may share it


@torch.no_grad()
def regenerate(model: Any) -> None:
    """Fill the seeded tensors, or put weights in that are generated where they are used (`seeded_execution`); enter their digests
    into the config, or check them against it.

    Raises ValueError for a tensor that does not match its digest.
    """
    engine = ENGINES[model.seeded_execution]
    for name, definition in model.seeded_tensors.items():
        parameter = model.get_parameter(name)
        if not parameter.is_meta and name not in model.on_disk:
            if engine is not None and whole_only(definition) is None:
                _unmake(model, name, parameter, SeededWeight(definition, parameter.dtype, parameter.device, engine))
                continue
            if isinstance(parameter, SeededWeight):
                value = generated(model, name, parameter.device).to(parameter.dtype)
                _put(model, parameter, nn.Parameter(value, requires_grad=False))
            else:
                parameter.copy_(generated(model, name, parameter.device))
            mark_initialized([model.get_parameter(name)])
            if model.paged is not None:
                model.paged.move(model.get_submodule(name.rpartition(".")[0]))


def _unmake(model: Any, name: str, parameter: Any, weight: SeededWeight) -> None:
    """Put `weight`, which has no memory, instead of `parameter`."""
    same = isinstance(parameter, SeededWeight) and parameter.definition == weight.definition
    if not same or base_name(model, name) not in model.config.digests:
        _check_digest(model, name, weight.engine.digest(weight))
    if not same or parameter.engine != weight.engine:
        _put(model, parameter, weight.as_parameter())


def _put(model: Any, old: Any, new: Any) -> None:
    """Replace a parameter under all of its names."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


@torch.no_grad()
def redraw(model: Any, definitions: Iterable[tuple[str, SeededTensor | None]]) -> None:
    """Give the parameters the values of `definitions` (None: those of the native class), in memory of their own: the backbone may
    share what they had before."""
    for name, definition in definitions:
        parameter = model.get_parameter(name)
        if definition is None:
            parameter.data = computed_constant(model, name, torch.empty_like(parameter)).data
        else:
            definition.check()
            parameter.data = definition.generate(parameter.device).to(parameter.dtype)
        mark_initialized([parameter])


def generated(model: Any, name: str, device: torch.device | str) -> torch.Tensor:
    """The values of a seeded tensor. Their digest goes into the config, or is checked against it.

    Raises ValueError if they do not match the digest.
    """
    value = model.seeded_tensors[name].generate(device)
    _check_digest(model, name, digest(value))
    return value


def _check_digest(model: Any, name: str, actual: str) -> None:
    expected = model.config.digests.setdefault(base_name(model, name), actual)
    if actual != expected:
        raise ValueError(
            f"digest mismatch: the regenerated tensor {base_name(model, name)!r} has {actual}, the config says {expected}; "
            "the config was changed, or this is not the hf_freeze that wrote it"
        )


def computed_constant(model: Any, name: str, memory: torch.Tensor) -> torch.Tensor:
    """The values that the native class gives a constant, such as positions, or a norm, written into `memory`."""
    owner, _, attribute = name.rpartition(".")
    module = copy.deepcopy(model.get_submodule(owner))
    module._parameters[attribute] = nn.Parameter(memory)  # the model's own may be sharded, or on meta
    # Native classes draw random values first: saving must not move the global random state.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        draw(model, module)
    return module.get_parameter(attribute)


@torch.no_grad()
def make_unstored(model: Any, constants: Iterable[str]) -> None:
    """Give seeded tensors, `constants` and empty buffers, which no checkpoint holds, values on the CPU, where accelerate's
    `init_empty_weights` has put the whole model on meta: what loads the checkpoint then need not know of them."""
    values = {name: generated(model, name, "cpu") for name in model.seeded_tensors}
    for name in constants:
        values[name] = computed_constant(model, name, torch.empty_like(model.get_parameter(name), device="cpu"))
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        entries = model.get_submodule(owner)._parameters  # accelerate would move what is set as an attribute
        on_meta = entries[attribute]
        entries[attribute] = nn.Parameter(value.to(on_meta.dtype), requires_grad=on_meta.requires_grad)
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if module._buffers[name] is not None and not module._buffers[name].numel():
                module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")


def promote_output_bias(model: Any) -> None:
    """Marian trains the bias of its softmax, which the native class holds as a buffer: make it a parameter, of the same key."""
    name = model.architecture.output_bias
    if model.config.init == "marian" and name is not None and name in model._buffers:
        value = model.get_buffer(name)
        delattr(model, name)
        model.register_parameter(name, nn.Parameter(value.detach().clone()))


def demote_output_bias(model: Any) -> None:
    """Undo `promote_output_bias`, for native code that expects the buffer."""
    name = model.architecture.output_bias
    if name is not None and name in model._parameters:
        value = model.get_parameter(name)
        delattr(model, name)
        model.register_buffer(name, value.detach())
