"""What happens in `make_variant`: from a backbone and methods to a variant.

1. The arguments are checked.
2. `_variant_config` makes the config of the variant: that of the backbone, with the methods as plain data. Its construction
   checks each method against the sizes of the backbone and against the methods before it (`config.py`, `methods/order.py`).
3. The variant class builds the model from that config: backbone, structure, ties, freezing, values (`build.py`).
4. A config as backbone needs 2 and 3 once (`_from_config`). For a backbone with weights they are repeated for each method that
   changes the structure, and this method converts the weights of the model before it (`_from_model`). Tensors that a method
   leaves as they are go from model to model without a copy (`sharing.py`).
"""

import copy
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_freeze._version import __version__
from hf_freeze.architectures.base import base_name
from hf_freeze.architectures.registry import architecture_for, architecture_of
from hf_freeze.architectures.tasks import AUTO_CLASSES, native_class, native_classes
from hf_freeze.compat.transformers import copy_attention_implementation, copy_quantizer, is_quantized
from hf_freeze.methods._budget import check_budget, decide, is_auto
from hf_freeze.methods.base import Method
from hf_freeze.methods.order import needs_config
from hf_freeze.methods.parts import InitialValues, SeededValues, Selection
from hf_freeze.methods.registry import method_to_dict
from hf_freeze.model import paging
from hf_freeze.model.alignment_heads import has_alignment, without_heads, without_layers
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.calibrating import Calibrator
from hf_freeze.model.classes import variant_class_of
from hf_freeze.model.components import take_components
from hf_freeze.model.config import INITS, native_config_class
from hf_freeze.model.loading import check_exists
from hf_freeze.model.merging import copy_runtime
from hf_freeze.model.resizing import vocabulary_size
from hf_freeze.model.sharing import copy_shared, releasing, share_tensors, take_packed, use_up
from hf_freeze.model.token_ids import check_fixed_token_ids, renumber_token_ids
from hf_freeze.model.weights import no_draws, redraw, regenerate, seeded_draws

_OF_CLASS = ("model_type", "auto_map")  # the latter names code that loads the variant as it was before


def make_variant(
    backbone: Any,
    methods: Sequence[Method],
    *,
    task: str | None = None,
    init: str = "backbone",
    seed: int = 0,
    copy: bool = True,
    components: Mapping[str, Any] | None = None,
    calibration: Any = None,
    tokenizer: Any = None,
    budget: float | None = None,
) -> Any:
    """Apply `methods`, in order, to a backbone; returns a variant, which is an instance of the backbone's class.

    `backbone`: a model (its weights are kept), a config (fresh weights; also under `torch.device("meta")`), or a Hub id or
    directory. If it is itself a variant, its own methods come first. `task`: a key of `AUTO_CLASSES`; required for a config or a
    name; a model has its own. `init`: how trainable fresh weights are drawn, natively or as `"marian"` does (Glorot matrices,
    tables U(±sqrt(3/d)), and a trained output bias where the native class has a constant one). `seed`: of the fresh weights.
    `copy`: True leaves a model as it is. With False the variant takes its tensors over, without a second copy in memory, and the
    model cannot be used any more. `components`, such as `{"embeddings": "folder"}`: components of the backbone that take the
    weights of another model, Hub id or directory of the same architecture and sizes there; its depth or other widths may differ.
    `calibration`: some hundred unlabelled texts for `tokenizer`, or batches, or "samples" of a causal language model itself, or
    what `analysis.calibrate` has found: then methods choose what goes by what the model sees there, and refit what stays
    (docs/calibration.md); `variant.calibration_report` says what that changed. `budget`: with a calibration and methods with
    `share="auto"`, the share that stays of the weights of all heads and neurons that these may remove; which go, their costs
    across layers and parts decide.

    Raises ValueError for an unsupported backbone, task, init or method setting, a budget that cannot be met, and a calibration
    of no texts, of another model or for a backbone without weights; FileNotFoundError for a missing directory.
    """
    _check_arguments(backbone, methods, task, init)
    check_budget(methods, budget, calibration)
    if calibration is None and (
        needing := next((method for method in methods if method.facts.calibration == "needed"), None)
    ):
        raise ValueError(f"{needing} needs a calibration: give make_variant trained weights and calibration=")
    if calibration is not None and isinstance(backbone, PreTrainedConfig):
        raise ValueError(
            "calibration= is for trained weights, but the backbone is a config: leave it out, or pass a model"
        )
    if components:
        if scratch := next((method.name for method in methods if method.facts.from_scratch), None):
            raise ValueError(
                f"method {scratch!r}: its blocks train from scratch, so the backbone can have no components="
            )
        backbone = make_variant(backbone, [], task=task, init=init, seed=seed, copy=copy)
        take_components(backbone, components)
        copy = False
    seen = (calibration, tokenizer)
    if isinstance(backbone, PreTrainedConfig):
        variant = _from_config(backbone, methods, task, init, seed)
    elif isinstance(backbone, PreTrainedModel):
        variant = _from_model(backbone, methods, copy=copy, seed=seed, calibration=seen, budget=budget)
    else:
        check_exists(backbone)
        model = AUTO_CLASSES[str(task)].from_pretrained(backbone)
        variant = _from_model(model, methods, copy=False, seed=seed, calibration=seen, budget=budget)
    for method in methods:
        if (teacher := getattr(method, "teacher", None)) is not None:
            variant.set_teacher(teacher)
    return variant


