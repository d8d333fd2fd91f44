"""Parts: optional abilities of a method, as small objects that `Method.parts` returns; and `Model`, the part of a variant's
interface that methods use.

The model asks for a part by its type: `method.part(Schedule)` is None for a method without a schedule.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture
from hf_freeze.seeded import Origin, SeededTensor
from hf_freeze.solvers.moments import Moments

# Stack -> for each of its layers, the number that the layer, or its original, had before.
Kept = Mapping[str, Sequence[int]]


class Model(Protocol):
    """The interface of a variant that methods use."""

    config: Any
    methods: list[Any]
    methods_now: list[Any]
    base_model_prefix: str
    all_tied_weights_keys: dict[str, str]

    @property
    def architecture(self) -> Architecture: ...
    @property
    def base_model(self) -> Any: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def get_parameter(self, target: str) -> nn.Parameter: ...
    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterable[tuple[str, nn.Parameter]]: ...
    def get_output_embeddings(self) -> Any: ...
    def get_teacher(self) -> Any: ...
    def tokens_differ(self, other: Any) -> str | None: ...


class Statistics(Protocol):
    """What the linears of a model see on texts, while a method converts it. See `model/calibrating.py`."""

    def walk(
        self,
        names: Sequence[str],
        before: Mapping[str, Sequence[str]] = ...,
        *,
        curvature: bool = ...,
        fit: bool = ...,
        norms: Sequence[str] = ...,
        channels: Sequence[int] = ...,
        resumes: bool | None = ...,
    ) -> Iterator[dict[str, Moments | None]]:
        """The moments of the linears `names` (below the base model), in the order in which the model runs them; those that read
        the same states come together. None for a linear that no token has reached.

        The inputs are those of the new model as far as it has been converted, so convert each linear before the next ones are
        asked for. `before`: linear -> the modules that are still the old model's when it is asked for, such as those of an FFN
        that is to lose neurons, which its last linear reads. The outputs, for pairs, are the old model's.

        `fit`: after each layer, all parameters of `names` and `before` in it are fitted together so that the layer gives what the
        old one gives; not in models larger than the memory, in fp16 and bf16, nor seeded or shared parameters.

        `norms`: come in this order too, each alone; its inputs are what it gives in the new model. A saved calibration has none.

        `channels`: of the hidden states, those that the new model has; the old outputs are these of norms, and of linears that
        write fewer.

        `resumes`: in models larger than the memory, what a killed process had finished is restored and does not come again. None:
        where a model is converted, and not only looked at.
        """
        ...

    def fit(self, stack: str, spans: Sequence[tuple[int, int]], names: Sequence[str]) -> None:
        """Fit the linears `names` of the new model (below the base model), layer by layer, as in `walk`. `spans`: for each layer
        of the new stack, the first and the last layer of the old one that it stands for."""
        ...

    def lookups(self, tables: Sequence[str]) -> torch.Tensor | None:
        """int64 (V,), on the CPU: how often the old model looks up each row of these tables, full names, for real tokens; None
        where that is not known."""
        ...

    def routed(self, modules: Sequence[str]) -> dict[str, torch.Tensor] | None:
        """Module of experts (below the base model) -> fp64 (E,): for each expert, the sum of the squares of what it adds to the
        outputs of the old model for real tokens; None where that is not known."""
        ...

    def output_moments(self) -> Moments | None:
        """The moments of the hidden states that the old model's output matrix multiplies; None if it has no such matrix."""
        ...

    def across(self, linear: str, first: str, last: str) -> tuple[Moments, tuple[str, str] | None] | None:
        """For the last linear of layer `first` (names below the base model): the moments of its inputs, paired with the outputs
        that it would need so that what leaves its layer is what leaves the later layer `last`. Where both layers end in a norm,
        that is before it, and the names of both norms come with them. None where no token reaches the linear."""
        ...

    def distance(self, method: Any) -> float:
        """How far the predictions are from the old model's if `method` changes it, without a calibration."""
        ...

    def record(self, name: str, plain: float, calibrated: float) -> None:
        """Report the relative error of a linear's outputs: as the method cuts without statistics, and with them."""
        ...

    def note(self, text: str) -> None:
        """Report something else, in words."""
        ...


class Part:
    """The base of all parts. `method`: the one whose part it is, if it reads its setting."""

    def __init__(self, method: Any = None) -> None:
        self.method = method


P = TypeVar("P", bound=Part)


def parts_of(methods: Iterable[Any], kind: type[P]) -> Iterator[tuple[Any, P]]:
    """(method, its part of this kind) for every method that has one."""
    for method in methods:
        if (part := method.part(kind)) is not None:
            yield method, part


