"""Shared by the methods that replace the linears of attention and FFN."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import LINEAR_COMPONENTS, Architecture, check_layers_type
from hf_freeze.layers.derived import features
from hf_freeze.layers.factorized import EXECUTIONS
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.checks import (
    check_any_selected,
    check_choice,
    check_one_given,
    check_positive,
    check_positive_list,
)
from hf_freeze.solvers.moments import Moments, loss
from hf_freeze.solvers.tensors import alternate

LINEARS = Facts(needs={"linears"})  # what all these methods have in common
_MOST_MODES = 32  # no dimension has more prime factors


@dataclass(frozen=True, kw_only=True)
class LinearMethod(Method):
    """Replaces each linear of `components` (`"ffn"`, `"attention"` or both) in `layers`, such as `{"encoder": [0, 1]}` (None:
    all layers)."""

    components: list[str] = field(default_factory=lambda: ["ffn"])
    layers: dict[str, list[int]] | None = None
    choices: ClassVar[tuple[str, ...]] = LINEAR_COMPONENTS
    replaces: ClassVar[tuple[type[nn.Module], ...]] = ()  # layers of other methods that it takes, too
    skips_removed: ClassVar[bool] = True  # leaves out linears of attentions that have lost their heads, unless named

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.components, list | tuple) or not self.components:
            raise ValueError(f"{name}(components={self.components!r}): must be a list such as ['ffn', 'attention']")
        for component in self.components:
            if component not in self.choices:
                raise ValueError(f"{name}(components={self.components!r}): choose from {list(self.choices)}")
        set_field(self, "components", sorted(set(self.components), key=self.choices.index))
        check_layers_type(self.layers)

    @classmethod
    def advice(cls, architecture: Architecture, config: Any) -> str | None:
        if not architecture.experts(config):
            return None
        with_linears = [component for component in LINEAR_COMPONENTS if architecture.linears(config, component)]
        (default,) = (field.default_factory() for field in fields(cls) if field.name == "components")  # type: ignore[misc]
        given = "" if set(default) & set(with_linears) else f"give components={with_linears}: "
        unless = ", unless components has 'experts'" if "experts" in cls.choices else ""
        return f"{given}the matrices of its experts stay as they are{unless}"

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        if self.layers is None and not self.linear_names(architecture, config):
            empty = [component for component in LINEAR_COMPONENTS if not architecture.linears(config, component)]
            raise ValueError(
                f"{type(self).__name__}(components={self.components!r}): this {architecture.model_type} has no plain linears "
                f"there, as in a mixture of experts; choose from {[c for c in self.choices if c not in empty]}"
            )
        check_any_selected(self.linear_names(architecture, config), self.layers, type(self).__name__)

    def linear_names(self, architecture: Architecture, config: Any) -> list[str]:
        """Names, below `base_model_prefix`, of the linears that the method replaces."""
        return surgery.linear_names(architecture, config, self.components, self.layers)

    def modules(self, model: Any, architecture: Architecture) -> list[tuple[str, Any]]:
        """(name, module) of each linear that the method replaces, or of its replacement."""
        return list(surgery.modules(model, self.present_names(model, architecture)))

    def named_linears(self) -> Iterable[str] | None:
        """The linears that have a setting of their own; None if one setting holds for all linears."""
        return None

    def present_names(self, model: Any, architecture: Architecture) -> list[str]:
        """As `linear_names`, without those that an earlier method has removed, unless this method names them."""
        names = self.linear_names(architecture, model.config)
        if not self.skips_removed or self.named_linears() is not None:
            return names
        return [name for name in names if not surgery.is_removed(model, name)]

    def make(self, linear: Any, name: str, model: Any) -> nn.Module:
        """The replacement of `linear`, made from its shape alone. `name`: its name in `model`, which is None for a linear
        outside any model. Raises ValueError if the setting does not fit."""
        raise NotImplementedError

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for name in self.present_names(model, architecture):
            linear = surgery.dense_module(model, name, self.name, self.replaces)
            try:
                replacement = self.make(linear, name, model)
            except ValueError as error:
                raise ValueError(f"method {self.name!r}, {name!r}: {error}") from None
            surgery.replace(model, name, replacement)

    def merge(self, model: Model, architecture: Architecture) -> None:
        for name, module in self.modules(model, architecture):
            surgery.replace(model, name, surgery.dense_linear(module))


def factors(*by_layer: str) -> Facts:
    """The facts of a `FactorizedMethod`, of which these fields may name linears."""
    return replace(LINEARS, shrinks=True, calibration="used", by_layer=by_layer)


@dataclass(frozen=True, kw_only=True)
class FactorizedMethod(LinearMethod):
    """Replaces linears by products of factors. `execution`: see `hf_freeze.layers.factorized`."""

    execution: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.execution, EXECUTIONS, type(self).__name__, "execution")

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        modules = dict(self.modules(new, new.architecture))
        plain = (
            [dict.fromkeys(modules)] if statistics is None else statistics.walk(list(modules), curvature=True, fit=True)
        )
        for moments in plain:
            for name, moment in moments.items():
                if not surgery.restored(old, name):
                    linear = old.base_model.get_submodule(name)
                    weight = surgery.effective_weight(linear)
                    modules[name].fill(weight)
                    if moment is not None and statistics is not None:
                        before = loss(weight, modules[name].dense_weight(), moment, linear.bias, linear.bias)
                        self.fit(modules[name], weight, linear.bias, moment)
                        after = loss(weight, modules[name].dense_weight(), moment, linear.bias, modules[name].bias)
                        statistics.record(name, before, after)
                surgery.release(old, [name])

    def fit(self, module: Any, weight: torch.Tensor, bias: torch.Tensor | None, moments: Moments) -> None:
        """Give `module`, which is filled with the nearest weight, the values whose outputs are nearest those of W (O, I) and its
        bias on the inputs that it sees."""
        raise NotImplementedError

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        choices = surgery.linear_names(architecture, config, self.components, self.layers)
        for name in self.named_linears() or ():
            if name not in choices:
                raise ValueError(
                    f"{type(self).__name__}: no linear {name!r} in these components and layers; choose from {choices}"
                )
        super().check(architecture, config)

    def linear_names(self, architecture: Architecture, config: Any) -> list[str]:
        named = self.named_linears()
        names = super().linear_names(architecture, config)
        return names if named is None else [name for name in names if name in named]


def set_field(method: Method, name: str, value: Any) -> None:
    """Set a field of the frozen dataclass `method` to the form that JSON gives back, such as a list for a tuple."""
    object.__setattr__(method, name, value)


@dataclass(frozen=True, kw_only=True)
class ShapedMethod(FactorizedMethod):
    """Replaces the weight of a linear by a decomposition of a tensor: both dimensions are split into factors (`shape`), and the
    decomposition has one `rank`, or a list of `ranks`."""

    rank: int | None = None
    ranks: list[int] | dict[str, list[int]] | None = None
    shape: list[list[int]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_one_given(name, rank=self.rank, ranks=self.ranks)
        if self.rank is not None:
            check_positive(self.rank, name, "rank")
        elif isinstance(self.ranks, dict):
            if not self.ranks:
                raise ValueError(f"{name}(ranks={{}}) names no linear")
            lists = self.ranks.items()
            set_field(self, "ranks", {key: check_positive_list(ranks, name, f"ranks[{key!r}]") for key, ranks in lists})
        else:
            set_field(self, "ranks", check_positive_list(self.ranks, name, "ranks"))
        if self.shape is not None:
            if not isinstance(self.shape, list | tuple) or len(self.shape) != 2:
                raise ValueError(
                    f"{name}(shape={self.shape!r}): must be two lists of factors such as ((2, 4, 8), (4, 8, 8))"
                )
            set_field(
                self,
                "shape",
                [check_positive_list(modes, name, f"shape[{side}]") for side, modes in enumerate(self.shape)],
            )
            if (longest := max(map(len, self.shape))) > _MOST_MODES:
                raise ValueError(f"{name}: shape has a list of {longest} factors; the limit is {_MOST_MODES}")

    def named_linears(self) -> Iterable[str] | None:
        return self.ranks if isinstance(self.ranks, dict) else None

    @torch.no_grad()
    def fit(self, module: Any, weight: torch.Tensor, bias: torch.Tensor | None, moments: Moments) -> None:
        parts, new_bias = alternate(weight, bias, moments, module.parts(), module.product)
        for part, values in zip(module.parts(), parts, strict=True):
            part.copy_(values)
        if new_bias is not None:
            surgery.set_values(module.bias, new_bias)

    def ranks_of(self, name: str, full_ranks: Sequence[int]) -> list[int]:
        """The ranks of the linear `name`: `ranks`, or `rank` limited to each full rank. Raises ValueError if `rank` exceeds
        every full rank."""
        if self.rank is None:
            return self.ranks[name] if isinstance(self.ranks, dict) else list(self.ranks or ())
        if self.rank > max(full_ranks):
            raise ValueError(
                f"rank={self.rank}: must be in 1..{max(full_ranks)}, the largest full rank of {list(full_ranks)}"
            )
        return [min(self.rank, full_rank) for full_rank in full_ranks]


def glorot_std(linear: Any) -> float:
    """Glorot's standard deviation, √(2 / (inputs + outputs)) (Glorot & Bengio, 2010)."""
    return (2 / sum(features(linear))) ** 0.5
