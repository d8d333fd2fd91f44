"""`Architecture`: a description of a backbone family as data, which tells methods where its stacks, attentions, FFNs and
embeddings are.

Names are below `base_model_prefix` (`encoder.layers.0.fc1`, not `model.encoder.layers.0.fc1`), so that one description
serves every task class. `{}` stands for the layer number.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from hf_freeze.architectures.blocks import Attention as Attention
from hf_freeze.architectures.blocks import Stack as Stack
from hf_freeze.architectures.blocks import read as read
from hf_freeze.architectures.roles import HEAD_COUNTS, HEAD_SIZES, attribute, features

T = TypeVar("T")

TRAINED = ("embeddings", "attention", "ffn", "norm", "head")
COMPONENTS = (*TRAINED, "constant")
LINEAR_COMPONENTS = ("ffn", "attention")
# Of models that are a decoder alone.
DECODER_TASKS = (
    "causal-lm",
    "sequence-classification",
    "feature-extraction",
    "token-classification",
    "question-answering",
)

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
    # name -> changes to `tiny`, for further models
    tiny_variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    tiny_inputs: Callable[[str], dict[str, torch.Tensor]]  # task -> a batch with labels, different lengths, padding
    named_like: str | None = None  # a model type with the same module names, for PEFT, which may not know this one
    # module -> config field of its rows; a model may have only some, and tie some to others
    token_tables: dict[str, str]
    other_tables: dict[str, str] = field(default_factory=dict)  # the same for positions and types
    normed_embeddings: NormedEmbeddings | None = None
    output: str | None = None
    constants: tuple[str, ...] = ()
    hidden: str = ""  # the config field that holds the number of hidden channels, if that is proved
    output_bias: str | None = None  # full name of a bias on the logits, (..., vocabulary), outside the output linear
    refusals: dict[str, str] = field(default_factory=dict)  # capability that could not be proved -> why

    @property
    def tiny_configs(self) -> dict[str, dict[str, Any]]:
        """Name -> config fields of a model for tests; the first is `tiny` itself, as `"base"`."""
        return {"base": self.tiny} | {name: self.tiny | changes for name, changes in self.tiny_variants.items()}

    @property
    def hidden_field(self) -> str:
        """The config field that holds the number of hidden channels."""
        return self.hidden or self.sizes.get("hidden size", ("",))[0]

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
            # What a method has put in the place of a parameter of experts.
            patterns += [
                (re.compile(rf"{stack.layer_pattern}\.{re.escape(module)}\.\w+\..+"), "ffn") for module in stack.experts
            ]
            for component, others in (("attention", stack.mixers), ("ffn", stack.others)):
                patterns += [(re.compile(rf"{stack.layer_pattern}\.{translate(other)}"), component) for other in others]
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

    def experts(self, config: Any) -> dict[str, str]:
        """Experts, such as "decoder.0.experts" -> the module that has their matrices as parameters (`roles.are_experts`)."""
        return {
            f"{name}.{layer}.{'experts' if number == 0 else f'experts_{number + 1}'}": f"{stack.layers.format(layer)}.{module}"
            for name, stack in self.stacks.items()
            for layer in range(read(config, stack.depth))
            for number, module in enumerate(stack.experts)
            if stack.has(module, layer)
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
        """Raise ValueError for a size above the limits at the top of this file, or a list that does not have an entry for each
        layer, before anything is allocated."""
        check_sizes(self.model_type, config, self.sizes)
        for stack in self.stacks.values():
            for name in stack.per_layer:
                if (entries := len(read(config, name) or ())) != (depth := read(config, stack.depth)):
                    raise ValueError(
                        f"{self.model_type} config: {name} must have an entry for each of {depth} layers ({stack.depth}), not "
                        f"{entries}"
                    )
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
        modules: dict[str, Any] = dict(model.base_model.named_modules(remove_duplicate=False))
        linears = [name for component in LINEAR_COMPONENTS for _, _, name in self.linears(config, component)]
        for name in [*linears, *self.experts(config).values(), *self.token_tables]:
            if name not in modules:
                raise ValueError(
                    f"the description of {self.model_type} names {name!r}, which this model does not have: it was derived from "
                    "another config or by another version of transformers"
                )
        for block, attention in self.attentions(config).items():
            inputs = features(modules[attention.o])[0]
            if inputs != attention.head_count(config) * attention.head_size(config):
                raise ValueError(
                    f"the description of {self.model_type} gives {block} {attention.head_count(config)} heads of "
                    f"{attention.head_size(config)}, but its output projection has {inputs} inputs"
                )
            owner = modules[attention.module]
            for names, expected in (
                (HEAD_SIZES, attention.head_size(config)),
                (HEAD_COUNTS, attention.head_count(config)),
            ):
                if attribute(owner, names) not in (None, expected):
                    raise ValueError(
                        f"the description of {self.model_type} gives {block} {attention.head_count(config)} heads of "
                        f"{attention.head_size(config)}, but the config makes a {type(owner).__name__} with "
                        f"{attribute(owner, names)}: it was changed by hand"
                    )

    def __deepcopy__(self, memo: Any) -> "Architecture":
        return self  # it never changes


def with_layers(architecture: Architecture, kept: Mapping[str, Sequence[int]]) -> Architecture:
    """The description of a model whose stacks keep the layers in `kept`, with new numbers; other stacks stay whole."""
    stacks = {
        name: stack.with_layers(kept[name]) if name in kept else stack for name, stack in architecture.stacks.items()
    }
    return replace(architecture, stacks=stacks)


def changes_of_layers(architecture: Architecture, config: Any, kept: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The config fields that change when the stacks in `kept` keep these layers, with their new values."""
    changes: dict[str, Any] = {}
    for stack, numbers in kept.items():
        changes |= architecture.stacks[stack].config_changes(config, numbers)
    return changes


def check_sizes(model_type: str, config: Any, sizes: dict[str, tuple[str, ...]]) -> None:
    """Raise ValueError for a config field in `sizes` (kind -> fields) above the limits at the top of this file."""
    for kind, names in sizes.items():
        for name in names:
            value = getattr(config, name, None)
            if type(value) is int and not 0 < value <= _LARGEST[kind]:
                raise ValueError(f"{model_type} config: {name}={value} is outside 1..{_LARGEST[kind]} ({kind})")


def hidden_size(config: Any) -> int:
    """The size of the hidden states."""
    text = config.get_text_config()
    return text.hidden_size if hasattr(text, "hidden_size") else text.decoder.hidden_size


def set_fields(config: Any, values: dict[str, Any]) -> None:
    """Set config fields; a dotted name lies in a nested config, if `config` has that."""
    for name, value in values.items():
        *path, last = name.split(".")
        if path and not hasattr(config, path[0]):
            continue  # the config of a part, which is the nested config itself or another one
        owner = config
        for part in path:
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
    labels = {
        "causal-lm": {"labels": [[5, 9, 3, 7, 1], [8, 4, 1, -100, -100]]},
        "sequence-classification": {"labels": [1, 0]},
        "token-classification": {"labels": [[0, 1, 1, 0, 1], [1, 0, 0, -100, -100]]},
        "question-answering": {"start_positions": [1, 0], "end_positions": [3, 1]},
    }.get(task, {})
    return batch | {name: torch.tensor(values) for name, values in labels.items()}
