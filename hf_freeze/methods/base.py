"""`Method`: what a technique is, and what it may do to a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_freeze.architectures.base import Architecture
    from hf_freeze.model.build import VariantMixin
    from hf_freeze.seeded import Origin, SeededTensor


@dataclass(frozen=True, kw_only=True)
class Method:
    """One technique: a validated, JSON-round-tripping config and what it does to a model.

    A subclass is a frozen, keyword-only dataclass that validates its fields in `__post_init__` (ValueError with the value,
    the limit and the choices) and overrides those hooks that it needs. The facts below are read by the contract tests.
    """

    name: ClassVar[str]
    example: ClassVar["Method"]  # a tiny setting that the contract tests apply to every supported architecture
    shrinks: ClassVar[bool] = False  # stored bytes fall with the example, after `finalize()` where there is one
    exact: ClassVar[bool] = False  # the example leaves the forward unchanged
    stochastic: ClassVar[bool] = False  # the example's forward in training mode is random
    from_scratch: ClassVar[bool] = False  # trained weights cannot be taken over: the backbone is a config
    of_values: ClassVar[bool] = False  # its modules cannot draw values of their own: fresh ones too come by `convert`
    architectures: ClassVar[frozenset[str] | None] = None  # supported model types; None is all

    @classmethod
    def supports(cls, model_type: str) -> bool:
        """Whether the method works on the architecture of this native model type."""
        return cls.architectures is None or model_type in cls.architectures

    def validate(self, architecture: "Architecture", config: Any) -> None:
        """Raise ValueError where the setting does not fit this backbone config, which `methods_before(config)` have changed.
        Allocates nothing."""

    def config_changes(self, architecture: "Architecture", config: Any) -> dict[str, Any]:
        """The native config fields that it changes, such as the depth, with their new values. Called after `validate`; the
        backbone is built with the values before, and `model.config` has the new ones after `restructure`."""
        return {}

    @property
    def kept_tokens(self) -> "Sequence[int] | None":
        """The token ids, of those that it finds, that it leaves, in the order of their new numbers; None: all, as they are.

        Token ids in the configs of the model and of its generation are numbered anew accordingly.
        """
        return None

    def keeping_tokens(self, kept: "Sequence[int]") -> "Method":
        """The same with other `kept_tokens`, after `resize_token_embeddings`."""
        raise NotImplementedError

    @property
    def names_layers(self) -> bool:
        """Whether this setting holds numbers or names of layers, which would be others once layers are removed."""
        return getattr(self, "layers", None) is not None

    @property
    def names_tokens(self) -> bool:
        """Whether this setting holds token ids, which would be others once tokens are removed."""
        return False

    @property
    def selects(self) -> bool:
        """Whether `convert` keeps some of the values and leaves others out, by their places and not by what they are."""
        return False

    def restructure(self, model: "VariantMixin", architecture: "Architecture") -> None:
        """Change modules and shapes, from the config alone: runs on `meta`, at every construction and load."""

    def described(self, architecture: "Architecture", config: Any) -> "Architecture":
        """What `architecture` is once `restructure` has put in other blocks."""
        return architecture

    def convert(self, old: "PreTrainedModel", new: "VariantMixin") -> None:
        """Fill the modules that `restructure` made in `new` from the weights of `old`, which may be a native model.

        Called once, by `make_variant`; what has the same name and shape in both is copied already.
        """

    def prepare(self, model: "VariantMixin", architecture: "Architecture") -> None:
        """Set what depends on the values of the new modules, converted or fresh. Called once, by `make_variant`."""

    def ties(self, model: "VariantMixin", architecture: "Architecture") -> dict[str, str]:
        """Parameter -> the parameter that it is one with, full names, beyond the native ties. Called after every `restructure`.

        Raises ValueError where the two cannot be one.
        """
        return {}

    def freeze(
        self, model: "VariantMixin", architecture: "Architecture"
    ) -> "Iterable[tuple[str, SeededTensor | None]]":
        """(full parameter name, definition or None to keep its value) of all it freezes, after every `restructure`."""
        return ()

    def frozen_at(self, progress: float | None) -> bool:
        """Whether what `freeze` names is frozen when this share of training is done; None is before training.

        What is frozen for a while only is not at None: an optimizer made before training must hold it. What a seed defines
        is always frozen.
        """
        return True

    @property
    def scheduled(self) -> bool:
        """Whether this setting depends on the progress of training, which a callback or `model.advance` must then tell."""
        return False

    def scheduled_values(self, step: int, total_steps: int) -> dict[str, float]:
        """What it schedules, in words, with the value when `step` of `total_steps` are done: what reports draw."""
        return {}

    def advance(self, model: "VariantMixin", architecture: "Architecture", step: int, total_steps: int) -> None:
        """Set what the step decides (a rate, a mask, a draw), and nothing else: training may resume at any step.

        Called before every optimiser step where `scheduled`, after `frozen_at` was followed; so it must be cheap.
        """

    def rewind(self, model: "VariantMixin", architecture: "Architecture") -> None:
        """Undo what `advance` has set for a step alone, such as a draw."""

    @property
    def skips(self) -> bool:
        """Whether a step of training may leave without a gradient what is trainable."""
        return False

    def auxiliary_loss(
        self, model: "VariantMixin", architecture: "Architecture", step: "Step | None" = None
    ) -> "torch.Tensor | None":
        """A scalar that training adds to the mean loss of a label; it counts once in an optimiser step. `step`: the forward that
        it is for; None outside of one."""
        return None

    @property
    def label_weight(self) -> float:
        """What training multiplies the loss of the labels by."""
        return 1.0

    def watched(self, model: "VariantMixin", architecture: "Architecture") -> Iterable[str]:
        """Names below the base model of the modules whose outputs `auxiliary_loss` finds in its step."""
        return ()

    @property
    def needs_teacher(self) -> bool:
        """Whether training needs `model.set_teacher`."""
        return False

    def check_teacher(self, model: "VariantMixin", architecture: "Architecture", teacher: "PreTrainedModel") -> None:
        """Raise ValueError where it is none for this model."""

    @property
    def finalizable(self) -> bool:
        """Whether training ends with `finalize`, and has not yet."""
        return False

    def finalize(self, model: "VariantMixin", architecture: "Architecture") -> "Method":
        """End training, in place, whatever its progress: drop what only training needs. Returns the method that the config
        names from then on, not `finalizable`."""
        raise NotImplementedError

    def resized(self, model: "VariantMixin", architecture: "Architecture") -> None:
        """Bring into line what `resize_token_embeddings` of the backbone, which has just resized, knows nothing of."""

    def is_seeded(self, component: str) -> bool:
        """Whether it has a seed regenerate weights of this component, which are then not stored."""
        return False

    def merge(self, model: "VariantMixin", architecture: "Architecture") -> None:
        """Undo `restructure` in place, densely. Raises ValueError that names the method where the maths forbids it."""


@dataclass(frozen=True, kw_only=True)
class SelectingMethod(Method):
    """A method that keeps values by position. After a Freeze that made them random, they stay a slice of its definition."""

    def origins(self, model: "VariantMixin", architecture: "Architecture") -> "dict[str, Origin]":
        """Parameter after `restructure` -> where its values come from, names below the base model; others stay as they are.

        Called before `restructure`, with the config alone; runs on `meta`. A setting that depends on values (`decided`) keeps
        the first positions: of fresh weights, all are alike.
        """
        raise NotImplementedError

    def decided(self, old: Any, architecture: "Architecture") -> "SelectingMethod":
        """The same setting with positions instead of a rule that depends on the values of `old`, so that the config says which
        slice of a seeded tensor is kept."""
        return self


@dataclass(frozen=True, kw_only=True)
class Step:
    """A forward in training: its `inputs` by name, its `outputs`, and what the modules returned that methods watch."""

    inputs: dict[str, Any]
    outputs: Any
    seen: "dict[str, torch.Tensor]" = field(default_factory=dict)