def _check_arguments(backbone: Any, methods: Any, task: str | None, init: str) -> None:
    if isinstance(methods, Method):
        raise ValueError(f"methods is a list: write [{methods!r}]")
    for method in methods:
        if not isinstance(method, Method):
            raise ValueError(f"methods must be instances such as methods.Freeze(ffn='random'), not {method!r}")
    if init not in INITS:
        raise ValueError(f"unknown init {init!r}; choose from {list(INITS)}")
    is_model, is_config = isinstance(backbone, PreTrainedModel), isinstance(backbone, PreTrainedConfig)
    if not is_model and not is_config and not isinstance(backbone, str | os.PathLike):
        raise ValueError(f"backbone must be a model, a config or a name, not {type(backbone).__name__}")
    if task not in AUTO_CLASSES and not (is_model and task is None):
        raise ValueError(f"task={task!r}: a config or name needs one of {list(AUTO_CLASSES)}")
    if not is_config and init != "backbone":
        what = "the backbone is a model with weights" if is_model else f"{backbone!r} names trained ones"
        raise ValueError(f"init={init!r} draws fresh weights, but {what}: pass a config")
    if is_model and task is not None:
        _check_task(backbone, task)
    earlier = [] if is_config else list(getattr(backbone, "methods", ()))
    for number, method in enumerate(methods):
        if not is_config and needs_config(method, [*earlier, *methods[:number]]):
            raise ValueError(
                f"method {method.name!r}: its blocks train from scratch and cannot take over trained weights; pass the config of "
                "the backbone, not a model or a name"
                + ", or put Theseus before it"
                * (method.facts.from_scratch <= {"blocks"})
            )


def _check_task(model: Any, task: str) -> None:
    """Raise ValueError if `task` is another than that of the class of `model`."""
    native = getattr(type(model), "native_class", type(model))
    classes = native_classes(native_config_class(type(model.config)))
    own = [name for name, model_class in classes.items() if model_class is native]
    if own and task not in own:  # `_check_class` refuses a class of no task
        raise ValueError(f"task={task!r}, but the backbone is a {native.__name__}, of task {own[0]!r}: leave task out")


def _from_config(config: Any, methods: Sequence[Method], task: Any, init: str, seed: int) -> Any:
    """A variant with fresh weights; methods from the first that cannot draw values on are applied to these weights."""
    fresh = next((number for number, method in enumerate(methods) if method.facts.stores), len(methods))
    for method in methods[fresh:]:
        if method.facts.from_scratch:
            raise ValueError(
                f"method {method.name!r}: its blocks train from scratch, and {methods[fresh].name!r} before it takes weights "
                f"over; put {method.name!r} first"
            )
    variant_class = _variant_class(_native_class(config, task))
    with seeded_draws(seed):
        model = variant_class(_variant_config(variant_class, config, methods[:fresh], init))
    for method in model.methods_now:
        _prepare(method, model)
    regenerate(model)  # `prepare` may have copied fresh values over seeded ones
    return _from_model(model, methods[fresh:], copy=False, seed=seed) if methods[fresh:] else model


