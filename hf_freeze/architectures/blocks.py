"""The parts of an architecture: attentions, and stacks of layers."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# How q, k and v lie in one projection: one after the other, head by head, or for each group of heads its queries, key and value.
LAYOUTS = ("blocks", "heads", "groups")


def read(config: Any, name: str) -> Any:
    """The value of a config field; a dotted name lies in a nested config, such as "text_config.hidden_size"."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention block of a layer. `q`, `k`, `v`, `o`: its projections, as names below the layer. In a fused projection q, k
    and v have the same name, and their outputs lie side by side.

    `heads`, `groups`: the numbers of query heads, and of key and value heads if queries share them, or the config fields that
    hold them; `size`: the size of a head. `switch`: a config field; if it is false, layers do not have this block. `layout`: how
    the outputs of a fused projection lie, one of `LAYOUTS`.
    """

    q: str
    k: str
    v: str
    o: str
    heads: str | int
    groups: str | int | None = None
    bidirectional: bool = False  # whether each token attends to all tokens of its sentence
    size: int | None = None
    others: tuple[str, ...] = ()  # patterns of further parameters of the block, such as those of a convolution
    # What an attention gets for all heads, although some may be pruned (`kept_heads.py`): arguments of its forward with an entry
    # for each head, norms over all heads' queries ("q") or keys ("k"), and whether it reads the numbers of heads from the config.
    biases: tuple[str, ...] = ()
    norms: dict[str, str] = field(default_factory=dict)
    reads_config: bool = False
    resizes: tuple[str, ...] = ()  # further attributes of the module that hold the size of all heads together
    switch: str | None = None
    layout: str = "blocks"
    # Whether each group of heads that share keys and values may lose the same number of heads. Descriptions in earlier
    # checkpoints do not say so: there, heads went in whole groups.
    thins: bool = False

    @property
    def linears(self) -> dict[str, int]:
        """Module name -> number of projections that it holds: 3 if q, k and v are fused."""
        return dict(Counter((self.q, self.k, self.v, self.o)))

    @property
    def knows_heads(self) -> bool:
        """Whether heads differ in more than their weights, so that a pruned attention must know which ones it has kept."""
        return bool(self.biases or self.norms)

    @property
    def module(self) -> str:
        """Name of the module that computes the heads."""
        return self.q.rpartition(".")[0]

    def head_count(self, config: Any) -> int:
        """Number of query heads."""
        return self.heads if isinstance(self.heads, int) else getattr(config, self.heads)

    def head_size(self, config: Any) -> int:
        """Size of a query, key or value of one head."""
        return self.size or getattr(config, "head_dim", None) or config.hidden_size // self.head_count(config)

    def key_head_count(self, config: Any) -> int:
        """Number of key and value heads."""
        if isinstance(self.groups, int):
            return self.groups
        return getattr(config, self.groups) if self.groups else self.head_count(config)

    def group_size(self, config: Any) -> int:
        """Number of query heads that share one key and value head."""
        return self.head_count(config) // self.key_head_count(config)

    def removed_together(self, config: Any) -> int:
        """The least number of heads that can be removed of one attention without looking at the others: a group, or one head
        where all share keys and values."""
        return 1 if self.thins and self.key_head_count(config) == 1 else self.group_size(config)

    def roles(self, name: str) -> list[str]:
        """The projections that the linear `name` holds, among "q", "k", "v" and "o"."""
        return [role for role in ("q", "k", "v", "o") if getattr(self, role) == name]

    def features(self, config: Any, name: str, kept: Sequence[int], heads: int, group: int | None = None) -> list[int]:
        """Positions of the heads `kept`, out of `heads`, among the inputs of the output projection or the outputs of the other
        linears; `name` is the linear. `group` heads (None: as natively) share keys and values; of each such group, `kept` has the
        same number, or none."""
        size, group = self.head_size(config), group or self.group_size(config)
        shared, groups = list(dict.fromkeys(head // group for head in kept)), heads // group
        each = len(kept) // max(len(shared), 1)

        def places(numbers: Iterable[int], stride: int, offset: int, count: int) -> list[int]:
            """`count` positions from `offset` on in each of the blocks `numbers`, which lie `stride` positions apart."""
            return [number * stride + offset + position for number in numbers for position in range(count)]

        roles = self.roles(name)
        if len(roles) > 1 and self.layout == "heads":
            return places(kept, len(roles) * size, 0, len(roles) * size)
        if len(roles) > 1 and self.layout == "groups":
            block = group + len(roles) - 1  # a group's queries, in the order of `kept`, and what they share
            rows = []
            for place, number in enumerate(shared):
                queries = [head % group for head in kept[place * each : (place + 1) * each]]
                rows += [number * block + row for row in (*queries, *range(group, block))]
            return places(rows, size, 0, size)
        index: list[int] = []
        offset = 0
        for role in roles:
            query = role in ("q", "o")
            index += places(kept if query else shared, size, offset, size)
            offset += (heads if query else groups) * size
        return index

    def outputs_of(self, config: Any, role: str, heads: int, group: int | None = None) -> list[int]:
        """Positions of the projection `role`, "q", "k" or "v", among the outputs of its linear, head by head. `group`: as for
        `features`."""
        size, group = self.head_size(config), group or self.group_size(config)
        roles = self.roles(getattr(self, role))
        count = heads if role == "q" else heads // group
        place = roles.index(role)
        if len(roles) > 1 and self.layout == "heads":
            starts = [(head * len(roles) + place) * size for head in range(count)]
        elif len(roles) > 1 and self.layout == "groups":
            block = group + len(roles) - 1
            starts = [
                (head // group * block + head % group) * size
                if role == "q"
                else (head * block + group + place - 1) * size
                for head in range(count)
            ]
        else:
            offset = sum(heads if earlier == "q" else heads // group for earlier in roles[:place])
            starts = [(offset + head) * size for head in range(count)]
        return [start + position for start in starts for position in range(size)]

    def inside(self, name: str, **changes: Any) -> "Attention":
        """The description after another module has replaced the one that computes the heads and holds it as its submodule
        `name`."""
        moved = {
            role: f"{self.module}.{name}{getattr(self, role).removeprefix(self.module)}"
            for role in ("q", "k", "v", "o")
        }
        return replace(self, **moved, **changes)

    def within(self, layer: str) -> "Attention":
        """The same attention in the layer named `layer`, with names below the base model."""
        norms = {f"{layer}.{name}": role for name, role in self.norms.items()}
        return replace(self, norms=norms, **{name: f"{layer}.{getattr(self, name)}" for name in ("q", "k", "v", "o")})


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A stack of equal layers, such as the encoder."""

    layers: str  # "encoder.layers.{}"
    depth: str  # the config field that holds the number of layers
    attentions: dict[str, Attention]  # "self", "cross"
    ffn: tuple[str, ...]  # the linears, in the order of the forward; the last one follows the activation
    apart: bool = False  # whether linears of `ffn` in different modules are FFNs of their own
    ends: tuple[str, ...] = ()  # the last linears of FFNs, where modules do not tell which linears are one FFN
    width: str | None  # the config field that holds the number of FFN neurons; None if no field does
    activation: str | None  # the activation, if it is a module
    neurons: dict[str, int] = field(default_factory=dict)  # linear of an FFN -> its inputs, where no field holds them
    reads: str = ""  # the module whose forward receives the stack's token ids; "" is the base model
    projections: tuple[str, ...] = ()  # linears of attentions that are no plain queries, keys, values and outputs
    mixers: tuple[str, ...] = ()  # patterns of parameters in the place of an attention, such as those of a convolution
    others: tuple[str, ...] = ()  # patterns of further parameters of the FFN, such as those of experts
    experts: dict[str, int] = field(default_factory=dict)  # module with parameters of experts -> neurons of each expert
    expert_width: str | None = None  # the config field that holds these neurons; None if no field does
    expert_count: str | None = None  # the config field that holds the number of experts; None if none holds it alone
    expert_axes: dict[str, int] = field(default_factory=dict)  # tensor with an entry for each expert -> their axis
    # Layers of a stack may differ: kind of attention, linear of the FFN or experts -> numbers of the layers without it.
    absent: dict[str, tuple[int, ...]] = field(default_factory=dict)
    differ: tuple[str, ...] = ()  # parameters that not all layers have, or not in one shape
    per_layer: tuple[str, ...] = ()  # config fields that hold an entry for each layer
    scaled: tuple[str, ...] = ()  # config fields that are a multiple of the depth and change with it, as in ALBERT
    returns_tuple: bool = False  # whether a layer returns a tuple that begins with the hidden states
    leads: bool = False  # whether the first layer has parameters of its own, which the others need
    unread: tuple[str, ...] = ()  # those of them that a copy of the first layer in another place does not read

    @property
    def keeps_first(self) -> bool:
        """Whether the first layer has to stay: it has parameters that others need, and they cannot be moved to another one."""
        return self.leads and not self.unread

    @property
    def layer_pattern(self) -> str:
        """A regular expression for the name of a layer, with its number as a group."""
        return re.escape(self.layers).replace(r"\{\}", r"(\d+)")

    def attentions_in(self, config: Any) -> dict[str, Attention]:
        """Kind -> attention, for the attentions that layers have with this config."""
        return {
            kind: attention
            for kind, attention in self.attentions.items()
            if attention.switch is None or getattr(config, attention.switch)
        }

    def has(self, part: str, layer: int) -> bool:
        """Whether the layer of this number has `part`: a kind of attention, a linear of the FFN or a module of experts."""
        return layer not in self.absent.get(part, ())

    def native_width(self, name: str) -> int:
        """The neurons of the native FFN whose last linear, or whose module of experts, has this name below the base model."""
        return (self.neurons | self.experts)[re.sub(rf"^{self.layer_pattern}\.", "", name)]

    def ffns_in(self, layer: int) -> list[list[str]]:
        """The linears of each FFN of a layer, in the order of the forward. A layer has more than one if their linears lie in
        different modules, such as shared experts beside a dense FFN."""
        names = [name for name in self.ffn if self.has(name, layer)]
        if not self.apart:
            return [names] if names else []
        groups: dict[str, list[str]] = {}
        if self.ends:
            number = 0
            for name in names:
                groups.setdefault(str(number), []).append(name)
                number += name in self.ends
            return list(groups.values())
        for name in names:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return list(groups.values())

    def config_changes(self, config: Any, numbers: Sequence[int]) -> dict[str, Any]:
        """The config fields that change when the stack keeps the layers `numbers`, with their new values."""
        lists = {name: [read(config, name)[number] for number in numbers] for name in self.per_layer}
        depth = read(config, self.depth)
        multiples = {name: read(config, name) // depth * len(numbers) for name in self.scaled}
        return {self.depth: len(numbers)} | multiples | lists

    def with_layers(self, numbers: Sequence[int]) -> "Stack":
        """The description of a stack that has the layers `numbers`, in this order and with new numbers."""
        absent = {
            part: tuple(new for new, old in enumerate(numbers) if old in layers) for part, layers in self.absent.items()
        }
        return replace(self, absent={part: layers for part, layers in absent.items() if layers})
