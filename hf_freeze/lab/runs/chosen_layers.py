"""Layers in a grid: a run that starts from another one without some of its layers, which the dev set chooses."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_freeze import analysis, methods
from hf_freeze.lab.recipes.rows import Layers


def selection(settings: Layers, model: Any, batches: Sequence[Mapping[str, Any]]) -> methods.LayerSelection:
    """What keeps the layers that a row's `layers` asks for: `keep`, stack -> number of layers, chosen `by` every_other (no
    batches), what each layer is worth (removal, similarity), the rates that LayerDrop has learnt (no batches), or a search of at
    most `trials` sub-networks.

    `batches`: of the dev set, with labels. Raises ValueError for stacks and numbers that the model has not, and for rates that it
    has not learnt.
    """
    keep, by = settings.keep, settings.by
    every_other = analysis.extract_depth(model, keep)  # which checks `keep`
    if by == "every_other":
        return every_other
    if by == "rates":
        return analysis.select_layers(analysis.keep_rates(model), keep)
    if by == "search":
        return analysis.search_layers(
            model, keep, batches, **settings.model_dump(include={"trials"}, exclude_none=True)
        )
    return analysis.select_layers(analysis.layer_importance(model, batches, measure=by), keep)
