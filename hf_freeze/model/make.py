"""What happens in `make_variant`: from a backbone and methods to a variant.

1. The arguments are checked.
2. `_variant_config` makes the config of the variant: that of the backbone, with the methods as plain data. Its construction
   checks each method against the sizes of the backbone and against the methods before it (`config.py`, `methods/order.py`).
3. The variant class builds the model from that config: backbone, structure, ties, freezing, values (`build.py`).
4. A config as backbone needs 2 and 3 once (`_from_config`). For a backbone with weights they are repeated for each method that
   changes the structure, and this method converts the weights of the model before it (`_Conversions`). Tensors that a method
   leaves as they are go from model to model without a copy (`sharing.py`).
"""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_freeze._version import __version__
from hf_freeze.architectures.base import base_name
from hf_freeze.architectures.registry import architecture_for, architecture_of
from hf_freeze.architectures.tasks import AUTO_CLASSES, native_class, native_classes
from hf_freeze.compat.transformers import copy_attention_implementation, copy_quantizer, is_quantized
from hf_freeze.methods.base import Method
from hf_freeze.methods.budget import check_budget, is_auto, share_budget
from hf_freeze.methods.order import needs_config
from hf_freeze.methods.parts import InitialValues, SeededValues, Selection
from hf_freeze.methods.registry import method_from_dict, method_to_dict
from hf_freeze.model.alignment_heads import has_alignment, without_heads, without_layers
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.calibrator import Calibrator
from hf_freeze.model.classes import variant_class_of
from hf_freeze.model.components import take_components
from hf_freeze.model.config import INITS, native_config_class
from hf_freeze.model.loading import check_exists
from hf_freeze.model.merging import copy_runtime
from hf_freeze.model.paging import Paged
from hf_freeze.model.resizing import vocabulary_size
from hf_freeze.model.sharing import copy_shared, releasing, share_tensors, take_packed, use_up
from hf_freeze.model.token_ids import check_fixed_token_ids, renumber_token_ids
from hf_freeze.model.weights import no_draws, redraw, regenerate, seeded_draws

_OF_CLASS = ("model_type", "auto_map")  # the latter names code that loads the variant as it was before


@dataclass(frozen=True)
class Conversion:
    """How the weights of a model go over to its variant: as the arguments of `make_variant` with these names say. `paged`: where
    what is made lies, if it is larger than the memory."""

    copy: bool = True
    seed: int = 0
    calibration: Any = None
    tokenizer: Any = None
    budget: float | None = None
    paged: Paged | None = None

    def check(self, methods: Sequence[Method]) -> None:
        """Raise ValueError for a budget or methods that need what is not there."""
        check_budget(methods, self.budget, self.calibration)
        needing = next((method for method in methods if method.facts.calibration == "needed"), None)
        if self.calibration is None and needing is not None:
            raise ValueError(f"{needing} needs a calibration: give make_variant trained weights and calibration=")


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
    if calibration is not None and isinstance(backbone, PreTrainedConfig):
        raise ValueError(
            "calibration= is for trained weights, but the backbone is a config: leave it out, or pass a model"
        )
    how = Conversion(copy, seed, calibration, tokenizer, budget)
    if components:
        if scratch := next((method.name for method in methods if method.facts.from_scratch), None):
            raise ValueError(
                f"method {scratch!r}: its blocks train from scratch, so the backbone can have no components="
            )
        how.check(methods)
        backbone = make_variant(backbone, [], task=task, init=init, seed=seed, copy=copy)
        take_components(backbone, components)
        how = replace(how, copy=False)
    if isinstance(backbone, PreTrainedConfig):
        how.check(methods)
        return _with_teachers(_from_config(backbone, methods, task, init, seed), methods)
    if not isinstance(backbone, PreTrainedModel):
        check_exists(backbone)
        backbone, how = AUTO_CLASSES[str(task)].from_pretrained(backbone), replace(how, copy=False)
    return variant_of(backbone, methods, how)


def variant_of(model: PreTrainedModel, methods: Sequence[Method], how: Conversion) -> Any:
    """The part of `make_variant` for a model with weights."""
    how.check(methods)
    return _with_teachers(_Conversions(model, methods, how).variant(), methods)


def _with_teachers(variant: Any, methods: Sequence[Method]) -> Any:
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
    if not methods[fresh:]:
        return model
    return _Conversions(model, methods[fresh:], Conversion(copy=False, seed=seed)).variant()


