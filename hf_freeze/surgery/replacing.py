"""Modules, by name: find them, put others in their place, and linears with other features."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.base import Architecture
from hf_freeze.compat.transformers import mark_uninitialized
from hf_freeze.layers.derived import features, linear_like
from hf_freeze.seeded import Origin

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
    put(model.base_model, name, new)


def replace_by_full_name(model: Any, name: str, new: nn.Module) -> None:
    """The same with a name in the whole model: what is outside the base model, such as the output matrix, has no other."""
    put(model, name, new)


def put(root: Any, name: str, new: nn.Module) -> None:
    old = root.get_submodule(name)
    root.set_submodule(name, new.train(old.training))
    # Some modules draw the weights of those inside them, as GPT-2 does: they must do so again where weights are fresh.
    around = name.split(".")[:-1]
    for depth in range(len(around) + 1):
        mark_uninitialized(root.get_submodule(".".join(around[:depth])))


def native_module(model: Any, name: str, kind: type[T], method: str) -> T:
    """The module of this full name, to be replaced. Raises ValueError where another method has replaced it before."""
    module = model.get_submodule(name)
    if type(module) is not kind:
        raise ValueError(
            f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made; merge() first"
        )
    return module


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


def feature_origins(name: str, linear: Any, kept: Sequence[int], *, outputs: bool) -> dict[str, Origin]:
    """Where the parameters of the linear `name` come from when `select_features` keeps these outputs (or inputs)."""
    axis = int(outputs) if isinstance(linear, Conv1D) else int(not outputs)
    size = features(linear)[int(outputs)]
    found = {f"{name}.weight": Origin(f"{name}.weight", axis, tuple(kept), size)}
    if outputs and linear.bias is not None:
        found[f"{name}.bias"] = Origin(f"{name}.bias", 0, tuple(kept), size)
    return found


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
