"""A layer that in some steps of training does something else: nothing, or what other layers do.

Shapes: B batch, T tokens, D hidden size.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Cache

F = TypeVar("F", bound="LayerForward")


class LayerForward:
    """Takes the place of the forward of `layer`, whose class, names and hooks stay: in training mode, while it is `active`,
    `instead` runs. One that takes the place of another falls back to that."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.before: Callable[..., Any] | None = vars(layer).get("forward")
        self.active = False
        layer.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(B, T, D) -> (B, T, D)"""
        if self.active and self.layer.training:
            return self.instead(hidden_states, *args, **kwargs)
        if self.before is not None:
            return self.before(hidden_states, *args, **kwargs)
        return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)

    def instead(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def remove(self) -> None:
        """The forward is as if it had never taken its place."""
        above: Any = vars(self.layer)["forward"]
        if above is not self:
            while above.before is not self:
                above = above.before
            above.before = self.before
        elif self.before is None:
            del self.layer.forward
        else:
            self.layer.forward = self.before

    @classmethod
    def of(cls: type[F], layer: Any) -> F:
        """The one of this class that took the place of the forward of `layer`."""
        found = vars(layer).get("forward")
        while not isinstance(found, cls):
            found = found.before
        return found


class Skipped(LayerForward):
    """Nothing: the whole block is the identity."""

    def instead(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


class Replaced(LayerForward):
    """What the layers do that `layer` is to replace: its `predecessor`. They write into no cache, in which they have no place."""

    def instead(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        args = tuple(None if isinstance(value, Cache) else value for value in args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        predecessor: Any = self.layer.predecessor
        for layer in predecessor:
            # Not by a call: hooks that collect hidden states are those of `layer`.
            hidden_states = layer.forward(hidden_states, *args, **kwargs)
        return hidden_states
