"""What the methods share that give the linears of attention and FFN another form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import LINEAR_COMPONENTS, Architecture, check_layers_type
from hf_freeze.layers.derived import features
from hf_freeze.layers.factorized import EXECUTIONS
from hf_freeze.methods.base import Method, Model

_MOST_MODES = 32  # a dimension has no more prime factors


@dataclass(frozen=True, kw_only=True)
class LinearMethod(Method):
    """Works on the linears of `components`, `"ffn"` or `"attention"` or both, in `layers` (such as `{"encoder": [0, 1]}`;
    None is all), one by one."""

    components: list[str] = field(default_factory=lambda: ["ffn"])
    layers: dict[str, list[int]] | None = None
    choices: ClassVar[tuple[str, ...]] = LINEAR_COMPONENTS

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.components, list | tuple) or not self.components:
            raise ValueError(f"{name}(components={self.components!r}): must be a list such as ['ffn', 'attention']")
        for component in self.components:
            if component not in self.choices:
                raise ValueError(f"{name}(components={self.components!r}): choose from {list(self.choices)}")
        set_field(self, "components", sorted(set(self.components), key=self.choices.index))
        check_layers_type(self.layers)

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        if not self.linear_names(architecture, config):
            raise ValueError(f"{type(self).__name__}(layers={self.layers!r}) names no layer: leave it out for all")

    def linear_names(self, architecture: Architecture, config: Any) -> list[str]:
        """Of the linears that it changes, below `base_model_prefix`."""
        return surgery.linear_names(architecture, config, self.components, self.layers)

    def modules(self, model: Any, architecture: Architecture) -> list[tuple[str, Any]]:
        """(name, module) of what it changes, or has changed."""
        return list(surgery.modules(model, self.linear_names(architecture, model.config)))

    def make(self, linear: Any, name: str, model: Any) -> nn.Module:
        """The module that takes the place of `linear`, called `name` in the `model` (None: it is in none), by its shape alone.
        Raises ValueError where the setting does not fit."""
        raise NotImplementedError

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for name in self.linear_names(architecture, model.config):
            linear = surgery.dense_module(model, name, self.name)
            try:
                made = self.make(linear, name, model)
            except ValueError as error:
                raise ValueError(f"method {self.name!r}, {name!r}: {error}") from None
            surgery.replace(model, name, made)

    def merge(self, model: Model, architecture: Architecture) -> None:
        for name, module in self.modules(model, architecture):
            surgery.replace(model, name, surgery.dense_linear(module))


@dataclass(frozen=True, kw_only=True)
class FactorizedMethod(LinearMethod):
    """A linear as a product of factors; `execution` as `hf_freeze.layers.factorized` explains it."""

    execution: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.execution not in EXECUTIONS:
            raise ValueError(f"{type(self).__name__}(execution={self.execution!r}): choose from {list(EXECUTIONS)}")

    def convert(self, old: Any, new: Model) -> None:
        for name, module in self.modules(new, new.architecture):
            module.fill(surgery.effective_weight(old.base_model.get_submodule(name)))

    @property
    def refers_to(self) -> frozenset[str]:
        return super().refers_to if self.per_linear() is None else frozenset({"layers"})

    def per_linear(self) -> "Iterable[str] | None":
        """The linears that a setting names one by one; None where it is the same for all."""
        return None

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        choices = surgery.linear_names(architecture, config, self.components, self.layers)
        for name in self.per_linear() or ():
            if name not in choices:
                raise ValueError(
                    f"{type(self).__name__}: no linear {name!r} in these components and layers; choose from {choices}"
                )
        super().check(architecture, config)

    def linear_names(self, architecture: Architecture, config: Any) -> list[str]:
        named = self.per_linear()
        names = super().linear_names(architecture, config)
        return names if named is None else [name for name in names if name in named]


def set_field(method: Method, name: str, value: Any) -> None:
    """Bring a field into its plain form, as it comes back from JSON: the dataclass is frozen."""
    object.__setattr__(method, name, value)


def check_positive(value: Any, what: str) -> int:
    """Raise ValueError unless it is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what}={value!r}: must be an integer of at least 1")
    return value


def check_ranks_list(value: Any, what: str) -> list[int]:
    """The value as a list. Raises ValueError unless it is a list or tuple of integers of at least 1."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{what}={value!r}: must be a list of integers such as [1, 4, 4, 1]")
    return [check_positive(rank, f"{what}[{k}]") for k, rank in enumerate(value)]


def check_seed(seed: Any, name: str) -> None:
    """Raise ValueError unless `seed`, of the method `name`, is one."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"{name}(seed={seed!r}): must be an integer in 0..2^63-1")


def check_share(value: Any, what: str, *, below_one: bool = False) -> None:
    """Raise ValueError unless it is a number in 0..1, or in [0, 1)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1 or (below_one and value == 1):
        raise ValueError(f"{what}={value!r}: must be a share {'of at least 0 and below 1' if below_one else 'in 0..1'}")


@dataclass(frozen=True, kw_only=True)
class ShapedMethod(FactorizedMethod):
    """Factors of a tensor that the dimensions of a linear are factorised into: `rank`, or `ranks`, and `shape`."""

    rank: int | None = None
    ranks: list[int] | dict[str, list[int]] | None = None
    shape: list[list[int]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if (self.rank is None) == (self.ranks is None):
            raise ValueError(f"{name}(rank={self.rank!r}, ranks={self.ranks!r}): give one of them")
        if self.rank is not None:
            check_positive(self.rank, f"{name}: rank")
        elif isinstance(self.ranks, dict):
            set_field(self, "ranks", {k: check_ranks_list(v, f"{name}: ranks[{k!r}]") for k, v in self.ranks.items()})
            if not self.ranks:
                raise ValueError(f"{name}(ranks={{}}) names no linear")
        else:
            set_field(self, "ranks", check_ranks_list(self.ranks, f"{name}: ranks"))
        if self.shape is not None:
            if not isinstance(self.shape, list | tuple) or len(self.shape) != 2:
                raise ValueError(
                    f"{name}(shape={self.shape!r}): must be two lists of factors such as ((2, 4, 8), (4, 8, 8))"
                )
            set_field(
                self, "shape", [check_ranks_list(modes, f"{name}: shape[{k}]") for k, modes in enumerate(self.shape)]
            )
            if (longest := max(map(len, self.shape))) > _MOST_MODES:
                raise ValueError(f"{name}: shape has a list of {longest} factors; the limit is {_MOST_MODES}")

    def per_linear(self) -> Iterable[str] | None:
        return self.ranks if isinstance(self.ranks, dict) else None

    def ranks_of(self, name: str, full: Sequence[int]) -> list[int]:
        """The ranks of one linear; `rank` is capped where less is full. Raises ValueError where it exceeds all."""
        if self.rank is None:
            return self.ranks[name] if isinstance(self.ranks, dict) else list(self.ranks or ())
        if self.rank > max(full):
            raise ValueError(f"rank={self.rank}: must be in 1..{max(full)}, the largest full rank of {list(full)}")
        return [min(self.rank, each) for each in full]


def glorot_std(linear: Any) -> float:
    """√(2 / (inputs + outputs)) (Glorot & Bengio, 2010)"""
    return (2 / sum(features(linear))) ** 0.5
