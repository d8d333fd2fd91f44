"""`Architecture`: a description of a backbone family as data, which tells methods where its stacks, attentions, FFNs and
embeddings are.

Names are below `base_model_prefix` (`encoder.layers.0.fc1`, not `model.encoder.layers.0.fc1`), so that one description
serves every task class. `{}` stands for the layer number.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")

TRAINED = ("embeddings", "attention", "ffn", "norm", "head")
COMPONENTS = (*TRAINED, "constant")
LINEAR_COMPONENTS = ("ffn", "attention")
# How q, k and v lie in one projection: one after the other, head by head, or for each group of heads its queries, key and value.
LAYOUTS = ("blocks", "heads", "groups")

# The limits exceed every published dense model. They stop a config from the Hub that would allocate without bound. For
# comparison: Llama 3.1 405B has 16,384 channels, 53,248 FFN neurons and 126 layers; DeepNet has 1,000 layers.
_LARGEST = {
    "hidden size": 1 << 16,
    "FFN width": 1 << 18,
    "heads": 1 << 12,
    "head size": 1 << 12,
    "layers": 1 << 10,
    "vocabulary": 1 << 24,
    "positions": 1 << 24,
    "rows of positions": 1 << 16,
}
_LARGEST_MODEL = 1 << 40  # numbers in matrices; needed because a seed regenerates tensors that no file stores
LARGEST_DEPTH = _LARGEST["layers"]
LARGEST_LABELS = 1 << 20
_OF_PREDECESSOR = re.compile(r"\.predecessor\.\d+(?=\.)")  # a predecessor is a submodule of its successor


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

    def roles(self, name: str) -> list[str]:
        """The projections that the linear `name` holds, among "q", "k", "v" and "o"."""
        return [role for role in ("q", "k", "v", "o") if getattr(self, role) == name]

    def features(self, config: Any, name: str, kept: Sequence[int], heads: int) -> list[int]:
        """Positions of the heads `kept`, out of `heads`, among the inputs of the output projection or the outputs of the other
        linears; `name` is the linear. Heads that share keys and values are kept together."""
        size, group = self.head_size(config), self.group_size(config)
        shared, groups = [head // group for head in kept[::group]], heads // group

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
                queries = [head % group for head in kept[place * group : (place + 1) * group]]
                rows += [number * block + row for row in (*queries, *range(group, block))]
            return places(rows, size, 0, size)
        index: list[int] = []
        offset = 0
        for role in roles:
            query = role in ("q", "o")
            index += places(kept if query else shared, size, offset, size)
            offset += (heads if query else groups) * size
        return index

    def outputs_of(self, config: Any, role: str, heads: int) -> list[int]:
        """Positions of the projection `role`, "q", "k" or "v", among the outputs of its linear, head by head."""
        size, group = self.head_size(config), self.group_size(config)
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
    width: str | None  # the config field that holds the number of FFN neurons; None if no field does
    activation: str | None  # the activation, if it is a module
    neurons: dict[str, int] = field(default_factory=dict)  # linear of an FFN -> its inputs, where no field holds them
    reads: str = ""  # the module whose forward receives the stack's token ids; "" is the base model
    projections: tuple[str, ...] = ()  # linears of attentions that are no plain queries, keys, values and outputs
    others: tuple[str, ...] = ()  # patterns of further parameters of the FFN, such as those of experts
    # Layers of a stack may differ: kind of attention, or linear of the FFN -> the numbers of the layers that do not have it.
    absent: dict[str, tuple[int, ...]] = field(default_factory=dict)
    per_layer: tuple[str, ...] = ()  # config fields that hold an entry for each layer
    scaled: tuple[str, ...] = ()  # config fields that are a multiple of the depth and change with it, as in ALBERT
    returns_tuple: bool = False  # whether a layer returns a tuple that begins with the hidden states
    leads: bool = False  # whether the first layer has parameters of its own, which the others need

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
        """Whether the layer of this number has `part`, a kind of attention or a linear of the FFN."""
        return layer not in self.absent.get(part, ())

    def native_width(self, linear: str) -> int:
        """The neurons of the native FFN whose last linear is this one, by its name below the base model."""
        return self.neurons[re.sub(rf"^{self.layer_pattern}\.", "", linear)]

    def ffns_in(self, layer: int) -> list[list[str]]:
        """The linears of each FFN of a layer, in the order of the forward. A layer has more than one if their linears lie in
        different modules, such as shared experts beside a dense FFN."""
        names = [name for name in self.ffn if self.has(name, layer)]
        if not self.apart:
            return [names] if names else []
        groups: dict[str, list[str]] = {}
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


@dataclass(frozen=True, kw_only=True)
class NormedEmbeddings:
    """Tables whose sum is normalised before the first layer, and an output with a linear and a norm before its matrix, as in
    BERT. Fields are names of modules below the base model; those of the output, which only some tasks have, are full names."""

    others: tuple[str, ...]  # the tables added to the token table: positions, types
    norm: str
    last: str  # the dropout whose result the first layer receives
    output_linear: str
    output_norm: str


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A backbone family.

    `embeddings`, `norms` and `constants` are patterns (`*` matches anything); parameters that match nothing belong to the task
    head. `sizes`: kind -> config fields, whose absurd values are refused. `output`: full name of the linear from hidden states
    to the vocabulary, in models of tasks that have one.
    """

    model_type: str
    tasks: tuple[str, ...]
    stacks: dict[str, Stack]
    embeddings: tuple[str, ...]
    norms: tuple[str, ...]
    sizes: dict[str, tuple[str, ...]]
    tiny: dict[str, Any]  # config fields of a model for tests, of about 10,000 parameters
    tiny_variants: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # name -> changes to `tiny`, for further models
    tiny_inputs: Callable[[str], dict[str, torch.Tensor]]  # task -> a batch with labels, different lengths, padding
    named_like: str | None = None  # a model type with the same module names, for PEFT, which may not know this one
    token_tables: dict[
        str, str
    ]  # module -> config field of its rows; a model may have only some, and tie some to others
    other_tables: dict[str, str] = field(default_factory=dict)  # the same for positions and types
    normed_embeddings: NormedEmbeddings | None = None
    output: str | None = None
    constants: tuple[str, ...] = ()
    output_bias: str | None = None  # full name of a bias on the logits, (..., vocabulary), outside the output linear
    refusals: dict[str, str] = field(default_factory=dict)  # capability that could not be proved -> why

    @property
    def tiny_configs(self) -> dict[str, dict[str, Any]]:
        """Name -> config fields of a model for tests; the first is `tiny` itself, as `"base"`."""
        return {"base": self.tiny} | {name: self.tiny | changes for name, changes in self.tiny_variants.items()}

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """(pattern of parameter names, component)"""
        patterns = []
        for stack in self.stacks.values():
            attention = [linear for block in stack.attentions.values() for linear in block.linears]
            attention += stack.projections
            for component, linears in (("attention", attention), ("ffn", stack.ffn)):
                patterns += [
                    (re.compile(rf"{stack.layer_pattern}\.{re.escape(linear)}\..+"), component) for linear in linears
                ]
            for block in stack.attentions.values():
                patterns += [
                    (re.compile(rf"{stack.layer_pattern}\.{translate(other)}"), "attention") for other in block.others
                ]
            patterns += [(re.compile(rf"{stack.layer_pattern}\.{translate(other)}"), "ffn") for other in stack.others]
        for component, globs in (("embeddings", self.embeddings), ("norm", self.norms), ("constant", self.constants)):
            patterns += [(re.compile(translate(glob)), component) for glob in globs]
        return patterns

    def matches(self, name: str) -> list[str]:
        """The components whose patterns match the parameter `name`: one, or none for the task head. The tests check this."""
        name = _OF_PREDECESSOR.sub("", name)
        return [component for pattern, component in self._patterns if pattern.fullmatch(name)]

    def component(self, name: str) -> str:
        """The component of the parameter `name` (below `base_model_prefix`)."""
        if name not in self._components:  # asked for again and again
            self._components[name] = next(iter(self.matches(name)), "head")
        return self._components[name]

    @cached_property
    def _components(self) -> dict[str, str]:
        """Component of each parameter that was asked for."""
        return {}

    def parts(self, name: str) -> int:
        """Number of projections side by side in the matrix `name`: 3 if queries, keys and values are fused, else 1."""
        return next((count for pattern, count in self._fused_patterns if pattern.fullmatch(name)), 1)

    @cached_property
    def _fused_patterns(self) -> list[tuple[re.Pattern[str], int]]:
        """(pattern of the names of fused matrices, number of projections in them)"""
        return [
            (re.compile(rf"{stack.layer_pattern}\.{re.escape(linear)}\.weight"), count)
            for stack in self.stacks.values()
            for block in stack.attentions.values()
            for linear, count in block.linears.items()
            if count > 1
        ]

    def depths(self, config: Any) -> dict[str, int]:
        """Stack -> number of its layers."""
        return {name: read(config, stack.depth) for name, stack in self.stacks.items() if stack.depth}

    def linears(self, config: Any, component: str) -> list[tuple[str, int, str]]:
        """(stack, layer, module name) of each linear of `component`, "ffn" or "attention". Raises ValueError for another."""
        if component not in LINEAR_COMPONENTS:
            raise ValueError(f"component={component!r} has no linears in layers: choose from {list(LINEAR_COMPONENTS)}")
        linears = []
        for name, stack in self.stacks.items():
            kinds = stack.attentions_in(config)
            for layer in range(read(config, stack.depth)):
                if component == "ffn":
                    names = [linear for linear in stack.ffn if stack.has(linear, layer)]
                else:
                    names = [n for kind, block in kinds.items() if stack.has(kind, layer) for n in block.linears]
                    names += [linear for linear in stack.projections if stack.has(linear, layer)]
                linears += [(name, layer, f"{stack.layers.format(layer)}.{linear}") for linear in names]
        return linears

    def ffns(self, config: Any) -> dict[str, list[str]]:
        """FFN block, such as "encoder.0.ffn" -> names of its linears, in the order of the forward."""
        return {
            f"{name}.{layer}.{'ffn' if number == 0 else f'ffn_{number + 1}'}": [
                f"{stack.layers.format(layer)}.{linear}" for linear in linears
            ]
            for name, stack in self.stacks.items()
            for layer in range(read(config, stack.depth))
            for number, linears in enumerate(stack.ffns_in(layer))
        }

    def attentions(self, config: Any) -> dict[str, Attention]:
        """Attention, such as "encoder.0.self" -> its description, with names below the base model."""
        return {
            f"{name}.{layer}.{kind}": attention.within(stack.layers.format(layer))
            for name, stack in self.stacks.items()
            for layer in range(read(config, stack.depth))
            for kind, attention in stack.attentions_in(config).items()
            if stack.has(kind, layer)
        }

    def layer_of(self, name: str) -> tuple[str, int] | None:
        """(stack, layer) that the parameter `name` lies in, or None."""
        for stack_name, stack in self.stacks.items():
            if match := re.match(rf"{stack.layer_pattern}\.", name):
                return stack_name, int(match[1])
        return None

    def check_layers(self, layers: dict[str, list[int]] | None, config: Any) -> None:
        """Raise ValueError if `layers` names a stack or layer that the backbone does not have."""
        depths = self.depths(config)
        for stack, numbers in (layers or {}).items():
            if stack not in depths:
                raise ValueError(f"no stack {stack!r} in {self.model_type}; choose from {sorted(depths)}")
            for number in numbers:
                if not 0 <= number < depths[stack]:
                    raise ValueError(
                        f"no layer {number} in stack {stack!r} of {self.model_type}: it has layers 0..{depths[stack] - 1}"
                    )

    def check_sizes(self, config: Any) -> None:
        """Raise ValueError for a size above the limits at the top of this file, before anything is allocated."""
        check_sizes(self.model_type, config, self.sizes)
        if (count := self.matrix_sizes(config)) > _LARGEST_MODEL:
            raise ValueError(f"{self.model_type} config: {count:.1e} parameters; the limit is {_LARGEST_MODEL:.1e}")

    def matrix_sizes(self, config: Any) -> int:
        """The count of numbers in all tables and matrices of the backbone and in an untied output matrix. Biases, norms and task
        heads do not count; tied tables count separately."""
        tokens = list(self.token_tables.values())
        rows = sum(read(config, field) for field in (*tokens, *tokens[:1], *self.other_tables.values()))
        hidden = hidden_size(config)
        columns = 0  # of all linears in layers: each is (hidden size, columns) or (columns, hidden size)
        for stack in self.stacks.values():
            # None in GPT-2 means this default.
            neurons = (read(config, stack.width) if stack.width else None) or 4 * hidden
            heads = sum(
                2 * attention.head_size(config) * (attention.head_count(config) + attention.key_head_count(config))
                for attention in stack.attentions_in(config).values()
            )
            columns += read(config, stack.depth) * (heads + len(stack.ffn) * neurons) if stack.depth else 0
        return hidden * (rows + columns)

    def check_fits(self, model: Any) -> None:
        """Raise ValueError unless the backbone `model` has the linears and tables that the description names, in its sizes."""
        config = model.config
        linears = [name for component in LINEAR_COMPONENTS for _, _, name in self.linears(config, component)]
        for name in [*linears, *self.token_tables]:
            try:
                model.base_model.get_submodule(name)
            except AttributeError:
                raise ValueError(
                    f"the description of {self.model_type} names {name!r}, which this model does not have: it was derived from "
                    "another config or by another version of transformers"
                ) from None
        for block, attention in self.attentions(config).items():
            module = model.base_model.get_submodule(attention.o)
            inputs = getattr(module, "in_features", None) or getattr(module, "nx", None)
            if inputs != attention.head_count(config) * attention.head_size(config):
                raise ValueError(
                    f"the description of {self.model_type} gives {block} {attention.head_count(config)} heads of "
                    f"{attention.head_size(config)}, but its output projection has {inputs} inputs"
                )

    def __deepcopy__(self, memo: Any) -> "Architecture":
        return self  # it never changes


