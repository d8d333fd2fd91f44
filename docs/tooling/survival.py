"""Which formats keep what a method saves. It is measured on a tiny model, so a new method has its answer too."""

import functools
from typing import Any

import torch
from transformers import AutoConfig

from hf_freeze.analysis.accounting import stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.recurrent import RecurrentAttention
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import SeededValues
from hf_freeze.model.make import make_variant
from hf_freeze.publish.export.convert import FORMATS

MODELS = {name: kind for name, kind in FORMATS.items() if not kind.is_complete}  # static vectors are no model
_SAME = 1.01  # of the bytes: what differs by less is kept


@functools.cache
def surviving_formats(method: type[Method]) -> list[str]:
    """The formats that keep the parts by which the variant is smaller: all if `merge()` keeps its bytes, else those that keep the
    structure. None if the method saves no bytes, such as one for training alone, or saves by a seed, which no engine has."""
    if method.example.part(SeededValues) is not None:
        return []
    architecture = next(each for each in ARCHITECTURES.values() if method.refusal(each) is None)
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny)
    torch.manual_seed(0)
    native = AUTO_CLASSES[architecture.tasks[0]].from_config(config).eval()
    if method.registered.from_scratch:
        variant: Any = make_variant(config, [method.example], task=architecture.tasks[0])
    else:
        variant = make_variant(native, [method.example])
    if variant.finalizable:
        variant.finalize()
    small = stored_bytes(variant)
    if small > stored_bytes(native) / _SAME:
        return []
    try:
        merged = stored_bytes(variant.merge())
    except ValueError:  # no native model has its layers
        merged = None
    kept = merged is not None and merged <= _SAME * small
    states = any(
        isinstance(module, RecurrentAttention) for module in variant.modules()
    )  # which browsers have no place for
    return [
        name for name, kind in MODELS.items() if kept or (kind.keeps_structure and not (states and kind.for_browsers))
    ]
