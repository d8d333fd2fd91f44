"""The shapes that a model may be cut to, and the methods that cut it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_freeze import methods
from hf_freeze.compression.blocks import Block
from hf_freeze.layers.grids import GROUP
from hf_freeze.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is kept. `layers`: stack -> the numbers of its layers; `units`: attention or FFN by its name in the whole model ->
    how many units (`blocks.Block`); `bits`: of the weights of each of these, and of the "tables"; `tokens`: how many, None for
    all."""

    layers: dict[str, tuple[int, ...]]
    units: dict[str, int]
    bits: dict[str, int]
    tokens: int | None = None

    @property
    def digest(self) -> str:
        """A short name for folders."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def has(self, block: Block) -> bool:
        stack, layer = block.place
        return layer in self.layers[stack]


def full_shape(depths: Mapping[str, int], blocks: Mapping[str, Block], bits: int) -> Shape:
    return Shape(
        layers={stack: tuple(range(depth)) for stack, depth in depths.items()},
        units={name: block.units for name, block in blocks.items()},
        bits=dict.fromkeys([*blocks, "tables"], bits),
    )


def in_words(shape: Shape, blocks: Mapping[str, Block], depths: Mapping[str, int], all_tokens: int | None) -> str:
    """Such as "encoder: 4 of 6 layers, 50 % of the heads, 31 % of the neurons; 2,000 of 4,000 tokens; 4 bits: the tables"."""
    parts = []
    for stack, numbers in shape.layers.items():
        kept = [f"{len(numbers)} of {depths[stack]} layers"] if len(numbers) < depths[stack] else []
        for kind in ("heads", "neurons"):
            share = share_kept(shape, blocks, stack, kind)
            kept += [f"{share:.0%} of the {kind}"] if share is not None and share < 1 else []
        parts += [f"{stack}: {', '.join(kept)}"] if kept else []
    if shape.tokens is not None and all_tokens is not None and shape.tokens < all_tokens:
        parts.append(f"{shape.tokens:,} of {all_tokens:,} tokens")
    few = [name for name, bits in shape.bits.items() if bits == 4 and (name == "tables" or shape.has(blocks[name]))]
    if few:
        linears = len(few) - ("tables" in few)
        named = (["the token tables"] if "tables" in few else []) + ([f"{linears} parts"] if linears else [])
        parts.append(f"4 bits: {' and '.join(named)}")
    return "; ".join(parts) or "everything"


def share_kept(shape: Shape, blocks: Mapping[str, Block], stack: str, kind: str) -> float | None:
    """Of the heads or neurons in those layers of a stack that stay; None where it has none."""
    some = [block for block in blocks.values() if block.place[0] == stack and block.kind == kind and shape.has(block)]
    return sum(shape.units[block.name] for block in some) / sum(block.units for block in some) if some else None


def methods_of(shape: Shape, blocks: Mapping[str, Block], depths: Mapping[str, int]) -> list[Method]:
    """Those that cut a model, which has the tokens of the shape already, to `shape`."""
    found: list[Method] = []
    if any(len(numbers) < depths[stack] for stack, numbers in shape.layers.items()):
        found.append(methods.LayerSelection(keep={stack: list(numbers) for stack, numbers in shape.layers.items()}))
    heads, neurons = {}, {}
    for block in filter(shape.has, blocks.values()):
        count = shape.units[block.name]
        if count == block.units:
            continue
        if block.heads:
            kept = block.kept(count)
            heads[renamed(block.name, shape)] = [head for unit in block.heads for head in unit if head not in kept]
        else:
            neurons[renamed(block.name, shape)] = block.kept(count)
    found += [methods.HeadPruning(heads={name: sorted(gone) for name, gone in heads.items()})] if heads else []
    found += [methods.FFNPruning(keep=neurons)] if neurons else []
    return found + few_bits(shape, blocks)


def few_bits(shape: Shape, blocks: Mapping[str, Block], bits: int = 4) -> list[Method]:
    """What makes few bits of the weights that the shape has in so many bits: all attentions of a layer, its FFN, or both."""
    found: list[Method] = []
    layers: dict[str, dict[str, list[int]]] = {}  # component -> stack -> layers by their new numbers
    for block in filter(shape.has, blocks.values()):
        if shape.bits[block.name] == bits:
            stack, layer = block.place
            component = "attention" if block.heads else "ffn"
            numbers = layers.setdefault(component, {}).setdefault(stack, [])
            number = shape.layers[stack].index(layer)
            numbers += [number] if number not in numbers else []
    together: dict[str, list[str]] = {}  # layers -> the components whose layers these are
    for component, of_stacks in layers.items():
        together.setdefault(json.dumps(of_stacks, sort_keys=True), []).append(component)
    found += [quantized(components, layers[components[0]], bits) for components in together.values()]
    if shape.bits["tables"] == bits:
        found.append(quantized(["embeddings"], bits=bits))
    return found


def quantized(
    components: Sequence[str], layers: Mapping[str, list[int]] | None = None, bits: int = 4
) -> methods.Quantize:
    settings: dict[str, Any] = {} if layers is None else {"layers": dict(layers)}
    granularity = f"group-{GROUP}" if bits == 4 else "channel"
    return methods.Quantize(weights=f"int{bits}", granularity=granularity, components=list(components), **settings)


def renamed(block: str, shape: Shape) -> str:
    """The name of a block in the model that has lost the other layers."""
    stack, layer, rest = block.split(".", 2)
    return f"{stack}.{shape.layers[stack].index(int(layer))}.{rest}"