def with_layers(architecture: Architecture, kept: dict[str, Sequence[int]] | dict[str, list[int]]) -> Architecture:
    """The description of a model whose stacks keep the layers in `kept`, with new numbers; other stacks stay whole."""
    stacks = {
        name: stack.with_layers(kept[name]) if name in kept else stack for name, stack in architecture.stacks.items()
    }
    return replace(architecture, stacks=stacks)


def check_sizes(model_type: str, config: Any, sizes: dict[str, tuple[str, ...]]) -> None:
    """Raise ValueError for a config field in `sizes` (kind -> fields) above the limits at the top of this file."""
    for kind, names in sizes.items():
        for name in names:
            value = getattr(config, name, None)
            if type(value) is int and not 0 < value <= _LARGEST[kind]:
                raise ValueError(f"{model_type} config: {name}={value} is outside 1..{_LARGEST[kind]} ({kind})")


def hidden_size(config: Any) -> int:
    """The size of the hidden states."""
    return config.get_text_config().hidden_size


def read(config: Any, name: str) -> Any:
    """The value of a config field; a dotted name lies in a nested config, such as "text_config.hidden_size"."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def set_fields(config: Any, values: dict[str, Any]) -> None:
    """Set config fields; a dotted name lies in a nested config, which `config` may itself be."""
    for name, value in values.items():
        *path, last = name.split(".")
        owner = config
        for part in path if path and hasattr(config, path[0]) else ():
            owner = getattr(owner, part)
        setattr(owner, last, value)


def is_of_predecessor(name: str) -> bool:
    """Whether a parameter lies in a predecessor layer (of Theseus), which is removed when training ends."""
    return _OF_PREDECESSOR.search(name) is not None


def base_name(model: Any, name: str) -> str:
    """The name of a parameter or module below `base_model_prefix`: the same in a task model and its base model."""
    return name.removeprefix(f"{model.base_model_prefix}.")


def full_name(model: Any, name: str) -> str:
    """The full name in `model` of the parameter or module `name` below `base_model_prefix`."""
    return name if model.base_model is model else f"{model.base_model_prefix}.{name}"


def canonical_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter), with each tied parameter once, under its source's name. Works on `meta`, before tensors are tied."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tied:
            yield name, parameter


def in_layers(blocks: dict[str, T], layers: dict[str, list[int]] | None) -> dict[str, T]:
    """The blocks, by names such as "encoder.0.ffn", that lie in `layers` (None: all)."""
    return {
        name: block
        for name, block in blocks.items()
        if layers is None or int(name.split(".")[1]) in layers.get(name.split(".")[0], ())
    }


def check_layers_type(layers: Any) -> None:
    """Raise ValueError unless `layers` is None or dict[str, list[int]]."""
    fits = layers is None or (
        isinstance(layers, dict)
        and all(isinstance(stack, str) and isinstance(numbers, list) for stack, numbers in layers.items())
        and all(type(number) is int for numbers in layers.values() for number in numbers)
    )
    if not fits:
        raise ValueError(f"layers={layers!r}: must be None or a dict such as {{'encoder': [0, 1]}}")


def decoder_inputs(task: str) -> dict[str, torch.Tensor]:
    """`tiny_inputs` for decoder-only models: two sentences of 5 and 3 tokens; 0 is the padding."""
    batch = {
        "input_ids": torch.tensor([[5, 9, 3, 7, 1], [8, 4, 1, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    }
    if task == "sequence-classification":
        batch["labels"] = torch.tensor([1, 0])
    elif task == "causal-lm":
        batch["labels"] = torch.tensor([[5, 9, 3, 7, 1], [8, 4, 1, -100, -100]])
    return batch
