"""What all linears share whose weight is computed: y = x Wᵀ + b, with W kept for inference once it is computed.

Shapes: I inputs, O outputs; `weight` and `dense_weight` are (O, I), as in nn.Linear, also where the linear that was replaced is
GPT-2's Conv1D, whose `weight` is (I, O).
"""

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_freeze.compat.transformers import NeverDrawn


def features(linear: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of an nn.Linear, a Conv1D or one of our layers."""
    found: Any = (linear.nx, linear.nf) if isinstance(linear, Conv1D) else (linear.in_features, linear.out_features)
    return found


def linear_like(
    linear: Any,
    inputs: int | None = None,
    outputs: int | None = None,
    *,
    classes: tuple[type[nn.Module], type[nn.Module]] = (nn.Linear, Conv1D),
    device: Any = None,
) -> Any:
    """An nn.Linear or Conv1D (or what `classes` has for them), whichever `linear` is or took the place of, with fresh values: in
    its dtype, with a bias if it has one, of as many features and on the same device where nothing else is asked for."""
    own_inputs, own_outputs = features(linear)
    inputs, outputs = own_inputs if inputs is None else inputs, own_outputs if outputs is None else outputs
    parameter = placed(linear)
    with torch.device(parameter.device if device is None else device):
        made = (
            classes[1](outputs, inputs)
            if dense_class(linear) is Conv1D
            else classes[0](inputs, outputs, bias=linear.bias is not None)
        )
    return made.to(parameter.dtype)


def placed(module: nn.Module) -> torch.Tensor:
    """A tensor of the module on its device and in its dtype: the first parameter, or of one without any, a buffer."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next(tensor for tensor in tensors if tensor.is_floating_point())


def dense_class(linear: nn.Module) -> type[nn.Module]:
    """nn.Linear or Conv1D: what it is, or took the place of."""
    return Conv1D if issubclass(getattr(linear, "dense_class", type(linear)), Conv1D) else nn.Linear


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """In which precision autocast multiplies; None where it is off."""
    try:
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    except RuntimeError:  # a device without autocast, such as meta
        return None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Full precision inside; on a device without autocast, such as meta, it is so anyway."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class Fresh(nn.Module):
    """Draws its own fresh values: the native initialisation knows nothing of them."""

    def initialize_parameters(self) -> None:
        """Draw them, all but those that the native initialisation draws."""


class Derived(Fresh):
    """Keeps what inference computes from the parameters, until one of them changes.

    A change in place through `parameter.data` cannot be seen; switching `train()` and `eval()` forgets everything.
    """

    # key -> (the tensors it was computed from, their versions and addresses; the value)
    _kept: dict[Any, tuple[list[Any], Any]] | None = None

    def dense_weight(self) -> torch.Tensor:
        """The weight (O, I) that the forward in eval mode stands for, differentiable."""
        raise NotImplementedError

    def keep(self, key: Any, compute: Callable[[], Any], sources: Iterable[Any] | None = None) -> Any:
        """`compute()` under `key`, or what it gave before if no source has changed since: by default any parameter or buffer."""
        sources = list(self._sources() if sources is None else sources)
        value = self._find(key, sources)
        if value is not None:
            return value
        # What is made in inference mode could not be used in training later; autocast would round what is computed.
        device = next(source.device.type for source in sources if source is not None)
        with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
            value = compute()
        if not any(source is not None and source.is_inference() for source in sources):  # these count no changes
            if self._kept is None:
                self._kept = {}
            states = [None if source is None else (source, source._version, source.data_ptr()) for source in sources]
            self._kept[key] = (states, value)
        return value

    def _sources(self) -> Iterable[Any]:
        return (*self._parameters.values(), *self._buffers.values())

    def _find(self, key: Any, sources: Iterable[Any]) -> Any:
        """What is kept under `key`, if anything is and no source has changed. This is part of each forward: it has to be fast."""
        if self._kept is None or key not in self._kept:
            return None
        states, value = self._kept[key]
        for state, source in zip(states, sources, strict=True):
            if state is None:
                if source is not None:
                    return None
            elif state[0] is not source or source._version != state[1] or source.data_ptr() != state[2]:
                return None
        return value

    def kept_weight(self, device_type: str) -> torch.Tensor:
        """The dense weight, kept; in the precision of autocast where that is on, which would round it in every forward."""
        dtype = autocast_dtype(device_type)
        found = self._find(dtype, self._sources())
        if found is not None:
            return found

        def compute() -> torch.Tensor:
            weight = self.dense_weight()
            return weight.contiguous() if dtype is None else weight.to(dtype).contiguous()

        return self.keep(dtype, compute)

    def keeps_weight(self, device_type: str) -> bool:
        """Whether `kept_weight` has its memory already."""
        return self._kept is not None and autocast_dtype(device_type) in self._kept

    def needs_gradient(self) -> bool:
        """Whether the forward must be differentiable with respect to what the weight is computed from."""
        return torch.is_grad_enabled() and any(
            parameter.requires_grad
            for name, parameter in self._parameters.items()
            if parameter is not None and name != "bias"
        )

    def train(self, mode: bool = True) -> Any:
        self._kept = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._kept = None
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}  # neither copied nor pickled


class DerivedWeight(Derived):
    """y = x Wᵀ + b with the dense weight W: kept in inference, computed anew in training."""

    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        weight = self.dense_weight() if self.needs_gradient() else self.kept_weight(x.device.type)
        return functional.linear(x, weight, self.bias)


class ComputedWeight(NeverDrawn, torch.Tensor):
    """A weight that the module `owner` computes. Its `data` is set by PEFT when it merges an adapter: the owner takes it, or
    refuses, where in a plain tensor it would be lost."""

    owner: Any
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # what is computed of it is a plain tensor

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.owner.take_weight(value)


class Computed(Derived):
    """Has a `weight` that is no parameter, but computed anew at each look, (O, I)."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        weight = self.dense_weight().as_subclass(ComputedWeight)
        weight.owner = self
        return weight

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        if getattr(value, "owner", None) is not self:  # PEFT puts back what it has found
            self.take_weight(value)

    def take_weight(self, weight: torch.Tensor) -> None:
        """Compute `weight` (O, I) from now on. Raises ValueError where the parameters cannot."""
        raise ValueError(f"{type(self).__name__} computes its weight from other parameters, and cannot take another")


class DerivedLinear(Computed, DerivedWeight, nn.Linear):
    """Takes the place of `linear` (nn.Linear or Conv1D), with a bias if that has one, on the same device in the same dtype.

    It is an nn.Linear so that PEFT knows what to do with it, but has no parameter `weight`.
    """

    def __init__(self, linear: nn.Module) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would draw a weight
        self.in_features, self.out_features = features(linear)
        self.dense_class = dense_class(linear)
        if linear.bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(torch.zeros_like(linear.bias))  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
