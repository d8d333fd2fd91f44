"""The parts of a model, read off its modules: names tell roles, shapes tell sizes. Nothing is proved yet."""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn

from hf_freeze.architectures.base import Architecture, Attention, Stack
from hf_freeze.architectures.examples import example_batch
from hf_freeze.architectures.kept_heads import biases_of
from hf_freeze.architectures.roles import (
    EXPERT_OUTPUT,
    HEAD_COUNTS,
    HEAD_SIZES,
    LayerParts,
    are_experts,
    attribute,
    features,
    is_cross,
    is_norm,
    is_sinusoidal,
    parts_of_layer,
    roles_in,
    stacks_of,
)


class NotDerived(ValueError):
    """A model whose parts are not understood; the message says which."""


def first_line(error: Exception, longest: int = 200) -> str:
    """The first line of an error of native code, or its class if it has no text."""
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # its own first line names only the function that refused the config
    if isinstance(error, KeyError):  # its text is the key alone
        return f"KeyError: {error}".splitlines()[0][:longest]
    return (str(error).strip() or type(error).__name__).splitlines()[0][:longest]


def describe(model: Any, config: Any, unused: Collection[str] = ()) -> Architecture:
    """The description of a base model, not proved, with sizes as numbers and without config fields.

    `unused`: lists of layers that are not described, because text alone does not reach them. Raises NotDerived if the model has
    no list of layers with linears.
    """
    stacks = {}
    lists = {path: layers for path, layers in stacks_of(model).items() if path not in unused}
    for name, path in _stack_names(lists, config).items():
        stacks[name] = _stack(path, lists[path])
    if not any(stack.attentions or stack.projections or stack.ffn for stack in stacks.values()):
        raise NotDerived(f"{config.model_type}: no list of layers with linears was found")
    embeddings, norms, constants, tokens = _outside(model, lists)
    for path, layers in lists.items():
        norms += list(dict.fromkeys(f"{path}.*.{name}.*" for layer in layers for name in _norms(layer)))
    return Architecture(
        model_type=config.model_type,
        tasks=(),
        stacks=stacks,
        embeddings=tuple(embeddings),
        norms=tuple(norms),
        constants=tuple(constants),
        sizes={},
        tiny={},
        tiny_inputs=partial(example_batch, config),
        token_tables=dict.fromkeys(tokens, ""),
    )


def _stack_names(lists: dict[str, nn.ModuleList], config: Any) -> dict[str, str]:
    """Name of a stack, such as "encoder" -> path of its list of layers."""
    names: dict[str, str] = {}
    for path in lists:
        words = re.sub(r"_?model\b", "", path).split(".")
        name = next((word for word in ("decoder", "encoder") if word in words), None)
        if len(lists) == 1:
            name = "encoder"
        elif name is None or name in names:
            name = re.sub(r"\W+", "_", ".".join(words[:-1])).strip("_") or words[-1]
        names[name if name not in names else path.replace(".", "_")] = path
    return names


def _stack(path: str, layers: nn.ModuleList) -> Stack:
    all_parts = [parts_of_layer(layer) for layer in layers]
    hybrid = any(parts.attentions for parts in all_parts)
    attentions: dict[str, Attention] = {}
    ffn: dict[str, None] = {}
    absent: dict[str, set[int]] = {}
    present: dict[str, set[int]] = {}
    others: dict[str, None] = {}
    projections: dict[str, None] = {}
    experts: dict[str, set[int]] = {}
    apart = False
    ends: dict[str, None] = {}
    for number, (layer, parts) in enumerate(zip(layers, all_parts, strict=True)):
        for kind, attention in _attentions(layer, parts):
            if kind in attentions and replace(attentions[kind], others=()) != replace(attention, others=()):
                kind = f"{kind}_{number}"
            elif kind in attentions:
                others_of = dict.fromkeys([*attentions[kind].others, *attention.others])
                attention = replace(attention, others=tuple(others_of))
            attentions[kind] = attention
            present.setdefault(kind, set()).add(number)
        mixers = [name for name in parts.others if hybrid and _beside_convolution(layer, name)]
        groups, routers = _ffns(layer, [name for name in parts.others if name not in mixers])
        apart = apart or len(groups) > 1
        if len(groups) > 1 and any(len({name.rpartition(".")[0] for name in group}) > 1 for group in groups):
            ends |= dict.fromkeys(group[-1] for group in groups)
        for name in (name for group in groups for name in group):
            ffn[name] = None
            present.setdefault(name, set()).add(number)
        others |= dict.fromkeys(f"{name}.*" for name in [*routers, *mixers])
        known = {n for _, attention in _attentions(layer, parts) for n in attention.linears}
        for name in (n for names in parts.attentions.values() for n in names if n not in known):
            projections[name] = None
            present.setdefault(name, set()).add(number)
        others |= dict.fromkeys(_other_parameters(layer, parts))
        for name, module in layer.named_modules():
            if are_experts(module):
                experts.setdefault(name, set()).add(module.get_parameter(EXPERT_OUTPUT).shape[2])
                present.setdefault(name, set()).add(number)
    for part, numbers in present.items():
        absent[part] = set(range(len(layers))) - numbers
    return Stack(
        layers=f"{path}.{{}}",
        depth="",
        attentions=attentions,
        ffn=tuple(ffn),
        projections=tuple(projections),
        apart=apart,
        ends=tuple(ends),
        width=None,
        activation=_activation(layers[0]),
        neurons=_neurons(layers, tuple(ffn), absent),
        others=tuple(others),
        experts={name: min(widths) for name, widths in experts.items() if len(widths) == 1},
        differ=_differ(layers),
        absent={part: tuple(sorted(numbers)) for part, numbers in absent.items() if numbers},
    )


