"""Base classes of linears that compute their weight from other parameters: y = x Wᵀ + b, with W cached for inference.

Shapes: I inputs, O outputs; `weight` and `dense_weight` are (O, I), as in nn.Linear, even if the replaced linear is GPT-2's
Conv1D, whose `weight` is (I, O).
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.roles import features as features
from hf_freeze.architectures.roles import weight_as_rows
from hf_freeze.compat.transformers import NeverDrawn


def linear_like(
    linear: Any,
    inputs: int | None = None,
    outputs: int | None = None,
    *,
    classes: tuple[type[nn.Module], type[nn.Module]] = (nn.Linear, Conv1D),
    device: Any = None,
) -> Any:
    """A fresh nn.Linear or Conv1D (or the corresponding one of `classes`), whichever `linear` is or replaced.

    It has the dtype of `linear`, and a bias if `linear` has one. Features and device default to those of `linear`.
    """
    old_inputs, old_outputs = features(linear)
    inputs, outputs = old_inputs if inputs is None else inputs, old_outputs if outputs is None else outputs
    reference = first_float_tensor(linear)
    with torch.device(reference.device if device is None else device):
        new = (
            classes[1](outputs, inputs)
            if dense_class(linear) is Conv1D
            else classes[0](inputs, outputs, bias=linear.bias is not None)
        )
    return new.to(reference.dtype)


def taken(tensor: torch.Tensor, axis: int, kept: Sequence[int]) -> torch.Tensor:
    """The positions `kept` of `tensor` along `axis`, in memory of their own."""
    return tensor.detach().index_select(axis, torch.tensor(kept, device=tensor.device, dtype=torch.long))


def scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """The rows that a table has looked up, times the native table's factor, which is often 1."""
    return rows if scale == 1 else rows * scale


def first_float_tensor(module: nn.Module) -> torch.Tensor:
    """A tensor with the device and dtype of the module: its first floating-point parameter, or without any, buffer."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next(tensor for tensor in tensors if tensor.is_floating_point())


def dense_class(linear: nn.Module) -> type[nn.Module]:
    """nn.Linear or Conv1D: the class of `linear`, or of the linear that it replaced."""
    return Conv1D if issubclass(getattr(linear, "dense_class", type(linear)), Conv1D) else nn.Linear


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype in which autocast multiplies; None if autocast is off."""
    try:
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    except RuntimeError:  # a device without autocast, such as meta
        return None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context that turns autocast off; it does nothing on a device without autocast, such as meta."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def is_traced() -> bool:
    """Whether torch.export records this forward. Then sizes may be symbols, and a value that is not computed from the parameters
    in this forward becomes a constant of the graph, stored beside them."""
    return torch.compiler.is_exporting()


def is_compiled() -> bool:
    """Whether torch.compile records this forward. It cannot see whether a parameter has changed, and layers of one shape should
    share one graph."""
    return torch.compiler.is_compiling() and not is_traced()


def traceable(function: Any) -> Any:
    """A function of `functools.lru_cache`, without its cache in a graph of torch.compile, which would warn of it."""
    return function.__wrapped__ if is_compiled() else function


class SelfInitialized(nn.Module):
    """Initialises its own parameters, which the native initialisation does not know."""

    def initialize_parameters(self) -> None:
        """Draw fresh values of all parameters except those that the native initialisation draws."""


