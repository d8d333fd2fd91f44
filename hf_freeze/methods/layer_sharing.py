"""One set of parameters for several layers (Dabre & Fujita, 2019, https://arxiv.org/abs/1807.05353; Lan et al., 2020, "ALBERT",
https://arxiv.org/abs/1909.11942)."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_freeze import surgery
from hf_freeze.architectures.base import LARGEST_DEPTH, Architecture, Stack, full_name, is_of_predecessor
from hf_freeze.architectures.layer_parts import AttentionParts, check_parts, named_by
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.roles import has_module
from hf_freeze.layers.derived import Derived
from hf_freeze.layers.factorized import FactorizedLinear
from hf_freeze.layers.quantized import STORED
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.checks import check_fields, check_positive, one_of, wrong
from hf_freeze.methods.linear import set_field
from hf_freeze.methods.parts import KeptLayers, Part
from hf_freeze.methods.registry import register_method
from hf_freeze.solvers.moments import best_dense, loss, together

WHOLE = ("attention", "ffn", "norm")  # components that lie in layers
NORMS = ("shared", "separate")
STARTS = ("mean", "middle")
_SWEEPS = 4  # what a linear sees and has to make up for changes with the others
_RIDGE = 0.1  # all places change with each step: smaller steps come nearer


@register_method(
    "layer_sharing",
    example={"start": "middle"},
    facts=Facts(needs={"layers"}, shrinks=True, calibration="used", shares_layers=True),
)
@dataclass(frozen=True, kw_only=True)
class LayerSharing(Method):
    """Let all layers of a stack share one set of parameters, which is stored and counted once, in each of `stacks` (None: all).
    With `groups`, each stack is divided into that many groups of consecutive layers, whose sizes differ by at most one, and each
    group has one set.

    `components` limits the sharing to parts of the layers, as in ALBERT's rows "shared-attention" and "shared-FFN": a list of
    `"attention"`, `"ffn"` and `"norm"`, of kinds of attentions (`"self"`, `"cross"`), of their projections (`"q"`, `"k"`, `"v"`,
    `"o"`), and of projections of one kind (`"cross.k"`). None: whole layers. Each layer keeps its own of all other parameters,
    norms included.

    `norms`: `"shared"`, or `"separate"` with norms of its own for each layer. `start`: from trained layers, the shared
    parameters start as the `"mean"` of the group's layers, or as its `"middle"` layer. `depth`, such as `{"encoder": 12}`,
    changes how many layers run; this costs time, and parameters only for what is not shared. `merge()` gives a native model in
    which each layer has a copy.

    With a calibration, the shared output projections of attentions and last linears of FFNs are fitted to all of their places, if
    the depth stays. Everything else stays as it started: heads and neurons of one layer have no like in another.

    Raises ValueError for an unknown stack or component, some of the projections that are one matrix (GPT-2's q, k and v), more
    groups than layers, a depth below 1, shared parameters of different shapes, a method that names only some of the layers that
    share parameters, a method that keeps a mask for each layer, and a mean over gated, sparse or quantised weights. The mean of
    factors is that of their products.
    """

    stacks: list[str] | None = None
    components: list[str] | None = None
    groups: int = 1
    norms: str = "shared"
    start: str = "mean"
    depth: dict[str, int] | None = None

    def __post_init__(self) -> None:
        for field, example in (("stacks", "encoder"), ("components", "attention")):
            value = getattr(self, field)
            strings = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
            if value is not None and not (strings and value):
                raise ValueError(f"LayerSharing({field}={value!r}): must be None or a list such as [{example!r}]")
            if value is not None:
                set_field(self, field, list(dict.fromkeys(value)))
        check_fields(self, groups=check_positive, norms=one_of(NORMS), start=one_of(STARTS))
        if self.norms == "separate" and "norm" in (self.components or ()):
            raise ValueError(
                f"LayerSharing(components={self.components!r}, norms='separate'): shares the norms and does not; leave one out"
            )
        if self.depth is not None:
            if not isinstance(self.depth, dict) or not self.depth:
                raise wrong(self, "must be None or a dict such as {'encoder': 12}", "depth")
            for stack, depth in self.depth.items():
                check_positive(depth, "LayerSharing", f"depth[{stack!r}]")

    @property
    def facts(self) -> Facts:
        named = {"layers"} if self.groups > 1 else frozenset()  # a layer's number decides its group
        return replace(super().facts, refers_to=named)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (KeptLayers(self.layers_kept),)

    def check(self, architecture: Architecture, config: Any) -> None:
        shared = self._shared(architecture, config)
        architecture.check_layers({stack: [] for stack in self.stacks or ()}, config)
        if self.components is not None:
            owner = f"LayerSharing(components={self.components!r})"
            check_parts(dict.fromkeys(self.components, True), WHOLE, architecture, config, owner, shared)
        for stack in self.depth or ():
            if stack not in shared:
                raise wrong(
                    self, f"the layers of stack {stack!r} are not shared; choose from {sorted(shared)}", "depth"
                )
        for stack, depth in shared.items():
            limit = min(depth, (self.depth or {}).get(stack, depth))
            if self.groups > limit:
                raise wrong(self, f"must be in 1..{limit}, the layers of stack {stack!r}", "groups")

    def _shared(self, architecture: Architecture, config: Any) -> dict[str, int]:
        """Stack -> its number of layers in `config`, for each stack whose layers are shared."""
        depths = architecture.depths(config)
        return {stack: depth for stack, depth in depths.items() if self.stacks is None or stack in self.stacks}

    def config_changes(self, architecture: Architecture, config: Any) -> dict[str, Any]:
        for stack, depth in (self.depth or {}).items():
            if depth > LARGEST_DEPTH:  # refused by the check of sizes, before a list of so many layers is made
                return {architecture.stacks[stack].depth: depth}
        return super().config_changes(architecture, config)

    def layers_kept(self, architecture: Architecture, config: Any) -> dict[str, list[int]]:
        """Stack of another depth -> for each of its layers, the number of the old layer that it copies."""
        depths = architecture.depths(config)
        return {stack: _stretched(depths[stack], depth) for stack, depth in (self.depth or {}).items()}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for stack, old_depth in self._shared(architecture, model.config).items():
            depth = (self.depth or {}).get(stack, old_depth)
            if depth != old_depth:
                surgery.take_layers(model, architecture.stacks[stack].layers, _stretched(old_depth, depth))

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        ties: dict[str, str] = {}
        is_shared, found = self._is_shared(architecture), False
        for stack, depth in self._shared(architecture, model.config).items():
            layers = architecture.stacks[stack].layers
            for group in _groups(depth, self.groups):
                owners: dict[str, tuple[str, tuple[int, ...]]] = {}  # name in a layer -> (its first layer, its shape)
                for number in group:
                    layer = layers.format(number)
                    parameters = _parameters(model.base_model.get_submodule(layer))
                    shapes = {n: tuple(t.shape) for n, t in parameters if is_shared(f"{layer}.{n}")}
                    found = found or bool(shapes)
                    self._check_alike(architecture.stacks[stack], stack, group[0], number, owners, shapes)
                    for name, shape in shapes.items():
                        owner, alike = owners.setdefault(name, (layer, shape))
                        if owner != layer and alike == shape:
                            ties[full_name(model, f"{layer}.{name}")] = full_name(model, f"{owner}.{name}")
        if not found:
            raise ValueError(
                f"LayerSharing(components={self.components!r}): the layers of this {architecture.model_type} have no such "
                f"parameters; choose from {list(WHOLE)}"
            )
        return ties

    def _is_shared(self, architecture: Architecture) -> Callable[[str], bool]:
        """A function that tells whether a parameter of a layer (its name below the base model) is shared."""
        parts = AttentionParts(architecture)

        def is_shared(parameter: str) -> bool:
            component = architecture.component(parameter)
            if is_of_predecessor(parameter) or (component == "norm" and self.norms == "separate"):
                return False
            if self.components is None or component in self.components:
                return True
            return component == "attention" and named_by(self.components, parts.of(parameter)) is not None

        return is_shared

    @staticmethod
    def _check_alike(
        description: Stack,
        stack: str,
        first: int,
        number: int,
        owners: dict[str, tuple[str, tuple[int, ...]]],
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        """Raise ValueError if the parameters of two layers of a group have different shapes, or if a method has left only one of
        them a parameter. Native layers may be of different kinds: ModernBERT's first layer lacks a norm."""
        before = {name: shape for name, (_, shape) in owners.items()}
        for name in sorted(before.keys() | shapes.keys()) if number != first else ():
            if before.get(name) != shapes.get(name) and name not in description.differ:
                one, other = description.layers.format(first), description.layers.format(number)
                raise ValueError(
                    f"LayerSharing: two layers of stack {stack!r} that share their parameters have different shapes: {name!r} is "
                    f"{before.get(name)} in {one!r} and {shapes.get(name)} in {other!r}; give them one setting"
                )

    @torch.no_grad()
    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        architecture = new.architecture
        new_depths, is_shared = self._shared(architecture, new.config), self._is_shared(architecture)
        for stack, old_depth in self._shared(architecture, old.config).items():
            layers, new_depth = architecture.stacks[stack].layers, new_depths[stack]
            old_layers = [old.base_model.get_submodule(layers.format(number)) for number in range(old_depth)]
            source_numbers = _stretched(old_depth, new_depth)
            groups = zip(_groups(old_depth, self.groups), _groups(new_depth, self.groups), strict=True)
            for old_numbers, new_numbers in groups:
                name = layers.format(new_numbers[0])
                group = [old_layers[number] for number in old_numbers]
                start = self._start_values(group, lambda n, layer=name: is_shared(f"{layer}.{n}"))
                for number in new_numbers:
                    own = old_layers[source_numbers[number]].state_dict()
                    shared = {n: value for n, value in start.items() if n in own and own[n].shape == value.shape}
                    layer = new.base_model.get_submodule(layers.format(number))
                    layer.load_state_dict(own | shared, assign=True)
        if statistics is not None:
            self._refit(old, new, statistics)

    def _refit(self, old: Any, new: Model, statistics: Statistics) -> None:
        """Fit the linears that end an attention or FFN, group after group, to all places that use them: to the inputs that they
        have there now, and the outputs that the old model had there."""
        architecture, config, is_shared = new.architecture, new.config, self._is_shared(new.architecture)
        old_depths, depths = architecture_for(old).depths(old.config), self._shared(architecture, new.config)
        linears = [attention.o for attention in architecture.attentions(config).values()]
        linears += [names[-1] for names in architecture.ffns(config).values()]
        groups: dict[
            tuple[str, int], dict[str, list[str]]
        ] = {}  # stack, group -> name in a layer -> names of the places
        for name in linears:
            stack, layer = architecture.layer_of(f"{name}.") or ("", 0)
            if not is_shared(f"{name}.weight") or depths.get(stack) != old_depths[stack] or not _is_dense(new, name):
                continue
            in_layer = name.removeprefix(architecture.stacks[stack].layers.format(layer))
            group = groups.setdefault((stack, layer * self.groups // depths[stack]), {})
            group.setdefault(in_layer, []).append(name)
        for group in groups.values():
            plain: dict[str, float] = {}
            for _ in range(_SWEEPS):
                for names in group.values():
                    self._refit_places(new, names, statistics, plain)

    @staticmethod
    def _refit_places(new: Model, names: list[str], statistics: Statistics, plain: dict[str, float]) -> None:
        """Fit one linear that is at all places `names`. `plain`: its error at each of them, as it started."""
        found = list(statistics.walk(names, resumes=False)) if len(names) > 1 else []
        seen = {
            name: each
            for moments in found
            for name, each in moments.items()
            if each is not None and each.cross is not None
        }
        if not seen or len(seen) < len(names):  # a saved calibration is of the inputs before layers were shared
            return
        linear = new.base_model.get_submodule(names[0])
        weight, bias = surgery.effective_weight(linear), linear.bias
        fitted, fitted_bias = best_dense(weight, bias, together(list(seen.values())), ridge=_RIDGE)
        for name, each in seen.items():
            plain.setdefault(name, loss(weight, weight, each, bias, bias))
            statistics.record(name, plain[name], loss(weight, fitted, each, bias, fitted_bias))
            surgery.set_linear(new.base_model.get_submodule(name), fitted, fitted_bias)

    def _start_values(self, group: list[Any], is_shared: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        """What the layers of a group start from, of the names in a state dict that are shared."""
        if self.start == "middle":
            return {n: value for n, value in group[len(group) // 2].state_dict().items() if is_shared(n)}
        factorized: dict[str, torch.Tensor] = {}
        for name, module in group[0].named_modules():
            if not is_shared(f"{name}.weight"):
                continue
            if isinstance(module, FactorizedLinear):  # the mean of factors is not that of their products
                weights = [layer.get_submodule(name).dense_weight().float() for layer in group]
                factors: Any = copy.deepcopy(module)
                factors.fill(torch.stack(weights).mean(0))
                factorized |= {f"{name}.{n}": value for n, value in factors.state_dict().items() if n != "bias"}
            elif isinstance(module, Derived):
                raise ValueError(
                    f"LayerSharing: the mean of the tensors in a {type(module).__name__} is not the mean of its weights; put "
                    "LayerSharing first, or use start='middle'"
                )
        states = [layer.state_dict() for layer in group]
        names = dict.fromkeys(name for state in states for name in state if is_shared(name))
        means = {}
        for name in names:
            values = [state[name] for state in states if name in state]
            alike = [value.float() for value in values if value.shape == values[0].shape]
            means[name] = torch.stack(alike).mean(0).to(values[0].dtype)
        return means | factorized

    def merge(self, model: Model, architecture: Architecture) -> None:
        """The native model gets a copy of the parameters for each layer, except for those that only its first layer has."""
        for stack in self.depth or ():
            description = architecture.stacks[stack]
            _, *others = surgery.layers_of(model, architecture, stack)
            for layer, name in ((layer, name) for layer in others for name in description.unread):
                owner, _, attribute = name.rpartition(".")
                if has_module(layer, owner):
                    delattr(layer.get_submodule(owner), attribute)


def _is_dense(model: Any, name: str) -> bool:
    return not surgery.is_removed(model, name) and surgery.is_dense(model.base_model.get_submodule(name))


def _parameters(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each parameter, and of the buffers of quantised weights."""
    yield from layer.named_parameters(remove_duplicate=False)
    for name, buffer in layer.named_buffers(remove_duplicate=False):
        if name.rpartition(".")[2] in STORED:
            yield name, buffer


def _groups(depth: int, count: int) -> list[list[int]]:
    """The layers of each of `count` groups, as ALBERT divides them: sizes differ by at most one."""
    return [[layer for layer in range(depth) if layer * count // depth == group] for group in range(count)]


def _stretched(old_depth: int, new_depth: int) -> list[int]:
    """For each layer of a stack of `new_depth` layers, the number of the old layer that it copies."""
    return [number * old_depth // new_depth for number in range(new_depth)]
