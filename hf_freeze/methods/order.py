"""The order of methods: decides from the facts that methods declare whether a method may follow others. No other module refuses
an order."""

from collections.abc import Callable, Mapping, Sequence

from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import KeptTokens, SeededValues


def check_order(method: Method, earlier: Sequence[Method]) -> None:
    """Raise ValueError if `method` cannot be applied after the methods in `earlier`. The one-line message names a way out."""
    for before in earlier:
        reason = _conflict(method, before)
        if reason is not None:
            raise ValueError(f"{type(method).__name__} after {before.name!r}{reason}")


def check_shared_layers(
    methods: Sequence[Method],
    ties: Mapping[str, str],
    layer_of: Callable[[str], tuple[str, int] | None],
    component_of: Callable[[str], str],
) -> None:
    """Raise ValueError if a method freezes only one of two layers that share their parameters.

    `ties`: parameter -> the parameter whose values it shares; `layer_of`: parameter -> (stack, layer); `component_of`: parameter
    -> component, which a method may leave trainable.
    """
    pairs = dict.fromkeys((component_of(target), layer_of(target), layer_of(source)) for target, source in ties.items())
    shared = [(part, one, other) for part, one, other in pairs if one and other and one[0] == other[0]]
    for method in methods:
        layers = getattr(method, "layers", None) if method.freezes else None
        for component, (stack, one), (_, other) in shared:
            if getattr(method, component, None) == "trainable":
                continue
            numbers = (layers or {}).get(stack)
            if numbers is not None and (one in numbers) != (other in numbers):
                raise ValueError(
                    f"{method.name!r} of layers {numbers} of stack {stack!r}: layers {sorted((one, other))} share their "
                    "parameters; name all of them or none"
                )


def needs_config(method: Method, earlier: Sequence[Method]) -> bool:
    """Whether `method`, after `earlier`, cannot be applied to a backbone with weights."""
    return method.from_scratch and not any(_succeeds(method, before) for before in earlier)


def _succeeds(method: Method, before: Method) -> bool:
    """Whether the blocks of `method` learn beside the old ones, which `before` keeps until it is finalized."""
    return method.as_successor and before.keeps_old_blocks and before.finalizable


def _conflict(method: Method, before: Method) -> str | None:
    """The reason why `method` may not follow `before`, as the end of the message; None if it may."""
    own = type(method).__name__
    first = f"put {own} first"
    if type(method) is type(before) and not method.repeatable:
        return ": it can be applied only once; give one setting, or finalize() and merge() before the second"
    can_follow = method.renumbers == "layers" and method.selects
    if (
        method.renumbers is not None
        and method.renumbers in before.refers_to
        and not (can_follow and before.follows_layers)
    ):
        other = ", or finalize() before" if can_follow and before.finalizable else ""
        return f", which names {method.renumbers} by number: the {method.renumbers} get new numbers; {first}{other}"
    if both := sorted(before.stores_anew & _seeded(method)):
        return (
            f", which will store the weights of {both[0]!r} in few bits: those from a seed take none; leave {both[0]!r} out of "
            "one of the two"
        )
    if "embeddings" in before.stores_anew and method.part(KeptTokens):
        return f", which trains the tables for few bits until finalize(); {first}, or finalize() before"
    if method.replaces_blocks and before.finalizable and not _succeeds(method, before):
        return f", which needs the old blocks until finalize(); {first}"
    if method.replaces_blocks and before.replaces_blocks:
        return ", which has put in other blocks; leave one of the two out"
    if (method.shares_layers and before.keeps_masks) or (method.keeps_masks and before.shares_layers):
        final = ", or finalize() before" if before.finalizable and before.drops_masks else ""
        return (
            ": layers that share their parameters cannot keep a mask or score each; merge() the first, or leave one of the two "
            f"out{final}"
        )
    if seeded := before.cuts & _seeded(method):
        return f", which removes some of {', '.join(seeded)} when training ends, so that no seed can define it; finalize() before"
    if seeded := method.cuts & _seeded(before):
        return f", whose {', '.join(seeded)} a seed regenerates: {own} cannot remove some of it when training ends, only at once"
    return None


def _seeded(method: Method) -> frozenset[str]:
    """The components that it has a seed regenerate."""
    part = method.part(SeededValues)
    return frozenset() if part is None else part.components
