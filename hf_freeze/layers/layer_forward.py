"""Replaces the forward of a layer in some training steps: by the identity, or by other layers.

Shapes: B batch, T tokens, D hidden size.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Cache

F = TypeVar("F", bound="LayerForward")


class LayerForward:
    """Replaces the forward of `layer`; the class, parameter names and hooks of the layer stay.

    In training mode, while `active`, `alternative` runs. Otherwise the previous forward runs, which may be another LayerForward.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.previous: Callable[..., Any] | None = vars(layer).get("forward")  # None: the forward of the class
        self.active = False
        layer.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(B, T, D) -> (B, T, D)"""
        if self.active and self.layer.training:
            return self.alternative(hidden_states, *args, **kwargs)
        if self.previous is not None:
            return self.previous(hidden_states, *args, **kwargs)
        return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)

    def alternative(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(B, T, D) -> (B, T, D)"""
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


class Skipped(LayerForward):
    """Skips the whole layer: the alternative is the identity."""

    def alternative(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


class Replaced(LayerForward):
    """Runs `layer.predecessor` instead: the layers that `layer` is trained to replace. They get no cache, which has no entries
    for them."""

    def alternative(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        args = tuple(None if isinstance(value, Cache) else value for value in args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        predecessor: Any = self.layer.predecessor
        for layer in predecessor:
            # `forward`, not a call: the hooks that collect hidden states must see `layer` only.
            hidden_states = layer.forward(hidden_states, *args, **kwargs)
        return hidden_states
