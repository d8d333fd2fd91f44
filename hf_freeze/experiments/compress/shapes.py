"""The shapes that a model may be cut to, and the methods that cut it."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_freeze import methods
from hf_freeze.analysis.sensitivity import (
    Sensitivity,
    fewer_heads,
    fewer_neurons,
    lower_rank,
    lower_ranks,
    plain_ffns,
)
from hf_freeze.architectures.base import Architecture, hidden_size
from hf_freeze.layers.low_rank import traced_as_factors
from hf_freeze.methods.registry import method_to_dict


@dataclass(frozen=True, kw_only=True)
class StackShape:
    """What is kept of a stack: a number of layers, and a share of their neurons, of their heads, and of the rank of the linears
    of their FFNs. Linears of attentions keep their rank: as many of their bytes saved by fewer heads cost less loss."""

    layers: int
    neurons: float = 1.0
    heads: float = 1.0
    linear_ranks: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`vocabulary`: tokens that are kept; `rank`: of the token tables, None as they are."""

    stacks: dict[str, StackShape]
    vocabulary: int
    rank: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Shape":
        return cls(**values | {"stacks": {name: StackShape(**stack) for name, stack in values["stacks"].items()}})

    def words(self, whole: "Shape") -> str:
        """What is kept of `whole`: "encoder 3 of 6 layers, 50 % of the neurons; 2,000 of 4,000 tokens"."""
        parts = []
        for name, stack in self.stacks.items():
            kept = []
            if stack.layers < whole.stacks[name].layers:
                kept.append(f"{stack.layers} of {whole.stacks[name].layers} layers")
            kept += [f"{stack.neurons:.0%} of the neurons"] if stack.neurons < 1 else []
            kept += [f"{stack.heads:.0%} of the heads"] if stack.heads < 1 else []
            kept += [f"{stack.linear_ranks:.0%} of the rank of FFNs"] if stack.linear_ranks < 1 else []
            parts += [f"{name} {', '.join(kept)}"] if kept else []
        if self.vocabulary < whole.vocabulary:
            parts.append(f"{self.vocabulary:,} of {whole.vocabulary:,} tokens")
        if self.rank is not None:
            parts.append(f"token table of rank {self.rank}")
        return "; ".join(parts) or "everything"


def whole_shape(architecture: Architecture, config: Any, vocabulary: int) -> Shape:
    depths = architecture.depths(config)
    return Shape(stacks={name: StackShape(layers=depth) for name, depth in depths.items()}, vocabulary=vocabulary)


def kept_layers(shape: Shape, measured: Sensitivity) -> dict[str, list[int]]:
    """Stack -> the numbers of the layers that are kept."""
    kept = {}
    for name, stack in shape.stacks.items():
        depth = max(measured.layers[name])
        removed = measured.removal[name][: depth - stack.layers]
        kept[name] = [layer for layer in range(depth) if layer not in removed]
    return kept


