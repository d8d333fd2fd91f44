"""METHODS and ARCHITECTURES, the decorators that fill them, and methods as plain data."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_freeze.architectures.base import Architecture
    from hf_freeze.rng import SeededTensor
    from hf_freeze.variant import VariantMixin


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
class Step:
    """A forward in training: its `inputs` by name, its `outputs`, and what the modules returned that methods watch."""

    inputs: dict[str, Any]
    outputs: Any
    seen: "dict[str, torch.Tensor]" = field(default_factory=dict)


METHODS: dict[str, type[Method]] = {}
ARCHITECTURES: "dict[str, Architecture]" = {}

M = TypeVar("M", bound=type[Method])


def register_method(
    name: str,
    *,
    example: dict[str, Any],
    shrinks: bool = False,
    exact: bool = False,
    stochastic: bool = False,
    from_scratch: bool = False,
    architectures: Iterable[str] | None = None,
) -> Callable[[M], M]:
    """Class decorator: enter a method under `name`, with the facts that the contract tests read."""

    def register(cls: M) -> M:
        if name in METHODS:
            raise ValueError(f"method {name!r} is registered already, by {METHODS[name].__qualname__}")
        cls.name, cls.shrinks, cls.exact, cls.stochastic = name, shrinks, exact, stochastic
        cls.from_scratch = from_scratch
        cls.architectures = None if architectures is None else frozenset(architectures)
        setattr(cls, "example", cls(**example))  # noqa: B010 (a subclass where Method is declared)
        METHODS[name] = cls
        return cls

    return register


def register_architecture(architecture: "Architecture") -> "Architecture":
    """Enter an architecture under its native model type."""
    if architecture.model_type in ARCHITECTURES:
        raise ValueError(f"architecture {architecture.model_type!r} is registered already")
    ARCHITECTURES[architecture.model_type] = architecture
    return architecture


def architecture_of(model_type: str) -> "Architecture":
    """The architecture of a native or variant `model_type`. Raises ValueError with the choices."""
    native = model_type.removeprefix(VARIANT_PREFIX)
    if native not in ARCHITECTURES:
        raise ValueError(f"no architecture {native!r}; choose from {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[native]


def architecture_for(model: Any) -> "Architecture":
    """That of a native model, or of a variant, as its methods have left it. Raises ValueError with the choices."""
    return getattr(model, "architecture", None) or architecture_of(model.config.model_type)


VARIANT_PREFIX = "hf_freeze_"


def methods_before(config: Any) -> list[Method]:
    """Those that are applied before the method that is validated with `config`."""
    return [method_from_dict(data) for data in config.methods_before]


def method_to_dict(method: Method) -> dict[str, Any]:
    """Plain JSON data: the registered name under `method`, then every field."""
    return {"method": method.name} | {
        name: copy.deepcopy(getattr(method, name)) for name in stored_fields(type(method))
    }


def stored_fields(method: type[Method]) -> list[str]:
    """Names of the fields of a method that its config holds: all but what only a process has, such as a teacher."""
    return [each.name for each in fields(method) if not each.metadata.get("runtime")]


def method_from_dict(data: Any) -> Method:
    """The method that `method_to_dict` wrote. Raises ValueError for anything else."""
    if not isinstance(data, dict) or not isinstance(data.get("method"), str):
        raise ValueError(f"a method is a dict with its name under 'method', not {data!r}")
    arguments = dict(data)
    name = arguments.pop("method")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose from {sorted(METHODS)} (or update hf_freeze)")
    known = stored_fields(METHODS[name])
    if unknown := sorted(set(arguments) - set(known)):
        raise ValueError(f"unknown field {unknown[0]!r} of method {name!r}; choose from {known} (or update hf_freeze)")
    try:
        return METHODS[name](**arguments)
    except TypeError as error:  # a required field is missing
        raise ValueError(f"method {name!r}: {error}") from error
