"""What parts cost in an engine: bytes by counting, milliseconds by a few measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from hf_freeze.architectures.base import hidden_size
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compression.blocks import Block
from hf_freeze.compression.engine import Engine
from hf_freeze.compression.shape import Shape
from hf_freeze.layers.grids import GROUP

_LISTED = 5.0  # bytes of the number of a token or neuron in a config that tells which are kept
_OF_LAYERS = 0.6  # share of a graph that its layers take, at least


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """`of_token`: numbers in the tables for each token; `token_bytes`: of the tokenizer's files; `hidden`: size; `of_layer`:
    stack -> bytes of a layer besides its weights; `bits`: of the whole model in the engine, `bytes`: of its folder. `lists`:
    whether a folder of this engine has a config with what is kept. `scale_bytes`: see `Engine`."""

    of_token: int
    tokens: int
    token_bytes: float
    bits: int
    bytes: float
    hidden: int = 256
    of_layer: Mapping[str, float] = field(default_factory=dict)
    lists: bool = False
    scale_bytes: float | None = None


def sizes_of(model: Any, tokens: int, depths: Mapping[str, int], folder: Path, size: int, engine: Engine) -> Sizes:
    """`folder`, `size`: of the whole model in the engine."""
    graphs, architecture = sum(map(_without_weights, folder.glob("*.onnx"))), architecture_for(model)
    graphs += sum(path.stat().st_size for path in folder.glob("*.xml"))  # of OpenVINO, whose weights are in *.bin
    of_layer = dict.fromkeys(depths, _OF_LAYERS * graphs / sum(depths.values()))
    for name, p in model.base_model.named_parameters():
        if p.ndim == 1 and (place := architecture.layer_of(name)) is not None:  # biases and norms
            of_layer[place[0]] += engine.float_bytes * p.numel() / depths[place[0]]
    tables = {id(p): p for p in model.parameters() if tokens and p.ndim == 2 and p.shape[0] == tokens}
    files = [path for path in folder.iterdir() if path.is_file() and ("token" in path.name or "vocab" in path.name)]
    return Sizes(
        of_token=sum(p.shape[1] for p in tables.values()),
        tokens=tokens,
        token_bytes=sum(path.stat().st_size for path in files) / max(tokens, 1),
        bits=engine.bits[0],
        bytes=size,
        hidden=hidden_size(model.config),
        of_layer=of_layer,
        lists=engine.lists,
        scale_bytes=engine.scale_bytes,
    )


def _without_weights(graph: Path) -> int:
    """The bytes of an ONNX file besides its tensors. Nearly all are of nodes: a layer has thousands of bytes of them."""
    import onnx

    tensors = onnx.load(graph, load_external_data=False).graph.initializer
    return graph.stat().st_size - sum(len(tensor.raw_data) for tensor in tensors)


def probe_shapes(full: Shape, blocks: Mapping[str, Block], may_go: frozenset[str]) -> dict[str, Shape]:
    """The whole, `full`, and it with one kind of part halved at a time, by their names in words."""
    found = {"whole": full}
    for stack, layers in full.layers.items():
        if len(layers) > 1 and "layers" in may_go:
            kept = full.layers | {stack: layers[: (len(layers) + 1) // 2]}
            found[f"half of the layers of the {stack}"] = replace(full, layers=kept)
        some = [block for block in blocks.values() if block.place[0] == stack and block.kind in may_go]
        half = {block.name: max(block.units // 2, 1) for block in some}
        found[f"half of the width of the {stack}"] = replace(full, units=full.units | half)
    return found


class Prices:
    """Sums over parts. `fixed_bytes`, `fixed_ms`: of what no choice changes. `probes`: (shape, ms), the whole first."""

    def __init__(
        self,
        blocks: Mapping[str, Block],
        depths: Mapping[str, int],
        sizes: Sizes,
        probes: Sequence[tuple[Shape, float]] = (),
    ) -> None:
        self._blocks, self._depths, self._sizes, self.knows_time = blocks, depths, sizes, bool(probes)
        self.fixed_ms, self._of_number = 0.0, 0.0
        # Of a weight, with its scales of 4 bytes: in 8 bits one for each output, of which FFNs have fewer; in 4 bits one for each
        # group of a row, the last of which is filled up.
        groups, hidden = -(-sizes.hidden // GROUP), sizes.hidden
        scales = 3 / hidden if sizes.scale_bytes is None else sizes.scale_bytes
        self._bytes = {32: 4.0, 16: 2.0, 8: 1 + scales, 4: groups * (GROUP / 2 + 4) / hidden}
        self._of_layer, self._of_weight = dict.fromkeys(depths, 0.0), dict.fromkeys(depths, 0.0)
        counted = sum(self.of_block(block, block.units, sizes.bits)[0] for block in blocks.values())
        counted += self.of_tables(sizes.tokens, sizes.bits)[0]
        counted += sum(self.of_layers(stack, depth)[0] for stack, depth in depths.items())
        self.fixed_bytes = sizes.bytes - counted
        if probes:
            self._fit(probes)

    def of_block(self, block: Block, units: int, bits: int) -> tuple[float, float]:
        """(bytes, ms)"""
        weights = units * block.per_unit
        stack, _ = block.place
        listed = self._listed(units, block.units) if block.kind == "neurons" else 0.0
        return weights * self._bytes[bits] + listed, weights * self._of_weight[stack]

    def _listed(self, kept: int, count: int) -> float:
        return _LISTED * kept if self._sizes.lists and kept < count else 0.0

    def of_layers(self, stack: str, depth: int) -> tuple[float, float]:
        return depth * self._sizes.of_layer.get(stack, 0.0), depth * self._of_layer[stack]

    def of_tables(self, tokens: int, bits: int) -> tuple[float, float]:
        numbers = tokens * self._sizes.of_token
        size = numbers * self._bytes[bits] + tokens * self._sizes.token_bytes + self._listed(tokens, self._sizes.tokens)
        return size, numbers * self._of_number

    def cost(self, shape: Shape) -> tuple[float, float]:
        """(bytes, ms) of a shape, estimated."""
        found = [
            self.of_block(b, shape.units[b.name], shape.bits[b.name]) for b in self._blocks.values() if shape.has(b)
        ]
        found += [self.of_layers(stack, len(kept)) for stack, kept in shape.layers.items()]
        found.append(self.of_tables(shape.tokens or self._sizes.tokens, shape.bits["tables"]))
        size, ms = np.sum(found, axis=0)
        return float(size) + self.fixed_bytes, float(ms) + self.fixed_ms

    def _fit(self, probes: Sequence[tuple[Shape, float]]) -> None:
        """Prices of time by relative errors (non-negative least squares): of a text, a layer and a weight of each stack, a number
        of the tables, by which tokens are predicted."""
        stacks = list(self._depths)
        rows = []
        for shape, _ in probes:
            row = [1.0]
            for stack in stacks:
                some = [b for b in self._blocks.values() if b.place[0] == stack and shape.has(b)]
                row += [len(shape.layers[stack]), sum(shape.units[b.name] * b.per_unit for b in some)]
            rows.append([*row, (shape.tokens or self._sizes.tokens) * self._sizes.of_token])
        matrix, times = np.array(rows), np.array([ms for _, ms in probes])
        scale = np.abs(matrix).max(0)
        scale[scale == 0] = 1.0
        prices = nnls(matrix / scale / times[:, None], np.ones(len(times)))[0] / scale
        self.fixed_ms, self._of_number = float(prices[0]), float(prices[-1])
        for number, stack in enumerate(stacks):
            self._of_layer[stack], self._of_weight[stack] = map(float, prices[1 + 2 * number : 3 + 2 * number])
        self.fixed_ms += probes[0][1] - self.cost(probes[0][0])[1]  # the whole is what it was measured to be
