"""`Method`, the base class of all techniques with the hooks that the model calls, and `Facts`, what others know of a method."""

import copy
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from hf_freeze.architectures.base import Architecture, changes_of_layers, with_layers
from hf_freeze.methods._layer_numbers import renumbered_layers, renumbered_names
from hf_freeze.methods.parts import Kept, P, Part, layers_kept
from hf_freeze.methods.parts import Model as Model
from hf_freeze.methods.parts import Statistics as Statistics
from hf_freeze.seeded import SeededTensor


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a method does, as far as the model, the table of orders (`order.py`) and the contract tests must know.

    `register_method` takes them. Those that depend on the setting are given by `Method.facts`.
    """

    # The backbones that it takes.
    needs: Set[str] = frozenset()  # capabilities that must be proved: `architectures/families.py`
    architectures: Set[str] | None = None  # supported model types; None means all
    from_scratch: Set[str] = frozenset()  # "blocks", "tables": it puts in others, which no trained weights fit
    # The outputs and the size of the model.
    exact: bool = False  # the forward in eval mode stays unchanged, until `finalize` makes the model smaller
    stochastic: bool = False  # the forward in training mode is random, drawn by `torch.randn_like`
    shrinks: bool = False  # stored bytes fall, after `finalize()` where there is one
    # How the model applies it.
    structural: bool = True  # it overrides `restructure` or `convert`
    selects: bool = False  # `convert` keeps weights by position, not by value: an optimiser's state can be carried over
    calibration: Literal["used", "needed"] | None = None  # what `convert` does with statistics of texts
    finalizable: bool = False  # training ends with `finalize`, which has not been called yet
    stores: Set[str] = frozenset()  # components whose weights it stores in a form of its own, which no seed can draw
    by_layer: tuple[str, ...] = ()  # fields that may be dicts with keys such as "encoder.0.self"
    # What may go together, by `order.py`.
    repeatable: bool = True  # it may be applied to the same model twice
    renumbers: Literal["layers", "tokens"] | None = None  # those that it keeps get new numbers
    refers_to: Set[str] = frozenset()  # "layers", "tokens": it names them by number; `layers` and `by_layer` are added
    shares_layers: bool = False  # several layers use one set of parameters
    holds: Set[str] = frozenset()  # "masks" of each layer; until `finalize`, "scores" of each layer or the old "blocks"
    cuts: Set[str] = frozenset()  # components of which `finalize` cuts matrices: until then, a seed cannot define them


@dataclass(frozen=True, kw_only=True)
class Method:
    """One technique: a validated config that round-trips through JSON, and hooks that change a model.

    A subclass is a frozen, keyword-only dataclass that validates its fields in `__post_init__` (ValueError with the value,
    the limit and the choices) and overrides the hooks that it needs. Rarer abilities are `parts`. `register_method` sets the
    class variables.
    """

    name: ClassVar[str]
    example: ClassVar["Method"]  # a tiny setting that the contract tests apply to every supported architecture
    modes: ClassVar[Mapping[str, "Method"]] = {}  # settings of another kind, by name, which the tests apply as well
    registered: ClassVar[Facts] = Facts()  # the facts of every setting

    @property
    def facts(self) -> Facts:
        """The facts of this setting."""
        named = any(isinstance(getattr(self, name), dict) for name in self.registered.by_layer)
        if not named and getattr(self, "layers", None) is None:
            return self.registered
        return replace(self.registered, refers_to={"layers", *self.registered.refers_to})

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its schedule, objective, kept tokens ...; see `hf_freeze.methods.parts`."""
        return ()

    def part(self, kind: type[P]) -> P | None:
        """Its part of this kind, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """Why the method does not work on this architecture; None if it does."""
        facts = cls.registered
        if facts.architectures is not None and architecture.model_type not in facts.architectures:
            return f"it supports {sorted(facts.architectures)}"
        return next(
            (architecture.refusals[need] for need in sorted(facts.needs) if need in architecture.refusals), None
        )

    @classmethod
    def advice(cls, architecture: Architecture, config: Any) -> str | None:
        """The settings that this model needs because the usual ones do not reach all of it; None if they do."""
        return None

    def renumbered(self, architecture: Architecture, kept: Kept) -> "Method":
        """The method with the numbers that layers have after `kept` (`KeptLayers` of a later method); itself if it names none.
        The result may name no layer any more, which `__post_init__` and `check` would refuse: they are not called."""
        changed: dict[str, Any] = {}
        if (layers := getattr(self, "layers", None)) is not None:
            changed["layers"] = renumbered_layers(layers, kept)
        for name in self.registered.by_layer:
            if isinstance(value := getattr(self, name), dict):
                changed[name] = renumbered_names(value, architecture, kept)
        if not changed:
            return self
        new = copy.copy(self)
        vars(new).update(changed)
        return new

    # -- the hooks, in the order of their calls -----------------------------------------------------------------------------

    def check(self, architecture: Architecture, config: Any) -> None:
        """Raise ValueError if the setting does not fit this backbone config, as earlier methods left it. Allocates nothing."""

    def config_changes(self, architecture: Architecture, config: Any) -> dict[str, Any]:
        """The native config fields that it changes, such as the depth, with their new values. The backbone is built with the
        old values; `model.config` has the new ones after `restructure`. Those of `KeptLayers` are known."""
        return changes_of_layers(architecture, config, layers_kept(self, architecture, config))

    def restructure(self, model: Model, architecture: Architecture) -> None:
        """Change modules and shapes, from the config alone: runs at every construction and load, also on `meta`."""

    def describe(self, architecture: Architecture, config: Any) -> Architecture:
        """The description of the architecture after `restructure`; it differs if the method puts in other blocks. That of
        `KeptLayers` is known."""
        kept = layers_kept(self, architecture, config)
        return with_layers(architecture, kept) if kept else architecture

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        """Parameter -> the parameter whose values it shares, full names, beyond the native ties. Called after every
        `restructure`. Raises ValueError if two cannot share."""
        return {}

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        """Fill the modules that `restructure` put into `new` from the weights of `old`, which may be a native model.

        Called once, by `make_variant`, after everything of the same name and shape has been copied. `statistics`: what the
        linears of `old` see, if there is a calibration; for methods with the fact `calibration`.
        """

    def prepare(self, model: Model, architecture: Architecture) -> None:
        """Set state that depends on the values of the new modules, converted or fresh. Called once, by `make_variant`."""

    def freeze(self, model: Model, architecture: Architecture) -> Iterable[tuple[str, SeededTensor | None]]:
        """(full parameter name, definition) of each parameter that it freezes. A definition regenerates the values, which are
        then not stored; None keeps and stores the present values."""
        return ()

    def finalize(self, model: Model, architecture: Architecture) -> "Method":
        """End training, in place, at any step: remove the parts that only training needs. Returns the method that the config
        names from then on, whose facts say no longer `finalizable`."""
        raise NotImplementedError

    def merge(self, model: Model, architecture: Architecture) -> None:
        """Undo `restructure` in place, densely. Raises ValueError that names the method if the maths forbids it."""
