"""`share="auto"`: heads and neurons of several methods compete for one budget."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.methods.parts import Statistics
from hf_freeze.solvers.allocation import allocate_sizes

AUTO = "auto"


@dataclass(frozen=True)
class Competing:
    """The units of an attention or FFN, which go in multiples of `step`, `most` of them at most.

    `losses`: after 0, 1, 2 … removals, the distance of the model's predictions. `size`: numbers in the matrices for each unit.
    """

    losses: list[float]
    most: int
    step: int
    size: float


def size_of(model: Any, linears: Iterable[str], units: int) -> float:
    """The numbers in these matrices for each of so many units."""
    return sum(surgery.effective_weight(linear).numel() for _, linear in surgery.modules(model, linears)) / units


def decide_shares(
    methods: list[Any], budget: float, old: Any, architecture: Architecture, statistics: Statistics
) -> dict[int, Any]:
    """Number of each method with `share="auto"` -> the same with the share that it keeps, so that of the weights of all heads
    and neurons that these may remove, the share `budget` stays, at the least sum of losses.

    Raises ValueError for a budget that cannot be met.
    """
    units: list[tuple[int, Competing]] = []
    for number, method in enumerate(methods):
        if getattr(method, "share", None) == AUTO:
            units += [(number, each) for each in method.competing(old, architecture, statistics).values()]
    parts = [each for _, each in units]
    whole = sum(part.size * (len(part.losses) - 1) for part in parts)
    least = whole - sum(part.size * (part.most // part.step * part.step) for part in parts)
    if budget * whole < least * (1 - 1e-9):
        raise ValueError(
            f"budget={budget:g}: share='auto' can leave no less than {least / whole:.3g} of the weights of these heads and "
            "neurons, since each attention and FFN keeps some: give at least that"
        )
    removed = allocate_sizes(
        [part.losses for part in parts],
        (1 - budget) * whole,
        most=[part.most for part in parts],
        steps=[part.step for part in parts],
        sizes=[part.size for part in parts],
    )
    shares: dict[int, Any] = {}
    for number in {number for number, _ in units}:
        of_method = [
            (len(part.losses) - 1, gone) for (n, part), gone in zip(units, removed, strict=True) if n == number
        ]
        total = sum(count for count, _ in of_method)
        shares[number] = methods[number].with_share(1 - sum(gone for _, gone in of_method) / total)
    return shares


def check_budget(methods: Iterable[Any], budget: Any, calibration: Any) -> None:
    """Raise ValueError unless `budget` and `share="auto"` come together, with texts."""
    auto = [method for method in methods if getattr(method, "share", None) == AUTO]
    if budget is None and auto:
        raise ValueError(
            f"{auto[0].name}(share='auto'): give make_variant budget=, the share of weights that stays, or a share"
        )
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ValueError(
            f"budget={budget!r}: must be a share in (0, 1], of the weights of the heads and neurons that may go"
        )
    if not auto:
        raise ValueError(f"budget={budget:g} shares out what methods with share='auto' may remove, and there are none")
    if calibration is None:
        raise ValueError(f"budget={budget:g}: what heads and neurons are worth, texts tell: give calibration=")
