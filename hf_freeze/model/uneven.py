"""Native models whose layers have unequal sizes, by `per_layer_config` of transformers.

transformers 5.23 accepts `per_layer_config` for every family: {layer number: {field: value}}, written to config.json. Whether it
has an effect depends on the files of the family. Its modeling file must read the field of each layer, and so must the checks of
its config, which run when it is saved; others raise AmbiguousGlobalPerLayerAttributeError.
`tests/families/test_per_layer_config.py` keeps account of them.
"""

from typing import Any, NoReturn

import torch
import transformers

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, set_fields
from hf_freeze.architectures.describe import first_line
from hf_freeze.compat.transformers import quiet
from hf_freeze.layers.no_attention import NoAttention


def set_sizes(config: Any, source: Any, architecture: Architecture) -> None:
    """Give `config`, the native one of `source`, the numbers of neurons and heads that the layers of `source` have: fields hold
    those of most layers or the native ones, `per_layer_config` those of each layer that differs.

    Raises ValueError for sizes that `per_layer_config` has no place for.
    """
    largest: dict[str, int] = {}
    blocks = surgery.neurons_of(architecture, source.config)
    for neurons in blocks.values():
        if neurons.field is not None:
            largest[neurons.field] = max(largest.get(neurons.field, 0), neurons.count(source))
    set_fields(config, largest)
    differing: dict[str, dict[str, int]] = {}
    for block, neurons in blocks.items():
        count = neurons.count(source)
        if count != (neurons.native if neurons.field is None else largest[neurons.field]):
            if neurons.field is None:
                _refuse(f"no config field holds the number of neurons of {block!r}")
            differing.setdefault(block.rpartition(".")[0], {})[neurons.field] = count
    for name, attention in architecture.attentions(source.config).items():
        module = dict(source.base_model.named_modules()).get(attention.module)
        if module is None or isinstance(module, NoAttention):
            _refuse(f"{name!r} has lost all its heads, and a native model keeps one")
        count = surgery.count_heads(source, attention, "merge(uneven=True)")
        if count == attention.head_count(source.config):
            continue
        if attention.knows_heads or not isinstance(attention.heads, str):
            _refuse(f"the heads of {name!r} differ in more than their weights, or no config field holds their number")
        sizes = {attention.heads: count}
        if isinstance(attention.groups, str):
            sizes[attention.groups] = count // surgery.group_size(source.base_model, attention, source.config, count)
        differing.setdefault(name.rpartition(".")[0], {}).update(sizes)
    if differing and len(architecture.stacks) > 1:
        _refuse(
            f"per_layer_config numbers the layers of one stack, and {architecture.model_type} has {len(architecture.stacks)}"
        )
    if differing:
        config.per_layer_config = {int(layer.rpartition(".")[2]): sizes for layer, sizes in differing.items()}


def check_native(native_class: Any, config: Any, source: Any) -> None:
    """Raise ValueError unless the native class makes a model of the shapes of `source` from `config`. Allocates nothing."""
    overrides = config.to_dict().get("per_layer_config") or {}
    fields = sorted({field for sizes in overrides.values() for field in sizes})
    unread = f"{native_class.__name__} of transformers {transformers.__version__} does not read {', '.join(fields)} of a layer"
    if not fields:
        return
    try:
        with torch.device("meta"), quiet():
            native = native_class(config)
            type(config).from_dict(config.to_dict()).validate()  # as saving and loading do
    except Exception as error:  # whatever the native classes raise for sizes that they refuse
        is_unread = type(error).__name__ == "AmbiguousGlobalPerLayerAttributeError"
        _refuse(unread if is_unread else f"{native_class.__name__} refuses these sizes: {first_line(error)}", error)
    if shapes_of(native) != shapes_of(source):
        _refuse(unread)


def shapes_of(model: Any) -> dict[str, torch.Size]:
    """Tensor name -> shape."""
    return {name: value.shape for name, value in model.state_dict().items()}


def _refuse(reason: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(
        f"merge(uneven=True): {reason}; without uneven, merge() fills the layers up with zeros, or save the variant itself, "
        "which hf_freeze opens"
    ) from cause
