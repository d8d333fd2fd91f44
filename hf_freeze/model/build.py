"""A variant is its backbone class: `VariantMarianMTModel` is a `MarianMTModel` whose config lists the methods applied.

`VariantMixin` builds the backbone, lets every method change its structure from the config alone, freezes, and regenerates
what is not stored. One factory makes the classes for every registered architecture and task, and registers them with the
Auto classes.
"""

import contextlib
import copy
import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, initialization
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

import hf_freeze.architectures
import hf_freeze.methods  # noqa: F401 (both fill the registries)
from hf_freeze import surgery
from hf_freeze.architectures.base import TRAINED, base_name, canonical_parameters, full_name
from hf_freeze.architectures.registry import ARCHITECTURES, VARIANT_PREFIX
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.derived import Fresh
from hf_freeze.layers.factorized_embedding import Factors, LowRankOutput
from hf_freeze.layers.quantized import STORED
from hf_freeze.methods.base import Method, SelectingMethod
from hf_freeze.model.adapters import AdaptingMixin
from hf_freeze.model.config import VariantConfigMixin, parse_methods, set_fields
from hf_freeze.model.resizing import ResizingMixin
from hf_freeze.model.saving import SavingMixin
from hf_freeze.model.training import TrainingMixin, trained_forward
from hf_freeze.seeded import Origin, SeededTensor, digest

_OWN_FIELDS = ("methods", "init", "hf_freeze_version", "digests", "original_fields")


