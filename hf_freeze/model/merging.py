"""From a variant back to a plain native model."""

import copy
from typing import Any

from transformers import PreTrainedModel

from hf_freeze import surgery
from hf_freeze.architectures.base import set_fields
from hf_freeze.compat.transformers import keep_on_save
from hf_freeze.model.config import cache_fields, native_config
from hf_freeze.model.weights import no_draws


def merged(variant: Any) -> PreTrainedModel:
    """A native model with the same weights and logits; loading it needs no hf_freeze.

    Raises ValueError for a method that cannot be undone, and while PEFT adapters are in the model.
    """
    if hasattr(variant, "peft_config"):
        raise ValueError("merge() with adapters of PEFT in the model: merge_and_unload() or unload() them first")
    source = variant
    structural = [method for method in variant.methods if method.structural]
    if structural:
        source = copy.deepcopy(variant)
        for method in reversed(structural):
            method.merge(source, variant.architecture)
    with no_draws():
        native: Any = variant.native_class(native_config_of(variant.native_class, source.config))
    native.tie_weights()
    native.to(device=variant.device, dtype=variant.dtype)
    native.load_state_dict(source.state_dict())
    attentions = variant.architecture.attentions(native.config).values()
    surgery.match_scales(source.base_model, native.base_model, attentions, native.config)
    keep_on_save(native, variant.trained_constants())  # native classes leave out positions, even trained ones
    copy_runtime(source, native)
    return native


def native_config_of(native_class: Any, config: Any) -> Any:
    """The config of a variant as a native one, without the fields that make it a variant's."""
    native = native_config(config)
    native.architectures = [native_class.__name__]
    set_fields(native, cache_fields(config))
    return native


def copy_runtime(old: Any, new: Any) -> None:
    """Copy what is neither structure nor weights: generation settings and the training mode."""
    if getattr(old, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(old.generation_config)
    new.train(old.training)
