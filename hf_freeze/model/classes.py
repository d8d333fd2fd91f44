"""The variant classes: one in front of each native class of each registered architecture and task.

They are registered with the Auto classes, so that `AutoModelFor….from_pretrained` opens a saved variant.
"""

import dataclasses
import sys
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

import hf_freeze.architectures
import hf_freeze.methods  # noqa: F401 (both fill the registries)
from hf_freeze.architectures.registry import ARCHITECTURES, VARIANT_PREFIX
from hf_freeze.architectures.tasks import AUTO_CLASSES, native_class
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.config import VARIANT_FIELDS, VariantConfigMixin
from hf_freeze.model.loss import trained_forward


def _make_classes() -> dict[type[PreTrainedModel], type[PreTrainedModel]]:
    """native class -> variant class, for every registered architecture and task; all are entered in the Auto classes."""
    classes: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}
    for architecture in ARCHITECTURES.values():
        native_config = type(AutoConfig.for_model(architecture.model_type))
        config_class = _define(
            f"Variant{native_config.__name__}",
            (VariantConfigMixin, native_config),
            {
                "__annotations__": {name: VariantConfigMixin.__annotations__[name] for name in VARIANT_FIELDS},
                "methods": dataclasses.field(default_factory=list),
                "init": "backbone",
                "hf_freeze_version": None,
                "digests": dataclasses.field(default_factory=dict),
                "original_fields": dataclasses.field(default_factory=dict),
                "__doc__": f"{native_config.__name__} with a list of methods.",
                "model_type": VARIANT_PREFIX + architecture.model_type,
            },
        )
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        if native_config in TOKENIZER_MAPPING:
            AutoTokenizer.register(config_class, TOKENIZER_MAPPING[native_config], exist_ok=True)
        for task in architecture.tasks:
            native = native_class(task, native_config)
            variant = _define(
                f"Variant{native.__name__}",
                (VariantMixin, native),
                {
                    "__doc__": f"{native.__name__} with the methods of its config applied.",
                    "native_class": native,
                    "architecture": architecture,
                    "config_class": config_class,
                    "forward": trained_forward(native.forward),
                    "shifts_labels": task == "causal-lm",
                },
            )
            AUTO_CLASSES[task].register(config_class, variant, exist_ok=True)
            classes[native] = variant
    return classes


def _define(name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
    """A class that pickle finds by name in this module."""
    cls = type(name, bases, {"__module__": __name__, "__qualname__": name, **members})
    setattr(sys.modules[__name__], name, cls)
    return cls


VARIANT_CLASSES = _make_classes()
