"""Folders that transformers and vLLM open by the package `compressed-tensors`
(https://github.com/vllm-project/compressed-tensors): safetensors in its format `pack-quantized`, where the weights of linears are
integers and their inputs are not rounded.

Of the linears of layers, the integers of a Quantize are kept as they are, and other weights are rounded to the nearest. Tables,
the output matrix and everything else keep the dtype of the model. The steps get it too, as readers demand. The writer needs no
package.

Shapes: O outputs, I inputs, G steps of a row.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_freeze import surgery
from hf_freeze.analysis.accounting import stored_bytes
from hf_freeze.architectures.base import LINEAR_COMPONENTS, full_name
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.compat.transformers import is_quantized
from hf_freeze.layers.grids import GROUP, Grid
from hf_freeze.layers.quantized import Quantized, QuantizedLinear
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.convert import bytes_of_shard
from hf_freeze.model.paging import Paged
from hf_freeze.publish.export.folders import Export, Format

_NAME = "compressed-tensors"
_GRIDS = {"int8": Grid(weights="int8"), "int4": Grid(weights="int4", granularity=f"group-{GROUP}")}
_VLLM_GROUPS = (None, 32, 64)  # SUPPORTED_GROUP_SIZES of vllm/model_executor/layers/quantization/utils/quant_utils.py


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`, with about `export.max_shard_size` of it in memory.

    Raises ValueError for a method that cannot be merged, integers that no native linear has, linears that are no nn.Linear, and a
    model of which nothing is rounded.
    """
    model = export.model
    if is_quantized(model):
        raise ValueError(f"{export.source} is quantized already")
    with (
        tempfile.TemporaryDirectory(dir=folder) as parts,
        Paged(Path(parts), bytes_of_shard(export.max_shard_size)) as paged,
    ):
        native = _merged(model, paged) if isinstance(model, VariantMixin) else model
        groups: dict[tuple[int, int | None], list[str]] = defaultdict(list)
        for name, numbers, steps, grid in _rounded(model, native, export.quantization):
            linear = _Packed(native.get_submodule(name), numbers, steps, grid)
            paged.move(linear)
            native.set_submodule(name, linear)
            groups[linear.bits, linear.group].append(name)
        if not groups:
            raise ValueError(f"{_NAME} holds integers, and this model has none: add --quantization int8 or int4")
        if native.config.is_encoder_decoder and len(groups) > 1:
            raise ValueError(
                f"{_NAME}: an encoder-decoder must have one number of bits and one size of groups, and this "
                f"{type(native).__name__} has {len(groups)} kinds of linears; quantise all alike"
            )
        native.config.quantization_config = _config(native, groups)
        export.say(f"writing {sum(map(len, groups.values()))} linears as integers")
        native.save_pretrained(folder, max_shard_size=export.max_shard_size)
    if (large := stored_bytes(native)) > 1.01 * (small := stored_bytes(model)):
        export.say(
            f"{_NAME} has dense tables and groups of one size: {large / 1e6:.2f} MB of weights instead of {small / 1e6:.2f}"
        )
    if others := [group for _, group in groups if group not in _VLLM_GROUPS]:
        export.say(
            f"steps are for {others[0]} inputs each, since rows are no multiple of {GROUP}: vLLM has no such groups"
        )


FORMAT = Format(write, quantizations=tuple(_GRIDS), keeps_structure=False, merges=False)


def _merged(variant: Any, paged: Paged) -> Any:
    """The native model, whose large tensors lie in files."""
    variant.paged = paged
    try:
        return variant.merge()
    except ValueError as error:
        raise ValueError(f"{_NAME} cannot hold this model: {error}; choose --format onnx") from error


