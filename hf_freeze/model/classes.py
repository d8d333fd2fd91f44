"""The variant classes: one in front of each native class, made when it is first asked for.

Whoever asks for a model type `hf_freeze_…` (AutoConfig of a saved variant), for a class of this module by name (pickle), or for
the variant of a native class (`make_variant`) has the classes of that family made and registered with the Auto classes.
"""

import copy
import sys
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_freeze.architectures
import hf_freeze.methods  # noqa: F401 (both fill the registries)
from hf_freeze.architectures.registry import VARIANT_PREFIX
from hf_freeze.architectures.tasks import AUTO_CLASSES, native_classes
from hf_freeze.compat.transformers import processor_mappings
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.config import VARIANT_FIELDS, VariantConfigMixin
from hf_freeze.model.loss import trained_forward

_PREFIX = "Variant"
_CONFIGS: dict[type, Any] = {}  # native config class -> variant config class
VARIANT_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}  # native class -> variant class, of those made


def config_class_of(native: Any) -> Any:
    """The variant of a native config class; makes the classes of all its tasks."""
    if native not in _CONFIGS:
        _make_family(native)
    return _CONFIGS[native]


def config_class_of_type(model_type: str) -> Any:
    """The config class of a variant's model type, such as `hf_freeze_bert`."""
    return config_class_of(CONFIG_MAPPING[model_type.removeprefix(VARIANT_PREFIX)])


def variant_class_of(native: Any) -> Any:
    """The variant of a native model class. Raises ValueError for a class of no known task."""
    if native not in VARIANT_CLASSES:
        config_class_of(native.config_class)
    if native not in VARIANT_CLASSES:
        choices = sorted(model_class.__name__ for model_class in native_classes(native.config_class).values())
        raise ValueError(f"no variant of {native.__name__}; choose from {choices}")
    return VARIANT_CLASSES[native]


def _make_family(native_config: type[PreTrainedConfig]) -> None:
    """Make the config class and the model classes of a family, and enter them in the Auto classes."""
    config_class = _CONFIGS[native_config] = _define(
        f"{_PREFIX}{native_config.__name__}",
        (VariantConfigMixin, native_config),
        {
            "__annotations__": {name: VariantConfigMixin.__annotations__[name] for name in VARIANT_FIELDS},
            **{name: copy.copy(default) for name, default in VARIANT_FIELDS.items()},
            "__doc__": f"{native_config.__name__} with a list of methods.",
            "model_type": VARIANT_PREFIX + native_config.model_type,
            "native_class": native_config,
        },
    )
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for mapping in processor_mappings():
        if native_config in mapping:
            mapping.register(config_class, mapping[native_config], exist_ok=True)
    # some seq2seq models are decoders that read sound
    has_encoder = getattr(native_config, "is_encoder_decoder", False)
    for task, native in native_classes(native_config).items():
        if native not in VARIANT_CLASSES:
            VARIANT_CLASSES[native] = _define(
                f"{_PREFIX}{native.__name__}",
                (VariantMixin, native),
                {
                    "__doc__": f"{native.__name__} with the methods of its config applied.",
                    "native_class": native,
                    "config_class": config_class,
                    "forward": trained_forward(native.forward),
                    "shifts_labels": task == "causal-lm" or (task == "seq2seq-lm" and not has_encoder),
                },
            )
        AUTO_CLASSES[task].register(config_class, VARIANT_CLASSES[native], exist_ok=True)


def _define(name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
    """A class that pickle finds by name in this module."""
    cls = type(name, bases, {"__module__": __name__, "__qualname__": name, **members})
    setattr(sys.modules[__name__], name, cls)
    return cls


def __getattr__(name: str) -> Any:
    """Pickle asks for a class by its name, in a process that may not have made it yet."""
    native: Any = getattr(transformers, name.removeprefix(_PREFIX), None) if name.startswith(_PREFIX) else None
    if isinstance(native, type) and issubclass(native, PreTrainedModel | PreTrainedConfig):
        make = variant_class_of if issubclass(native, PreTrainedModel) else config_class_of
        return make(native)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
