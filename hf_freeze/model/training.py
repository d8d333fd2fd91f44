"""Schedules, phases of freezing, teachers and `finalize`: what a variant adds to training (its loss is in loss.py)."""

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from hf_freeze.architectures.base import Architecture
from hf_freeze.compat.transformers import MixedModel
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import KeptTokens, Objective, Schedule, Step, frozen_at, parts_of
from hf_freeze.model.alignment_heads import without_heads
from hf_freeze.model.tokenizers import load_tokenizer


class _Teacher:
    """Keeps a teacher out of the parameters, copies and pickles of its student."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __deepcopy__(self, memo: Any) -> "_Teacher":
        return self

    def __reduce__(self) -> Any:
        return type(self), (None,)


class TrainingMixin(MixedModel):
    """The part of a variant that only training uses.

    `progress`: the share of training steps done, in 0..1; None until the first `advance`. It is never saved: it follows from
    the step. `only_counted`: the model is a twin on which operations are counted, and is not trained.
    """

    native_class: ClassVar[type[PreTrainedModel]]
    architecture: Architecture  # the class attribute, until a method puts in other blocks
    shifts_labels: ClassVar[bool]  # a causal language model: the label of a position is the next token
    progress: float | None = None
    only_counted: bool = False
    methods: list[Method]
    methods_now: list[Method]
    reached: set[str] | None = None  # reached by gradients since the last forward: "outputs", "term"
    _active: tuple[int, ...] = ()  # numbers of the methods that freeze at `progress`, but not always
    _teacher: _Teacher | None = None
    _frozen_now: frozenset[str] = frozenset()  # parameters that they froze; those frozen by the user stay frozen

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the Trainer passes `num_items_in_batch`, which `trained_forward` handles for every backbone.

        False for older versions, whose label smoothing ignores it: the Trainer then divides by the accumulation steps.
        """
        from transformers.trainer_pt_utils import LabelSmoother

        return "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters

    @property
    def scheduled(self) -> bool:
        """Whether a method follows the progress of training."""
        return any(True for _ in parts_of(self.methods, Schedule))

    def advance(self, step: int, total_steps: int) -> None:
        """Tell the methods, before an optimiser step, that `step` of `total_steps` are done. In the Trainer, `VariantCallback`
        calls it.

        Schedules are functions of `step` alone, so a resumed training continues exactly. Give the optimiser all of
        `parameters()`, or create it before the first `advance`: until then every parameter that will ever be trained is
        trainable. Freezing for a while under DistributedDataParallel needs `find_unused_parameters=True`.

        Raises ValueError unless both are integers with 0 <= step <= total_steps >= 1, and if nothing is left to train.
        """
        for name, value, least in (("step", step, 0), ("total_steps", total_steps, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"advance({name}={value!r}): must be an integer of at least {least}")
        if step > total_steps:
            raise ValueError(f"advance(step={step}): must be in 0..{total_steps}, the total_steps")
        self.progress = step / total_steps
        self._freeze_phase()
        model: Any = self
        for _, schedule in parts_of(self.methods_now, Schedule):
            schedule.advance(model, self.architecture, step, total_steps)

    def rewind(self) -> None:
        """Undo all `advance` calls, for a new optimiser or another training: unfreezes what a schedule froze."""
        self.progress = None
        self._freeze_phase()
        model: Any = self
        for _, schedule in parts_of(self.methods_now, Schedule):
            schedule.rewind(model, self.architecture)

    @property
    def not_broadcast(self) -> list[str]:
        """Names of the parameters and buffers that DistributedDataParallel need not send: a seed fills them in every process, or
        each has its own. Seeded parameters that the user has made trainable are sent."""
        tied, seeded = self.all_tied_weights_keys, getattr(self, "seeded_tensors", {})
        named = self.named_parameters(remove_duplicate=False)
        own = [
            f"{name}.{buffer}"
            for name, module in self.named_modules()
            for buffer in getattr(module, "own_to_each_process", ())
        ]
        return own + [name for name, p in named if tied.get(name, name) in seeded and not p.requires_grad]

    @property
    def finalizable(self) -> bool:
        """Whether a method still has to be finalized."""
        return any(method.facts.finalizable for method in self.methods)

    def finalize(self) -> None:
        """End training, in place and at any step: fix masks and drop everything that only training needs. The config then
        describes the result. Optimisers created before hold parameters that no longer exist.

        Raises ValueError if no method needs it, as in a second call, and on meta.
        """
        if not self.finalizable:
            raise ValueError(
                f"nothing to finalize: the methods {[method.name for method in self.methods]} are finalized, or do not need it"
            )
        if self.device.type == "meta":
            raise ValueError("finalize() reads the weights, which have no values on meta")
        model: Any = self
        stored_anew = any(method.facts.finalizable and method.facts.stores for method in self.methods)
        finalized = [m.finalize(model, self.architecture) if m.facts.finalizable else m for m in self.methods]
        for before, method in zip(self.methods, finalized, strict=True):
            if method is not before:
                without_heads(getattr(self, "generation_config", None), method, model)
        model._set_methods(finalized)
        if stored_anew:
            model.tie_anew()
        model.apply_freeze()

    def set_teacher(self, teacher: Any) -> None:
        """Set the model that Distillation learns from, or None. It is neither stored nor copied with this model.

        Raises ValueError for a teacher that does not fit this model.
        """
        model: Any = self
        if teacher is not None and not isinstance(teacher, PreTrainedModel):
            raise ValueError(f"the teacher must be a model of transformers, not a {type(teacher).__name__}")
        if teacher is self:
            raise ValueError("a model cannot be its own teacher: give a copy of it")
        for _, objective in parts_of(self.methods if teacher is not None else (), Objective):
            objective.check_teacher(model, self.architecture, teacher)
        self._teacher = _Teacher(teacher)

    def get_teacher(self) -> Any:
        """The model that Distillation learns from; None if none was set."""
        return None if self._teacher is None else self._teacher.model

    def tokens_differ(self, other: Any) -> str | None:
        """Why the ids of `other` are not known to be the tokens of this model, in words; None if one tokenizer lies beside both,
        and both have a row for each of its tokens."""
        models: list[Any] = [self, other]
        if any(any(parts_of(getattr(model, "methods", ()), KeptTokens)) for model in models):
            return "a method has given tokens new ids"
        tokenizers: list[Any] = [load_tokenizer(model.name_or_path) if model.name_or_path else None for model in models]
        for model, tokenizer in zip(models, tokenizers, strict=True):
            if tokenizer is None:
                return f"{model.name_or_path or f'this {type(model).__name__}'} has no tokenizer to tell"
        vocabularies = [tokenizer.get_vocab() for tokenizer in tokenizers]
        rows = min(model.get_input_embeddings().weight.shape[0] for model in models)
        same = vocabularies[0] == vocabularies[1] and max(vocabularies[0].values()) < rows
        return None if same else "their tokenizers differ"

    def auxiliary_loss(self, step: Step | None = None) -> torch.Tensor | None:
        """The terms that methods add to the mean loss per label in the forward `step`, summed; None if there are none."""
        model: Any = self
        teacher = self.get_teacher()
        if step is not None and teacher is not None and (teacher.training or teacher.device != self.device):
            teacher.to(self.device).eval()
        terms = [part.loss(model, self.architecture, step) for _, part in parts_of(self.methods, Objective)]
        terms = [term for term in terms if term is not None]
        return torch.stack(terms).sum() if terms else None

    def frozen_for_a_while(self) -> list[str]:
        """Names of the parameters that a schedule freezes during a part of training only."""
        names = self._names_of(i for i, method in enumerate(self.methods) if not frozen_at(method, None))
        return [name for name in sorted(names) if name in self._frozen_now or self.get_parameter(name).requires_grad]

    @property
    def needs_teacher(self) -> bool:
        """Whether training needs `set_teacher`."""
        return any(part.needs_teacher for _, part in parts_of(self.methods, Objective))

    @property
    def skips(self) -> bool:
        """Whether a training step may leave a trainable parameter without a gradient."""
        return any(part.skips for _, part in parts_of(self.methods, Schedule))

    def _names_of(self, numbers: Iterable[int]) -> set[str]:
        model: Any = self
        frozen = (pair for number in numbers for pair in model.methods_now[number].freeze(model, self.architecture))
        return {name for name, definition in frozen if definition is None}

    def _freeze_phase(self) -> None:
        """Freeze and unfreeze for `progress`. Called in every step, so it looks at the parameters only if the phase changes."""
        active = tuple(
            i
            for i, method in enumerate(self.methods)
            if not frozen_at(method, None) and frozen_at(method, self.progress)
        )
        if active == self._active:
            return
        wanted = self._names_of(active)
        frozen_now = set(self._frozen_now & wanted)
        tied = self.all_tied_weights_keys
        for alias, parameter in self.named_parameters(remove_duplicate=False):
            name = tied.get(alias, alias)
            if name in self._frozen_now and name not in wanted:
                parameter.requires_grad_(True)
            elif name in wanted and parameter.requires_grad:
                parameter.requires_grad_(False)
                parameter.grad = None  # with a gradient of zero, weight decay and momentum would still move it
                frozen_now.add(name)
        self._active, self._frozen_now = active, frozenset(frozen_now)
        if frozen_now and not any(parameter.requires_grad for parameter in self.parameters()):
            raise ValueError(
                f"nothing is left to train at progress {self.progress}: {sorted(frozen_now)[0]!r} and everything else is frozen"
            )

    def _forget_phase(self) -> None:
        """Call after every `requires_grad` has been set to its state before training."""
        self._active, self._frozen_now = (), frozenset()
        self._freeze_phase()
