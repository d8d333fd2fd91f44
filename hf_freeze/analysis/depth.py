"""Choose the layers to remove from a model that was trained with LayerDrop."""

from collections.abc import Mapping
from typing import Any

from hf_freeze.architectures.base import check_layers_type
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.methods import LayerSelection
from hf_freeze.methods._spacing import evenly_spaced


def extract_depth(model: Any, layers: Mapping[str, int]) -> LayerSelection:
    """The `LayerSelection` that reduces each stack to the number of layers in `layers`, such as `{"encoder": 3}`, as LayerDrop
    prunes (Fan et al., 2020, https://arxiv.org/abs/1909.11556, section 3.2); training with LayerDrop prepares a model for this.
    Every ⌊1 / p⌋-th layer is removed, where p is the share to remove. If that would leave another number of layers, the kept
    ones lie at even distances, the first and the last layer among them. `model` may be a config.

        shallow = make_variant(model, [analysis.extract_depth(model, {"encoder": 3, "decoder": 3})])

    Raises ValueError for an unsupported model, an unknown stack, and a number outside 1..the layers of the stack.
    """
    config = getattr(model, "config", model)
    if not hasattr(config, "model_type"):
        raise ValueError(f"extract_depth: {type(model).__name__} is neither a transformers model nor a config")
    architecture = architecture_of(config)
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
                f"extract_depth(layers={{{stack!r}: {count!r}}}): must be an integer in 1..{depths[stack]}, its layers"
            )
    return LayerSelection(keep={stack: evenly_spaced(depths[stack], count) for stack, count in layers.items()})
