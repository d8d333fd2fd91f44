"""Select the neurons of an FFN: of linears, or of experts whose matrices lie in three-dimensional parameters."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture
from hf_freeze.architectures.roles import EXPERT_OUTPUT, EXPERT_WIDTHS, are_experts, expert_input
from hf_freeze.compat.transformers import mark_uninitialized
from hf_freeze.layers.derived import features
from hf_freeze.seeded import Origin, take
from hf_freeze.surgery.replacing import (
    feature_origins,
    finished,
    is_removed,
    native_experts,
    neuron_features,
    neuron_magnitudes,
    release,
    replace,
    select_features,
    selectable_module,
    spread_features,
)

Kept: TypeAlias = list[int] | list[list[int]]
"""Neurons to keep, in ascending order; or such a list for each expert."""


@dataclass(frozen=True)
class LinearNeurons:
    """Neurons between linears, which are named in the order of the forward; the last one follows the activation.

    `field`: the config field that holds their number; `native`: their number in the native model, where no field holds it.
    """

    linears: tuple[str, ...]
    field: str | None
    native: int | None

    def count(self, model: Any) -> int:
        """The number of neurons, of each expert if there are several."""
        return features(model.base_model.get_submodule(self.linears[-1]))[0]

    def check_selectable(self, model: Any, method: str) -> None:
        """Raise ValueError if another method has removed the FFN, or replaced it by layers that cannot lose neurons."""
        for name in self.linears:
            selectable_module(model, name, method)

    def outputs(self, model: Any) -> list[str]:
        """The linears that read them: one, or that of each expert (`linear_at`); none if a method has removed the FFN, or
        replaced the experts."""
        return [] if is_removed(model, self.linears[-1]) else [self.linears[-1]]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that lose neurons."""
        return self.linears

    def resize(self, model: Any, count: int) -> None:
        """Leave `count` neurons with arbitrary values."""
        for name, linear, outputs in self._modules(model):
            positions = len(neuron_features(linear, range(count), self.count(model), outputs=outputs))
            replace(model, name, select_features(linear, positions, outputs=outputs))

    def take(self, model: Any, source: Any, kept: Kept) -> None:
        """Give `model` the neurons `kept` of `source`, and no others; then `source` may lose them (`release`)."""
        for name, linear, outputs in self._modules(source):
            index = neuron_features(linear, cast(Any, kept), self.count(source), outputs=outputs)
            replace(model, name, select_features(linear, index, outputs=outputs))
        release(source, self.linears)

    def pad(self, model: Any, count: int) -> None:
        """Add neurons with zero weights, up to `count`: they contribute nothing to the output."""
        narrow = self.count(model)
        for name, linear, outputs in self._modules(model):
            halves = features(linear)[1] // narrow if outputs else 1
            places = [half * count + neuron for half in range(halves) for neuron in range(narrow)]
            replace(model, name, spread_features(linear, places, halves * count, outputs=outputs))

    def first(self, model: Any, count: int) -> Kept:
        """The first `count` neurons."""
        return list(range(count))

    def largest(self, model: Any, count: int) -> Kept:
        """The `count` neurons of the largest magnitude."""
        return _largest(neuron_magnitudes(model, self.linears), count)

    def origins(self, model: Any, kept: Kept) -> dict[str, Origin]:
        """The origins of the parameters when `take` keeps these neurons."""
        origins: dict[str, Origin] = {}
        for name, linear, outputs in self._modules(model):
            index = neuron_features(linear, cast(Any, kept), self.count(model), outputs=outputs)
            origins |= feature_origins(name, linear, index, outputs=outputs)
        return origins

    def _modules(self, model: Any) -> Iterator[tuple[str, Any, bool]]:
        """(name, linear, whether its outputs are the neurons); the last one, whose inputs tell their number, comes last."""
        for name in self.linears:
            yield name, model.base_model.get_submodule(name), name != self.linears[-1]


