"""`Method`: the base class of all techniques, with the hooks that the model calls."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_freeze.architectures.base import Architecture
from hf_freeze.methods._layer_numbers import Kept, renumbered_layers, renumbered_names
from hf_freeze.methods.parts import Model as Model
from hf_freeze.methods.parts import P, Part
from hf_freeze.methods.parts import Statistics as Statistics
from hf_freeze.seeded import SeededTensor


@dataclass(frozen=True, kw_only=True)
class Method:
    """One technique: a validated config that round-trips through JSON, and hooks that change a model.

    A subclass is a frozen, keyword-only dataclass that validates its fields in `__post_init__` (ValueError with the value,
    the limit and the choices) and overrides the hooks that it needs. Rarer abilities are `parts`. The facts below are read by
    the model, by `order.py` and by the contract tests.
    """

    name: ClassVar[str]
    example: ClassVar["Method"]  # a tiny setting that the contract tests apply to every supported architecture
    shrinks: ClassVar[bool] = False  # stored bytes fall with the example, after `finalize()` where there is one
    exact: ClassVar[bool] = False  # the example leaves the forward unchanged
    stochastic: ClassVar[bool] = False  # the example's forward in training mode is random
    from_scratch: ClassVar[bool] = False  # it cannot take over trained weights: the backbone must be a config
    architectures: ClassVar[frozenset[str] | None] = None  # supported model types; None means all
    needs: ClassVar[frozenset[str]] = frozenset()  # capabilities that must be proved: `architectures/families.py`

    structural: ClassVar[bool] = True  # it overrides `restructure` or `convert`
    converts_fresh: ClassVar[bool] = False  # its modules cannot draw values: fresh weights also pass through `convert`
    freezes: ClassVar[bool] = False  # `freeze` names parameters, in `layers` if the method has that field
    as_successor: ClassVar[bool] = (
        False  # though `from_scratch`, its blocks may learn beside trained ones: `keeps_old_blocks`
    )
    keeps_old_blocks: ClassVar[bool] = False  # copies of the old blocks run beside the new ones until `finalize`
    replaces_blocks: ClassVar[bool] = False  # replaces all attentions or FFNs by blocks of another design
    repeatable: ClassVar[bool] = True  # may be applied to the same model twice
    shares_layers: ClassVar[bool] = False  # several layers use one set of parameters
    drops_masks: ClassVar[bool] = False  # `finalize` drops what `keeps_masks` is about
    calibrates: ClassVar[bool] = False  # `convert` uses statistics of texts, if it gets any
    renumbers: ClassVar[str | None] = None  # "layers" or "tokens": the kept ones get new numbers
    by_layer: ClassVar[tuple[str, ...]] = ()  # fields that may be dicts with keys such as "encoder.0.self"

    @property
    def refers_to(self) -> frozenset[str]:
        """The items ("layers", "tokens") that the setting refers to by number or name: renumbering them would change its
        meaning."""
        named = any(isinstance(getattr(self, name), dict) for name in self.by_layer)
        return frozenset({"layers"} if named or getattr(self, "layers", None) is not None else ())

    @property
    def cuts(self) -> frozenset[str]:
        """The components of which `finalize` cuts matrices, so that a seed cannot regenerate them before."""
        return frozenset()

    @property
    def keeps_masks(self) -> bool:
        """Whether it keeps a mask or a score for each layer, which layers with shared parameters cannot have."""
        return False

    @property
    def follows_layers(self) -> bool:
        """Whether a later method may remove or repeat layers that the setting names: `renumbered` gives it their new numbers."""
        return not self.finalizable

    @property
    def selects(self) -> bool:
        """Whether `convert` keeps weights by position, not by value, so that an optimiser's state can be carried over."""
        return False

    @property
    def needs_calibration(self) -> bool:
        """Whether it has no form without statistics, when it is applied to a model."""
        return False

    @property
    def finalizable(self) -> bool:
        """Whether training ends with `finalize`, which has not been called yet."""
        return False

    @property
    def stores_anew(self) -> frozenset[str]:
        """Components whose weights `finalize` will store in another form: a seed cannot draw them."""
        return frozenset()

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its schedule, objective, kept tokens ...; see `hf_freeze.methods.parts`."""
        return ()

    def part(self, kind: type[P]) -> P | None:
        """Its part of this kind, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @classmethod
    def supports(cls, architecture: Architecture) -> bool:
        """Whether the method works on this architecture."""
        return cls.refusal(architecture) is None

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """Why the method does not work on this architecture; None if it does."""
        if cls.architectures is not None and architecture.model_type not in cls.architectures:
            return f"it supports {sorted(cls.architectures)}"
        return next((architecture.refusals[need] for need in sorted(cls.needs) if need in architecture.refusals), None)

    @classmethod
    def advice(cls, architecture: Architecture, config: Any) -> str | None:
        """The settings that this model needs because the usual ones do not reach all of it; None if they do."""
        return None

    def layers_kept(self, architecture: Architecture, config: Any) -> Kept:
        """Stack -> the old numbers of its new layers, in order, for the stacks whose layers get new numbers."""
        return {}

    def renumbered(self, architecture: Architecture, kept: Kept) -> "Method":
        """The method with the numbers that layers have after `kept` (`layers_kept` of a later method); itself if it names none.
        The result may name no layer any more, which `__post_init__` and `check` would refuse: they are not called."""
        changed: dict[str, Any] = {}
        if (layers := getattr(self, "layers", None)) is not None:
            changed["layers"] = renumbered_layers(layers, kept)
        for name in self.by_layer:
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
        old values; `model.config` has the new ones after `restructure`."""
        return {}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        """Change modules and shapes, from the config alone: runs at every construction and load, also on `meta`."""

    def describe(self, architecture: Architecture, config: Any) -> Architecture:
        """The description of the architecture after `restructure`; it differs if the method puts in other blocks."""
        return architecture

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        """Parameter -> the parameter whose values it shares, full names, beyond the native ties. Called after every
        `restructure`. Raises ValueError if two cannot share."""
        return {}

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        """Fill the modules that `restructure` put into `new` from the weights of `old`, which may be a native model.

        Called once, by `make_variant`, after everything of the same name and shape has been copied. `statistics`: what the
        linears of `old` see, if there is a calibration; for methods that say `calibrates`.
        """

    def prepare(self, model: Model, architecture: Architecture) -> None:
        """Set state that depends on the values of the new modules, converted or fresh. Called once, by `make_variant`."""

    def freeze(self, model: Model, architecture: Architecture) -> Iterable[tuple[str, SeededTensor | None]]:
        """(full parameter name, definition) of each parameter that it freezes. A definition regenerates the values, which are
        then not stored; None keeps and stores the present values."""
        return ()

    def finalize(self, model: Model, architecture: Architecture) -> "Method":
        """End training, in place, at any step: remove the parts that only training needs. Returns the method that the config
        names from then on; it is no longer `finalizable`."""
        raise NotImplementedError

    def merge(self, model: Model, architecture: Architecture) -> None:
        """Undo `restructure` in place, densely. Raises ValueError that names the method if the maths forbids it."""
