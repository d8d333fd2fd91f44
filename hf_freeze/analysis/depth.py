"""Which layers to leave out of a model that was trained with LayerDrop."""

from collections.abc import Mapping
from typing import Any

from hf_freeze.architectures.base import check_layers_type
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.methods import LayerSelection
from hf_freeze.methods._spacing import evenly_spaced


def extract_depth(model: Any, layers: Mapping[str, int]) -> LayerSelection:
    """The method that leaves so many layers of each stack, such as `{"encoder": 3}`, as LayerDrop prunes (Fan et al., 2020,
    https://arxiv.org/abs/1909.11556, section 3.2): what a training with it has prepared for. Every ⌊1 / p⌋-th goes, p being the
    share to remove; where that would leave another number, those at even distances stay, the first and the last among them.
    `model` may be a config.

    >>> shallow = make_variant(model, [analysis.extract_depth(model, {"encoder": 3, "decoder": 3})])

    Raises ValueError for an unsupported model, an unknown stack, and a number outside 1..its layers.
    """
    config = getattr(model, "config", model)
    if not hasattr(config, "model_type"):
        raise ValueError(f"extract_depth: {type(model).__name__} is neither a transformers model nor a config")
    architecture = architecture_of(config.model_type)
    if not isinstance(layers, Mapping) or not layers:
        raise ValueError(
            f"extract_depth(layers={layers!r}): must be a dict from stacks to numbers, such as {{'encoder': 3}}"
        )
    check_layers_type({stack: [] for stack in layers})
    architecture.check_layers({stack: [] for stack in layers}, config)
    depths = architecture.depths(config)
    for stack, count in layers.items():
        if type(count) is not int or not 1 <= count <= depths[stack]:
            raise ValueError(
                f"extract_depth(layers={{{stack!r}: {count!r}}}): must be an integer in 1..{depths[stack]}, the layers there"
            )
    return LayerSelection(keep={stack: evenly_spaced(depths[stack], count) for stack, count in layers.items()})
