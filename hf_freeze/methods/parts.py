"""What only some methods have: small objects that a method owns and returns from `Method.parts`; and what methods use of a model.

The model asks for a part by its type, `method.part(Schedule)`, and gets None where the method has no such part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture
from hf_freeze.seeded import Origin


class Model(Protocol):
    """What methods use of a variant."""

    config: Any
    methods: list[Any]
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


class Part:
    """The base of all parts."""


P = TypeVar("P", bound=Part)


def parts_of(methods: Iterable[Any], kind: type[P]) -> Iterator[tuple[Any, P]]:
    """(method, its part of this kind) for every method that has one."""
    for method in methods:
        if (part := method.part(kind)) is not None:
            yield method, part


class Schedule(Part):
    """Settings that follow the progress of training, as a function of the step alone: a resumed run continues exactly.

    Training then needs `VariantCallback` or `model.advance`; without either, the first step raises an error.
    """

    @property
    def skips(self) -> bool:
        """Whether a step may leave a trainable parameter without a gradient."""
        return False

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        """Description in words -> value when `step` of `total_steps` are done; reports plot these."""
        raise NotImplementedError

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        """Set what `step` decides (a rate, a mask, a draw), and nothing else. Runs before every optimiser step: keep it cheap."""

    def rewind(self, model: Model, architecture: Architecture) -> None:
        """Undo what holds for one step alone, such as a draw."""


class FreezePhase(Schedule):
    """A schedule that freezes for a part of training what `Method.freeze` names."""

    def frozen_at(self, progress: float | None) -> bool:
        """Whether it is frozen when this share of training is done. None stands for before training, when optimisers are made:
        what is frozen for a while must not be frozen then."""
        raise NotImplementedError


def frozen_at(method: Any, progress: float | None) -> bool:
    """Whether what `method.freeze` names is frozen when this share of training is done (None: before training)."""
    phase = method.part(FreezePhase)
    return phase is None or phase.frozen_at(progress)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward in training: its `inputs` by name, its `outputs`, and the outputs `seen` of the modules that are watched."""

    inputs: dict[str, Any]
    outputs: Any
    seen: dict[str, torch.Tensor] = field(default_factory=dict)


class Objective(Part):
    """A term that training adds to the mean loss per label."""

    label_weight: float = 1.0  # factor on the loss of the labels
    needs_teacher: bool = False  # whether training needs `model.set_teacher`

    def loss(self, model: Model, architecture: Architecture, step: Step | None = None) -> torch.Tensor | None:
        """A scalar that counts once per optimiser step. `step`: the forward that it belongs to; None outside of one."""
        raise NotImplementedError

    def watched(self, model: Model, architecture: Architecture) -> Iterable[str]:
        """Names, below the base model, of the modules whose outputs `loss` finds in `step.seen`."""
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
class SeededValues(Part):
    """A seed regenerates the weights of these `components`, so they are not stored."""

    components: frozenset[str]


@dataclass(frozen=True)
class Selection(Part):
    """The method keeps weights by position. After a Freeze that made them random, what is kept stays a slice of its definition.

    `origins(model, architecture)`: parameter after `restructure` -> where its values come from, names below the base model;
    others stay as they are. Called before `restructure`, also on `meta`. A setting whose rule depends on values keeps the first
    positions here: fresh weights are all alike.
    `decided(old, architecture)`: the same method with positions instead of such a rule, so that the config says which slice of
    a seeded tensor is kept; None if it always names positions.
    """

    origins: Callable[[Model, Architecture], dict[str, Origin]]
    decided: Callable[[Any, Architecture], Any] | None = None


class ResizedTables(Part):
    """Token tables that `resize_token_embeddings` of the backbone does not fully understand."""

    def follow_resize(self, model: Any, architecture: Architecture) -> None:
        """Bring the model in line after the backbone has resized its tables."""
        raise NotImplementedError
