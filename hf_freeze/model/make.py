"""`make_variant`: from a backbone and methods to a variant."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import AutoConfig, PreTrainedModel

from hf_freeze._version import __version__
from hf_freeze.architectures.base import base_name
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.tasks import AUTO_CLASSES, native_class
from hf_freeze.compat.transformers import copy_attention_implementation
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import SeededValues, Selection
from hf_freeze.methods.registry import method_to_dict
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.classes import VARIANT_CLASSES
from hf_freeze.model.config import INITS
from hf_freeze.model.merging import copy_runtime
from hf_freeze.model.resizing import vocabulary_size
from hf_freeze.model.token_ids import renumber_token_ids
from hf_freeze.model.weights import no_draws, regenerate


def make_variant(
    backbone: Any,
    methods: Sequence[Method],
    *,
    task: str | None = None,
    init: str = "backbone",
    seed: int = 0,
) -> Any:
    """Apply `methods`, in order, to a backbone; returns a variant, which is an instance of the backbone's class.

    `backbone`: a model (its weights are kept), a config (fresh weights; also under `torch.device("meta")`), or a Hub id or
    directory. It is never modified; where it is a variant, its own methods come first. `task`: one of `AUTO_CLASSES`;
    needed where the backbone is a config or a name. `init`: how trainable fresh weights are drawn, natively or `"marian"` (Glorot
    matrices, tables U(±sqrt(3/d)), and a trained output bias where the native class has a constant one). `seed`: of the
    fresh weights.

    Raises ValueError for an unsupported backbone, task, init or method setting, FileNotFoundError for a missing directory.
    """
    model = _made(backbone, methods, task, init, seed)
    for method in methods:
        if (teacher := getattr(method, "teacher", None)) is not None:
            model.set_teacher(teacher)
    return model


def _made(backbone: Any, methods: Sequence[Method], task: str | None, init: str, seed: int) -> Any:
    if isinstance(methods, Method):
        raise ValueError(f"methods is a list: write [{methods!r}]")
    for method in methods:
        if not isinstance(method, Method):
            raise ValueError(f"methods must be instances such as methods.Freeze(ffn='random'), not {method!r}")
    if init not in INITS:
        raise ValueError(f"unknown init {init!r}; choose from {list(INITS)}")
    is_model = isinstance(backbone, PreTrainedModel)
    if not is_model and not isinstance(backbone, (transformers.PreTrainedConfig, str, os.PathLike)):
        raise ValueError(f"backbone must be a model, a config or a name, not {type(backbone).__name__}")
    if task not in AUTO_CLASSES and not (is_model and task is None):
        raise ValueError(f"task={task!r}: a config or name needs one of {list(AUTO_CLASSES)}")
    for method in methods:
        if method.from_scratch and not isinstance(backbone, transformers.PreTrainedConfig):
            raise ValueError(
                f"method {method.name!r}: its blocks train from scratch and cannot take over trained weights; pass the config of "
                "the backbone, not a model or a name"
            )
    if is_model:
        if init != "backbone":
            raise ValueError(
                f"init={init!r} draws fresh weights, but the backbone is a model with weights: pass its config"
            )
        return _from_model(backbone, methods)
    if isinstance(backbone, transformers.PreTrainedConfig):
        return _from_config(backbone, methods, task, init, seed)
    if init != "backbone":
        raise ValueError(f"init={init!r} draws fresh weights, but {backbone!r} names trained ones: pass a config")
    check_exists(backbone)
    auto_class = AUTO_CLASSES[str(task)]
    return _from_model(auto_class.from_pretrained(backbone), methods)


def _from_config(config: Any, methods: Sequence[Method], task: Any, init: str, seed: int) -> Any:
    drawn = next((number for number, method in enumerate(methods) if method.converts_fresh), len(methods))
    for method in methods[drawn:]:
        if method.from_scratch:
            raise ValueError(
                f"method {method.name!r}: its blocks train from scratch, and {methods[drawn].name!r} before it takes weights "
                f"over; put {method.name!r} first"
            )
    variant_class = _variant_class(_native_class(config, task))
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        model = variant_class(_variant_config(variant_class, config, methods[:drawn], init))
    for method in model.methods:
        _prepare(method, model)
    regenerate(model)  # `prepare` may have copied fresh values over seeded ones
    return _from_model(model, methods[drawn:]) if methods[drawn:] else model


def _native_class(config: Any, task: Any) -> type[PreTrainedModel]:
    architecture = architecture_of(config.model_type)
    if task not in architecture.tasks:
        raise ValueError(f"no task {task!r} for {architecture.model_type}; choose from {list(architecture.tasks)}")
    return native_class(task, type(AutoConfig.for_model(architecture.model_type)))


def _variant_class(model_class: type[PreTrainedModel]) -> Any:
    if issubclass(model_class, VariantMixin):
        return model_class
    if model_class not in VARIANT_CLASSES:
        raise ValueError(
            f"no variant of {model_class.__name__}; choose from {sorted(c.__name__ for c in VARIANT_CLASSES)}"
        )
    return VARIANT_CLASSES[model_class]


def _variant_config(variant_class: Any, config: Any, added: Sequence[Method], init: str) -> Any:
    data = {name: value for name, value in copy.deepcopy(config.to_dict()).items() if name != "model_type"}
    data |= data.get("original_fields", {}) | {"original_fields": None}
    data["methods"] = data.get("methods", []) + [method_to_dict(method) for method in added]
    data["init"] = data.get("init", init) if init == "backbone" else init
    # Freezing and randomising anew changes what the digests are of.
    data |= {"digests": {}, "hf_freeze_version": __version__, "architectures": [variant_class.__name__]}
    made = variant_class.config_class.from_dict(data)
    renumber_token_ids(made, added, vocabulary_size(config))
    copy_attention_implementation(config, made)
    return made


def _from_model(model: PreTrainedModel, added: Sequence[Method]) -> Any:
    """Up to each structural method in turn, so that its `convert` sees what its predecessors left; freezing comes last."""
    variant_class = _variant_class(type(model))
    added = list(added)
    steps = [number for number, method in enumerate(added, 1) if method.structural]
    # Later methods may select by seeded values, so these are drawn when their method has its turn.
    seeding = [number for number, method in enumerate(added, 1) if method.part(SeededValues)]
    current: Any = model
    for step in sorted({*steps, *seeding, len(added)}):
        if step and model.device.type != "meta":
            added[step - 1] = _decided(added[step - 1], current)
        config = _variant_config(variant_class, model.config, added[:step], "backbone")
        with torch.device("meta") if model.device.type == "meta" else no_draws():
            new = variant_class(config)
        if model.device.type != "meta":
            new.tie_weights(recompute_mapping=False)  # no_init_weights leaves the ties out too
            _load_matching(new, current, strict=step not in steps)
            if step in steps:
                added[step - 1].convert(current, new)
                new.tie_weights(recompute_mapping=False)  # it may have put new modules in
                _prepare(added[step - 1], new)
            new._apply_freeze()  # `convert` may have put modules in, which are trainable
            new.config.digests = {}
            regenerate(new)
        current = new
    copy_runtime(model, current)
    if getattr(current, "generation_config", None) is not None:
        renumber_token_ids(current.generation_config, added, vocabulary_size(model.config))
    return current


def _decided(method: Method, old: Any) -> Method:
    """`method`, or if it keeps slices of seeded tensors, the same method with the positions that it keeps."""
    selection = method.part(Selection)
    if not isinstance(old, VariantMixin) or selection is None or selection.decided is None:
        return method
    seeded = {base_name(old, name) for name in old.seeded_tensors}
    if not seeded & selection.origins(old, old.architecture).keys():
        return method
    return selection.decided(old, old.architecture)


def _prepare(method: Method, model: Any) -> None:
    if model.device.type != "meta":
        method.prepare(model, model.architecture)


def _load_matching(new: Any, old: Any, *, strict: bool) -> None:
    new.to(device=old.device, dtype=old.dtype)
    shapes = {name: tensor.shape for name, tensor in new.state_dict().items()}
    state = {name: tensor for name, tensor in old.state_dict().items() if strict or shapes.get(name) == tensor.shape}
    new.load_state_dict(state, strict=strict)


def check_exists(name: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError where `name` is no folder here and cannot be a Hub id either, such as `./missing` or `a/b/c`."""
    if Path(name).exists():
        return
    try:
        validate_repo_id(os.fspath(name))
    except HFValidationError:
        message = (
            f"{name} does not exist: neither a folder here nor a Hub id such as 'bert-base-uncased' or 'user/model'"
        )
        raise FileNotFoundError(message) from None


