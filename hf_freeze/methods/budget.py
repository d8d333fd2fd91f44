"""`share="auto"`: heads and neurons of several methods compete for one budget."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.methods.parts import Statistics
from hf_freeze.solvers.allocation import allocate, allocate_sizes

AUTO = "auto"


@dataclass(frozen=True)
class Competing:
    """The units of an attention or FFN, which go in multiples of `step`, `most` of them at most.

    `losses`: after 0, 1, 2 … removals, the distance of the model's predictions. `size`: numbers in the matrices for each unit.
    `kept`: how many units stay -> the heads or neurons that stay.
    """

    losses: list[float]
    most: int
    step: int
    size: float
    kept: Callable[[int], list[int]]


def size_of(model: Any, linears: Iterable[str], units: int) -> float:
    """The numbers in these matrices for each of so many units."""
    return sum(surgery.effective_weight(linear).numel() for _, linear in surgery.modules(model, linears)) / units


def allocated(blocks: Mapping[str, Competing], removals: int) -> dict[str, list[int]]:
    """Block -> the heads or neurons that stay when so many of all go at the least sum of losses, in the steps of the first."""
    steps = [block.step for block in blocks.values()]
    most = [block.most for block in blocks.values()]
    removed = allocate([block.losses for block in blocks.values()], removals, most=most, step=steps[0])
    left = zip(blocks.items(), removed, strict=True)
    return {name: block.kept(len(block.losses) - 1 - gone) for (name, block), gone in left}


def share_budget(
    methods: Sequence[Any],
    budget: float,
    old: Any,
    architecture: Architecture,
    statistics: Statistics,
    removal: float | None,
) -> tuple[Any, float]:
    """The first of `methods` with the heads or neurons that it keeps, and how many numbers of matrices those after it must still
    remove, so that of the weights of all that those with `share="auto"` may remove, the share `budget` stays at the least sum
    of losses. What the later ones keep is decided again when it is their turn, by what the smaller model sees.

    `removal`: how many numbers must go, as it was given for the method before; None for the first one.
    Raises ValueError for a budget that cannot be met, and for two methods that cut the same block.
    """
    competing = [method.competing(old, architecture, statistics) for method in methods if is_auto(method)]
    for name, times in Counter(name for of_method in competing for name in of_method).items():
        if times > 1:
            raise ValueError(f"{times} methods with share='auto' cut {name!r}: leave one, or give each other layers")
    blocks = [block for of_method in competing for block in of_method.values()]
    if removal is None:
        whole = sum(block.size * (len(block.losses) - 1) for block in blocks)
        least = whole - sum(block.size * (block.most // block.step * block.step) for block in blocks)
        if budget * whole < least * (1 - 1e-9):
            raise ValueError(
                f"budget={budget:g}: share='auto' can leave no less than {least / whole:.3g} of the weights of these heads and "
                "neurons, since each attention and FFN keeps some: give at least that"
            )
        removal = (1 - budget) * whole
    removed = allocate_sizes(
        [block.losses for block in blocks],
        removal,
        most=[block.most for block in blocks],
        steps=[block.step for block in blocks],
        sizes=[block.size for block in blocks],
    )
    first = list(zip(competing[0].items(), removed, strict=False))
    kept = {name: block.kept(len(block.losses) - 1 - gone) for (name, block), gone in first}
    removal -= sum(block.size * gone for (_, block), gone in first)
    return methods[0].keeping(kept, old, architecture), removal


def is_auto(method: Any) -> bool:
    return getattr(method, "share", None) == AUTO


def check_budget(methods: Sequence[Any], budget: Any, calibration: Any) -> None:
    """Raise ValueError unless `budget` and `share="auto"` come together, with texts."""
    places = [number for number, method in enumerate(methods) if is_auto(method)]
    if budget is None and places:
        raise ValueError(
            f"{methods[places[0]].name}(share='auto'): give a budget, the share of weights that stays, or a share"
        )
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ValueError(
            f"budget={budget!r}: must be a share in (0, 1], of the weights of the heads and neurons that may go"
        )
    if not places:
        raise ValueError(f"budget={budget:g} shares out what methods with share='auto' may remove, and there are none")
    if calibration is None:
        raise ValueError(f"budget={budget:g}: what heads and neurons are worth, texts tell: give calibration=")
    if (between := methods[places[0] : places[-1] + 1]) and len(between) > len(places):
        other = next(method for method in between if not is_auto(method))
        raise ValueError(
            f"{other.name} stands between methods with share='auto', which share one budget: put it before or after them"
        )