@torch.no_grad()
def _rounded(model: Any, native: Any, width: str | None) -> Iterator[tuple[str, Tensor, Tensor, Grid]]:
    """(name, int8 numbers (O, I), steps (O, G), grid) of each linear in the layers of `native`: with the integers of `model`, or
    rounded to `width` where it has none, if that is given."""
    architecture = architecture_of(native.config)
    if architecture.experts(native.config):
        raise ValueError(
            f"{_NAME}: transformers opens no {architecture.model_type} whose experts are dense and its other linears integers; "
            "choose --format onnx"
        )
    linears = surgery.linear_names(architecture, native.config, LINEAR_COMPONENTS, None)
    names = [full_name(native, name) for name in linears]
    tables = surgery.vocabulary_modules(model, architecture)
    holders: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, Quantized) and name not in tables
    }
    for name in dict.fromkeys((*holders, *(names if width is not None else ()))):
        linear, holder = native.get_submodule(name) if name in names else None, holders.get(name)
        if holder is not None and not _is_same(holder, linear):
            raise ValueError(
                f"{_NAME} has no place for the integers of {name!r}, which are not those of a linear of "
                f"{type(native).__name__}: run hf-freeze merge, and export that folder with --quantization int8 or int4"
            )
        if not isinstance(linear, nn.Linear):
            raise ValueError(
                f"{_NAME} has no {type(linear).__name__}, which {name!r} of {type(native).__name__} is; choose --format gguf or "
                "onnx"
            )
        if holder is not None:
            yield name, holder.integers(), holder.steps(), holder.grid
            continue
        grid = _GRIDS[str(width)]
        steps = grid.steps(linear.weight).to(linear.weight.dtype).float()  # as they are stored
        yield name, grid.numbers(linear.weight, steps).to(torch.int8), steps, grid


def _is_same(holder: Quantized, linear: Any) -> bool:
    """Whether a native linear has the weights of the integers, whose steps are for rows or for groups of inputs."""
    if linear is None or not isinstance(holder, QuantizedLinear) or not isinstance(holder.grid, Grid):
        return False
    return torch.equal(holder.dense_weight(), surgery.effective_weight(linear))


class _Packed(nn.Module):
    """What the file has of a linear: `weight_packed` int32 (O, ⌈I · bits / 32⌉), `weight_scale` (O, G) and `weight_shape` (2,).

    `group`: the number of inputs that share a step; None: all. Groups must have one size, so those of 64 are split where
    64 is no divisor of I.
    """

    def __init__(self, linear: nn.Linear, numbers: Tensor, steps: Tensor, grid: Grid) -> None:
        super().__init__()
        columns = numbers.shape[1]
        self.bits = 8 if grid.weights == "int8" else 4
        self.group = None if grid.granularity == "channel" else math.gcd(GROUP, columns)
        if self.group is not None:
            steps = steps.repeat_interleave(GROUP // self.group, 1)[:, : columns // self.group]
        self.register_buffer("weight_packed", _packed(numbers, self.bits))
        self.register_buffer("weight_scale", steps.to(linear.weight.dtype, copy=True))  # layers may share them
        self.register_buffer("weight_shape", torch.tensor(numbers.shape))
        self.bias = linear.bias


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """int8 (O, I) -> int32 (O, ⌈I · bits / 32⌉): numbers + 2^(bits - 1), the first in the lowest bits."""
    values = (numbers.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    values = functional.pad(values, (0, -values.shape[1] % (32 // bits)))
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    return values.contiguous().view(torch.int32)


def _config(native: Any, groups: dict[tuple[int, int | None], list[str]]) -> dict[str, Any]:
    """`quantization_config` of config.json; `groups`: (bits, inputs that share a step) -> linears."""
    schemes = {}
    for number, ((bits, group), names) in enumerate(groups.items()):
        strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **strategy}
        schemes[f"group_{number}"] = {"targets": ["Linear"] if len(groups) == 1 else names, "weights": weights}
    # transformers then makes dense weights when it opens the folder, but reads all as the first group. Otherwise it makes them in
    # the first call of the model, which `generate` of an encoder-decoder goes around, as sentence-transformers does.
    early = {"dequantize": True} if len(groups) == 1 else {}
    return {
        "quant_method": _NAME,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": schemes,
        "ignore": [name for name, module in native.named_modules() if isinstance(module, nn.Linear)],
        **early,
    }