def _from_model(
    model: PreTrainedModel,
    added: Sequence[Method],
    *,
    copy: bool,
    seed: int,
    calibration: tuple[Any, Any] = (None, None),
    budget: float | None = None,
) -> Any:
    """A variant with the weights of `model`, by way of one model for each method that changes the structure.
    `calibration`: and its tokenizer. `budget`: see `make_variant`."""
    _check_class(type(model), model.config)
    if is_quantized(model) and (quantizer := model.quantization_method) != "bitsandbytes":
        name = getattr(quantizer, "value", quantizer)  # of an enum, in transformers 5
        raise ValueError(f"no variant of a model that {name} has packed: make it first, save it, and open that so")
    check_fixed_token_ids(model.config, added)
    variant_class = _variant_class(type(model))
    added = list(added)
    on_meta = model.device.type == "meta"
    calibrator = None if calibration[0] is None or on_meta else Calibrator(model, *calibration, make=_plain)
    structural = {number for number, method in enumerate(added, 1) if method.facts.structural}
    # Later methods may select by seeded values, so these are drawn when their method has its turn.
    seeding = {number for number, method in enumerate(added, 1) if method.part(SeededValues)}
    current: Any = model
    settings = deepcopy(getattr(model, "generation_config", None))
    redrawing = {number for number, method in enumerate(added, 1) if method.part(InitialValues)}

    def built(number: int, *, calibrated: bool, used_up: bool) -> Any:
        """The model of the first `number` methods, with the weights of `current`."""
        method = added[number - 1] if number in structural else None
        config = _variant_config(variant_class, model.config, added[:number], "backbone")
        with torch.device("meta") if on_meta else no_draws(model.dtype):
            new = variant_class(config)
        if on_meta:
            return new
        from_scratch = method is not None and bool(method.facts.from_scratch)
        if is_quantized(current):
            take_packed(current, new, method)
        share_tensors(current, new, converted=not from_scratch)
        new.tie_weights(recompute_mapping=False)
        with seeded_draws(seed if from_scratch else None):
            new.draw_fresh()  # what neither the model before nor `convert` fills
        if method is not None:
            with no_draws(), releasing(current, new, used_up=used_up):
                if calibrated and calibrator is not None:
                    calibrator.convert(method, current, new)
                else:
                    method.convert(current, new)
            new.tie_weights(recompute_mapping=False)  # `convert` may have put new modules in
        if number in structural | redrawing:
            _prepare(added[number - 1], new)
        new.apply_freeze()  # `convert` may have put modules in, which are trainable
        new.config.digests = {}
        regenerate(new)
        if (paged := paging.active()) is not None:
            paged.move(new)
        copy_quantizer(current, new)
        return new

    removal = None  # of the budget, what methods to come must remove
    for number in sorted({*structural, *seeding, *redrawing, len(added)}):
        if number and not on_meta:
            if budget is not None and calibrator is not None and is_auto(added[number - 1]):
                added[number - 1], removal = _shared_out(added[number - 1 :], budget, current, calibrator, removal)
            added[number - 1] = _decided(added[number - 1], current, calibrator, has_alignment(settings))
        if number in structural:
            if not on_meta:  # which heads go, the weights tell
                without_heads(settings, added[number - 1], current)
            without_layers(settings, added[number - 1], current)
        compared = calibrator is not None and number in structural and calibrator.compares(added[number - 1])
        used_up = (current is not model or not copy) and not compared
        new = built(number, calibrated=True, used_up=used_up)
        if calibrator is not None and compared:
            new = calibrator.better(added[number - 1], model, new, built(number, calibrated=False, used_up=False))
        current = new
    copy_runtime(model, current)
    if settings is not None:
        current.generation_config = settings
    if calibrator is not None:
        current.calibration_report = calibrator.report
        current.config.calibration = {"texts": calibrator.report.texts, "tokens": calibrator.report.tokens}
    if copy:
        copy_shared(model, current)
    elif current is not model:
        use_up(model)
    if getattr(current, "generation_config", None) is not None:
        renumber_token_ids(current.generation_config, added, vocabulary_size(model.config))
    return current


