"""The shapes that a model may be cut to, and the methods that cut it."""

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_freeze import methods
from hf_freeze.analysis.sensitivity import (
    Sensitivity,
    fewer_heads,
    fewer_neurons,
    lower_rank,
    lower_ranks,
    of_ranks,
    plain_linears,
)
from hf_freeze.architectures.base import Architecture, hidden_size
from hf_freeze.layers.low_rank import traced_as_factors
from hf_freeze.methods.registry import method_to_dict


@dataclass(frozen=True, kw_only=True)
class StackShape:
    """What is kept of a stack: a number of layers, and a share of their neurons, of their heads, and of the ranks of the linears
    of their FFNs and attentions. Attentions lose heads or ranks, not both."""

    layers: int
    neurons: float = 1.0
    heads: float = 1.0
    ffn_ranks: float = 1.0
    attention_ranks: float = 1.0


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
            kept += [f"{stack.ffn_ranks:.0%} of the rank of FFNs"] if stack.ffn_ranks < 1 else []
            kept += [f"{stack.attention_ranks:.0%} of the rank of attentions"] if stack.attention_ranks < 1 else []
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
        for component, share in (("ffn", stack.ffn_ranks), ("attention", stack.attention_ranks)):
            if share < 1:
                ranks |= lower_ranks(measured, name, component, share, layers[name], architecture, neurons)
    found += [methods.HeadPruning(heads=heads)] if heads else []
    found += [methods.FFNPruning(keep=neurons)] if neurons else []
    found += [of_ranks(ranks)] if ranks else []
    found += [methods.FactorizedEmbedding(rank=shape.rank)] if shape.rank is not None else []
    return [method_to_dict(method) for method in found]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of weights in a model, by which costs are estimated. `ffn`, `attention`: stack -> of a layer, on average;
    `tables`: token tables with weights of their own; `hidden`: the width of a row. `linears`: stack -> (component, side of the
    neurons or any, other side) of a weight -> how many a layer has, on average."""

    ffn: dict[str, float]
    attention: dict[str, float]
    tables: int
    hidden: int
    linears: dict[str, dict[tuple[str, int, int], float]] = field(default_factory=dict)

    def of_stack(self, name: str, stack: StackShape) -> float:
        """That are stored."""
        return self._dense(name, stack) - stack.layers * self._factors(name, stack)[0]

    def factors_of_stack(self, name: str, stack: StackShape) -> float:
        """Number of weights that are stored as factors."""
        return stack.layers * self._factors(name, stack)[1]

    def products_of_stack(self, name: str, stack: StackShape) -> tuple[float, float]:
        """(multiply-adds for one token, linears that are computed as two products), in an exported model."""
        _, _, saved, computed = self._factors(name, stack)
        return self._dense(name, stack) - stack.layers * saved, stack.layers * computed

    def _dense(self, name: str, stack: StackShape) -> float:
        return stack.layers * (self.ffn[name] * stack.neurons + self.attention[name] * stack.heads)

    def _factors(self, name: str, stack: StackShape) -> tuple[float, float, float, float]:
        """(numbers that factors save in a layer, weights stored as factors, multiply-adds saved, linears computed by factors)."""
        saved = stored = products = computed = 0.0
        for (component, side, other), count in self.linears.get(name, {}).items():
            kept, share = (stack.neurons, stack.ffn_ranks) if component == "ffn" else (1.0, stack.attention_ranks)
            side = round(side * kept)
            if share == 1 or (rank := lower_rank(side, other, share)) is None:
                continue
            less = count * (side * other - rank * (side + other))
            saved, stored = saved + less, stored + count
            if traced_as_factors(side, other, rank):
                products, computed = products + less, computed + count
        return saved, stored, products, computed

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
    linears: dict[str, dict[tuple[str, int, int], float]] = {name: defaultdict(float) for name in depths}
    counted = set()  # layers may share their weights
    for block, found in plain_linears(model, architecture).items():
        stack, layer, kind = block.split(".")
        for name, side, other in found:
            linear = model.base_model.get_submodule(f"{architecture.stacks[stack].layers.format(int(layer))}.{name}")
            if id(linear.weight) not in counted:
                linears[stack]["attention" if kind == "attention" else "ffn", side, other] += 1 / depths[stack]
            counted.add(id(linear.weight))
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
        kinds = {"heads": stack.heads, "neurons": stack.neurons}
        ranks = {"rank of FFNs": stack.ffn_ranks, "rank of attentions": stack.attention_ranks}
        kinds |= {kind: share for kind, share in ranks.items() if share < 1}
        for kind, share in kinds.items():
            parts.append(Part(name=f"{name}: {kind} in these layers", share=share, words=f"{share:.0%}"))
    tokens = f"{shape.vocabulary:,} of {whole.vocabulary:,}"
    parts.append(Part(name="tokens", share=shape.vocabulary / whole.vocabulary, words=tokens))
    if shape.rank is not None:
        parts.append(Part(name="rank of the token table", share=shape.rank / hidden, words=f"{shape.rank} of {hidden}"))
    return [*parts, Part(name="bits of a weight", share=bits / 32, words=f"{bits} of 32")]