def methods_of(
    shape: Shape, measured: Sensitivity, architecture: Architecture, config: Any, *, uniform: bool
) -> list[dict[str, Any]]:
    """The methods that cut a model, whose vocabulary is that of the shape already, to `shape`, as a recipe writes them.

    `architecture`, `config`: of the whole model. `uniform`: one width for all FFNs of a stack.
    """
    found: list[Any] = []
    layers = kept_layers(shape, measured)
    if any(len(layers[name]) < max(measured.layers[name]) for name in layers):
        cut = {name: numbers for name, numbers in layers.items() if len(numbers) < max(measured.layers[name])}
        found.append(methods.LayerSelection(keep=cut))
    heads: dict[str, list[int]] = {}
    neurons: dict[str, Any] = {}
    ranks: dict[str, int] = {}
    for name, stack in shape.stacks.items():
        if stack.heads < 1:
            heads |= fewer_heads(measured, name, stack.heads, layers[name], architecture, config).heads or {}
        if stack.neurons < 1:
            neurons |= fewer_neurons(measured, name, stack.neurons, layers[name], uniform=uniform).keep or {}
        if stack.linear_ranks < 1:
            ranks |= lower_ranks(measured, name, stack.linear_ranks, layers[name], architecture, neurons)
    found += [methods.HeadPruning(heads=heads)] if heads else []
    found += [methods.FFNPruning(keep=neurons)] if neurons else []
    found += [methods.LowRank(rank=ranks)] if ranks else []
    found += [methods.FactorizedEmbedding(rank=shape.rank)] if shape.rank is not None else []
    return [method_to_dict(method) for method in found]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of weights in a model, by which costs are estimated. `ffn`, `attention`: stack -> of a layer, on average;
    `tables`: token tables with weights of their own; `hidden`: the width of a row. `linears`: stack -> (side of the neurons,
    other side) of a linear of an FFN -> how many a layer has, on average."""

    ffn: dict[str, float]
    attention: dict[str, float]
    tables: int
    hidden: int
    linears: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)

    def of_stack(self, name: str, stack: StackShape) -> float:
        """That are stored."""
        return self._dense(name, stack) - stack.layers * self._factors(name, stack)[0]

    def products_of_stack(self, name: str, stack: StackShape) -> tuple[float, float]:
        """(multiply-adds for one token, linears that are computed as two products), in an exported model."""
        _, saved, linears = self._factors(name, stack)
        return self._dense(name, stack) - stack.layers * saved, stack.layers * linears

    def _dense(self, name: str, stack: StackShape) -> float:
        return stack.layers * (self.ffn[name] * stack.neurons + self.attention[name] * stack.heads)

    def _factors(self, name: str, stack: StackShape) -> tuple[float, float, float]:
        """(weights, multiply-adds that factors save in a layer, linears computed by them)."""
        weights = products = linears = 0.0
        for (neurons, other), count in self.linears.get(name, {}).items() if stack.linear_ranks < 1 else ():
            sides = round(neurons * stack.neurons), other
            rank = lower_rank(*sides, stack.linear_ranks)
            if rank is None:
                continue
            saved = count * (sides[0] * sides[1] - rank * sum(sides))
            weights += saved
            if traced_as_factors(*sides, rank):
                products, linears = products + saved, linears + count
        return weights, products, linears

    def of_tables(self, vocabulary: int, rank: int | None) -> float:
        if rank is None:
            return self.tables * vocabulary * self.hidden
        return self.tables * rank * (vocabulary + self.hidden)


def count_weights(model: Any, architecture: Architecture) -> Weights:
    counts: dict[str, dict[str, float]] = {"ffn": {}, "attention": {}}
    depths = architecture.depths(model.config)
    sizes = {id(p): (name, p.numel()) for name, p in model.base_model.named_parameters()}
    for component, by_stack in counts.items():
        by_stack.update(dict.fromkeys(depths, 0.0))
        for name, size in sizes.values():
            place = architecture.layer_of(name)
            if place is not None and architecture.component(name) == component:
                by_stack[place[0]] += size / depths[place[0]]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rows = {id(p): p for p in model.parameters() if p.ndim == 2 and p.shape[0] == vocabulary}
    linears: dict[str, dict[tuple[int, int], float]] = {name: Counter() for name in depths}
    for block, sizes in plain_ffns(model, architecture).items():
        stack = block.split(".")[0]
        for number, (_, inputs, outputs) in enumerate(sizes, start=1):
            sides = (inputs, outputs) if number == len(sizes) else (outputs, inputs)
            linears[stack][sides] += 1 / depths[stack]
    return Weights(tables=len(rows), hidden=hidden_size(model.config), linears=linears, **counts)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a shape keeps of one kind of part, as a share and in words."""

    name: str
    share: float
    words: str


def parts_of_shape(shape: Shape, whole: Shape, hidden: int, bits: int) -> list[Part]:
    """For pictures. `hidden`: the width of a token table; `bits`: of a weight in the engine, where fp32 is the whole."""
    parts = []
    for name, stack in shape.stacks.items():
        layers = whole.stacks[name].layers
        parts.append(Part(name=f"{name}: layers", share=stack.layers / layers, words=f"{stack.layers} of {layers}"))
        for kind, share in (("heads in these layers", stack.heads), ("neurons in these layers", stack.neurons)):
            parts.append(Part(name=f"{name}: {kind}", share=share, words=f"{share:.0%}"))
        if (share := stack.linear_ranks) < 1:
            parts.append(Part(name=f"{name}: rank of FFNs in these layers", share=share, words=f"{share:.0%}"))
    tokens = f"{shape.vocabulary:,} of {whole.vocabulary:,}"
    parts.append(Part(name="tokens", share=shape.vocabulary / whole.vocabulary, words=tokens))
    if shape.rank is not None:
        parts.append(Part(name="rank of the token table", share=shape.rank / hidden, words=f"{shape.rank} of {hidden}"))
    return [*parts, Part(name="bits of a weight", share=bits / 32, words=f"{bits} of 32")]