@dataclass(frozen=True)
class ExpertNeurons:
    """Neurons of experts: E experts of W neurons each, with hidden size H. The functions are those of `LinearNeurons`.

    The module has a parameter `gate_up_proj` (E, 2 W, H), whose rows are those of the gate and then those of up, or `up_proj`
    (E, W, H) without a gate; and `down_proj` (E, H, W).
    """

    module: str
    field: str | None
    native: int | None

    def count(self, model: Any) -> int:
        return self._matrices(model)[1].shape[2]

    def check_selectable(self, model: Any, method: str) -> None:
        native_experts(model, self.module, method)

    def outputs(self, model: Any) -> list[str]:
        if not are_experts(self._experts(model)):
            return []
        return [f"{self.module}.{EXPERT_OUTPUT}.{number}" for number in range(len(self._matrices(model)[1]))]

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.module,)

    def resize(self, model: Any, count: int) -> None:
        experts, old = self._experts(model), self.count(model)
        for name, axis in ((expert_input(experts), 1), (EXPERT_OUTPUT, 2)):
            parameter = experts.get_parameter(name)
            shape = list(parameter.shape)
            shape[axis] = shape[axis] // old * count
            setattr(experts, name, nn.Parameter(parameter.new_empty(shape), parameter.requires_grad))
        for name in EXPERT_WIDTHS:
            if type(getattr(experts, name, None)) is int:
                setattr(experts, name, count)
        mark_uninitialized(experts)

    @torch.no_grad()
    def take(self, model: Any, source: Any, kept: Kept) -> None:
        selected = [
            take(parameter, axis, index)
            for parameter, (axis, index) in zip(self._matrices(source), self._places(source, kept), strict=True)
        ]
        release(source, [self.module])
        self.resize(model, selected[1].shape[2])
        for parameter, values in zip(self._matrices(model), selected, strict=True):
            parameter.copy_(values)

    @torch.no_grad()
    def pad(self, model: Any, count: int) -> None:
        before, after = (parameter.detach() for parameter in self._matrices(model))
        narrow = after.shape[2]
        self.resize(model, count)
        wide_before, wide_after = (parameter.zero_() for parameter in self._matrices(model))
        wide_after[:, :, :narrow] = after
        for wide, part in zip(wide_before.split(count, dim=1), before.split(narrow, dim=1), strict=True):
            wide[:, :narrow] = part
        finished(model, self._experts(model))

    def first(self, model: Any, count: int) -> Kept:
        return [list(range(count)) for _ in self._matrices(model)[1]]

    def largest(self, model: Any, count: int) -> Kept:
        return _largest(self.magnitudes(model), count)

    @torch.no_grad()
    def magnitudes(self, model: Any) -> torch.Tensor:
        """fp32 (E, W): the product of the norms of the weights of each neuron."""
        before, after = (parameter.float() for parameter in self._matrices(model))
        parts = torch.stack([part.norm(dim=2) for part in before.split(after.shape[2], dim=1)])
        return parts.prod(0) * after.norm(dim=1)

    def origins(self, model: Any, kept: Kept) -> dict[str, Origin]:
        names = (expert_input(self._experts(model)), EXPERT_OUTPUT)
        return {
            f"{self.module}.{name}": Origin(f"{self.module}.{name}", axis, index, parameter.shape[axis])
            for name, parameter, (axis, index) in zip(
                names, self._matrices(model), self._places(model, kept), strict=True
            )
        }

    def _experts(self, model: Any) -> Any:
        return model.base_model.get_submodule(self.module)

    def _matrices(self, model: Any) -> tuple[Any, Any]:
        """The parameters with the matrices before and after the activation."""
        experts = self._experts(model)
        return experts.get_parameter(expert_input(experts)), experts.get_parameter(EXPERT_OUTPUT)

    def _places(self, model: Any, kept: Kept) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
        """(axis, for each expert the positions of its neurons along this axis) of both parameters."""
        before, after = self._matrices(model)
        starts = range(0, before.shape[1], after.shape[2])
        lists: Any = kept
        rows = tuple(tuple(start + neuron for start in starts for neuron in neurons) for neurons in lists)
        return [(1, rows), (2, tuple(map(tuple, lists)))]


Neurons: TypeAlias = LinearNeurons | ExpertNeurons
"""The neurons of an FFN, in any model that has it. Names are below the base model."""


def neurons_of(architecture: Architecture, config: Any) -> dict[str, Neurons]:
    """FFN or experts, such as "decoder.0.ffn" or "decoder.0.experts" -> its neurons."""
    blocks: dict[str, Neurons] = {}
    for block, linears in architecture.ffns(config).items():
        stack = architecture.stacks[block.split(".")[0]]
        native = None if stack.width else stack.native_width(linears[-1])
        blocks[block] = LinearNeurons(tuple(linears), stack.width, native)
    for block, module in architecture.experts(config).items():
        stack = architecture.stacks[block.split(".")[0]]
        blocks[block] = ExpertNeurons(module, stack.expert_width, stack.native_width(module))
    return blocks


def _largest(scores: torch.Tensor, count: int) -> Any:
    """The positions of the `count` largest scores along the last dimension, in ascending order."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort().values.tolist()
