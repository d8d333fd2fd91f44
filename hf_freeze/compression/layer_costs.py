"""What the parts of a model larger than the memory are worth, by one pass layer by layer: all in one unit, the mean square by
which the states behind the part change, as a share of their mean square."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from hf_freeze import surgery
from hf_freeze.architectures.base import hidden_size
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compression.blocks import Block, blocks_in
from hf_freeze.io import append_line, whole_lines
from hf_freeze.layers.grids import Grid
from hf_freeze.methods.head_pruning import eliminated_heads
from hf_freeze.model.calibrating import CalibrationPass
from hf_freeze.model.calibration import Report, warned_once
from hf_freeze.model.paging import Paged
from hf_freeze.model.samples import Samples
from hf_freeze.solvers.columns import eliminate
from hf_freeze.solvers.moments import working_dtype

_FILE = "costs.jsonl"
_RIDGE = {torch.float64: 1e-6, torch.float32: 1e-4}  # by which copies of a neuron seem to cost something
_COMPARED = 2  # batches that tell what fewer bits change
_BITS = (8, 4)


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """`blocks`: by name; `layers`: (stack, layer) -> what it changes in the states; `bits`: number of bits -> block -> what
    rounding to so many changes."""

    blocks: dict[str, Block]
    layers: dict[tuple[str, int], float]
    bits: dict[int, dict[str, float]]


def layer_costs(model: Any, samples: Samples, paged: Paged) -> LayerCosts:
    """Those of all layers of `model`, on `samples`. What is known of a layer goes to a file in the folder of `paged`, and a
    killed process resumes there. Raises ValueError for a model whose layers do more than pass states on."""
    path = paged.folder / _FILE
    found, weights = blocks_in(model)
    known = _known(path)
    changed: dict[tuple[str, int], float] = {}  # (stack, layer) -> what it changes in the states
    size = hidden_size(model.config)
    running = CalibrationPass(model, model, samples.batches, Report(), lambda *_: model, paged).running()
    with warned_once(), running as statistics:
        for moments in statistics.walk(list(found), curvature=True, resumes=True):
            for output, moment in moments.items():
                name, attention = found[output]
                if name in known or moment is None or name not in weights:
                    continue
                if not statistics.streams.flow:
                    raise ValueError(
                        f"the layers of this {architecture_for(model).model_type} do more than pass states on: it cannot be "
                        "compressed layer by layer"
                    )
                heads: list[list[int]] = []
                if attention is not None:
                    heads, order = eliminated_heads(model, attention, moment)
                else:
                    linear = model.base_model.get_submodule(output)
                    weight = surgery.effective_weight(linear).float()
                    weight = weight.to(dtype := working_dtype(weight))
                    order = eliminate(weight, linear.bias, moment, ridge=_RIDGE[dtype])
                # Errors count by 1 / the mean square of a channel of the states.
                losses = (moment.weight / size * order.losses).tolist()
                block = Block(
                    name, weights[name], weights[name] / len(order.order), order.order.tolist(), losses, heads
                )
                if block.place not in changed:
                    changed[block.place] = _changed(statistics)
                bits = _of_bits(statistics, model, name)
                line = {"block": asdict(block), "layer": changed[block.place], "bits": bits}
                known[name] = line
                _append(path, line)
    places = {name: Block(**line["block"]).place for name, line in known.items()}
    return LayerCosts(
        blocks={name: Block(**known[name]["block"]) for name in weights if name in known},
        layers={places[name]: line["layer"] for name, line in known.items()},
        bits={bits: {name: line["bits"][str(bits)] for name, line in known.items()} for bits in _BITS},
    )


def _known(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in whole_lines(path)] if path.exists() else []
    return {line["block"]["name"]: line for line in lines}


def _append(path: Path, line: dict[str, Any]) -> None:
    line["bits"] = {str(bits): cost for bits, cost in line["bits"].items()}
    append_line(path, json.dumps(line))


def _changed(statistics: CalibrationPass) -> float:
    """What the present layer changes in the states that come in."""
    pairs = [statistics.streams.changes(batch) for batch in range(statistics.batch_count)]
    return sum(_share(before, after) for before, after in pairs) / len(pairs)


def _share(one: Tensor, other: Tensor) -> float:
    """The mean over tokens of ‖one - other‖² / ‖other‖²."""
    one, other = (states.to(one.device).float().flatten(0, -2) for states in (one, other))
    return float(((one - other).square().sum(-1) / other.square().sum(-1).clamp_min(1e-12)).mean())


def _of_bits(statistics: CalibrationPass, model: Any, name: str) -> dict[int, float]:
    """Number of bits -> what rounding the weights of a block changes in the states behind its layer."""
    found, batches = {}, range(min(_COMPARED, statistics.batch_count))
    for bits in _BITS:
        with _rounded(model, name, bits):
            pairs = [(statistics.streams.run("old", batch), statistics.streams.changes(batch)[1]) for batch in batches]
        found[bits] = sum(_share(*pair) for pair in pairs) / len(pairs)
    return found


@contextmanager
def _rounded(model: Any, name: str, bits: int) -> Iterator[None]:
    """Inside, each weight of a block is rounded to the nearest."""
    architecture = architecture_for(model)
    attentions, ffns = architecture.attentions(model.config), architecture.ffns(model.config)
    names = list(attentions[name].linears if name in attentions else ffns[name])
    grid = Grid(weights=f"int{bits}", granularity="group-64" if bits == 4 else "channel")
    own = {}
    for linear_name, linear in surgery.modules(model, names):
        own[linear_name] = linear.weight.data
        weight = surgery.effective_weight(linear)
        numbers, steps = grid.quantized(weight)
        rounded = grid.read(grid.packed(numbers), steps, (weight.shape[0], weight.shape[1]), weight.dtype)
        rounded = rounded.T.contiguous() if isinstance(linear, Conv1D) else rounded
        linear.weight.data = rounded.to(weight.device)
    try:
        yield
    finally:
        for linear_name, linear in surgery.modules(model, names):
            linear.weight.data = own[linear_name]
