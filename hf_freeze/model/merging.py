"""From a variant back to a plain native model."""

from collections.abc import Collection
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, read, set_fields
from hf_freeze.architectures.derive import base_model
from hf_freeze.architectures.fields import change
from hf_freeze.architectures.kinds import tells_kinds
from hf_freeze.compat.transformers import LAYER_NUMBERS, is_quantized, keep_on_save
from hf_freeze.methods.registry import shortened
from hf_freeze.model.config import cache_fields, native_config
from hf_freeze.model.paging import Paged
from hf_freeze.model.sharing import memory_of, use_up
from hf_freeze.model.weights import no_draws


def merged(variant: Any, *, copy: bool = True) -> PreTrainedModel:
    """A native model with the same weights and logits; loading it needs no hf_freeze. It has memory of its own, or with
    `copy=False` that of the variant where a tensor stays as it is; the variant then cannot be used any more.

    Raises ValueError for a method that cannot be undone, while PEFT adapters are in the model, and for one whose tensors are
    elsewhere (`device_map`).
    """
    if hasattr(variant, "peft_config"):
        raise ValueError("merge() with adapters of PEFT in the model: merge_and_unload() or unload() them first")
    if is_quantized(variant):
        raise ValueError("merge() of a model that a quantiser has packed: dequantize() it first, or open it without")
    if getattr(variant, "hf_device_map", None) and any(tensor.is_meta for tensor in variant.parameters()):
        raise ValueError(
            "merge() of a model that device_map has put elsewhere: load it without, or see `hf-freeze merge`"
        )
    source = variant
    structural = [method for method in variant.methods_now if method.facts.structural]
    if structural:
        # Methods replace modules and leave tensors as they are, so that the copy can have those of the variant.
        source = deepcopy(variant, {id(tensor): tensor for tensor in chain(variant.parameters(), variant.buffers())})
        if variant.paged is not None:
            surgery.call_when_finished(source, variant.paged.move)
        with no_draws():
            for method in reversed(structural):
                method.merge(source, variant.architecture)
    on_meta = variant.device.type == "meta"
    config = native_config_of(variant.native_class, source.config)
    earlier = getattr(variant.config, "merged_methods", ())
    config.merged_methods = [*earlier, *map(shortened, variant.config.methods)]  # what its card tells was done to it
    with torch.device("meta") if on_meta else no_draws(variant.dtype):
        native: Any = variant.native_class(config)
    _check_layers(native, source, variant.config, variant.architecture)
    _take_over(source, native, variant.device)
    _separate(native, variant if copy else nn.Module(), variant.paged)
    attentions = variant.architecture.attentions(source.config).values()
    surgery.match_scales(source.base_model, native.base_model, attentions, source.config)
    keep_on_save(native, variant.trained_constants())  # native classes leave out positions, even trained ones
    copy_runtime(source, native)
    if not copy:
        use_up(variant, "merge(copy=False), which gave its tensors to the native model; use that one")
    return native


def _check_layers(native: Any, source: Any, config: Any, architecture: Architecture) -> None:
    """Raise ValueError unless the layers of `native` have the tensors of those of `source`, and the settings that they had before
    methods gave them other numbers: native classes may derive both from the number of a layer. `config`: that of the variant."""
    left = config.layers_left
    lists = {n for stack in architecture.stacks.values() for n in (stack.depth, *stack.per_layer, *stack.scaled)}
    fields = {n: read(config, n) for n in config.original_fields if n in lists or tells_kinds(n)}
    before = native_config(config.before_methods()) if left else None
    models = (base_model(before), base_model(change(before, **fields))) if left else ()
    for name in architecture.stacks:
        layers, others = (surgery.layers_of(model, architecture, name) for model in (native, source))
        differences = [_other_tensors(layer, other) for layer, other in zip(layers, others, strict=True)]
        if name in left:
            old, new = (surgery.layers_of(model, architecture, name) for model in models)
            # Modules that only in the first layer have parameters, which `move_first` sees to.
            moved = {parameter.rsplit(".", 2)[0] for parameter in architecture.stacks[name].unread}
            pairs = zip(left[name], new, strict=True)
            depth = architecture.stacks[name].depth.rpartition(".")[2]
            differences += [_other_settings(old[number], layer, moved, depth) for number, layer in pairs]
        for number, difference in enumerate(differences):
            if difference is not None:
                raise ValueError(
                    f"this {architecture.model_type} cannot be merged: layer {number % len(layers)} of stack {name!r} of a "
                    f"native model {difference}; save the variant itself"
                )


def _other_tensors(native: nn.Module, source: nn.Module) -> str | None:
    """What the tensors of a native layer have other names than in `source`, which has its weights; None if nothing."""
    own, others = native.state_dict().keys(), source.state_dict().keys()
    return next((f"would {'need' if name in own else 'lack'} {name!r}" for name in sorted(own ^ others)), None)


def _other_settings(old: nn.Module, new: nn.Module, left_out: Collection[str], depth: str) -> str | None:
    """What two native layers compute differently with the same weights, as the attributes of their modules tell, except for those
    `left_out`, and except for the `depth`, from which MiniMax makes buffers that are taken over; None if nothing."""
    modules = dict(old.named_modules())
    for path, module in new.named_modules():
        settings = vars(modules[path]) if path in modules and path not in left_out else {}
        for name, value in vars(module).items():
            # `match_scales` sees to the scale of scores, and only training reads what drops.
            if (
                name in ("scaling", depth, *LAYER_NUMBERS)
                or "drop" in name
                or not isinstance(value, int | float | str | None)
            ):
                continue
            if (before := settings.get(name, value)) != value:
                return f"would compute with {f'{path}.{name}'.lstrip('.')}={value!r} instead of {before!r}"
    return None


@torch.no_grad()
def _take_over(source: Any, native: Any, device: torch.device) -> None:
    """Give `native` the tensors of `source`, in the same memory. Raises RuntimeError if their names or shapes differ."""
    values = {name: value.to(device) for name, value in source.state_dict().items()}
    native.load_state_dict(values, assign=True)
    native.tie_weights()
    unsaved = dict(source.named_buffers(remove_duplicate=False))  # as natively, but perhaps in another dtype
    for prefix, module in native.named_modules():
        for name in module._non_persistent_buffers_set:
            value, old = module._buffers[name], unsaved.get(f"{prefix}.{name}" if prefix else name)
            if value is not None:
                module._buffers[name] = (value if old is None or old.shape != value.shape else old.detach()).to(device)


@torch.no_grad()
def _separate(native: Any, variant: nn.Module, paged: Paged | None) -> None:
    """Copy the tensors of `native` that lie in the memory of `variant`, or in that of another tensor of `native`, as those of
    layers that shared their parameters do."""
    taken = {memory_of(tensor) for tensor in chain(variant.parameters(), variant.buffers())}
    done: set[int] = set()
    for module in native.modules():
        copied = False
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or id(tensor) in done:
                continue
            done.add(id(tensor))
            if memory_of(tensor) in taken:
                tensor.data, copied = tensor.data.clone(), True
            taken.add(memory_of(tensor))
        if copied and paged is not None:
            paged.move(module)


def native_config_of(native_class: Any, config: Any) -> Any:
    """The config of a variant as a native one, without the fields that make it a variant's."""
    native = native_config(config)
    native.architectures = [native_class.__name__]
    set_fields(native, cache_fields(config))
    return native


def copy_runtime(old: Any, new: Any) -> None:
    """Copy what is neither structure nor weights: generation settings and the training mode."""
    if getattr(old, "generation_config", None) is not None:
        new.generation_config = deepcopy(old.generation_config)
    new.train(old.training)