def _shared_out(
    methods: list[Method], budget: float, old: Any, calibrator: Calibrator, removal: float | None
) -> tuple[Method, float]:
    """As `decide`."""
    if not calibrator.runs:
        raise ValueError(
            f"budget={budget:g}: costs of different parts are compared by their gradients, which a saved calibration does not "
            "have: give texts"
        )
    with calibrator.statistics(old, old) as statistics:
        return decide(methods, budget, old, architecture_for(old), statistics, removal)


def _plain(model: Any, method: Method) -> Any:
    return _from_model(model, [method], copy=True, seed=0)


def _native_class(config: Any, task: Any) -> type[PreTrainedModel]:
    architecture = architecture_of(
        config
    )  # raises an error, before any class is made, for a family that is not understood
    if task not in architecture.tasks:
        raise ValueError(f"no task {task!r} for {architecture.model_type}; choose from {list(architecture.tasks)}")
    return native_class(task, native_config_class(type(config)))


def _variant_class(model_class: type[PreTrainedModel]) -> Any:
    return model_class if issubclass(model_class, VariantMixin) else variant_class_of(model_class)


def _check_class(model_class: type[PreTrainedModel], config: Any) -> None:
    """Raise ValueError for a class of no task of its architecture, such as a decoder without its encoder."""
    tasks = architecture_of(config).tasks
    choices = {c for task, c in native_classes(native_config_class(type(config))).items() if task in tasks}
    if not issubclass(model_class, VariantMixin) and model_class not in choices:
        raise ValueError(f"no variant of {model_class.__name__}; choose from {sorted(c.__name__ for c in choices)}")


def _variant_config(variant_class: Any, config: Any, added: Sequence[Method], init: str) -> Any:
    """A config of `variant_class`: the fields of `config`, its methods if it is a variant's, and those that are `added`."""
    fields = {name: value for name, value in copy.deepcopy(config.to_dict()).items() if name not in _OF_CLASS}
    fields |= fields.get("original_fields", {}) | {"original_fields": None}
    fields["methods"] = fields.get("methods", []) + [method_to_dict(method) for method in added]
    fields["init"] = fields.get("init", init) if init == "backbone" else init
    # The new methods may change the tensors that the digests are of.
    fields |= {"digests": {}, "hf_freeze_version": __version__, "architectures": [variant_class.__name__]}
    variant_config = variant_class.config_class.from_dict(fields)
    renumber_token_ids(variant_config, added, vocabulary_size(config))
    copy_attention_implementation(config, variant_config)
    return variant_config


def _decided(method: Method, old: Any, calibrator: Calibrator | None, aligned: bool) -> Method:
    """`method`, or if it keeps slices of seeded tensors, the same method with the positions that it keeps; also
    if heads are `aligned`, and a calibration chooses them."""
    selection = method.part(Selection)
    if selection is None or selection.decided is None:
        return method
    architecture = architecture_for(old)
    calibrated = calibrator is not None and method.facts.calibration is not None
    by_texts = selection.by_statistics and calibrator is not None and calibrator.runs
    if selection.must_decide(architecture, old.config) or (calibrated and (aligned or by_texts)):
        if calibrator is None or not calibrated:
            return selection.decided(old, architecture, None)
        with calibrator.statistics(old, old) as statistics:
            return selection.decided(old, architecture, statistics)
    seeded = {base_name(old, name) for name in getattr(old, "seeded_tensors", ())}
    if not seeded or not seeded & selection.origins(old, architecture).keys():
        return method
    return selection.decided(old, architecture, None)


def _prepare(method: Method, model: Any) -> None:
    if model.device.type != "meta":
        if (fresh := method.part(InitialValues)) is not None:
            redraw(model, fresh.definitions(model, model.architecture))
        method.prepare(model, model.architecture)