class Derived(SelfInitialized):
    """Caches the values that inference computes from the parameters, until a parameter changes.

    In-place changes through `parameter.data` are not detected. `train()`, `eval()` and `load_state_dict` clear the cache. In a
    graph of torch.compile, no other change is detected.
    """

    # key -> ([(source tensor, its version, its address), ...], cached value)
    _cache: dict[Any, tuple[list[Any], Any]] | None = None
    _held: dict[Any, Any] | None = None  # key -> value, for graphs of torch.compile

    def dense_weight(self) -> torch.Tensor:
        """The weight (O, I) equivalent to the forward in eval mode, differentiable."""
        raise NotImplementedError

    def cached(self, key: Any, compute: Callable[[], Any], sources: Iterable[Any] | None = None) -> Any:
        """The cached result of `compute()`, recomputed if a source has changed. Default sources: all parameters and buffers."""
        if is_traced():
            return compute()
        if is_compiled():
            return self._held_value(key, compute)
        sources = list(self._sources() if sources is None else sources)
        value = self._lookup(key, sources)
        if value is not None:
            return value
        # Tensors created in inference mode cannot be used in training later; autocast would round the result.
        device = next(source.device.type for source in sources if source is not None)
        with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
            value = compute()
        # Inference tensors have no version counter, so changes could not be detected.
        if not any(source is not None and source.is_inference() for source in sources):
            if self._cache is None:
                self._cache = {}
            states = [None if source is None else (source, source._version, source.data_ptr()) for source in sources]
            self._cache[key] = (states, value)
        return value

    def _held_value(self, key: Any, compute: Callable[[], Any]) -> Any:
        """As `cached`, in a graph: the first forward computes the value, and the next ones get it as an input."""
        held = self._held
        if held is not None and key in held:
            return held[key]
        with torch.no_grad():
            value = compute()
        self._held = {key: value} if held is None else {**held, key: value}
        return value

    def _sources(self) -> Iterable[Any]:
        return (*self._parameters.values(), *self._buffers.values())

    def _lookup(self, key: Any, sources: Iterable[Any]) -> Any:
        """The cached value of `key`; None if there is none or a source has changed. Every forward calls it: it must be fast."""
        if self._cache is None or key not in self._cache:
            return None
        states, value = self._cache[key]
        for state, source in zip(states, sources, strict=True):
            if state is None:
                if source is not None:
                    return None
            elif state[0] is not source or source._version != state[1] or source.data_ptr() != state[2]:
                return None
        return value

    def cached_weight(self, device_type: str) -> torch.Tensor:
        """The cached dense weight. Under autocast it has autocast's dtype, so that a forward need not cast it."""
        if is_traced():
            return self.dense_weight()
        dtype = autocast_dtype(device_type)
        weight = None if is_compiled() else self._lookup(dtype, self._sources())
        if weight is not None:
            return weight

        def compute() -> torch.Tensor:
            weight = self.dense_weight()
            return weight.contiguous() if dtype is None else weight.to(dtype).contiguous()

        return self.cached(dtype, compute)

    def needs_gradient(self) -> bool:
        """Whether the forward must be differentiable with respect to the parameters that the weight is computed from."""
        return torch.is_grad_enabled() and any(
            parameter.requires_grad
            for name, parameter in self._parameters.items()
            if parameter is not None and name != "bias"
        )

    def forget(self) -> None:
        """Clear the cache."""
        self._cache = self._held = None

    def train(self, mode: bool = True) -> Any:
        self.forget()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.forget()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.forget()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_cache", "_held")
        }  # the cache is not copied or pickled


class DerivedWeight(Derived):
    """y = x Wᵀ + b with the dense weight W: cached in inference, recomputed in every training forward."""

    bias: nn.Parameter | None

    def of_heads(self, factors: torch.Tensor) -> torch.Tensor:
        """(O, I): the weight of an nn.Linear or Conv1D, of which each of N `factors` multiplies an equal part of the inputs."""
        weight = weight_as_rows(self)
        return weight * factors.to(weight.dtype).repeat_interleave(weight.shape[1] // factors.numel())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        weight = self.dense_weight() if self.needs_gradient() else self.cached_weight(x.device.type)
        return functional.linear(x, weight, self.bias)


class ComputedWeight(NeverDrawn, torch.Tensor):
    """A weight that the module `owner` computes.

    PEFT sets `weight.data` when it merges an adapter. Here that calls `owner.take_weight`, which stores the new weight or raises
    an error; setting the data of a plain tensor would lose it silently.
    """

    owner: Any
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # results of operations are plain tensors

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.owner.take_weight(value)


class Computed(Derived):
    """`weight` (O, I) is a property, computed at each access, not a parameter."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        if is_traced():
            return self.dense_weight()
        weight = self.dense_weight().as_subclass(ComputedWeight)
        weight.owner = self
        return weight

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        if getattr(value, "owner", None) is not self:  # PEFT assigns the weight that it has read back to the module
            self.take_weight(value)

    def take_weight(self, weight: torch.Tensor) -> None:
        """Set the parameters so that they give `weight` (O, I). Raises ValueError if this is impossible."""
        raise ValueError(f"{type(self).__name__} computes its weight from other parameters, and cannot take another")


class DerivedLinear(Computed, DerivedWeight, nn.Linear):
    """Replaces `linear` (nn.Linear or Conv1D); it has a bias if `linear` has one, and the same device and dtype.

    It is an nn.Linear, so that PEFT supports it, but has no parameter `weight`.
    """

    def __init__(self, linear: nn.Module) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would draw a weight
        self.in_features, self.out_features = features(linear)
        self.dense_class = dense_class(linear)
        if linear.bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(torch.zeros_like(linear.bias))  # type: ignore[arg-type]

    @property
    def selectable(self) -> bool:
        """Whether `selected` can remove inputs and outputs."""
        return False

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        """A copy with only the outputs `kept`, or the inputs if `outputs` is False. It shares no tensor with this module."""
        new = copy.deepcopy(self)
        if not outputs:
            new.in_features = len(kept)
            return new
        new.out_features = len(kept)
        if self.bias is not None:
            new.bias = nn.Parameter(taken(self.bias, 0, kept))
        return new

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