class VariantMixin(AdaptingMixin, SavingMixin, ResizingMixin, TrainingMixin):
    """In front of a native class: structure from the config, freezing, regeneration, and what training needs."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self._built = False
        self._own_ties: dict[str, str] = {}
        self._gone_ties: set[str] = set()
        final = {name: getattr(config, name) for name in config.original_fields}
        try:
            set_fields(config, config.original_fields)
            with _native_base_model(type(config), self.native_class.config_class):
                super().__init__(config, *args, **kwargs)
            self._restructure(parse_methods(config))
        finally:
            set_fields(config, final)
        if self.shifts_labels:
            # transformers finds the loss by the class name, and not that of GPT-2; its Trainer counts labels accordingly.
            self.loss_type = "ForCausalLM"
        self._declared_digests = frozenset(config.digests)
        self._promote_output_bias()
        # Constants are stored only where they are not what is computed; the native base classes store them always.
        self._constants = constants = {
            name for name, _ in self.named_parameters() if self._component(name) == "constant"
        }
        self._native_keys_to_ignore = (
            set(self._keys_to_ignore_on_save or ()) | constants,
            set(self._keys_to_ignore_on_load_missing or ()) | {f"^{re.escape(name)}$" for name in constants},
        )
        self._built = True
        self._apply_freeze()
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.initialize_weights()
            # Methods may have replaced what is tied. Not before the values are there: an output matrix would draw the table
            # anew, and while a checkpoint is loaded one parameter would be taken for two.
            self.tie_weights(recompute_mapping=False)

    # -- structure and freezing ------------------------------------------------------------------------------------------

    def _restructure(self, methods: list[Method]) -> None:
        self._methods = methods
        self._origins: list[dict[str, Origin]] = []  # of each method: where it took the values of a parameter
        self.scheduled = any(method.scheduled for method in methods)
        for number, method in enumerate(methods):
            if isinstance(method, SelectingMethod) and any(map(is_seeding, methods[:number])):
                self._origins.append(method.origins(self, self.architecture))
            else:
                self._origins.append({})
            changes = method.config_changes(self.architecture, self.config)
            method.restructure(self, self.architecture)
            described = method.described(self.architecture, self.config)
            if described is not self.architecture:
                self.architecture = described
            for module in self.modules():  # encoder and decoder have a copy of the config each
                if changes and hasattr(module, "config"):
                    set_fields(module.config, changes)
        own = {target: source for method in methods for target, source in method.ties(self, self.architecture).items()}
        held = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        # Natively tied, where a method has put in something without that parameter.
        self._gone_ties = {t for t, source in self.all_tied_weights_keys.items() if not {t, source} <= held}
        self.all_tied_weights_keys = {
            t: source for t, source in self.all_tied_weights_keys.items() if t not in self._gone_ties
        }
        ties = self.all_tied_weights_keys | own
        # With what is tied to a parameter that is now tied itself.
        self._own_ties = {t: _end_of(ties, source) for t, source in ties.items() if t in own or source in own}
        self.all_tied_weights_keys |= self._own_ties
        self._declare_ties()

    def _declare_ties(self) -> None:
        """Enter all ties where transformers, PEFT and accelerate look them up, also in the base model: it can be saved alone."""
        for module, prefix in {self: "", self.base_model: full_name(self, "")}.items():
            inside = {
                target.removeprefix(prefix): source.removeprefix(prefix)
                for target, source in self._own_ties.items()
                if target.startswith(prefix) and source.startswith(prefix)
            }
            gone = {target.removeprefix(prefix) for target in self._gone_ties if target.startswith(prefix)}
            native = {t: source for t, source in (module._tied_weights_keys or {}).items() if t not in gone}
            module._tied_weights_keys = native | inside

    def _promote_output_bias(self) -> None:
        """Marian trains the bias of its softmax; the native class holds it as a buffer. Same key, now a parameter."""
        name = self.architecture.output_bias
        if self.config.init == "marian" and name is not None and name in self._buffers:
            value = self.get_buffer(name)
            delattr(self, name)
            self.register_parameter(name, nn.Parameter(value.detach().clone()))
            self._keys_to_ignore_on_load_missing = set(self._keys_to_ignore_on_load_missing or ()) - {name}

    def _demote_output_bias(self) -> None:
        name = self.architecture.output_bias
        if name is not None and name in self._parameters:
            value = self.get_parameter(name)
            delattr(self, name)
            self.register_buffer(name, value.detach())

    def _apply_freeze(self) -> None:
        """Set `requires_grad` and find out which tensors are seeded, hence neither stored nor expected in a checkpoint."""
        frozen: set[str] = {n for n, _ in canonical_parameters(self) if self._component(n) == "constant"}
        self.seeded_tensors: dict[str, SeededTensor] = {}
        for number, method in enumerate(self._methods):
            always = method.frozen_at(None)
            for name, definition in method.freeze(self, self.architecture):
                if definition is not None:
                    self.seeded_tensors[name] = self._traced(definition, number)
                if always or definition is not None:
                    frozen.add(name)
        tied = self.all_tied_weights_keys
        for name, parameter in self.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(tied.get(name, name) not in frozen)
        self._forget_phase()
        unstored = set(self.seeded_tensors) | {t for t, source in tied.items() if source in self.seeded_tensors}
        on_save, on_load = self._native_keys_to_ignore
        self._keys_to_ignore_on_save = on_save | unstored | set(self._own_ties)
        self._keys_to_ignore_on_load_missing = on_load | {f"^{re.escape(name)}$" for name in unstored}

    def _traced(self, definition: SeededTensor, number: int) -> SeededTensor:
        """`definition`, by the method of this number, as a slice of the tensor that the parameter was before later methods."""
        for origins in reversed(self._origins[number + 1 :]):
            if definition.name in origins:
                definition = definition.taken_from(origins[definition.name])
        return definition

    def _component(self, name: str) -> str:
        return self.architecture.component(base_name(self, name))

    # -- values ----------------------------------------------------------------------------------------------------------

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, LowRankOutput):  # as an nn.Linear, it would be drawn natively too
            super()._init_weights(module)
        if isinstance(module, Fresh):
            module.initialize_parameters()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw fresh weights and regenerate seeded ones; transformers also calls it at the end of `from_pretrained`."""
        loading = any(getattr(parameter, "_is_hf_initialized", False) for parameter in self.parameters())
        if (
            self._built and loading
        ):  # fresh weights are drawn for every row alike; for a loaded model that costs a third
            for name in self.seeded_tensors:
                setattr(self.get_parameter(name), "_is_hf_initialized", True)  # noqa: B010 (transformers' own mark)
        fresh = [p for p in self.parameters() if not getattr(p, "_is_hf_initialized", False)]
        super().initialize_weights()
        if not self._built:  # called from the native __init__: the structure is not there yet
            return
        if self.config.init == "marian":
            self._initialize_like_marian(fresh)
        self._balance_factors(fresh)
        self._apply_freeze()  # loading has made every loaded tensor trainable
        self._regenerate()

    def _initialize_like_marian(self, fresh: list[nn.Parameter]) -> None:
        """Glorot-uniform matrices, tables U(±sqrt(3/d)); biases 0 and norms 1/0 are native (Bogoychev, 2021)."""
        wanted = {id(parameter) for parameter in fresh}
        for name, weight in self.named_parameters():
            # A layer whose weight is computed has parameters of other names, and has drawn them with the variance of the weight.
            if weight.ndim != 2 or id(weight) not in wanted or not name.endswith((".weight", ".projection")):
                continue
            component = self._component(name)
            if component == "embeddings":
                bound = (3 / weight.shape[1]) ** 0.5
                initialization.uniform_(weight, -bound, bound)
            elif component != "constant":
                outputs = weight.shape[1] // self.architecture.parts(base_name(self, name))
                bound = (6 / (weight.shape[0] + outputs)) ** 0.5
                initialization.uniform_(weight, -bound, bound)
        for parameter in fresh:
            setattr(parameter, "_is_hf_initialized", True)  # noqa: B010 (transformers' own mark)

    def _balance_factors(self, fresh: list[nn.Parameter]) -> None:
        drawn, tied = {id(parameter) for parameter in fresh}, self.all_tied_weights_keys
        for name, module in self.named_modules():
            if isinstance(module, Factors):
                names = [tied.get(n, n) for n in (f"{name}.weight", f"{name}.projection")]
                table, projection = map(self.get_parameter, names)
                if id(projection) not in drawn:
                    continue
                gain = module.gain(projection)
                for parameter, factor in ((table, 1 / gain), (projection, gain)):
                    if id(parameter) in drawn:
                        parameter.mul_(factor)
                        drawn.discard(id(parameter))  # two may have one

    @torch.no_grad()
    def _regenerate(self) -> None:
        """Fill the seeded tensors, and check or enter their digests."""
        for name, definition in self.seeded_tensors.items():
            parameter = self.get_parameter(name)
            if parameter.is_meta:
                continue
            value = definition.generate(parameter.device)
            below_base = base_name(self, name)
            expected = self.config.digests.setdefault(below_base, found := digest(value))
            if found != expected:
                raise ValueError(
                    f"digest mismatch: the regenerated tensor {below_base!r} has {found}, the config says {expected}; "
                    "the config was changed, or this is not the hf_freeze that wrote it"
                )
            parameter.copy_(value)
            setattr(parameter, "_is_hf_initialized", True)  # noqa: B010 (transformers' own mark)

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        # While loading, the source of a tie is "missing" where it is seeded; it has its values all the same.
        if missing_keys is not None and self._built:
            missing_keys.difference_update(self.seeded_tensors)
        # The native function takes every tie for that of an output matrix, whose bias it would stretch to the vocabulary.
        for target in self._own_ties:
            self.all_tied_weights_keys.pop(target, None)
        super().tie_weights(missing_keys=missing_keys, recompute_mapping=recompute_mapping)
        for target, source in self._own_ties.items():
            parent, _, name = target.rpartition(".")
            setattr(self.get_submodule(parent), name, self.get_parameter_or_buffer(source))
            if missing_keys is not None and source not in missing_keys:
                missing_keys.discard(target)
        self.all_tied_weights_keys |= self._own_ties

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        # The native one knows parameters only. Of what is quantised, buffers are tied, which on meta nothing initializes.
        tied = self.all_tied_weights_keys
        self.all_tied_weights_keys = {t: s for t, s in tied.items() if t.rpartition(".")[2] not in STORED}
        super().mark_tied_weights_as_initialized(loading_info)
        self.all_tied_weights_keys = tied

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        ties = super().get_expanded_tied_weights_keys(all_submodels)
        # Those of methods are made by `tie_weights` of this class.
        left_out = self._gone_ties | self._own_ties.keys()
        return {target: source for target, source in ties.items() if target not in left_out}

    # -- merging -----------------------------------------------------------------------------------------------------------

    def merge(self) -> PreTrainedModel:
        """A plain native model with the same weights and logits; loading it needs no hf_freeze.

        Raises ValueError where a method cannot be undone, and while adapters of PEFT are in it.
        """
        if hasattr(self, "peft_config"):
            raise ValueError("merge() with adapters of PEFT in the model: merge_and_unload() or unload() them first")
        source = self
        structural = [method for method in self._methods if is_structural(method)]
        if structural:
            source = copy.deepcopy(self)
            for method in reversed(structural):
                method.merge(source, self.architecture)
        native: Any = _native_model(self.native_class, source.config)
        native.to(device=self.device, dtype=self.dtype)
        native.load_state_dict(source.state_dict())
        attentions = self.architecture.attentions(native.config).values()
        surgery.match_scales(source.base_model, native.base_model, attentions)
        copy_runtime(source, native)
        return native


