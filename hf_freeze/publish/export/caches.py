"""The past of a model that generates, as tensors that an engine reads and gives.

They are named `past_key_values.LAYER.SIDE.PART` as inputs and `present.LAYER.SIDE.PART` as outputs. SIDE is "decoder", or
"encoder" for cross-attention. PART is "key" or "value" of an attention, "conv" for the last inputs of a convolution, "state" of
a recurrent unit, or its "tokens", which hold no numbers: their shape tells how many tokens it has seen.

Shapes: B rows, P previous tokens, S source tokens or frames, N heads, D head size, H hidden size, K kernel size. Keys and values
(B, N, P, D), of cross-attention (B, N, S, D); inputs of a convolution (B, H, K); state of a unit (B, 1, 1, its size), tokens
(B, 1, P, 0).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_freeze.compat.transformers import convolution_layer, has_states, state_of_convolution
from hf_freeze.layers.recurrent import StateLayer

PAST, PRESENT = "past_key_values", "present"


def empty_cache(config: Any) -> DynamicCache:
    """The cache of a decoder before the first token. Attentions keep all tokens, also those before a sliding window."""
    cache = DynamicCache()
    layers = DynamicCache(config=config).layers
    if any(has_states(layer) for layer in layers):
        cache.layers = [layer if has_states(layer) else DynamicLayer() for layer in layers]
    return cache


def tensors_of(cache: Any, kind: str, side: str) -> dict[str, Tensor]:
    """The tensors of a cache by name. `kind`: `PAST` or `PRESENT`."""
    return {
        f"{kind}.{number}.{side}.{part}": tensor
        for number, layer in enumerate(cache.layers)
        for part, tensor in _parts(layer).items()
    }


def _parts(layer: Any) -> dict[str, Tensor]:
    if has_states(layer):
        return {"conv": state_of_convolution(layer)}
    if isinstance(layer, StateLayer):
        return {"tokens": layer.keys, "state": layer.values}
    return {"key": layer.keys, "value": layer.values}


def cache_of(tensors: Mapping[str, Tensor]) -> DynamicCache:
    """The cache with these tensors of one side."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        _, number, _, part = name.split(".")
        layers.setdefault(int(number), {})[part] = tensor
    cache = DynamicCache()
    for number, parts in sorted(layers.items()):
        if "conv" in parts:
            cache.layers.append(convolution_layer(parts["conv"]))
        elif "state" in parts:
            cache.layers.append(StateLayer(keys=parts["tokens"], values=parts["state"]))
        else:
            cache.update(parts["key"], parts["value"], number)
    return cache


def check_cache(model: Any, cache: Any) -> None:
    """Raises ValueError unless every layer of the cache holds keys and values that grow by the new tokens, or the last inputs of
    a convolution."""
    layers = getattr(cache, "layers", None)
    if not layers or not all(_is_known(layer) for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers or [cache]})
        raise ValueError(
            f"{type(model).__name__} keeps its past in {', '.join(kinds)}: an exported file holds keys, values and inputs of "
            "convolutions alone; choose --format dense"
        )


def _is_known(layer: Any) -> bool:
    if has_states(layer):
        return state_of_convolution(layer) is not None
    return isinstance(layer, DynamicLayer) and layer.keys is not None


def start_of(
    shapes: Mapping[str, list[Any]], encoded: Mapping[str, Tensor], mask: Tensor | None, rows: int | None = None
) -> dict[str, Tensor]:
    """The inputs of a decoder before the first token, except the tokens: no past, and the keys and values of the source.

    `shapes`: of the decoder's inputs. `encoded`: the outputs of the encoder, for `mask` (B, S), None if it reads none; without an
    encoder none, and `rows` gives B.
    """
    rows = len(next(iter(encoded.values()))) if encoded else rows or 1
    inputs = {} if mask is None else {"encoder_attention_mask": mask}
    for name, shape in shapes.items():
        if name.startswith(PAST) and ".decoder." in name:
            inputs[name] = torch.zeros(rows, *(size if isinstance(size, int) else 0 for size in shape[1:]))
        elif name.startswith(PAST):
            inputs[name] = encoded[name.replace(PAST, PRESENT)]
    return inputs


def past_of(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The past that a decoder has given, as inputs of its next step."""
    return {name.replace(PRESENT, PAST): value for name, value in found.items() if name.startswith(f"{PRESENT}.")}
