"""Replace modules while they are trained: BERT-of-Theseus (Xu et al., 2020, https://arxiv.org/abs/2002.02925)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention, base_name, canonical_parameters, is_of_predecessor
from hf_freeze.architectures.kinds import types_of_layers
from hf_freeze.layers.layer_forward import Replaced
from hf_freeze.methods._ramps import RAMPS, ramp
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.checks import check_fields, check_positive_share, is_number, one_of, wrong
from hf_freeze.methods.linear import set_field
from hf_freeze.methods.parts import KeptLayers, Part, Schedule, Selection
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin, SeededTensor, draws

_INITS = ("first", "alternate")
_TRAIN = ("successor", "all")


def _is_float(value: Any) -> bool:
    """Whether `value` is a number that fits into a float; an int may be too large."""
    return is_number(value) and abs(value) < 1e300


def _whole_steps(steps: float) -> float:
    """`steps` rounded up. A value that exceeds an integer only by a rounding error counts as that integer."""
    return steps if steps > 1e15 else math.ceil(steps - 1e-9 * max(steps, 1))


@register_method(
    "theseus",
    example={"rate": 0.5, "train": "all"},
    facts=Facts(needs={"layers"}, shrinks=True, repeatable=False, renumbers="layers"),
)
@dataclass(frozen=True, kw_only=True)
class Theseus(Method):
    """Halve the depth, or divide it further. Each layer of the shallow successor replaces an equal number of consecutive layers
    of the backbone, its predecessor; the two form a module. In each training step a draw for each module chooses which of the
    two runs; in eval mode the successor always runs. `finalize()` drops the predecessors, and `merge()` gives a native model of
    the new depth.

    `successor`: stack -> layers, such as `{"encoder": 3}`; other stacks stay whole. None: half of each stack, as in the paper.

    Methods after Theseus change the successor only: factors (LowRank, TensorTrain, Tucker), fewer heads or neurons, fixed
    attention, or the blocks of LiteTransformer then replace the trained layers. For these, the successor may be as deep as the
    backbone.

    The successor of a module runs with the replacing rate: the constant `rate` (None: 0.5), or a `schedule`. `("linear", k, b)`
    is min(1, k·t + b) after t optimiser steps, as in the paper's equation 6; `("linear", b)`, `("cosine", b)` and
    `("cubic", b)` rise from b to 1 within `steps`. `steps` is a number of steps, or a share of training below 1; after it only
    successors run. None: with a schedule, the end of training; with `rate`, predecessors run until `finalize()`, and training
    should continue after that.

    The draws are a function of `seed` and the step. All processes and a resumed run get equal draws, so training needs
    `VariantCallback` or `model.advance`. DistributedDataParallel needs `find_unused_parameters=True`.

    `init`: the successor starts from the backbone's `"first"` layers, as in the released code, or from the first layer of each
    module (`"alternate"`). `train`: `"successor"` freezes embeddings, head and all other parameters, as in the released code;
    `"all"` freezes only the predecessors. This also holds after `finalize()`.

    Raises ValueError for an unknown stack, a depth that does not divide the backbone's, layers of several types (sliding and full
    attention) that successors of another type would replace, a rate outside (0, 1], a schedule that
    does not rise, and after a method that refers to layers by number. A schedule that does not end within training raises it in
    the first step.
    """

    successor: dict[str, int] | None = None
    rate: float | None = None
    schedule: Sequence[Any] | None = None
    steps: int | float | None = None
    init: str = "first"
    train: str = "successor"
    seed: int = 0
    finalized: bool = False

    def __post_init__(self) -> None:
        depths = self.successor.values() if isinstance(self.successor, dict) else [1] * (self.successor is None)
        if not depths or any(type(depth) is not int or depth < 1 for depth in depths):
            raise wrong(self, "must be None, or a dict from stacks to layers such as {'encoder': 3}", "successor")
        if self.rate is not None and self.schedule is not None:
            raise ValueError(f"Theseus(rate={self.rate!r}, schedule={self.schedule!r}): give one of them")
        check_fields(self, rate=check_positive_share, init=one_of(_INITS), train=one_of(_TRAIN))
        if self.steps is not None and not self._are_steps(self.steps):
            raise wrong(
                self, "must be None, a number of steps of at least 1, or a share of training in 0 < steps < 1", "steps"
            )
        if self.schedule is not None:
            self._check_schedule(self.schedule)
        if type(self.finalized) is not bool:
            raise ValueError(f"Theseus(finalized={self.finalized!r}): must be False; finalize() sets it")

    @staticmethod
    def _are_steps(steps: Any) -> bool:
        return _is_float(steps) and (0 < steps < 1 or (type(steps) is int and steps >= 1))

    def _check_schedule(self, schedule: Any) -> None:
        setting = f"Theseus(schedule={schedule!r}, steps={self.steps!r})"
        has_shape = isinstance(schedule, list | tuple) and len(schedule) in (2, 3) and schedule[0] in RAMPS
        if not has_shape or not all(map(_is_float, schedule[1:])) or (len(schedule) == 3 and schedule[0] != "linear"):
            raise ValueError(
                f"{setting}: must be ('linear', k, b), or one of {list(RAMPS)} with b, such as ('cosine', 0.3)"
            )
        set_field(self, "schedule", list(schedule))
        if not 0 <= schedule[-1] < 1:
            raise ValueError(f"{setting}: it starts at b={schedule[-1]!r}, which must be in 0 <= b < 1")
        if len(schedule) == 3 and schedule[1] <= 0:
            raise ValueError(f"{setting}: k={schedule[1]!r} must be above 0, or the rate never reaches 1")
        if len(schedule) == 3 and self.steps is not None:
            raise ValueError(f"{setting}: k determines the number of steps; leave steps out")

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers({stack: [] for stack in self.successor or {}}, config)
        for stack, depth in self._depths(architecture, config).items():
            before = architecture.depths(config)[stack]
            if before == 1 and self.successor is None:
                raise ValueError(
                    f"Theseus: stack {stack!r} has one layer, which fewer cannot replace; name other stacks by successor="
                )
            if before % depth:
                choices = [divisor for divisor in range(1, before + 1) if before % divisor == 0]
                raise ValueError(
                    f"Theseus(successor={{{stack!r}: {depth}}}): the {before} layers of that stack must be divided equally among "
                    f"as many or fewer; choose from {choices}"
                )
            if not self.finalized:
                _check_types(types_of_layers(config, architecture.stacks[stack]), stack, depth)

    def _depths(self, architecture: Architecture, config: Any) -> dict[str, int]:
        """Stack -> number of successor layers, for the depths in `config`."""
        if self.successor is not None:
            return self.successor
        return {stack: max(depth // 2, 1) for stack, depth in architecture.depths(config).items()}

    def layers_kept(self, architecture: Architecture, config: Any) -> dict[str, Sequence[int]]:
        """Stack -> the layers whose kind the successor layers have: the first ones."""
        return {stack: range(depth) for stack, depth in self._depths(architecture, config).items()}

    @property
    def facts(self) -> Facts:
        if self.finalized:
            return super().facts
        # A predecessor layer is found by the number of its successor.
        return replace(super().facts, finalizable=True, refers_to={"layers"}, holds={"blocks"})

    # -- the modules -----------------------------------------------------------------------------------------------------

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for stack, depth in self._depths(architecture, model.config).items():
            layers = architecture.stacks[stack].layers
            if self.finalized:
                surgery.take_layers(model, layers, range(depth))
            else:
                # Of another class: the model may run them otherwise, as Mllama does without an image.
                _check_types(
                    [type(one).__name__ for one in surgery.layers_of(model, architecture, stack)], stack, depth
                )
                surgery.add_predecessors(model, layers, depth)

    def successor_layers(self, model: Any, architecture: Architecture) -> list[Any]:
        """The layers of the successor, before `finalize()`."""
        return [
            layer
            for stack in architecture.stacks  # JSON may change the order of `successor`
            if self.successor is None or stack in self.successor
            for layer in surgery.layers_of(model, architecture, stack)
        ]

    def origins(self, model: Model, architecture: Architecture) -> dict[str, Origin]:
        origins: dict[str, Origin] = {}
        for stack, depth in self._depths(architecture, model.config).items():
            step = 1 if self.init == "first" else architecture.depths(model.config)[stack] // depth
            origins |= surgery.layer_origins(model, architecture.stacks[stack].layers, range(0, depth * step, step))
        return origins

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        for stack in self.successor or new.architecture.stacks:
            successor = surgery.layers_of(new, new.architecture, stack)
            predecessor = [layer for module in successor for layer in module.predecessor]
            for layer, source in zip(predecessor, surgery.layers_of(old, new.architecture, stack), strict=True):
                surgery.copy_layer(source, layer, _attentions(new, stack), new.config, share=True)

    def prepare(self, model: Model, architecture: Architecture) -> None:
        if self.finalized:
            raise ValueError(
                "Theseus(finalized=True): only finalize() may set it; to remove layers, use LayerSelection(keep=...)"
            )
        for stack in self.successor or architecture.stacks:
            successor = surgery.layers_of(model, architecture, stack)
            predecessor = [layer for module in successor for layer in module.predecessor]
            for number, layer in enumerate(successor):
                source = predecessor[number] if self.init == "first" else layer.predecessor[0]
                try:
                    surgery.copy_layer(source, layer, _attentions(model, stack), model.config)
                except ValueError as error:
                    raise wrong(self, f"{error}; put Theseus first, or use init='first'", "init") from None

    def freeze(self, model: Model, architecture: Architecture) -> Iterable[tuple[str, SeededTensor | None]]:
        replaced = self.successor or architecture.stacks
        for full_name, _ in canonical_parameters(model):
            name = base_name(model, full_name)
            layer = architecture.layer_of(name)
            outside = self.train == "successor" and (layer is None or layer[0] not in replaced)
            if is_of_predecessor(name) or outside:
                yield full_name, None

    # -- training --------------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Part, ...]:
        always = (Selection(self.origins), KeptLayers(self.layers_kept))
        return always if self.finalized else (*always, _Replacing(self))

    def rate_at(self, step: int, total_steps: int) -> float:
        """The replacing rate after `step` of `total_steps` steps. Raises ValueError if the schedule ends after training."""
        if self.schedule is not None and len(self.schedule) == 3:
            _, slope, start = self.schedule
            self._check_end(_whole_steps((1 - start) / slope), total_steps)
            return min(1.0, slope * step + start)
        steps: float = total_steps if self.steps is None else self.steps
        steps = max(_whole_steps(steps * total_steps), 1) if steps < 1 else steps
        self._check_end(steps, total_steps)
        if self.schedule is not None:
            shape, start = self.schedule
            return start + (1 - start) * ramp(shape, step / steps)
        return 1.0 if self.steps is not None and step >= steps else 0.5 if self.rate is None else self.rate

    def _check_end(self, steps: float, total_steps: int) -> None:
        if steps > total_steps:
            raise ValueError(
                f"Theseus(schedule={self.schedule!r}, steps={self.steps!r}): only successors run after {steps} steps, but "
                f"training has {total_steps}; give fewer, or a share of training such as steps=0.5"
            )

    def finalize(self, model: Model, architecture: Architecture) -> "Theseus":
        self.merge(model, architecture)
        return replace(self, finalized=True)

    def merge(self, model: Model, architecture: Architecture) -> None:
        if not self.finalized:
            surgery.drop_predecessors(self.successor_layers(model, architecture))


class _Replacing(Schedule):
    """Draws, for each successor layer, whether a step runs it or its predecessor."""

    skips = True

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        return {"replacing rate": self.method.rate_at(step, total_steps)}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        rate = self.method.rate_at(step, total_steps)
        layers = self.method.successor_layers(model, architecture)
        for layer, draw in zip(layers, draws(self.method.seed, f"theseus/{step}", len(layers)), strict=True):
            Replaced.of(layer).active = draw >= rate

    def rewind(self, model: Model, architecture: Architecture) -> None:
        for layer in self.method.successor_layers(model, architecture):
            Replaced.of(layer).active = False


def _attentions(model: Any, stack: str) -> Iterable[Attention]:
    """The attentions of the stack, with names below a layer."""
    return model.architecture.stacks[stack].attentions_in(model.config).values()


def _check_types(types: Sequence[str], stack: str, depth: int) -> None:
    """`types`: of the old layers; none where nothing tells them."""
    if any(types[n] != types[n * depth // len(types)] for n in range(len(types))):
        raise ValueError(
            f"Theseus(successor={{{stack!r}: {depth}}}): layers would run instead of successors of another type, "
            f"with their masks; the types are {list(types)}; use LayerSelection"
        )
