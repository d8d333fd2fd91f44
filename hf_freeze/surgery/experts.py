"""Remove whole experts of mixtures whose matrices lie in three-dimensional parameters, with what their routers have for them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture, read
from hf_freeze.architectures.shrink import EXPERT_COUNTS
from hf_freeze.compat.transformers import mark_uninitialized
from hf_freeze.seeded import Origin, take
from hf_freeze.surgery.neurons import ExpertNeurons
from hf_freeze.surgery.replacing import native_experts, release, set_values

Experts: TypeAlias = Mapping[str, list[int]]
"""Of each mixture, such as "decoder.0.experts": the experts to keep, in ascending order, of all as many."""


@dataclass(frozen=True)
class Mixtures:
    """All mixtures of a config: each has `count` experts, side by side in `groups`. A token gets `chosen` of them, from the
    `chosen_groups` groups that suit it best."""

    field: str  # the config field that holds the count
    count: int
    chosen: int
    groups: int
    chosen_groups: int

    def check(self, count: int) -> None:
        """Raise ValueError if `count` experts cannot be left."""
        least = max(self.chosen, 2 * self.groups if self.groups > 1 else 1)  # a group is judged by its two best experts
        least = max(least, -(-self.chosen // self.chosen_groups) * self.groups)
        if not least <= count <= self.count:
            tokens = f"a token gets {self.chosen}"
            tokens += f" from {self.chosen_groups} of {self.groups} groups" if self.groups > 1 else ""
            raise ValueError(f"must be in {least}..{self.count}: {tokens}")
        if count % self.groups:
            raise ValueError(f"must be a multiple of {self.groups}: its router chooses among groups of equal size")

    def grouped(self, numbers: list[int]) -> list[int]:
        """How many of these experts each group has."""
        return [sum(number * self.groups // self.count == group for number in numbers) for group in range(self.groups)]

    def largest(self, scores: torch.Tensor, count: int) -> list[int]:
        """The `count` experts of the largest scores (E,), in ascending order, of each group as many."""
        order = scores.view(self.groups, -1).argsort(dim=1, descending=True, stable=True)[:, : count // self.groups]
        starts = torch.arange(0, self.count, self.count // self.groups, device=scores.device)
        return (order + starts[:, None]).flatten().sort().values.tolist()


def mixtures_of(architecture: Architecture, config: Any) -> Mixtures:
    """Raises ValueError if there are none, or if the config cannot hold another number of experts."""
    fields = {architecture.stacks[block.split(".")[0]].expert_count for block in architecture.experts(config)}
    field = fields.pop() if len(fields) == 1 else None
    if field is None:
        raise ValueError(
            f"whole experts of this {architecture.model_type} cannot be removed: no field of its config holds the number of "
            "its experts and nothing else"
        )
    text = config.get_text_config()
    chosen, groups, chosen_groups = (
        getattr(text, name, None) or 1 for name in ("num_experts_per_tok", "n_group", "topk_group")
    )
    chosen = max(chosen) if isinstance(chosen, list | tuple) else chosen  # one for each layer
    return Mixtures(field, read(config, field), chosen, groups, chosen_groups)


def expert_magnitudes(model: Any, module: str) -> torch.Tensor:
    """fp32 (E,): of each expert of a module, the root of the summed squares of the magnitudes of its neurons."""
    return ExpertNeurons(module, None, 0).magnitudes(model).norm(dim=1)


@torch.no_grad()
def keep_experts(model: Any, architecture: Architecture, kept: Experts, method: str) -> None:
    """Leave these experts. Raises ValueError if another method than `method` has replaced them."""
    for module in architecture.experts(model.config).values():
        native_experts(model, module, method)
    count = mixtures_of(architecture, model.config).count
    for name, axis, numbers in _tensors(model, architecture, kept):
        path, _, last = name.rpartition(".")
        owner = model.base_model.get_submodule(path)
        value = getattr(owner, last)
        left = take(value.detach(), axis, tuple(numbers))
        setattr(owner, last, nn.Parameter(left, value.requires_grad) if isinstance(value, nn.Parameter) else left)
        mark_uninitialized(owner)
    left = len(next(iter(kept.values())))
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if value == count and type(value) is int and re.fullmatch(EXPERT_COUNTS, name):
                setattr(module, name, left)


@torch.no_grad()
def take_experts(model: Any, source: Any, architecture: Architecture, kept: Experts) -> None:
    """Give `model` these experts of `source`; then `source` may lose them."""
    for name, axis, numbers in _tensors(source, architecture, kept):
        path, _, last = name.rpartition(".")
        values = take(getattr(source.base_model.get_submodule(path), last), axis, tuple(numbers))
        set_values(getattr(model.base_model.get_submodule(path), last), values)
    release(source, [architecture.experts(source.config)[block] for block in kept])


def experts_origins(model: Any, architecture: Architecture, kept: Experts) -> dict[str, Origin]:
    """The origins of the tensors that have an entry for each expert."""
    count = mixtures_of(architecture, model.config).count
    return {
        name: Origin(name, axis, tuple(numbers), count) for name, axis, numbers in _tensors(model, architecture, kept)
    }


def _tensors(model: Any, architecture: Architecture, kept: Experts) -> Iterator[tuple[str, int, list[int]]]:
    """(tensor below the base model, axis, experts that it keeps) of each tensor that has an entry for each expert."""
    tensors = {*dict(model.base_model.named_parameters()), *dict(model.base_model.named_buffers())}
    for block, module in architecture.experts(model.config).items():
        name, layer, _ = block.split(".")
        stack = architecture.stacks[name]
        prefix = f"{stack.layers.format(layer)}."
        for tensor, axis in stack.expert_axes.items():
            inside = f"{prefix}{tensor}".startswith(f"{module.rpartition('.')[0]}.")
            if inside and f"{prefix}{tensor}" in tensors:
                yield f"{prefix}{tensor}", axis, kept[block]
