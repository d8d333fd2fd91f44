"""The story of a variant, from its config to its weights: `VariantMixin.__init__`, read from top to bottom.

A variant is its backbone class: `VariantMarianMTModel` is a `MarianMTModel` whose config lists the methods applied.
`VariantMixin` goes in front of the native class (`classes.py`). `make_variant` (`make.py`) makes the config, calls the class, and
converts trained weights.
"""

import contextlib
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, base_name, full_name, read, set_fields
from hf_freeze.architectures.kinds import tells_kinds
from hf_freeze.compat.transformers import (
    PrivateHooks,
    declare_ties,
    is_initialized,
    is_packed,
    keep_in_fp32,
    keys_to_ignore,
    leave_unquantized,
    mark_initialized,
    set_keys_to_ignore,
)
from hf_freeze.layers.constants import native_shapes
from hf_freeze.layers.derived import SelfInitialized
from hf_freeze.layers.factorized_embedding import LowRankOutput
from hf_freeze.layers.quantized import STORED
from hf_freeze.methods.base import Method
from hf_freeze.methods.order import check_shared_layers
from hf_freeze.methods.parts import SeededValues, Selection, frozen_at, layers_kept, parts_of
from hf_freeze.model.adapters import check_adapters
from hf_freeze.model.execution import ExecutionMixin, check_mode
from hf_freeze.model.merging import merged
from hf_freeze.model.paging import Paged
from hf_freeze.model.resizing import ResizingMixin
from hf_freeze.model.saving import SavingMixin
from hf_freeze.model.training import TrainingMixin
from hf_freeze.model.weights import (
    balance_factors,
    draw_like_marian,
    make_unstored,
    no_draws,
    promote_output_bias,
    regenerate,
)
from hf_freeze.seeded import Origin, SeededTensor
from hf_freeze.surgery.replacing import DENSE


