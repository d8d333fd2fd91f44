"""What does not go together: a table of refused orders of methods, by the facts of both.

What else a setting cannot follow, its own hooks refuse.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_freeze.methods.base import Facts, Method
from hf_freeze.methods.parts import KeptTokens, SeededValues


def check_order(method: Method, earlier: Sequence[Method]) -> None:
    """Raise ValueError if `method` cannot be applied after the methods in `earlier`. The one-line message names a way out."""
    for before in earlier:
        pair = _Pair(method, before, method.facts, before.facts)
        for clash, reason, ends in _REFUSED:
            if found := clash(pair):
                words = {"own": type(method).__name__, "found": found, "renumbers": pair.new.renumbers}
                way_out = ", or finalize() before" * (pair.old.finalizable and ends(pair))
                raise ValueError(f"{type(method).__name__} after {before.name!r}{reason.format(**words)}{way_out}")


@dataclass(frozen=True)
class _Pair:
    """A method, one before it, and the facts of both."""

    method: Method
    before: Method
    new: Facts
    old: Facts

    @property
    def follows(self) -> bool:
        """Whether a setting that names layers can be given their new numbers."""
        return self.new.renumbers == "layers" and self.new.selects

    @property
    def loses_numbers(self) -> bool:
        """Whether the numbers in the earlier setting would mean others; groups of shared layers would be others."""
        follows = self.follows and not self.old.finalizable and not self.old.shares_layers
        return self.new.renumbers in self.old.refers_to and not follows

    @property
    def marks_shared(self) -> bool:
        """Whether each of several layers would have a mask or score, and all of them one set of parameters."""
        old, new = self.old, self.new
        marks = {"masks", "scores"}
        return bool((new.shares_layers and old.holds & marks) or (new.holds & marks and old.shares_layers))

    @property
    def rounds(self) -> frozenset[str]:
        """The components that the earlier method will round when training ends."""
        return frozenset(self.old.stores if self.old.finalizable else ())


def _never(pair: _Pair) -> bool:
    return False


# (what a pair of methods has that cannot be; the reason, as the end of the message; whether it is gone once the earlier method is
# finalized). The first row that a pair meets refuses it.
_REFUSED: tuple[tuple[Callable[[_Pair], Any], str, Callable[[_Pair], bool]], ...] = (
    (
        lambda pair: type(pair.method) is type(pair.before) and not pair.new.repeatable,
        ": it can be applied only once; give one setting, or finalize() and merge() before the second",
        _never,
    ),
    (
        lambda pair: pair.loses_numbers,
        ", which names {renumbers} by number: the {renumbers} get new numbers; put {own} first",
        lambda pair: pair.follows,
    ),
    (
        lambda pair: min(pair.rounds & _seeded(pair.method), default=None),
        ", which will store the weights of {found!r} in few bits: those from a seed take none; leave {found!r} out of one of "
        "the two",
        _never,
    ),
    (
        lambda pair: "embeddings" in pair.rounds and pair.method.part(KeptTokens),
        ", which trains the tables for few bits until finalize(); put {own} first",
        lambda pair: True,
    ),
    (
        lambda pair: pair.new.from_scratch and pair.old.finalizable and not _succeeds(pair.new, pair.old),
        ", which needs the old blocks until finalize(); put {own} first",
        _never,
    ),
    (
        lambda pair: pair.new.from_scratch & pair.old.from_scratch,
        ", which has put in other blocks; leave one of the two out",
        _never,
    ),
    (
        lambda pair: pair.marks_shared,
        ": layers that share their parameters cannot keep a mask or score each; merge() the first, or leave one of the two out",
        lambda pair: "scores" in pair.old.holds,
    ),
    (
        lambda pair: ", ".join(sorted(pair.old.cuts & _seeded(pair.method))),
        ", which removes some of {found} when training ends, so that no seed can define it; finalize() before",
        _never,
    ),
    (
        lambda pair: ", ".join(sorted(pair.new.cuts & _seeded(pair.before))),
        ", whose {found} a seed regenerates: {own} cannot remove some of it when training ends, only at once",
        _never,
    ),
)


def needs_config(method: Method, earlier: Sequence[Method]) -> bool:
    """Whether `method`, after `earlier`, cannot be applied to a backbone with weights."""
    facts = method.facts
    return bool(facts.from_scratch) and not any(_succeeds(facts, before.facts) for before in earlier)


def _succeeds(new: Facts, old: Facts) -> bool:
    """Whether all that a method puts in learns beside the trained ones, which an earlier method holds until it is finalized."""
    return new.from_scratch <= old.holds


def _seeded(method: Method) -> frozenset[str]:
    """The components that it has a seed regenerate."""
    part = method.part(SeededValues)
    return frozenset() if part is None else part.components


def check_shared_layers(
    methods: Sequence[Method],
    ties: Mapping[str, str],
    layer_of: Callable[[str], tuple[str, int] | None],
    component_of: Callable[[str], str],
) -> None:
    """Raise ValueError if a method without modules of its own, such as Freeze, names only one of two layers that share their
    parameters.

    `ties`: parameter -> the parameter whose values it shares; `layer_of`: parameter -> (stack, layer); `component_of`: parameter
    -> component, which a method may leave trainable.
    """
    pairs = dict.fromkeys((component_of(target), layer_of(target), layer_of(source)) for target, source in ties.items())
    shared = [(part, one, other) for part, one, other in pairs if one and other and one[0] == other[0]]
    for method in methods:
        layers = None if method.facts.structural else getattr(method, "layers", None)
        for component, (stack, one), (_, other) in shared:
            if getattr(method, component, None) == "trainable":
                continue
            numbers = (layers or {}).get(stack)
            if numbers is not None and (one in numbers) != (other in numbers):
                raise ValueError(
                    f"{method.name!r} of layers {numbers} of stack {stack!r}: layers {sorted((one, other))} share their "
                    "parameters; name all of them or none"
                )
