"""One set of parameters for several layers (Dabre & Fujita, 2019, https://arxiv.org/abs/1807.05353; Lan et al., 2020, "ALBERT",
https://arxiv.org/abs/1909.11942)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, full_name, is_of_predecessor
from hf_freeze.layers.derived import Derived
from hf_freeze.layers.quantized import STORED, Quantized
from hf_freeze.methods._linear import check_positive
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.registry import register_method

NORMS = ("shared", "separate")
STARTS = ("mean", "middle")


@register_method("layer_sharing", example={"start": "middle"}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class LayerSharing(Method):
    """The layers of each of `stacks` (None: all) share their parameters, which are stored and counted once; or the layers of
    each of `groups` parts of the stack, one after the other and of sizes that differ by one at most.

    `norms`: `"shared"` too, or `"separate"`, each layer's own. From trained layers, the shared one starts as their `"mean"`, or
    as the one in the middle (`start`). `depth`, such as `{"encoder": 12}`, has the stack repeat its layers more or less often,
    which costs time and no parameters. `merge()` gives a native model whose layers have each their own copy.

    Raises ValueError for an unknown stack, more groups than layers, a depth below 1, layers of unlike shape, a method that names
    some layers that share their parameters and others not, one that keeps a mask of each layer, and a mean of what is no plain
    layer any more.
    """

    shares_layers: ClassVar[bool] = True
    stacks: list[str] | None = None
    groups: int = 1
    norms: str = "shared"
    start: str = "mean"
    depth: dict[str, int] | None = None

    def __post_init__(self) -> None:
        strings = isinstance(self.stacks, list | tuple) and all(isinstance(stack, str) for stack in self.stacks)
        if self.stacks is not None and not (strings and self.stacks):
            raise ValueError(f"LayerSharing(stacks={self.stacks!r}): must be None or a list such as ['encoder']")
        if self.stacks is not None:
            object.__setattr__(self, "stacks", list(dict.fromkeys(self.stacks)))
        check_positive(self.groups, "LayerSharing: groups")
        for name, value, choices in (("norms", self.norms, NORMS), ("start", self.start, STARTS)):
            if value not in choices:
                raise ValueError(f"LayerSharing({name}={value!r}): choose from {list(choices)}")
        if self.depth is not None:
            if not isinstance(self.depth, dict) or not self.depth:
                raise ValueError(
                    f"LayerSharing(depth={self.depth!r}): must be None or a dict such as {{'encoder': 12}}"
                )
            for stack, depth in self.depth.items():
                check_positive(depth, f"LayerSharing: depth[{stack!r}]")

    @property
    def refers_to(self) -> frozenset[str]:
        return frozenset({"layers"} if self.groups > 1 else ())  # which layers are in which group

    def check(self, architecture: Architecture, config: Any) -> None:
        shared = self._shared(architecture, config)
        for stack in self.stacks or ():
            if stack not in shared:
                raise ValueError(
                    f"LayerSharing: no stack {stack!r} in {architecture.model_type}; choose from {sorted(architecture.stacks)}"
                )
        for stack in self.depth or ():
            if stack not in shared:
                raise ValueError(
                    f"LayerSharing(depth={self.depth!r}): {stack!r} is no stack whose layers are shared; choose from "
                    f"{sorted(shared)}"
                )
        for stack, depth in shared.items():
            limit = min(depth, (self.depth or {}).get(stack, depth))
            if self.groups > limit:
                raise ValueError(
                    f"LayerSharing(groups={self.groups}): must be in 1..{limit}, the layers of stack {stack!r}"
                )

    def _shared(self, architecture: Architecture, config: Any) -> dict[str, int]:
        """Stack -> its number of layers in `config`, of those that it shares."""
        depths = architecture.depths(config)
        return {stack: depth for stack, depth in depths.items() if self.stacks is None or stack in self.stacks}

    def config_changes(self, architecture: Architecture, config: Any) -> dict[str, Any]:
        return {architecture.stacks[stack].depth: depth for stack, depth in (self.depth or {}).items()}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for stack, before in self._shared(architecture, model.config).items():
            depth = (self.depth or {}).get(stack, before)
            if depth != before:
                surgery.take_layers(model, architecture.stacks[stack].layers, _stretched(before, depth))

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        found = {}
        for stack, depth in self._shared(architecture, model.config).items():
            layers = architecture.stacks[stack].layers
            for first, *others in _parts(depth, self.groups):
                for other in others:
                    for name in self._alike(model, stack, layers.format(first), layers.format(other)):
                        if self._is_shared(architecture, f"{layers.format(other)}.{name}"):
                            source, target = (full_name(model, f"{layers.format(n)}.{name}") for n in (first, other))
                            found[target] = source
        return found

    def _is_shared(self, architecture: Architecture, parameter: str) -> bool:
        if is_of_predecessor(parameter):
            return False
        return self.norms == "shared" or architecture.component(parameter) != "norm"

    @staticmethod
    def _alike(model: Any, stack: str, first: str, other: str) -> list[str]:
        """Names of the parameters that both layers have. Raises ValueError where they differ."""
        one, two = (
            {n: tuple(p.shape) for n, p in _parameters(model.base_model.get_submodule(layer))}
            for layer in (first, other)
        )
        for name in sorted(one.keys() | two.keys()):
            if one.get(name) != two.get(name):
                raise ValueError(
                    f"LayerSharing: two layers of stack {stack!r} that share their parameters are of unlike shape: {name!r} is "
                    f"{one.get(name)} in {first!r} and {two.get(name)} in {other!r}; give them one setting"
                )
        return list(two)

    @torch.no_grad()
    def convert(self, old: Any, new: Model) -> None:
        architecture = new.architecture
        after = self._shared(architecture, new.config)
        for stack, before in self._shared(architecture, old.config).items():
            layers = architecture.stacks[stack].layers
            from_all = [old.base_model.get_submodule(layers.format(number)) for number in range(before)]
            of_own = _stretched(before, after[stack])
            for sources, targets in zip(_parts(before, self.groups), _parts(after[stack], self.groups), strict=True):
                start = self._start([from_all[number] for number in sources])
                for number in targets:
                    own = from_all[of_own[number]].state_dict()
                    name = layers.format(number)
                    shared = {n: value for n, value in start.items() if self._is_shared(architecture, f"{name}.{n}")}
                    new.base_model.get_submodule(name).load_state_dict(own | shared)

    def _start(self, group: list[Any]) -> dict[str, torch.Tensor]:
        if self.start == "middle":
            return group[len(group) // 2].state_dict()
        for module in (module for layer in group for module in layer.modules()):
            if isinstance(module, Derived):
                raise ValueError(
                    f"LayerSharing: the mean of what {type(module).__name__} holds is not that of the layers; put LayerSharing "
                    "first, or use start='middle'"
                )
        states = [layer.state_dict() for layer in group]
        return {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}

    def merge(self, model: Model, architecture: Architecture) -> None:
        """Nothing to undo: the native model gets a copy of the parameters for each layer."""


def _parameters(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """By name, with what stands for them where they are quantised."""
    yield from layer.named_parameters(remove_duplicate=False)
    for name, module in layer.named_modules():
        if isinstance(module, Quantized):
            yield from ((f"{name}.{each}", module.get_buffer(each)) for each in STORED)


def _parts(depth: int, groups: int) -> list[list[int]]:
    """The layers of each group, as ALBERT divides them: sizes differ by one at most."""
    return [[layer for layer in range(depth) if layer * groups // depth == group] for group in range(groups)]


def _stretched(before: int, after: int) -> list[int]:
    """For each of `after` layers, which of `before` it is like."""
    return [place * before // after for place in range(after)]