class VariantMixin(SavingMixin, ResizingMixin, TrainingMixin, ExecutionMixin, PrivateHooks):
    """In front of a native class: builds the structure from the config, freezes, and regenerates what is not stored.

    `methods`: those applied, in order; `methods_now`: the same, where they name layers, by the numbers that layers have after all
    methods. `seeded_tensors`: full name -> definition of each tensor that is not stored. `paged`: the files that hold what is
    made, if that is larger than the memory.
    """

    methods: list[Method]
    methods_now: list[Method]
    architecture: Architecture
    seeded_tensors: dict[str, SeededTensor]
    paged: Paged | None

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A variant; but the native base model for the config of a backbone: some native task classes make theirs by AutoModel,
        and the methods are applied to the whole model, once."""
        if getattr(config, "of_backbone", False):
            return cls.native_class(config, *args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        config: Any,
        *args: Any,
        seeded_execution: str = "resident",
        paged: Paged | None = None,
        **kwargs: Any,
    ) -> None:
        check_mode(seeded_execution)
        self.paged = paged
        self._restructured = False
        self._native_ties: dict[str, str] | None = None
        self.on_disk: set[str] = set()  # seeded tensors that `from_pretrained` leaves to accelerate
        # 1. The backbone, as its native class builds it from the sizes that it had before any method. `self.config` is a copy:
        #    the caller's config stays as it is.
        #    On meta there is nothing to draw, and torch takes longer to find that out than for all the rest.
        on_meta = torch.empty(0).is_meta
        undrawn = no_draws if on_meta else contextlib.nullcontext
        backbone = config.before_methods()
        backbone.of_backbone = True
        with undrawn():
            super().__init__(backbone, *args, **kwargs)
        for module in self.modules():
            if hasattr(module, "config"):
                vars(module.config).pop("of_backbone", None)
        native_linears = {name for name, module in self.named_modules() if surgery.is_dense(module)}
        if on_meta:
            self.tie_weights(recompute_mapping=False)  # which comes with the draws
        keep_in_fp32(self, torch.get_default_dtype())
        self.architecture = config.native_architecture
        if config.description is not None:
            self.architecture.check_fits(self)
        if self.shifts_labels:  # transformers would look for the loss by the class name, and not find GPT-2's
            self.loss_type = "ForCausalLM"
        # 2. Every method changes modules and shapes, from its settings alone (this also runs on meta).
        with undrawn():
            self._restructure(config.parsed_methods)
        self._set_on_all_configs(fields := {name: read(config, name) for name in config.original_fields})
        self._set_copied_lists(config, fields)
        # 3. Parameters that are shared, natively or by a method.
        self._collect_ties()
        # 4. What is frozen, and what is not stored because a seed regenerates it.
        self._collect_constants()
        self.apply_freeze()
        self._leave_unquantized(native_linears)
        self._set_execution(seeded_execution)
        # 5. Values: fresh draws, then the seeded tensors. On meta there are none yet; `from_pretrained` fills them in and calls
        #    `initialize_weights` at its end.
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.init_weights()  # draws, then ties: a tied output matrix would draw the table anew
        elif not on_meta:  # accelerate's `init_empty_weights`, after which accelerate loads the checkpoint
            make_unstored(self, self._constants)

    # -- 2. structure ----------------------------------------------------------------------------------------------------

    def _restructure(self, methods: list[Method]) -> None:
        self.methods, self.methods_now = methods, list(methods)
        self._origins: list[dict[str, Origin]] = []  # of each method: where it took the values of a parameter
        for number, method in enumerate(methods):
            selection = method.part(Selection) if any(parts_of(methods[:number], SeededValues)) else None
            self._origins.append({} if selection is None else selection.origins(self, self.architecture))
            changes = method.config_changes(self.architecture, self.config)
            kept = layers_kept(method, self.architecture, self.config)
            method.restructure(self, self.architecture)
            for position, before in enumerate(self.methods_now[:number] if kept else ()):
                # Freeze and what else has no modules of its own has always meant the layers that LayerSharing(depth=) gives.
                if method.facts.selects or before.facts.structural:
                    self.methods_now[position] = before.renumbered(self.architecture, kept)
            self.architecture = method.describe(self.architecture, self.config)
            self._set_on_all_configs(changes)
        promote_output_bias(self)
        self._restructured = True

    def _set_on_all_configs(self, values: dict[str, Any]) -> None:
        for module in self.modules() if values else ():  # encoder and decoder have a copy of the config each
            if hasattr(module, "config"):
                set_fields(module.config, values)

    def _set_copied_lists(self, config: Any, fields: dict[str, Any]) -> None:
        """Set the lists of layers that modules have copied from the native config, as Mllama does `cross_attention_layers`."""
        lists = [name for name in fields if tells_kinds(name)]
        before = config.before_methods() if lists else None
        for name in lists:
            old, own = read(before, name), name.rpartition(".")[2]
            for module in self.modules() if isinstance(old, list) else ():
                if vars(module).get(own) == old:
                    setattr(module, own, fields[name])

    def _set_methods(self, methods: list[Method]) -> None:
        """Replace the settings of `methods`, after what a method holds has changed; also in the config."""
        places = zip(self.methods, methods, self.methods_now, strict=True)
        self.methods_now = [new if now is old else now for old, new, now in places]
        self.methods = methods
        self.config.set_methods(methods)

    # -- 3. ties -----------------------------------------------------------------------------------------------------------

    def _collect_ties(self) -> None:
        """Find out which parameters share their values: natively, less what a method has replaced, and by methods."""
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        native = self._native_ties = self.all_tied_weights_keys if self._native_ties is None else self._native_ties
        self.all_tied_weights_keys = native  # where methods look for them, also when ties are found again
        self._gone_ties = {target for target, source in native.items() if not {target, source} <= names}
        native = {target: source for target, source in native.items() if target not in self._gone_ties}
        by_methods: dict[str, str] = {}
        for method in self.methods_now:
            by_methods |= method.ties(self, self.architecture)
        check_shared_layers(
            self.methods_now,
            by_methods,
            lambda name: self.architecture.layer_of(base_name(self, name)),
            self._component,
        )
        ties = native | by_methods
        # A native tie whose source is tied by a method now ends there.
        self._own_ties = {t: _end_of(ties, s) for t, s in ties.items() if t in by_methods or s in by_methods}
        self.all_tied_weights_keys = native | self._own_ties
        prefixes = {self: "", self.base_model: full_name(self, "")}  # the base model can be saved alone
        for module, prefix in prefixes.items():
            declare_ties(module, prefix, self._own_ties, self._gone_ties)

    def tie_anew(self) -> None:
        """Find ties again, after `finalize` has replaced modules."""
        self._collect_ties()
        self.tie_weights(recompute_mapping=False)

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        """As the native one, with the ties of methods; a seeded source is never missing."""
        if missing_keys is not None and self._restructured:
            missing_keys.difference_update(self.seeded_tensors)
        own_ties = self._own_ties if self._restructured else {}
        # The native function takes every tie for that of an output matrix, whose bias it would stretch to the vocabulary.
        for target in own_ties:
            self.all_tied_weights_keys.pop(target, None)
        super().tie_weights(missing_keys=missing_keys, recompute_mapping=recompute_mapping)
        for target, source in own_ties.items():
            parent, _, name = target.rpartition(".")
            setattr(self.get_submodule(parent), name, self.get_parameter_or_buffer(source))
            if missing_keys is not None and source not in missing_keys:
                missing_keys.discard(target)
        self.all_tied_weights_keys |= own_ties

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        # The native one knows parameters only. Quantised modules tie buffers, which nothing initialises on meta.
        tied = self.all_tied_weights_keys
        self.all_tied_weights_keys = {t: s for t, s in tied.items() if t.rpartition(".")[2] not in STORED}
        super().mark_tied_weights_as_initialized(loading_info)
        self.all_tied_weights_keys = tied

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        ties = super().get_expanded_tied_weights_keys(all_submodels)
        if not self._restructured:
            return ties
        left_out = self._gone_ties | self._own_ties.keys()  # `tie_weights` of this class makes the ties of methods
        return {target: source for target, source in ties.items() if target not in left_out}

    # -- 4. freezing -------------------------------------------------------------------------------------------------------

    def _collect_constants(self) -> None:
        """Constants that are as computed are not stored, though native classes do store them; see `trained_constants`."""
        self._constants = {name for name, _ in self.named_parameters() if self._component(name) == "constant"}
        on_save, on_load = keys_to_ignore(self)
        # Natively a buffer, which a checkpoint may lack.
        trained_bias = {self.architecture.output_bias} & self._parameters.keys()
        self._ignored = on_save | self._constants, (on_load - trained_bias) | self._constants
        self._declared_digests = frozenset(self.config.digests)

    def apply_freeze(self) -> None:
        """Find out which tensors are frozen, and which are seeded: neither stored nor expected in a checkpoint; then set
        `requires_grad`."""
        self._frozen = set(self._constants)
        self.seeded_tensors = {}
        for number, method in enumerate(self.methods_now):
            always = frozen_at(method, None)
            for name, definition in method.freeze(self, self.architecture):
                if definition is not None:
                    self.seeded_tensors[name] = traced = self._traced(definition, number)
                    traced.check()
                if always or definition is not None:
                    self._frozen.add(name)
        tied = self.all_tied_weights_keys
        unstored = set(self.seeded_tensors) | {t for t, source in tied.items() if source in self.seeded_tensors}
        on_save, on_load = self._ignored
        set_keys_to_ignore(self, on_save | unstored | set(self._own_ties), on_load | unstored)
        self._set_trainable()

    def _leave_unquantized(self, native_linears: set[str]) -> None:
        """Keep linears from quantisers that are made by methods, that a seed fills, or that share their weight."""
        tied = self.all_tied_weights_keys
        kept = {name.rpartition(".")[0] for name in (*self.seeded_tensors, *tied, *tied.values())}
        linears = {name: module for name, module in self.named_modules() if isinstance(module, DENSE)}
        own = {name for name, module in linears.items() if name not in native_linears or not surgery.is_dense(module)}
        leave_unquantized(self, own | kept & linears.keys())

    def _set_trainable(self) -> None:
        tied = self.all_tied_weights_keys
        for name, parameter in self.named_parameters(remove_duplicate=False):
            if not is_packed(parameter):
                parameter.requires_grad_(tied.get(name, name) not in self._frozen)
        self._forget_phase()

    def _traced(self, definition: SeededTensor, number: int) -> SeededTensor:
        """`definition`, from the method of this number, as a slice of the tensor that the parameter was before later methods."""
        for origins in reversed(self._origins[number + 1 :]):
            if definition.name in origins:
                definition = definition.taken_from(origins[definition.name])
        return definition

    def _component(self, name: str) -> str:
        return self.architecture.component(base_name(self, name))

    # -- 5. values ---------------------------------------------------------------------------------------------------------

    def draw_module(self, module: nn.Module, native_draw: Any) -> None:
        """Draw fresh values of one module: natively, or as the module itself does."""
        if not isinstance(module, LowRankOutput):  # as an nn.Linear, it would be drawn natively too
            with native_shapes(module):
                native_draw(module)
        if isinstance(module, SelfInitialized):
            module.initialize_parameters()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw fresh weights and regenerate seeded ones; transformers also calls it at the end of `from_pretrained`."""
        if not self._restructured:  # called by the native __init__
            super().initialize_weights()
            return
        if any(map(is_initialized, self.parameters())):
            # Loading: seeded tensors need no draw first, which would cost a third of the time. Fresh models draw them, so that
            # the other weights are the same whatever is frozen.
            mark_initialized(map(self.get_parameter, self.seeded_tensors))
        self.draw_fresh()
        self._set_trainable()  # loading has made every loaded tensor trainable
        regenerate(self)

    @torch.no_grad()
    def draw_fresh(self) -> None:
        """Draw the weights that are neither loaded nor drawn, seeded ones included."""
        fresh = [parameter for parameter in self.parameters() if not is_initialized(parameter)]
        # Native draws may read the hidden size from the config, such as rotary frequencies that of a head.
        field, fields = self.architecture.hidden_field, self.config.original_fields
        native = {field: fields[field]} if field in fields else {}
        width = read(self.config, field) if native else 0
        self._set_on_all_configs(native)
        with contextlib.ExitStack() as stack:
            for module in self.modules():
                stack.enter_context(native_shapes(module))
            super().initialize_weights()
        self._set_on_all_configs(dict.fromkeys(native, width))
        if fresh:
            if self.config.init == "marian":
                draw_like_marian(self, fresh)
            balance_factors(self, fresh)

    # -- and back ----------------------------------------------------------------------------------------------------------

    def merge(self, *, copy: bool = True) -> PreTrainedModel:
        """A plain native model with the same weights and logits; loading it needs no hf_freeze.

        `copy`: True gives it memory of its own. With False it takes over the tensors that stay as they are, and the variant
        cannot be used any more. Layers that have lost heads or neurons are filled up with zeros.

        Raises ValueError for a method that cannot be undone, and while PEFT adapters are in the model.
        """
        if not copy:
            self.set_seeded_execution("resident")
        with self.resident():
            return merged(self, copy=copy)

    @property
    def peft_config(self) -> Any:
        """PEFT sets it once its layers are in the model, and deletes it when they are gone."""
        if "_peft_config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'peft_config'")
        return self.__dict__["_peft_config"]

    @peft_config.setter
    def peft_config(self, value: Any) -> None:
        self.__dict__["_peft_config"] = value
        check_adapters(self)

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["_peft_config"]


def _end_of(ties: dict[str, str], name: str) -> str:
    while name in ties:
        name = ties[name]
    return name