def empty_model(name: str | os.PathLike[str]) -> Any:
    """The model of a directory or Hub id on `meta`, of the class that it was saved from: its structure without its weights.

    Raises ValueError for an architecture that is not registered, FileNotFoundError for a missing directory.
    """
    config, model_class = _saved_class(name)
    with torch.device("meta"):
        model = model_class(config)
    return model.to(config.dtype or torch.float32)


def load_model(name: str | os.PathLike[str]) -> Any:
    """The model of a directory or Hub id, of the class that it was saved from.

    Raises ValueError where that class is not supported, FileNotFoundError for a missing directory.
    """
    config, model_class = _saved_class(name)
    if model_class.__name__ not in (config.architectures or ()):
        raise ValueError(
            f"{name} holds {config.architectures or 'no class of model'}; choose from {list(_classes(config))}"
        )
    return model_class.from_pretrained(name)


def _saved_class(name: str | os.PathLike[str]) -> tuple[Any, Any]:
    """The config of a saved model, and the class that wrote it; where that is unknown, that of the first task."""
    check_exists(name)
    config = AutoConfig.from_pretrained(name)
    classes = _classes(config)
    named = [c for name, c in classes.items() if name in (config.architectures or ())]
    return config, (named or list(classes.values()))[0]


def _classes(config: Any) -> dict[str, Any]:
    found = (native_class(task, type(config)) for task in architecture_of(config.model_type).tasks)
    return {each.__name__: each for each in found}
