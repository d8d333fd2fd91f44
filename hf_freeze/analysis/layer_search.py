"""Search for the layers to keep: sub-networks of a trained model are compared on held-out data."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import torch

from hf_freeze.analysis._probe import check_model, count_labels, loss_of
from hf_freeze.analysis.depth import extract_depth
from hf_freeze.methods import LayerSelection
from hf_freeze.methods.checks import check_positive
from hf_freeze.model.make import make_variant
from hf_freeze.model.running import in_eval_mode, on_device, without_cache
from hf_freeze.progress import track

Kept = tuple[tuple[int, ...], ...]  # the layers of each stack


def search_layers(
    model: Any,
    layers: Mapping[str, int],
    data: Sequence[Mapping[str, Any]] | None = None,
    *,
    evaluate: Callable[[Any], float] | None = None,
    trials: int = 100,
) -> LayerSelection:
    """The `LayerSelection` that reduces each stack to the number of layers in `layers`, such as `{"encoder": 3}`, and is best on
    held-out data: the search among sub-networks of Fan et al. (2020, https://arxiv.org/abs/1909.11556, "Search on Valid"). A
    model trained with LayerDrop is prepared for this; nothing is trained.

        shallow = make_variant(model, [analysis.search_layers(model, {"encoder": 2, "decoder": 1}, batches)])

    All sub-networks are compared if there are at most `trials`. Otherwise the search begins at those of `extract_depth`, every
    other layer, and exchanges a kept layer for a removed one as long as the result improves, until `trials` have been
    measured. So it is never worse than every other layer on the same data. Choose on other data than you test on.

    `data`: batches with labels, as dicts of tensors for the forward, which are gone through once a trial; the loss decides.
    `evaluate`: instead, a function of the shallow model in eval mode, where more is better, such as BLEU.

    Raises ValueError for both or neither of data and evaluate, trials below 1, a score that is not a finite number, a model on
    meta, batches without labels, and what `extract_depth` refuses.
    """
    architecture = check_model(model)
    if (data is None) == (evaluate is None):
        raise ValueError("search_layers: give one of data and evaluate")
    check_positive(trials, "search_layers", "trials")
    stacks, depths = list(layers), architecture.depths(model.config)
    start: Any = extract_depth(model, layers).keep
    measured: dict[Kept, float] = {}

    def cost(kept: Kept) -> float:
        if kept not in measured:
            shallow = make_variant(model, [_selection(stacks, kept)]).eval()
            if evaluate is None:
                loss, labels = total_loss(shallow, data or ())
                value = loss / max(labels, 1)
            else:
                value = -float(evaluate(shallow))
            if not math.isfinite(value):
                raise ValueError(f"search_layers: the layers {_selection(stacks, kept).keep} have the score {value}")
            measured[kept] = value
        return measured[kept]

    counts, leads = list(layers.values()), [architecture.stacks[stack].keeps_first for stack in stacks]
    sizes = [depths[stack] for stack in stacks]
    number = math.prod(
        math.comb(size - lead, count - lead) for size, count, lead in zip(sizes, counts, leads, strict=True)
    )
    if number <= trials:
        choices = [
            [kept for kept in combinations(range(size), count) if kept[0] == 0 or not lead]
            for size, count, lead in zip(sizes, counts, leads, strict=True)
        ]
        return _selection(stacks, min(track(product(*choices), "Comparing sub-networks", number), key=cost))
    best: Kept = tuple(tuple(start[stack]) for stack in stacks)
    cost(best)
    improved = True
    while improved:
        improved = False
        for neighbour in _neighbours(best, sizes, leads):
            if len(measured) >= trials and neighbour not in measured:
                return _selection(stacks, best)
            if cost(neighbour) < cost(best):
                best, improved = neighbour, True
                break
    return _selection(stacks, best)


def _selection(stacks: Sequence[str], kept: Kept) -> LayerSelection:
    return LayerSelection(keep={stack: list(numbers) for stack, numbers in zip(stacks, kept, strict=True)})


def _neighbours(kept: Kept, depths: Sequence[int], leading: Sequence[bool]) -> Iterator[Kept]:
    """Every choice with one layer exchanged. The layer 0 of a `leading` stack stays."""
    for stack, numbers in enumerate(kept):
        for out, new in product(numbers, range(depths[stack])):
            if new in numbers or (out == 0 and leading[stack]):
                continue
            changed = tuple(sorted({*numbers, new} - {out}))
            yield (*kept[:stack], changed, *kept[stack + 1 :])


def total_loss(model: Any, batches: Iterable[Mapping[str, Any]]) -> tuple[float, int]:
    """The loss of `model` in nats, summed over the labels of all batches, and the number of labels. In eval mode.

    Raises ValueError for batches without labels.
    """
    total, labels = 0.0, 0
    with in_eval_mode(model), without_cache(model), torch.no_grad():
        for batch in batches:
            batch = on_device(model, batch)
            count = count_labels(model, batch)
            total, labels = total + float(loss_of(model, batch, "total_loss")) * count, labels + count
    return total, labels