class _Conversions:
    """From a model with weights to a variant, by way of one model for each method that changes the structure.

    `numbers`: of the methods that such a model is made for, counted from 1; `current`: the last one that was made.
    """

    def __init__(self, model: PreTrainedModel, methods: Sequence[Method], how: Conversion) -> None:
        _check_class(type(model), model.config)
        if is_quantized(model) and (quantizer := model.quantization_method) != "bitsandbytes":
            name = getattr(quantizer, "value", quantizer)  # of an enum, in transformers 5
            raise ValueError(f"no variant of a model that {name} has packed: make it first, save it, and open that so")
        check_fixed_token_ids(model.config, methods)
        self.model, self.how, self.methods = model, how, list(methods)
        self.variant_class = _variant_class(type(model))
        self.on_meta = model.device.type == "meta"
        self.calibrator = None
        if how.calibration is not None and not self.on_meta:
            self.calibrator = Calibrator(model, how.calibration, how.tokenizer, _plain, how.paged)
        numbered = list(enumerate(self.methods, 1))
        self.structural = {number for number, method in numbered if method.facts.structural}
        self.redrawing = {number for number, method in numbered if method.part(InitialValues)}
        # Later methods may select by seeded values, so these are drawn when their method has its turn.
        seeding = {number for number, method in numbered if method.part(SeededValues)}
        self.numbers = sorted({*self.structural, *seeding, *self.redrawing, len(self.methods)})
        self.current: Any = model
        self.settings = deepcopy(getattr(model, "generation_config", None))
        self.removal: float | None = None  # of the budget, what methods to come must remove

    def variant(self) -> Any:
        """The variant with all methods."""
        for number in self.numbers:
            if number and not self.on_meta:
                self._fix_selection(number)
            if number in self.structural:
                method = self.methods[number - 1]
                if not self.on_meta:  # which heads go, the weights tell
                    without_heads(self.settings, method, self.current)
                without_layers(self.settings, method, self.current)
            self.current = self._next(number)
        return self._finished()

    def _fix_selection(self, number: int) -> None:
        """Fix what the method keeps, where weights or texts decide it."""
        if (paged := self.how.paged) is None:
            self._decide(number)
            return

        def decided() -> dict[str, Any]:
            self._decide(number)
            return {"method": method_to_dict(self.methods[number - 1]), "removal": self.removal}

        found = paged.once(f"decided {number}", decided)
        self.methods[number - 1], self.removal = method_from_dict(found["method"]), found["removal"]

    def _decide(self, number: int) -> None:
        method, calibrator = self.methods[number - 1], self.calibrator
        if self.how.budget is not None and calibrator is not None and is_auto(method):
            if not calibrator.runs:
                raise ValueError(
                    f"budget={self.how.budget:g}: costs of different parts are compared by their gradients, which a saved "
                    "calibration does not have: give texts"
                )
            with calibrator.statistics(self.current, self.current) as statistics:
                method, self.removal = share_budget(
                    self.methods[number - 1 :],
                    self.how.budget,
                    self.current,
                    architecture_for(self.current),
                    statistics,
                    self.removal,
                )
        self.methods[number - 1] = _with_positions(method, self.current, calibrator, has_alignment(self.settings))

    def _next(self, number: int) -> Any:
        """The model of the first `number` methods; of its forms with and without a calibration, the better one."""
        calibrator = self.calibrator
        compares = (
            number in self.structural and calibrator is not None and calibrator.compares(self.methods[number - 1])
        )
        new = self._built(
            number, calibrated=True, used_up=(self.current is not self.model or not self.how.copy) and not compares
        )
        if calibrator is None or not compares:
            return new
        plain = self._built(number, calibrated=False, used_up=False)
        return calibrator.better(self.methods[number - 1], self.model, new, plain)

    def _built(self, number: int, *, calibrated: bool, used_up: bool) -> Any:
        """The model of the first `number` methods, with the weights of `current`."""
        current, method = self.current, self.methods[number - 1] if number in self.structural else None
        config = _variant_config(self.variant_class, self.model.config, self.methods[:number], "backbone")
        with torch.device("meta") if self.on_meta else no_draws(self.model.dtype):
            new = self.variant_class(config, paged=self.how.paged)
        if self.on_meta:
            return new
        from_scratch = method is not None and bool(method.facts.from_scratch)
        if is_quantized(current):
            take_packed(current, new, method)
        share_tensors(current, new, converted=not from_scratch)
        new.tie_weights(recompute_mapping=False)
        with seeded_draws(self.how.seed if from_scratch else None):
            new.draw_fresh()  # what neither the model before nor `convert` fills
        if method is not None:
            with no_draws(), releasing(current, new, used_up=used_up):
                if calibrated and self.calibrator is not None:
                    self.calibrator.convert(method, current, new)
                else:
                    method.convert(current, new)
            new.tie_weights(recompute_mapping=False)  # `convert` may have put new modules in
        if number in self.structural | self.redrawing:
            _prepare(self.methods[number - 1], new)
        new.apply_freeze()  # `convert` may have put modules in, which are trainable
        new.config.digests = {}
        regenerate(new)
        if self.how.paged is not None:
            self.how.paged.move(new)
        copy_quantizer(current, new)
        return new

    def _finished(self) -> Any:
        """The last model, with what is neither structure nor weights."""
        model, variant = self.model, self.current
        copy_runtime(model, variant)
        if self.settings is not None:
            variant.generation_config = self.settings
        if self.calibrator is not None:
            report = variant.calibration_report = self.calibrator.report
            variant.config.calibration = {"texts": report.texts, "tokens": report.tokens}
        if self.how.copy:
            copy_shared(model, variant)
        elif variant is not model:
            use_up(model)
        if getattr(variant, "generation_config", None) is not None:
            renumber_token_ids(variant.generation_config, self.methods, vocabulary_size(model.config))
        return variant


def _plain(model: Any, method: Method) -> Any:
    return _Conversions(model, [method], Conversion()).variant()


def _native_class(config: Any, task: Any) -> type[PreTrainedModel]:
    # raises an error, before any class is made, for a family that is not understood
    architecture = architecture_of(config)
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
    fields = {name: value for name, value in deepcopy(config.to_dict()).items() if name not in _OF_CLASS}
    fields |= fields.get("original_fields", {}) | {"original_fields": None}
    fields["methods"] = fields.get("methods", []) + [method_to_dict(method) for method in added]
    fields["init"] = fields.get("init", init) if init == "backbone" else init
    # The new methods may change the tensors that the digests are of.
    fields |= {"digests": {}, "hf_freeze_version": __version__, "architectures": [variant_class.__name__]}
    variant_config = variant_class.config_class.from_dict(fields)
    renumber_token_ids(variant_config, added, vocabulary_size(config))
    copy_attention_implementation(config, variant_config)
    return variant_config


def _with_positions(method: Method, old: Any, calibrator: Calibrator | None, aligned: bool) -> Method:
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