class Schedule(Part):
    """Settings that change with the progress of training. They are a function of the step alone, so a resumed run continues
    exactly.

    Training then needs `VariantCallback` or `model.advance`; without either, the first step raises an error.
    """

    skips: ClassVar[bool] = False  # whether a step may leave a trainable parameter without a gradient

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        """Description in words -> value after `step` of `total_steps` steps. Reports plot these values."""
        raise NotImplementedError

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        """Set only what depends on `step`: a rate, a mask, a draw. Runs before every optimiser step, so it must be cheap."""

    def rewind(self, model: Model, architecture: Architecture) -> None:
        """Undo settings of a single step, such as a draw."""


class FreezePhase(Schedule):
    """A schedule that freezes the parameters of `Method.freeze` during a part of training."""

    def frozen_at(self, progress: float | None) -> bool:
        """Whether the parameters are frozen after the share `progress` of training. None means before training, when optimisers
        are created: it must be False then, or the optimiser would leave the parameters out."""
        raise NotImplementedError


def layers_kept(method: Any, architecture: Architecture, config: Any) -> Kept:
    """What `KeptLayers` of a method says, or nothing."""
    part = None if method is None else method.part(KeptLayers)
    return {} if part is None else part.kept(architecture, config)


def frozen_at(method: Any, progress: float | None) -> bool:
    """Whether the parameters of `method.freeze` are frozen after the share `progress` of training (None: before training)."""
    phase = method.part(FreezePhase)
    return phase is None or phase.frozen_at(progress)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward in training: its `inputs` by name, its `outputs`, and in `seen` the outputs of the watched modules by name."""

    inputs: dict[str, Any]
    outputs: Any
    seen: dict[str, torch.Tensor] = field(default_factory=dict)


class Objective(Part):
    """A term that training adds to the mean loss per label."""

    label_weight: float = 1.0  # factor of the loss of the labels
    needs_teacher: bool = False  # whether training needs `model.set_teacher`

    def loss(self, model: Model, architecture: Architecture, step: Step | None = None) -> torch.Tensor | None:
        """A scalar that counts once per optimiser step. `step`: the forward that it belongs to; None outside a forward."""
        raise NotImplementedError

    def watched(self, model: Model, architecture: Architecture) -> Iterable[str]:
        """Names, below the base model, of the modules whose outputs `loss` reads from `step.seen`."""
        return ()

    def check_teacher(self, model: Model, architecture: Architecture, teacher: Any) -> None:
        """Raise ValueError for a teacher that does not fit this model."""


class KeptTokens(Part):
    """The vocabulary is reduced to the ids in `kept`, in the order of their new numbers.

    Token ids in the configs of the model and of generation are renumbered accordingly.
    """

    kept: Sequence[int]

    def with_kept(self, kept: list[int]) -> Any:
        """The method with other kept ids, after `resize_token_embeddings`."""
        raise NotImplementedError


@dataclass(frozen=True)
class KeptLayers(Part):
    """Stacks get another depth.

    `kept(architecture, config)`: stack -> for each of its new layers, the number of the old one that it is or copies; without
    the stacks that stay. Earlier methods that name layers go on with the new numbers.
    """

    kept: Callable[[Architecture, Any], Kept]


@dataclass(frozen=True)
class SeededValues(Part):
    """A seed regenerates the weights of these `components`, so they are not stored."""

    components: frozenset[str]


@dataclass(frozen=True)
class InitialValues(Part):
    """`make_variant` draws parameters again, once; from then on they are like all others.

    `definitions(model, architecture)`: (full parameter name, definition of its values, or None: as the native class draws it).
    Called after `restructure` and `convert`.
    """

    definitions: Callable[[Model, Architecture], Iterable[tuple[str, SeededTensor | None]]]


@dataclass(frozen=True)
class Selection(Part):
    """The method keeps weights by position. So if a Freeze has made the weights random, the kept ones remain a slice of the
    seeded tensor, and a seed can still regenerate them.

    `origins(model, architecture)`: parameter after `restructure` -> origin of its values, with names below the base model;
    unnamed parameters keep their values. Called before `restructure`, also on `meta`. A setting that chooses by value keeps the
    first positions here, because fresh weights all have the same distribution.
    `decided(old, architecture, statistics)`: the same method with positions instead of a choice by value, so that the config
    defines the slice of a seeded tensor; None if the method always names positions. `must_decide(architecture, config)`: whether
    it needs that for every backbone of this architecture; `by_statistics`: whenever there is a calibration.
    """

    origins: Callable[[Model, Architecture], dict[str, Origin]]
    decided: Callable[[Any, Architecture, Statistics | None], Any] | None = None
    must_decide: Callable[[Architecture, Any], bool] = lambda architecture, config: False
    by_statistics: bool = False


class ResizedTables(Part):
    """Token tables that `resize_token_embeddings` of the backbone does not resize completely."""

    def follow_resize(self, model: Any, architecture: Architecture) -> None:
        """Complete the resizing after the backbone has resized its tables."""
        raise NotImplementedError
