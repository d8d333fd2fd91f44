"""What the modules of a layer do, told by the names and classes that transformers gives them.

Nothing here is about one family. A wrong guess does no harm: `verify.py` proves each one before it is used.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

LINEARS = (nn.Linear, Conv1D)

# The last part of the name of a linear, below its attention.
_ROLES = {
    "qkv": ("qkv", "qkv_proj", "query_key_value", "wqkv", "c_attn", "in_proj", "w_pack", "attn_qkv"),
    "q": ("q", "query", "q_proj", "q_lin", "wq", "q_linear", "query_proj", "linear_q", "to_q", "in_query", "q_attn"),
    "k": ("k", "key", "k_proj", "k_lin", "wk", "k_linear", "key_proj", "linear_k", "to_k"),
    "v": ("v", "value", "v_proj", "v_lin", "wv", "v_linear", "value_proj", "linear_v", "to_v"),
    "o": ("o", "out", "out_proj", "o_proj", "dense", "c_proj", "wo", "out_lin", "linear_out", "attn_out", "to_out"),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_ATTENTION_NAMES = re.compile(r"(self_?attn|self_?attention|cross_?attn|encoder_attn|attn|attention|mha)\d*$", re.I)
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec", re.I)
_SINUSOIDAL = re.compile(r"sinusoidal", re.I)


@dataclass
class LayerParts:
    """The parts of one layer, as names below it.

    `attentions`: name of the module -> its linears. `others`: the linears outside attentions, in the order of registration.
    """

    attentions: dict[str, list[str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, LINEARS)


def features(linear: Any) -> tuple[int, int]:
    """(inputs, outputs) of an nn.Linear, a Conv1D or a layer of hf_freeze."""
    sizes: Any = (linear.nx, linear.nf) if isinstance(linear, Conv1D) else (linear.in_features, linear.out_features)
    return sizes


def role_of(name: str) -> str | None:
    """The role of a linear of this name, below its attention; None if the name says nothing."""
    return _ROLE_OF.get(name.rpartition(".")[2].lower())


def roles_in(attention: str, linears: list[str]) -> dict[str, str]:
    """Role ("q", "k", "v", "qkv", "o") -> the linear of an attention; a linear without a role of its own has the role ""."""
    roles: dict[str, str] = {}
    for name in linears:
        role = role_of(name.removeprefix(f"{attention}."))
        roles["" if role is None or role in roles else role] = name
    return roles


def is_cross(name: str) -> bool:
    """Whether an attention of this name attends to the states of an encoder."""
    return _CROSS.search(name) is not None


def is_sinusoidal(module: nn.Module) -> bool:
    """Whether a table of positions is computed and not trained."""
    return _SINUSOIDAL.search(type(module).__name__) is not None


def table_scale(table: nn.Embedding) -> float:
    """The factor on the rows that a table looks up, such as BART's √(hidden size)."""
    scale: Any = getattr(table, "scalar_embed_scale", getattr(table, "embed_scale", 1.0))
    return float(scale)


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(map(is_linear, module.modules()))


def stacks_of(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Name -> each outermost list of layers, which are modules of one class with linears."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 0
        and any(map(is_linear, module.modules()))
        and not any(is_linear(child) for child in module)
    }
    return {
        name: module
        for name, module in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists if other != name)
    }


def parts_of_layer(layer: nn.Module) -> LayerParts:
    """The parts of a layer."""
    attentions = list(_attentions(layer))
    parts = LayerParts({name: [] for name in attentions})
    for name, module in layer.named_modules():
        if not is_linear(module):
            continue
        owner = next((a for a in attentions if name.startswith(f"{a}.")), None)
        if owner is None:
            parts.others.append(name)
            continue
        parts.attentions[owner].append(name)
    return parts


def _attentions(layer: nn.Module) -> Iterator[str]:
    """Names of the outermost modules that are attentions."""
    inside: list[str] = []
    for name, module in layer.named_modules():
        if not name or is_linear(module) or any(name.startswith(f"{outer}.") for outer in inside):
            continue
        called = "attention" in type(module).__name__.lower() or _ATTENTION_NAMES.search(name.rpartition(".")[2])
        if called and any(map(is_linear, module.modules())):
            inside.append(name)
            yield name


# Where native attentions keep the size of a head, and the numbers of heads, of key and value heads and of all their outputs.
HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_per_head", "head_size", "d_head", "d_kv")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "h")
GROUP_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
GROUP_SIZES = ("num_key_value_groups",)
HIDDEN_SIZES = ("embed_dim", "hidden_size")  # some attentions take these for the outputs of all heads
HEAD_OUTPUTS = ("all_head_size", "split_size", "inner_dim")


# Experts whose matrices are parameters (experts, outputs, inputs): one before the activation, with or without a gate, one after.
_EXPERT_INPUTS = ("gate_up_proj", "up_proj")
EXPERT_OUTPUT = "down_proj"
EXPERT_WIDTHS = ("intermediate_dim", "intermediate_size", "expert_dim", "ffn_dim")  # attributes that hold the neurons


def are_experts(module: nn.Module) -> bool:
    """Whether the parameters of a module are matrices of experts, and nothing else."""
    parameters = dict(module.named_parameters())
    after = parameters.pop(EXPERT_OUTPUT, None)
    if after is None or after.ndim != 3 or len(parameters) != 1:
        return False
    (name, before), (experts, hidden, width) = next(iter(parameters.items())), after.shape
    return name in _EXPERT_INPUTS and before.shape in ((experts, 2 * width, hidden), (experts, width, hidden))


def expert_input(experts: nn.Module) -> str:
    """The name of the parameter with the matrices before the activation."""
    return next(name for name in _EXPERT_INPUTS if name in experts._parameters)


def has_module(root: nn.Module, name: str) -> bool:
    """Whether `root` has a submodule of this name."""
    try:
        root.get_submodule(name)
    except AttributeError:
        return False
    return True


def attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is an integer."""
    return next((getattr(module, name) for name in names if type(getattr(module, name, None)) is int), None)


def set_heads(module: nn.Module, heads: int, size: int, groups: int, further: tuple[str, ...] = ()) -> None:
    """Set the attributes in which a native attention keeps the number and size of its heads; `further`: more names of attributes
    that hold the outputs of all heads together."""
    values = dict.fromkeys(HEAD_COUNTS, heads) | dict.fromkeys(HEAD_SIZES, size)
    values |= dict.fromkeys(GROUP_COUNTS, groups) | dict.fromkeys(GROUP_SIZES, heads // max(groups, 1))
    values |= dict.fromkeys((*HEAD_OUTPUTS, *further), heads * size)
    for name in values.keys() & vars(module).keys():
        if type(vars(module)[name]) is int:
            setattr(module, name, values[name])


def weight_as_rows(linear: Any) -> torch.Tensor:
    """(O, I): the weight of an nn.Linear, or that of a Conv1D transposed, as a view."""
    return linear.weight.T if isinstance(linear, Conv1D) else linear.weight