def _differ(layers: nn.ModuleList) -> tuple[str, ...]:
    """The parameters that not all layers have, or not in one shape."""
    shapes = [{(name, tuple(value.shape)) for name, value in layer.named_parameters()} for layer in layers]
    alike = set.intersection(*shapes)
    return tuple(sorted({name for layer in shapes for name, _ in layer - alike}))


def _attentions(layer: nn.Module, parts: LayerParts) -> Iterator[tuple[str, Attention]]:
    """(kind, description) of each attention of a layer whose projections are all known."""
    kinds: dict[str, int] = {}
    for name, linears in parts.attentions.items():
        roles = roles_in(name, linears)
        if "" in roles or "o" not in roles or not ({"q", "k", "v"} <= roles.keys() or "qkv" in roles):
            continue
        kind = "cross" if is_cross(roles["o"]) else "self"
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] > 1:
            kind = f"{kind}_{kinds[kind]}"
        attention = _attention(layer, name, roles)
        if attention is not None:
            yield kind, attention


def _attention(layer: nn.Module, name: str, roles: dict[str, str]) -> Attention | None:
    """The description of an attention; None if its sizes do not fit."""
    q, k, v = (roles.get(role, roles.get("qkv", "")) for role in ("q", "k", "v"))
    o = roles["o"]
    width = features(layer.get_submodule(o))[0]
    owner = layer.get_submodule(q.rpartition(".")[0])
    size = attribute(owner, HEAD_SIZES)
    count = attribute(owner, HEAD_COUNTS)
    if size is None and count:
        size = width // count
    if not size or width % size:
        return None
    heads = width // size
    outputs = features(layer.get_submodule(k))[1]
    if k == q:
        groups, rest = divmod(outputs - width, 2 * size)
    elif k == v:
        groups, rest = divmod(outputs, 2 * size)
    else:
        groups, rest = divmod(outputs, size)
    if rest or not 0 < groups <= heads or heads % groups:
        return None
    others = tuple(
        other
        for other, _ in layer.named_parameters()
        if other.startswith(f"{name}.")
        and not _in_norm(layer, other)
        and other.rpartition(".")[0] not in set(roles.values())
    )
    norms = {
        norm: role
        for norm, module in layer.named_modules()
        if norm.startswith(f"{name}.") and (role := _role_of_norm(norm, module, {width, groups * size} - {size}))
    }
    return Attention(
        biases=biases_of(owner),
        norms=norms,
        q=q,
        k=k,
        v=v,
        o=o,
        heads=heads,
        groups=None if groups == heads else groups,
        size=size,
        others=others,
    )


def _role_of_norm(name: str, module: nn.Module, sizes: set[int]) -> str:
    """ "q" or "k" if a norm of one of these `sizes` is over the queries or keys of all heads, told by a name such as "q_norm";
    "" for another."""
    weight = getattr(module, "weight", None)
    if not is_norm(module) or weight is None or weight.numel() not in sizes:
        return ""
    last = name.rpartition(".")[2].lower()
    return next((role for role in ("q", "k") if last.startswith(role)), "")


