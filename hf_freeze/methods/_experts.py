"""Whole experts that FFNPruning removes from mixtures: which may go, and which add least."""

from typing import Any

import torch

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.methods.checks import check_numbers_by_name, check_positive
from hf_freeze.methods.parts import Statistics

Experts = int | dict[str, list[int]] | None


def check_experts(method: Any) -> None:
    """Raise ValueError for experts of a wrong type, or another setting beside them."""
    for name in ("width", "keep", "layers", "expert_width", "share"):
        if (value := getattr(method, name)) is not None:
            raise ValueError(
                f"FFNPruning(experts={method.experts!r}, {name}={value!r}): experts go from all mixtures, and neurons by a "
                "second FFNPruning"
            )
    if isinstance(method.experts, dict):
        example = "{'decoder.0.experts': [0, 1, 3]}"
        check_numbers_by_name(method.experts, "FFNPruning", "experts", items="experts", example=example)
    else:
        check_positive(method.experts, "FFNPruning", "experts")


def experts_left(experts: Experts, architecture: Architecture, config: Any) -> dict[str, list[int]]:
    """Mixture -> the experts that stay; of a number, the first ones. Raises ValueError if they cannot."""
    mixtures, blocks = surgery.mixtures_of(architecture, config), list(architecture.experts(config))
    if isinstance(experts, dict):
        if experts.keys() != set(blocks):
            raise ValueError(f"FFNPruning(experts=...) of {sorted(experts)}: must name all of {blocks}")
        last = max(numbers[-1] for numbers in experts.values())
        grouped = {tuple(mixtures.grouped(numbers)) for numbers in experts.values()}
        if last >= mixtures.count or len({number for counts in grouped for number in counts}) > 1:
            raise ValueError(
                f"FFNPruning(experts={experts}): must be numbers in 0..{mixtures.count - 1}, as many of each mixture "
                f"and of each of its {mixtures.groups} groups"
            )
    count: Any = len(experts[blocks[0]]) if isinstance(experts, dict) else experts
    try:
        mixtures.check(count)
    except ValueError as error:
        raise ValueError(f"FFNPruning(experts={experts}): {count} experts of each mixture: {error}") from None
    return (
        experts
        if isinstance(experts, dict)
        else dict.fromkeys(blocks, mixtures.largest(torch.zeros(mixtures.count), count))
    )


def best_experts(
    method: Any, count: int, old: Any, architecture: Architecture, statistics: Statistics | None
) -> dict[str, list[int]]:
    """Mixture -> the experts that add most to its outputs or, without statistics, are the largest."""
    experts_left(count, architecture, old.config)  # which checks their number
    blocks, mixtures = architecture.experts(old.config), surgery.mixtures_of(architecture, old.config)
    for module in blocks.values():
        surgery.native_experts(old, module, method.name)
    scores = {module: surgery.expert_magnitudes(old, module) for module in blocks.values()}
    if statistics is not None and (masses := statistics.routed(list(scores))) is not None:
        scores = masses
    elif statistics is not None:
        statistics.note(
            f"{method.name}: magnitudes choose the experts: a saved calibration does not know their factors"
        )
    return {block: mixtures.largest(scores[module], count) for block, module in blocks.items()}
