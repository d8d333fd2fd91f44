"""Replaces the forward of a layer in some training steps: by the identity, or by other layers.

Shapes: B batch, T tokens, D hidden size.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Cache

F = TypeVar("F", bound="LayerForward")


class LayerForward:
    """Replaces the forward of `layer`; the class, parameter names and hooks of the layer stay.

    In training mode, while `active`, `alternative` runs. Otherwise the previous forward runs, which may be another LayerForward.
    Some layers return a tuple: hidden states first, then what later layers need, such as T5's position bias.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.previous: Callable[..., Any] | None = vars(layer).get("forward")  # None: the forward of the class
        self.active = False
        layer.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(B, T, D) -> (B, T, D), or a tuple that begins with it"""
        if self.active and self.layer.training:
            return self.alternative(hidden_states, *args, **kwargs)
        return self.usual(hidden_states, *args, **kwargs)

    def usual(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the layer computes without this replacement."""
        if self.previous is not None:
            return self.previous(hidden_states, *args, **kwargs)
        return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)

    def alternative(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(B, T, D) -> (B, T, D), or a tuple that begins with it"""
        raise NotImplementedError

    def remove(self) -> None:
        """Restore the previous forward, also if another LayerForward has since replaced this one."""
        outer: Any = vars(self.layer)["forward"]
        if outer is not self:
            while outer.previous is not self:
                outer = outer.previous
            outer.previous = self.previous
        elif self.previous is None:
            del self.layer.forward
        else:
            self.layer.forward = self.previous

    @classmethod
    def of(cls: type[F], layer: Any) -> F:
        """The replacement of class `cls` in the forward of `layer`."""
        forward = vars(layer).get("forward")
        while not isinstance(forward, cls):
            forward = forward.previous
        return forward


@contextlib.contextmanager
def not_checkpointed(layer: Any) -> Iterator[None]:
    """Inside, `layer` keeps its activations. With reentrant checkpointing, the parameters of which no output is used would get
    gradients of zero instead of none, and weight decay and momentum would move them."""
    before = getattr(layer, "gradient_checkpointing", False)
    try:
        if before:
            layer.gradient_checkpointing = False
        yield
    finally:
        if before:
            layer.gradient_checkpointing = before


class Skipped(LayerForward):
    """Skips the whole layer: the alternative is the identity.

    `returns_tuple`: whether the layer returns a tuple. Then it runs, and only its hidden states are left out, because later
    layers need the rest.
    """

    def __init__(self, layer: nn.Module, *, returns_tuple: bool = False) -> None:
        super().__init__(layer)
        self.returns_tuple = returns_tuple

    def alternative(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.returns_tuple:
            with not_checkpointed(self.layer):
                outputs = self.usual(hidden_states, *args, **kwargs)
            return type(outputs)((hidden_states, *outputs[1:]))
        return hidden_states


class Replaced(LayerForward):
    """Runs `layer.predecessor` instead: the layers that `layer` is trained to replace. They get no cache, which has no entries
    for them."""

    def alternative(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        predecessor: Any = self.layer.predecessor
        signature = inspect.signature(type(self.layer).forward)
        arguments = signature.bind(self.layer, hidden_states, *args, **kwargs).arguments
        names = list(signature.parameters)
        further = arguments.pop(next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), ""), {})
        arguments = {name: None if isinstance(value, Cache) else value for name, value in (arguments | further).items()}
        del arguments[names[0]]
        # T5's first layer returns it for the others.
        carried = [name for name in names if name.endswith("position_bias")]
        # What came by position goes on by position: reentrant checkpointing gives gradients to no other arguments.
        by_position = names[1 : 2 + len(args)]
        outputs: Any = hidden_states
        for layer in predecessor:
            positional = [arguments[name] for name in by_position]
            others = {name: value for name, value in arguments.items() if name not in by_position}
            # `forward`, not a call: the hooks that collect hidden states must see `layer` only.
            outputs = layer.forward(*positional, **others)
            first, *rest = outputs if isinstance(outputs, tuple | list) else (outputs,)
            arguments[names[1]] = first
            if len(rest) >= 2 * len(carried):  # LongT5 returns the weights of each attention after its bias
                rest = rest[::2]
            arguments |= dict(zip(carried, rest, strict=False))
        return outputs
