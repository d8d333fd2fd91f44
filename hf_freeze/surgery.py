"""The only place where modules of a model are replaced."""

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.base import Architecture, Attention, full_name
from hf_freeze.layers.derived import features, linear_like
from hf_freeze.layers.factorized_embedding import LowRankEmbedding, LowRankOutput
from hf_freeze.layers.fixed_heads import FixedHeads, Words
from hf_freeze.layers.layer_forward import Replaced
from hf_freeze.layers.made_embedding import MadeEmbedding
from hf_freeze.layers.no_attention import NoAttention, NoHeads

LINEAR_COMPONENTS = ("ffn", "attention")
DENSE = (nn.Linear, Conv1D)

T = TypeVar("T", bound=nn.Module)


def linear_names(
    architecture: Architecture, config: Any, components: Iterable[str], layers: dict[str, list[int]] | None
) -> list[str]:
    """Names, below `base_model_prefix`, of the linears of these components in these layers (None: all), in the model's order."""
    return [
        name
        for component in components
        for stack, layer, name in architecture.linears(config, component)
        if layers is None or layer in layers.get(stack, ())
    ]


def modules(model: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(name, module) below the base model."""
    for name in names:
        yield name, model.base_model.get_submodule(name)


def replace(model: Any, name: str, new: nn.Module) -> None:
    """Put `new` where the module `name` (below the base model) was, in the same training mode."""
    _put(model.base_model, name, new)


def replace_by_full_name(model: Any, name: str, new: nn.Module) -> None:
    """The same with a name in the whole model: what is outside the base model, such as the output matrix, has no other."""
    _put(model, name, new)


def _put(root: Any, name: str, new: nn.Module) -> None:
    old = root.get_submodule(name)
    root.set_submodule(name, new.train(old.training))
    # Some modules draw the weights of those inside them, as GPT-2 does: they must do so again where weights are fresh.
    around = name.split(".")[:-1]
    for depth in range(len(around) + 1):
        root.get_submodule(".".join(around[:depth]))._is_hf_initialized = False


def token_tables(model: Any, architecture: Architecture) -> dict[str, Any]:
    """Full name -> module, of the tables of token embeddings that the model has; some may be tied to others."""
    names = {name: full_name(model, name) for name in architecture.token_tables}
    present = {module_name for module_name, _ in model.base_model.named_modules(remove_duplicate=False)}
    return {full: model.get_submodule(full) for name, full in names.items() if name in present}


def output_name(model: Any, architecture: Architecture) -> str | None:
    """Full name of the linear from hidden states to the vocabulary; None where the task has none."""
    return None if model.get_output_embeddings() is None else architecture.output


def native_module(model: Any, name: str, kind: type[T], method: str) -> T:
    """The module of this full name, to be replaced. Raises ValueError where another method has replaced it before."""
    module = model.get_submodule(name)
    if type(module) is not kind:
        raise ValueError(
            f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made; merge() first"
        )
    return module


def native_table(model: Any, name: str, method: str) -> nn.Embedding:
    """The same of a table of tokens. Raises ValueError also where another method has left it one of other rows."""
    table = native_module(model, name, nn.Embedding, method)
    if table.embedding_dim != model.config.hidden_size:  # of FactorizedEmbedding in BERT
        raise ValueError(
            f"method {method!r}: {name!r} has rows of {table.embedding_dim} numbers already, not of the hidden size "
            f"{model.config.hidden_size}, by another method; leave one of the two out"
        )
    return table


def drawn_std(module: Any) -> float:
    """Of the weight as the backbone has just drawn it; where nothing is drawn, as on meta, any."""
    drawn = 0.0 if module.weight.is_meta else float(module.weight.detach().float().std())
    return drawn if 0 < drawn < 1 else 0.02


@torch.no_grad()
def dense_table(module: Any) -> nn.Embedding:
    """The nn.Embedding that computes the same as the table that `module` took the place of."""
    weight = module.dense_weight()
    padding = getattr(module, "dense_padding_idx", module.padding_idx)  # of bands, in whatever band it is
    return nn.Embedding(*weight.shape, padding_idx=padding, _weight=weight.clone())


def layers_of(model: Any, architecture: Architecture, stack: str) -> list[Any]:
    """The layers of a stack, in order."""
    return list(model.base_model.get_submodule(architecture.stacks[stack].layers.removesuffix(".{}")))


def take_layers(model: Any, layers: str, taken: Sequence[int]) -> None:
    """Make the stack whose layers are named `layers` (such as "encoder.layers.{}") consist of these of them, numbered anew; one
    that is taken again is a copy."""
    name = layers.removesuffix(".{}")
    old: Any = model.base_model.get_submodule(name)
    new = nn.ModuleList(
        copy.deepcopy(old[number]) if number in taken[:place] else old[number] for place, number in enumerate(taken)
    )
    for place, layer in enumerate(new):
        for module in layer.modules():
            if "layer_idx" in vars(module):  # the place in the cache
                vars(module)["layer_idx"] = place
    replace(model, name, new)


def add_predecessors(model: Any, layers: str, count: int) -> None:
    """Make the stack whose layers are named `layers` consist of its first `count`, each of which has taken over equally many of
    all, in their order: it holds them as its `predecessor`."""
    stack: Any = model.base_model.get_submodule(layers.removesuffix(".{}"))
    former = [copy.deepcopy(layer) for layer in stack]
    take_layers(model, layers, range(count))
    stack = model.base_model.get_submodule(layers.removesuffix(".{}"))
    each = len(former) // count
    for place, layer in enumerate(stack):
        layer.add_module("predecessor", nn.ModuleList(former[place * each : (place + 1) * each]))
        Replaced(layer)


def drop_predecessors(layers: Iterable[Any]) -> None:
    """Leave what `add_predecessors` has made without the former layers."""
    for layer in layers:
        Replaced.of(layer).remove()
        del layer.predecessor


@torch.no_grad()
def copy_layer(old: Any, new: Any) -> None:
    """The values of one layer into another of the same shapes, whatever either is to replace."""
    new.load_state_dict(
        {name: value for name, value in old.state_dict().items() if not name.startswith("predecessor.")}, strict=False
    )


def vocabulary_modules(model: Any, architecture: Architecture) -> dict[str, Any]:
    """Full name -> module with a row for each token: the tables of those that it has, and the output matrix."""
    output = output_name(model, architecture)
    return token_tables(model, architecture) | ({} if output is None else {output: model.get_submodule(output)})


def cut_vocabulary(model: Any, architecture: Architecture, count: int, method: str) -> None:
    """Give tables, output matrix and output bias `count` rows, of no particular values. What was tied must be tied anew.

    Raises ValueError where a method has replaced one of them before by what has not one row for each token.
    """
    for name, module in vocabulary_modules(model, architecture).items():
        if type(module) in (LowRankEmbedding, LowRankOutput) or isinstance(module, MadeEmbedding):
            module.weight = nn.Parameter(module.weight.detach()[:count].clone())
            if isinstance(module, nn.Embedding):
                module.num_embeddings = count
            elif module.bias is not None:
                module.bias = nn.Parameter(module.bias.detach()[:count].clone())
            continue
        if type(module) is nn.Embedding:
            weight = module.weight
            made: nn.Module = nn.Embedding(
                count, module.embedding_dim, module.padding_idx, device=weight.device, dtype=weight.dtype
            )
        elif type(module) is nn.Linear:
            made = select_features(module, count, outputs=True)
        else:
            raise ValueError(
                f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made; put {method!r} "
                "before that one, or merge() first"
            )
        _put(model, name, made)
    if (found := output_bias(model, architecture)) is not None:
        owner, attribute, bias = found
        cut = bias.detach()[..., :count].clone()
        setattr(owner, attribute, nn.Parameter(cut) if attribute in owner._parameters else cut)
    for module in model.modules():  # some models keep a copy of the number, as `resize_token_embeddings` does
        if "vocab_size" in vars(module):
            vars(module)["vocab_size"] = count


@torch.no_grad()
def copy_tokens(old: Any, new: Any, architecture: Architecture, kept: Sequence[int]) -> None:
    """Fill tables, output matrix and output bias of `new` with the rows `kept` of those of `old`."""
    for name, module in vocabulary_modules(new, architecture).items():
        source = old.get_submodule(name)
        index = torch.tensor(kept, device=source.weight.device)
        module.weight.copy_(source.weight[index])
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(source.bias[index])
    if (found := output_bias(new, architecture)) is not None:
        source = output_bias(old, architecture)[2]  # type: ignore[index]
        found[2].copy_(source[..., torch.tensor(kept, device=source.device)])


def output_bias(model: Any, architecture: Architecture) -> tuple[Any, str, torch.Tensor] | None:
    """(module, its attribute, value) of the bias on the logits that lies outside the output matrix, if the model has one."""
    if architecture.output_bias is None or model.get_output_embeddings() is None:
        return None
    path, _, attribute = architecture.output_bias.rpartition(".")
    owner = model.get_submodule(path)
    return owner, attribute, getattr(owner, attribute)


def dense_module(model: Any, name: str, method: str) -> Any:
    """The linear `name`, to be replaced. Raises ValueError where a method has replaced it before."""
    try:
        module = model.base_model.get_submodule(name)
    except AttributeError:
        raise ValueError(
            f"method {method!r}: {name!r} is gone, by an earlier method; leave that layer out by layers="
        ) from None
    if type(module) not in DENSE:
        raise ValueError(
            f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made; leave it out by "
            "components= or layers=, or merge() first"
        )
    return module


@torch.no_grad()
def dense_linear(module: Any) -> nn.Module:
    """An nn.Linear or Conv1D, whichever `module` took the place of, that computes the same."""
    weight = module.dense_weight()
    made = linear_like(module, device="meta")
    weight = weight.T if isinstance(made, Conv1D) else weight
    made.weight = nn.Parameter(weight.contiguous().clone())
    if module.bias is not None:
        made.bias = nn.Parameter(module.bias.detach().clone())
    return made


@torch.no_grad()
def select_features(linear: Any, kept: Sequence[int] | int, *, outputs: bool) -> Any:
    """The linear with only these outputs (or inputs); with a number, so many of them, of no particular values."""
    count = kept if isinstance(kept, int) else len(kept)
    made = linear_like(linear, outputs=count) if outputs else linear_like(linear, inputs=count)
    if not isinstance(kept, int):
        index = torch.tensor(kept, device=linear.weight.device, dtype=torch.long)
        axis = int(outputs) if isinstance(linear, Conv1D) else int(not outputs)
        made.weight.copy_(linear.weight.index_select(axis, index))
        if linear.bias is not None:
            made.bias.copy_(linear.bias.index_select(0, index) if outputs else linear.bias)
    return made


def effective_weight(module: Any) -> torch.Tensor:
    """(O, I): the dense weight of any linear, ours or native, detached."""
    if type(module) in DENSE:
        weight = module.weight.detach()
        return weight.T if isinstance(module, Conv1D) else weight
    return module.dense_weight().detach()


@torch.no_grad()
def copy_into_corner(linear: Any, larger: Any) -> None:
    """The first inputs and outputs of `larger` become those of `linear`, the others zero."""
    larger.weight.zero_()
    larger.weight[tuple(map(slice, linear.weight.shape))] = linear.weight
    if linear.bias is not None:
        larger.bias.zero_()
        larger.bias[: linear.bias.shape[0]] = linear.bias


@torch.no_grad()
def neuron_magnitudes(model: Any, linears: Sequence[str]) -> torch.Tensor:
    """fp32 (neurons,): of an FFN, whose linears are named in the order of the forward, the product of the norms of each
    neuron's input weights (of all linears before the last) and of its output weights."""
    *before, after = (effective_weight(module) for _, module in modules(model, linears))
    return torch.stack([weight.float().norm(dim=1) for weight in before]).prod(0) * after.float().norm(dim=0)


def count_heads(model: Any, attention: Attention, method: str) -> int:
    """The heads that `attention` (with names below the base model) has. Raises ValueError where a method has replaced one of its
    linears before."""
    linears = {name: dense_module(model, name, method) for name in attention.linears}
    outputs = features(linears[attention.q])[1] // attention.linears[attention.q]
    if outputs != features(linears[attention.o])[0]:
        raise ValueError(
            f"method {method!r}: {attention.module!r} has fixed heads, without queries and keys; put {method!r} before that "
            "method, or leave one of the two out"
        )
    return outputs // attention.head_size(model.config)


def _features_of_heads(config: Any, attention: Attention, name: str, kept: Sequence[int], heads: int) -> list[int]:
    """Places of the heads `kept`, of so many, along the inputs of the output projection or the outputs of another linear."""
    size, group = attention.head_size(config), attention.group_size(config)
    if name not in (attention.q, attention.o):
        kept, heads = [head // group for head in kept[::group]], heads // group
    return [
        (part * heads + head) * size + place
        for part in range(attention.linears[name])
        for head in kept
        for place in range(size)
    ]


def take_heads(model: Any, attention: Attention, count: int, heads: int) -> None:
    """Give `attention`, which has so many `heads`, the shape of one with `count` heads."""
    module = model.base_model.get_submodule(attention.module)
    linears = dict(modules(model, attention.linears))
    if not count:
        within = f"{attention.module}."
        inside = attention.o.startswith(within)
        removed = {name: copy.deepcopy(linear).to("meta") for name, linear in linears.items()}
        made = NoAttention(module, removed, attention.o.removeprefix(within) if inside else None)
        replace(model, attention.module, made)
        left = NoHeads(linears[attention.o], features(linears[attention.o])[1])
        if inside:
            made.add_module(attention.o.removeprefix(within), left)
        else:
            replace(model, attention.o, left)
        return
    for name, linear in linears.items():
        features_kept = len(_features_of_heads(model.config, attention, name, range(count), heads))
        replace(model, name, select_features(linear, features_kept, outputs=name != attention.o))
    _set_heads(module, count, attention.head_size(model.config))


def _set_heads(module: Any, heads: int, size: int) -> None:
    """What the module that computes the heads knows of their number and size."""
    values = dict.fromkeys(("num_heads", "num_attention_heads"), heads)
    values |= dict.fromkeys(("head_dim", "attention_head_size"), size)
    values |= dict.fromkeys(("all_head_size", "split_size"), heads * size)
    for field in values.keys() & vars(module).keys():
        setattr(module, field, values[field])


def resize_attention(
    model: Any,
    attention: Attention,
    heads: int,
    size: int,
    method: str,
    *,
    inputs: int | None = None,
    outputs: int | None = None,
) -> None:
    """Give `attention` so many heads of another size, fresh, which scale their scores accordingly, and as many inputs and outputs
    as before or as these.

    Raises ValueError where a method has replaced one of its linears before.
    """
    module: Any = model.base_model.get_submodule(attention.module)
    for name, number in attention.linears.items():
        linear = dense_module(model, name, method)
        sizes = (heads * size, outputs) if name == attention.o else (inputs, number * heads * size)
        replace(model, name, linear_like(linear, *sizes))
    if getattr(module, "scale_attn_weights", True):  # GPT-2's may have no scale
        module.scaling *= (attention.head_size(model.config) / size) ** 0.5
    _set_heads(module, heads, size)


def resize_ffns(model: Any, architecture: Architecture, width: int, method: str) -> None:
    """Give all FFNs so many neurons, fresh. Raises ValueError where a method has replaced one of their linears before."""
    for linears in architecture.ffns(model.config).values():
        for name in linears:
            linear = dense_module(model, name, method)
            sizes = (width, None) if name == linears[-1] else (None, width)
            replace(model, name, linear_like(linear, *sizes))


def device_and_dtype(model: Any, name: str) -> dict[str, Any]:
    """Of the parameters of the module `name` (below the base model), for those that are to lie beside them."""
    parameter = next(model.base_model.get_submodule(name).parameters())
    return {"device": parameter.device, "dtype": parameter.dtype}


def fix_heads(
    model: Any, attention: Attention, patterns: Sequence[int], empty_rows: str, words: Words | None, heads: int
) -> None:
    """Have the first of the so many `heads` of `attention`, one for each of `patterns`, attend by position alone."""
    module = model.base_model.get_submodule(attention.module)
    linears = dict(modules(model, attention.linears))
    within = f"{attention.module}."
    roles = {role: getattr(attention, role) for role in ("q", "k", "v", "o")}
    inside = {role: name.removeprefix(within) for role, name in roles.items() if name.startswith(within)}
    learnt = heads - len(patterns)
    if not learnt:
        inside = {role: name for role, name in inside.items() if role not in ("q", "k")}
    made = FixedHeads(module, patterns, empty_rows, words, attention.head_size(model.config), inside)
    for role, name in inside.items():
        linear = linears[roles[role]]
        if role in ("q", "k"):
            linear = select_features(linear, learnt * attention.head_size(model.config), outputs=True)
        made.add_module(name, linear)
    replace(model, attention.module, made)


@torch.no_grad()
def copy_heads(
    old: Any, new: Any, attention: Attention, kept: Sequence[int], heads: int, only: Collection[str] = ()
) -> None:
    """Fill the attention of `new`, which has as many heads as `kept` says, with these of the so many of `old`; or `only` these of
    its linears."""
    for name, linear in modules(old, only or attention.linears):
        outputs = name != attention.o
        if kept:
            index = _features_of_heads(old.config, attention, name, kept, heads)
            new.base_model.get_submodule(name).load_state_dict(
                select_features(linear, index, outputs=outputs).state_dict()
            )
        elif not outputs and linear.bias is not None:
            new.base_model.get_submodule(name).bias.copy_(linear.bias)


@torch.no_grad()
def pad_heads(model: Any, attention: Attention) -> None:
    """Give `attention` all the heads that its config names: those that it lacks come last and are zero."""
    module = model.base_model.get_submodule(attention.module)
    gone, heads = isinstance(module, NoAttention), attention.head_count(model.config)
    count = 0 if gone else count_heads(model, attention, "head_pruning")
    for name in attention.linears:
        outputs = name != attention.o
        wanted = _features_of_heads(model.config, attention, name, range(heads), heads)
        index = torch.tensor(_features_of_heads(model.config, attention, name, range(count), heads), dtype=torch.long)
        old = module.removed[name] if gone else model.base_model.get_submodule(name)
        made = linear_like(old, *((None, len(wanted)) if outputs else (len(wanted), None)), device=model.device)
        made.weight.zero_()
        if made.bias is not None:
            made.bias.zero_()
        if count:
            axis = int(outputs) if isinstance(made, Conv1D) else int(not outputs)
            made.weight.index_copy_(axis, index.to(model.device), old.weight)
        if made.bias is not None and not outputs:
            made.bias.copy_(model.base_model.get_submodule(name).bias)
        elif made.bias is not None and count:
            made.bias.index_copy_(0, index.to(model.device), old.bias)
        path, _, leaf = name.rpartition(".")
        model.base_model.get_submodule(path).add_module(leaf, made)


@torch.no_grad()
def head_magnitudes(model: Any, attention: Attention, heads: int) -> torch.Tensor:
    """fp32 (heads,): the product of the norms of each head's value weights and of its output weights."""
    size, group = attention.head_size(model.config), attention.group_size(model.config)
    value, output = (
        effective_weight(model.base_model.get_submodule(name)).float() for name in (attention.v, attention.o)
    )
    value = value[-heads // group * size :]  # the last part, where queries, keys and values are one
    values = value.unflatten(0, (-1, size)).flatten(1).norm(dim=1).repeat_interleave(group)
    return values * output.unflatten(1, (-1, size)).transpose(0, 1).flatten(1).norm(dim=1)
