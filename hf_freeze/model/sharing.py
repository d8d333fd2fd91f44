"""Tensors on their way from a backbone to its variant: taken over without a copy, copied once at the end, or used up."""

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import full_name
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compat.transformers import is_packed, mark_initialized
from hf_freeze.layers.derived import features
from hf_freeze.layers.seeded_weight import SeededWeight
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import layers_kept

_BY_MAKING = "make_variant(copy=False), which gave its tensors to the variant; use the variant"


@torch.no_grad()
def share_tensors(old: Any, new: Any, *, converted: bool = True) -> None:
    """Give `new` the parameters and stored buffers of `old` that have the same name and shape, in the same memory, except for
    seeded ones. Those of the same name and another shape get the dtype of the old ones; with `converted`, a method fills them."""
    named = [*old.named_parameters(remove_duplicate=False), *old.named_buffers(remove_duplicate=False)]
    tensors = {name: tensor for name, tensor in named if not is_packed(tensor)}
    own: dict[int, nn.Parameter] = {}  # a tied parameter of `old` becomes a tied one of `new`
    for prefix, module in new.named_modules():
        if is_packed(module):
            continue
        unsaved = module._non_persistent_buffers_set
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            source = None if name in unsaved else tensors.get(full_name)
            if source is None:
                moved = tensor.to(old.device)
            elif source.shape == tensor.shape and full_name not in new.seeded_tensors:
                moved = source.detach()
            else:
                moved = torch.empty_like(tensor, device=source.device, dtype=source.dtype)
            if name in module._parameters:
                key = id(source) if source is not None and source.shape == tensor.shape else id(tensor)
                if key not in own:
                    own[key] = nn.Parameter(moved, requires_grad=tensor.requires_grad)
                moved = module._parameters[name] = own[key]
            else:
                module._buffers[name] = moved
            if source is not None and (converted or source.shape == tensor.shape):
                mark_initialized([moved])


def take_packed(old: Any, new: Any, method: Method | None) -> None:
    """Give `new` copies of the linears that bitsandbytes has packed in `old`, each where `method` has put its layer.

    Raises ValueError if `method` changes the weight of one of them.
    """
    architecture, linears = architecture_for(old), dict(new.named_modules())
    kept = layers_kept(method, architecture, old.config)
    stacks = {full_name(old, architecture.stacks[stack].layers[:-2]): numbers for stack, numbers in kept.items()}
    for name, packed in [(name, module) for name, module in old.named_modules() if is_packed(module)]:
        places = [name]
        for layers, numbers in stacks.items():
            if name.startswith(layers):
                old_number, _, rest = name.removeprefix(layers).partition(".")
                places = [f"{layers}{now}.{rest}" for now, number in enumerate(numbers) if number == int(old_number)]
        for place in places:
            linear: Any = linears.get(place)
            if f"{place}.weight" in new.seeded_tensors:
                continue
            fits = linear is not None and surgery.is_dense(linear) and features(linear) == features(packed)
            if method is not None and (method.facts.shares_layers or "blocks" in method.facts.holds or not fits):
                raise ValueError(
                    f"method {method.name!r} changes {name!r}, which bitsandbytes has packed: make the variant first, save it, "
                    "and open that with quantization_config="
                )
            copied = deepcopy(packed)
            mark_initialized([copied, *copied.parameters(), *copied.buffers()])
            new.set_submodule(place, copied)


@contextlib.contextmanager
def releasing(model: Any, new: Any, *, used_up: bool) -> Iterator[None]:
    """Inside, methods free the tensors of `model` that they have converted (`surgery.release`) if it is used up, and what they
    have filled in `new` goes to its files, if it has some (`paging.py`). A model is used up after an error, too."""
    if not used_up:
        yield
        return
    if new.paged is not None:
        new.paged.next_step()
    try:
        with surgery.releasing(model, new, new.paged):
            yield
    except Exception:
        use_up(model)
        raise


@torch.no_grad()
def copy_shared(old: Any, new: Any) -> None:
    """Copy the tensors of `new` that lie in the memory of `old`."""
    taken = {memory_of(tensor) for tensor in (*old.parameters(), *old.buffers())}
    for parameter in new.parameters():
        if memory_of(parameter) in taken:
            parameter.data = parameter.data.clone()
    for module in new.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and memory_of(buffer) in taken:
                module._buffers[name] = buffer.clone()


def use_up(model: Any, by: str = _BY_MAKING) -> None:
    """Free the tensors of `model`; a later use raises an error that says `by` what they were taken, and what to do."""
    for module in model.modules():
        if is_packed(module):  # its parameters cannot move to meta
            module._parameters.clear()
    nn.Module.to(model, "meta")

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"this {type(model).__name__} was used up by {by}, or copy=True")

    for name in ("forward", "generate", "merge", "save_pretrained", "state_dict"):
        setattr(model, name, refuse)


def memory_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor lies in, perhaps with others. A weight without memory has one of its own."""
    if isinstance(tensor, SeededWeight):
        return -id(tensor)
    return tensor.untyped_storage().data_ptr()