def _end_of(ties: dict[str, str], name: str) -> str:
    while name in ties:
        name = ties[name]
    return name


@contextlib.contextmanager
def _native_base_model(config_class: type, native_config_class: Any) -> Iterator[None]:
    """Some native task classes have AutoModel make their base model. It must be the native one: the methods are applied to
    the whole, once."""
    registered: Any = transformers.AutoModel._model_mapping
    variant = registered._extra_content.get(config_class)
    registered._extra_content[config_class] = registered[native_config_class]
    try:
        yield
    finally:
        registered._extra_content.pop(config_class)
        if variant is not None:
            registered._extra_content[config_class] = variant


def native_config_of(native_class: Any, config: Any) -> Any:
    """The config of a variant without what makes it one."""
    data = {name: value for name, value in config.to_dict().items() if name not in (*_OWN_FIELDS, "model_type")}
    native_config = native_class.config_class.from_dict(data)
    native_config.architectures = [native_class.__name__]
    native_config._attn_implementation = config._attn_implementation
    return native_config


def _native_model(native_class: Any, config: Any) -> PreTrainedModel:
    with no_draws():
        native = native_class(native_config_of(native_class, config))
    native.tie_weights()
    return native


@contextlib.contextmanager
def no_draws() -> Iterator[None]:
    """Construct without drawing weights, which are loaded next, and without moving the global random state."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), initialization.no_init_weights():
        yield


def copy_runtime(old: Any, new: Any) -> None:
    """What is neither structure nor weights: generation settings and the training mode."""
    if getattr(old, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(old.generation_config)
    new.train(old.training)


def is_structural(method: Method) -> bool:
    return type(method).restructure is not Method.restructure


def is_seeding(method: Method) -> bool:
    """Whether it has a seed regenerate part of the model."""
    return any(method.is_seeded(component) for component in TRAINED)


# -- the factory -------------------------------------------------------------------------------------------------------------


def _make_classes() -> dict[type[PreTrainedModel], type[PreTrainedModel]]:
    """native class -> variant class, for every registered architecture and task; all are entered in the Auto classes."""
    made: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}
    for architecture in ARCHITECTURES.values():
        native_config = type(AutoConfig.for_model(architecture.model_type))
        config_class = _define(
            f"Variant{native_config.__name__}",
            (VariantConfigMixin, native_config),
            {
                "__annotations__": {name: VariantConfigMixin.__annotations__[name] for name in _OWN_FIELDS},
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
            native = AUTO_CLASSES[task]._model_mapping[native_config]
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
            made[native] = variant
    return made


def _define(name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
    """A class that pickle finds by name in this module."""
    cls = type(name, bases, {"__module__": __name__, "__qualname__": name, **members})
    setattr(sys.modules[__name__], name, cls)
    return cls


VARIANT_CLASSES = _make_classes()
