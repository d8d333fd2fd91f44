"""Find modules by name, replace them, and change the inputs and outputs of linears."""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.base import Architecture
from hf_freeze.architectures.roles import are_experts, has_module
from hf_freeze.compat.transformers import mark_uninitialized
from hf_freeze.layers.derived import features, linear_like
from hf_freeze.layers.no_attention import NoHeads
from hf_freeze.seeded import Origin

DENSE = (nn.Linear, Conv1D)


class Expert(nn.Linear):
    """The matrix (O, I) of one expert, which lies in a parameter (experts, O, I), as a linear that shares its memory."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(matrix.detach(), requires_grad=False)


T = TypeVar("T", bound=nn.Module)


def linear_names(
    architecture: Architecture, config: Any, components: Iterable[str], layers: dict[str, list[int]] | None
) -> list[str]:
    """Names, below `base_model_prefix`, of the linears of `components` in `layers` (None: all), in the model's order."""
    return [
        name
        for component in components
        for stack, layer, name in architecture.linears(config, component)
        if layers is None or layer in layers.get(stack, ())
    ]


def modules(model: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(name, module) for each of `names`, which are below the base model."""
    for name in names:
        yield name, linear_at(model, name)


def linear_at(model: Any, name: str) -> Any:
    """The linear `name` (below the base model), or as an `Expert` the matrix of one, as "layers.0.mlp.experts.down_proj.3"."""
    owner = owner_of(model, name)
    if owner == name:
        return model.base_model.get_submodule(name)
    parameter, number = name.removeprefix(f"{owner}.").split(".")
    return Expert(model.base_model.get_submodule(owner).get_parameter(parameter)[int(number)])


def owner_of(model: Any, name: str) -> str:
    """The module that runs the linear `name` (names below the base model): itself, or the experts whose matrix it is."""
    owner = name.rsplit(".", 2)[0]
    inside = not has_module(model.base_model, name) and has_module(model.base_model, owner)
    return owner if inside and are_experts(model.base_model.get_submodule(owner)) else name


def native_experts(model: Any, name: str, method: str) -> Any:
    """The experts `name` (below the base model). Raises ValueError if another method has replaced their matrices."""
    experts = model.base_model.get_submodule(name)
    if not are_experts(experts):
        raise ValueError(f"method {method!r}: another method has already changed the matrices of {name!r}")
    return experts


def replace(model: Any, name: str, new: nn.Module) -> None:
    """Replace the module `name` (below the base model) by `new`, in the same training mode."""
    put(model.base_model, name, new)
    finished(model, new)


def replace_by_full_name(model: Any, name: str, new: nn.Module) -> None:
    """Replace the module with the full name `name`. Needed for modules outside the base model, such as the output matrix."""
    put(model, name, new)
    finished(model, new)


_FINISH = "_hf_freeze_finish"  # only models that `call_when_finished` was called for have it


def call_when_finished(model: Any, finish: Callable[[nn.Module], Any]) -> None:
    """Have `finish` called with each module that is put into `model` from now on, values included."""
    setattr(model, _FINISH, finish)


def finished(model: Any, module: nn.Module) -> None:
    """Say that a module of `model` has its values."""
    if hasattr(model, _FINISH):
        getattr(model, _FINISH)(module)


@torch.no_grad()
def set_values(parameter: Any, values: torch.Tensor) -> None:
    """Give a parameter new `values`, in its shape and in memory of its own: the old memory may belong to the model that is
    converted."""
    parameter.data = values.to(parameter, copy=True).contiguous()


_AT_ONCE = 2**25


@dataclass
class _Conversion:
    """What is known of a model while it is converted to `new`. The model itself, perhaps a native one, gets no marks."""

    new: Any
    kept: Any  # where finished modules of `new` are kept, or None
    waiting: list[str] = field(default_factory=list)  # names that `release` was called for
    held: bool = False
    freed: int = 0  # bytes since freed memory was given back


_CONVERSIONS: dict[nn.Module, _Conversion] = {}


@contextlib.contextmanager
def releasing(model: Any, new: Any, kept: Any = None) -> Iterator[None]:
    """Inside, `release` frees tensors of `model`, which is being converted to `new`. `kept`: has `keep(name, module)` for the
    modules that are finished, and `restore(name, module)`, whether it had one of them before."""
    _CONVERSIONS[model] = _Conversion(new, kept)
    try:
        yield
    finally:
        del _CONVERSIONS[model]


def restored(model: Any, name: str) -> bool:
    """Whether the new module `name` (below the base model) was found finished, so that it need not be converted."""
    conversion = _CONVERSIONS.get(model)
    if conversion is None or conversion.kept is None:
        return False
    return conversion.kept.restore(name, conversion.new.base_model.get_submodule(name))


def release(model: Any, names: Iterable[str]) -> None:
    """Free the tensors of the modules `names` (below the base model) of a model that is being converted, if nobody needs it
    afterwards. So the old tensors and the new ones never fill the memory together."""
    if (conversion := _CONVERSIONS.get(model)) is not None:
        conversion.waiting.extend(names)
        if not conversion.held:
            let_go(model)


@contextlib.contextmanager
def holding(model: Any) -> Iterator[None]:
    """Inside, `release` waits until `let_go`, because the model still runs."""
    conversion = _CONVERSIONS.get(model, _Conversion(None, None))
    conversion.held = True
    try:
        yield
    finally:
        conversion.held = False
        let_go(model)


def let_go(model: Any) -> None:
    """Free what `release` was called for since the model is held."""
    if (conversion := _CONVERSIONS.get(model)) is None:
        return
    names, conversion.waiting = conversion.waiting, []
    for module_name, module in modules(model, names):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            conversion.freed += parameter.nbytes
            module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), False)
        if conversion.kept is not None:
            conversion.kept.keep(module_name, conversion.new.base_model.get_submodule(module_name))
    if conversion.freed > _AT_ONCE:
        return_freed_memory()
        conversion.freed = 0


def return_freed_memory() -> None:
    """Give the memory of freed tensors back to the system. glibc keeps it, where small tensors lie between them."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def put(root: Any, name: str, new: nn.Module) -> None:
    """Replace the module `name` below `root` by `new`, in the same training mode."""
    old = root.get_submodule(name)
    root.set_submodule(name, new.train(old.training))
    # Some modules, such as GPT-2's, draw the weights of their submodules: mark them all, so that fresh weights are drawn again.
    parents = name.split(".")[:-1]
    for depth in range(len(parents) + 1):
        mark_uninitialized(root.get_submodule(".".join(parents[:depth])))


def is_native(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the backbone itself made this module, of `kind` or of a subclass that transformers has of it."""
    return type(module) is kind or (isinstance(module, kind) and type(module).__module__.startswith("transformers."))


def is_dense(module: nn.Module) -> bool:
    """Whether a linear is one that the backbone made."""
    return isinstance(module, Expert) or any(is_native(module, kind) for kind in DENSE)


def native_module(model: Any, name: str, kind: type[T], method: str, other: type[nn.Module] | None = None) -> T:
    """The module of this full name and class, to be replaced. Raises ValueError if another method has replaced it by a module
    that is not of the class `other`."""
    module = model.get_submodule(name)
    if not is_native(module, kind) and type(module) is not other:
        raise ValueError(
            f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made; leave one of the two "
            "out, or merge() first"
        )
    return module


def is_removed(model: Any, name: str) -> bool:
    """Whether a method has removed the linear `name` (below the base model), as the projections of an attention without heads."""
    try:
        return isinstance(linear_at(model, name), NoHeads)
    except AttributeError:
        return True


def dense_module(
    model: Any, name: str, method: str, others: tuple[type[nn.Module], ...] = (), advice: str | None = None
) -> Any:
    """The linear `name`, to be replaced. Raises ValueError if a method has removed it, or replaced it by a layer that is none of
    the classes `others`. `advice`: what to do then."""
    module = _linear(model, name, method)
    if not is_dense(module) and type(module) not in others:
        raise ValueError(
            f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made; "
            f"{advice or 'leave it out by components= or layers='}, or merge() first{or_finalize(module)}"
        )
    return module


def selectable_module(model: Any, name: str, method: str) -> Any:
    """The linear `name`, to be reduced by `select_features`. Raises ValueError if a method has removed it, or replaced it by a
    layer whose inputs and outputs cannot be removed."""
    module = _linear(model, name, method)
    if not is_dense(module) and not getattr(module, "selectable", False):
        raise ValueError(
            f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made, and which cannot lose "
            f"inputs or outputs; put {method!r} before that method, or merge() first{or_finalize(module)}"
        )
    return module


def or_finalize(module: nn.Module) -> str:
    """Further advice about a linear that a method has replaced until training ends."""
    return ", or finalize() before" if getattr(module, "until_finalize", False) else ""


def _linear(model: Any, name: str, method: str) -> Any:
    """The linear `name`. Raises ValueError if a method has removed it."""
    if is_removed(model, name):
        raise ValueError(f"method {method!r}: an earlier method has removed {name!r}; leave that layer out by layers=")
    return model.base_model.get_submodule(name)


@torch.no_grad()
def dense_linear(module: Any) -> nn.Module:
    """The native linear that computes the same as `module`: an nn.Linear or Conv1D, as before the replacement. It is `module`
    itself if that is one."""
    if is_dense(module):
        return module
    weight = module.dense_weight()
    linear = linear_like(module, device="meta")
    weight = weight.T if isinstance(linear, Conv1D) else weight
    linear.weight = nn.Parameter(weight.contiguous().clone())
    if module.bias is not None:
        linear.bias = nn.Parameter(module.bias.detach().clone())
    return linear


@torch.no_grad()
def select_features(linear: Any, kept: Sequence[int] | int, *, outputs: bool) -> Any:
    """A copy of `linear` with only the outputs `kept`, or the inputs if `outputs` is False. If `kept` is a number, a linear with
    that many outputs (or inputs) and arbitrary values."""
    if not is_dense(linear):
        return linear.selected(range(kept) if isinstance(kept, int) else kept, outputs=outputs)
    count = kept if isinstance(kept, int) else len(kept)
    selected = linear_like(linear, outputs=count) if outputs else linear_like(linear, inputs=count)
    if not isinstance(kept, int):
        index = torch.tensor(kept, device=linear.weight.device, dtype=torch.long)
        torch.index_select(linear.weight, weight_axis(linear, outputs=outputs), index, out=selected.weight.detach())
        if linear.bias is not None:
            selected.bias.copy_(linear.bias.index_select(0, index) if outputs else linear.bias)
    return selected


def neuron_features(linear: Any, kept: Sequence[int], width: int, *, outputs: bool) -> list[int]:
    """Positions of the neurons `kept`, out of `width`, among the outputs of a linear before the activation (or the inputs of the
    one after it). Gate and up may be one linear, which has two outputs for each neuron."""
    halves = features(linear)[1] // width if outputs else 1
    return [half * width + neuron for half in range(halves) for neuron in kept]


def weight_axis(linear: Any, *, outputs: bool) -> int:
    """The axis of the weight along which its outputs (or inputs) lie: nn.Linear has (O, I), Conv1D (I, O)."""
    return int(outputs) if isinstance(linear, Conv1D) else int(not outputs)


def feature_origins(name: str, linear: Any, kept: Sequence[int], *, outputs: bool) -> dict[str, Origin]:
    """The origins of the parameters of the linear `name` when `select_features` keeps these outputs (or inputs)."""
    size = features(linear)[int(outputs)]
    axis = weight_axis(linear, outputs=outputs)
    origins = {f"{name}.weight": Origin(f"{name}.weight", axis, tuple(kept), size)}
    if outputs and linear.bias is not None:
        origins[f"{name}.bias"] = Origin(f"{name}.bias", 0, tuple(kept), size)
    return origins


def effective_weight(module: Any) -> torch.Tensor:
    """(O, I): the dense weight of any linear, native or a replacement, detached."""
    if is_dense(module):
        weight = module.weight.detach()
        return weight.T if isinstance(module, Conv1D) else weight
    return module.dense_weight().detach()


@torch.no_grad()
def set_linear(linear: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Give a native linear the values of W (O, I) and of its bias (O,); None leaves the bias as it is."""
    if isinstance(linear, Expert):
        linear.weight.copy_(weight)
        return
    set_values(linear.weight, weight.T if isinstance(linear, Conv1D) else weight)
    if bias is not None:
        set_values(linear.bias, bias)


@torch.no_grad()
def spread_features(linear: Any, places: Sequence[int], count: int, *, outputs: bool) -> Any:
    """A native linear with `count` outputs (or inputs): those of `linear` at `places`, and zeros elsewhere."""
    linear = dense_linear(linear)
    wide = linear_like(linear, outputs=count) if outputs else linear_like(linear, inputs=count)
    index = torch.tensor(places, device=linear.weight.device, dtype=torch.long)
    wide.weight.zero_().index_copy_(weight_axis(linear, outputs=outputs), index, linear.weight)
    if linear.bias is not None:
        wide.bias.copy_(wide.bias.zero_().index_copy_(0, index, linear.bias) if outputs else linear.bias)
    return wide


@torch.no_grad()
def neuron_magnitudes(model: Any, linears: Sequence[str]) -> torch.Tensor:
    """fp32 (neurons,): for each neuron of an FFN, the product of the norms of its input weights (one norm for each linear before
    the last) and of its output weights. `linears`: the names of the FFN's linears, in the order of the forward."""
    *before, after = (effective_weight(module) for _, module in modules(model, linears))
    parts = [part for weight in before for part in weight.split(after.shape[1])]
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts]
    return torch.stack(norms).prod(0) * torch.linalg.vector_norm(after, dim=0, dtype=torch.float32)


def resize_ffns(model: Any, architecture: Architecture, width: int, method: str) -> None:
    """Give every FFN `width` fresh neurons. Raises ValueError if a method has replaced one of their linears."""
    for linears in architecture.ffns(model.config).values():
        for name in linears:
            linear = dense_module(model, name, method, advice=f"put {method!r} first")
            sizes = (width, None) if name == linears[-1] else (None, width)
            replace(model, name, linear_like(linear, *sizes))


def device_and_dtype(model: Any, name: str) -> dict[str, Any]:
    """Device and dtype of the parameters of the module `name` (below the base model), as arguments for new modules."""
    parameter = next(model.base_model.get_submodule(name).parameters())
    return {"device": parameter.device, "dtype": parameter.dtype}