def _beside_convolution(layer: nn.Module, name: str) -> bool:
    """Whether the module of a linear has a convolution too: it mixes tokens instead of an attention, and is no FFN."""
    owner = name.rpartition(".")[0]
    return bool(owner) and any(isinstance(module, nn.Conv1d) for module in layer.get_submodule(owner).modules())


def _ffns(layer: nn.Module, names: list[str]) -> tuple[list[list[str]], list[str]]:
    """(FFNs, others): the linears of each FFN with the one that returns to the hidden size last; and the linears that belong to
    none, such as routers.

    The linears of one module are an FFN if they fit together. If nothing fits, all linears count as one.
    """
    sizes = {name: features(layer.get_submodule(name)) for name in names}
    by_module: dict[str, list[str]] = {}
    for name in names:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    groups = [ordered for group in by_module.values() if (ordered := _ordered({n: sizes[n] for n in group}))]
    rest = {name: size for name, size in sizes.items() if not any(name in group for group in groups)}
    while whole := _ordered(rest):  # FFNs whose matrices lie in modules of their own
        groups.append(whole)
        rest = {name: size for name, size in rest.items() if name not in whole}
    if not groups:
        return ([names] if names else []), []
    return groups, [name for name in names if not any(name in group for group in groups)]


def _ordered(sizes: dict[str, tuple[int, int]]) -> list[str] | None:
    """Some of the linears as an FFN: those before the activation, then the one after it; None if none fit together."""
    for last, (width, hidden) in reversed(sizes.items()):
        before = [
            name for name, size in sizes.items() if name != last and size in ((hidden, width), (hidden, 2 * width))
        ]
        if before and width != hidden:
            return [*before, last]
    return None


def _neurons(layers: nn.ModuleList, ffn: tuple[str, ...], absent: dict[str, set[int]]) -> dict[str, int]:
    """Linear of an FFN -> its inputs; those of the last one are the neurons."""
    neurons = {}
    for number, layer in enumerate(layers):
        for name in ffn:
            if number not in absent[name]:
                neurons[name] = features(layer.get_submodule(name))[0]
    return neurons


def _norms(layer: nn.Module) -> list[str]:
    return [
        name
        for name, module in layer.named_modules()
        if is_norm(module) and any(True for _ in module.parameters(recurse=False))
    ]


def _in_norm(layer: nn.Module, parameter: str) -> bool:
    return is_norm(layer.get_submodule(parameter.rpartition(".")[0]))


def _other_parameters(layer: nn.Module, parts: LayerParts) -> list[str]:
    """Parameters of a layer outside its attentions, linears and norms: experts, scales of residuals."""
    linears = {*parts.others, *(name for names in parts.attentions.values() for name in names)}
    described = {name for _, attention in _attentions(layer, parts) for name in attention.others}
    return [
        name
        for name, _ in layer.named_parameters()
        if name not in described and name.rpartition(".")[0] not in linears and not _in_norm(layer, name)
    ]


def _activation(layer: nn.Module) -> str | None:
    """The name of the module that is the activation of the FFN; None unless there is exactly one."""
    names = [
        name
        for name, module in layer.named_modules()
        if type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    ]
    return names[0] if len(names) == 1 else None


def _outside(model: Any, lists: dict[str, nn.ModuleList]) -> tuple[list[str], list[str], list[str], list[str]]:
    """(patterns of embeddings, of norms, of constants, names of token tables) of what lies in no layer."""
    inputs = model.get_input_embeddings() if _has_input_embeddings(model) else None
    embeddings, norms, constants, tokens = [], [], [], []
    rows = getattr(inputs, "num_embeddings", None)
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(f"{path}.") for path in lists) or not any(
            True for _ in module.parameters(recurse=False)
        ):
            continue
        pattern = f"{name}.*" if name else "*"
        if is_norm(module):
            norms.append(pattern)
        elif is_sinusoidal(module):
            constants.append(f"{name}.weight")
        elif isinstance(module, nn.Embedding):
            embeddings.append(pattern)
            if module is inputs or (module.num_embeddings == rows and "position" not in name):
                tokens.append(name)
        elif "pool" not in name:
            embeddings += [f"{name}.{p}" if name else p for p, _ in module.named_parameters(recurse=False)]
    return embeddings, norms, constants, tokens


def _has_input_embeddings(model: Any) -> bool:
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except (NotImplementedError, AttributeError):
        return False
