"""Skips layers at learnt rates (Fan et al., 2020, https://arxiv.org/abs/1909.11556, "data driven pruning").

Shapes: L layers of a stack, B batch, T tokens, D hidden size.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization

from hf_freeze.layers.derived import SelfInitialized, first_float_tensor
from hf_freeze.layers.layer_forward import Skipped, not_checkpointed

_HALVINGS = 60  # of an interval of doubles: more hardly change it


class KeepScore(SelfInitialized):
    """The trained `score` (1,) of a layer: the larger, the less often it is skipped."""

    learnt_gates = ("score",)

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        like = first_float_tensor(layer)
        self.score = nn.Parameter(torch.zeros(1, device=like.device, dtype=like.dtype))

    def initialize_parameters(self) -> None:
        initialization.zeros_(self.score)


def keep_rates(scores: Sequence[float], p: float) -> list[float]:
    """sigmoid(score + c) for each score, with the one c for which their mean is 1 - p.

    As in a softmax, only differences of scores count, and equal scores get equal rates; but each rate stays below 1.
    """
    middle = math.log1p(-p) - math.log(p)
    low, high = middle - max(scores), middle - min(scores)  # at these, no rate is above the mean, and none below it
    for _ in range(_HALVINGS):
        c = (low + high) / 2
        if math.fsum(_sigmoid(score + c) for score in scores) < (1 - p) * len(scores):
            low = c
        else:
            high = c
    return [_sigmoid(score + (low + high) / 2) for score in scores]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


class LearntSkip(Skipped):
    """As Skipped, and every step has a gradient of the scores of the stack.

    The layer f gives x + g (f(x) - x), with g = 1 where it runs and g = 0 where it is skipped, so the loss L has the derivative
    G = ⟨∂L/∂output, f(x) - x⟩ by g. The mean loss has the derivative L(1) - L(0) by the probability q that the layer runs. For an
    L that is quadratic in g, this is (G(1) + G(0)) / 2. A step sees one of the two: it gives q the gradient G / 2q where the
    layer runs, and G / 2(1 - q) where not, for which f(x) is computed without gradients of its own.
    """

    def __init__(self, layer: Any, *, returns_tuple: bool = False) -> None:
        super().__init__(layer, returns_tuple=returns_tuple)
        layer.layer_drop = KeepScore(layer)
        self.stack: Sequence[KeepScore] = ()  # not the layers: copies would follow them from one to the next
        self.slopes: Sequence[float] = ()  # the gradients of the scores of the stack, over G

    def set(self, active: bool, stack: Sequence[KeepScore], slopes: Sequence[float]) -> None:
        """Skip the layer or not, and give the scores gradients from now on; with empty `stack` and `slopes`, none."""
        self.active, self.stack, self.slopes = active, stack, slopes

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.layer.training or not torch.is_grad_enabled() or not any(self.slopes):
            return super().__call__(hidden_states, *args, **kwargs)
        unused = not_checkpointed(self.layer) if self.active else contextlib.nullcontext()
        # Later layers need the rest of a tuple.
        with torch.set_grad_enabled(not self.active or self.returns_tuple), unused:
            outputs = self.usual(hidden_states, *args, **kwargs)
        after = outputs[0] if isinstance(outputs, tuple) else outputs
        value = hidden_states if self.active else after
        # From the scores themselves, not from a tensor for all layers: checkpointing computes layers again, one graph for each.
        terms = [slope * keep.score.float() for slope, keep in zip(self.slopes, self.stack, strict=True)]
        total = torch.stack(terms).sum()
        value = value + (total - total.detach()).to(value.dtype) * (after - hidden_states).detach()
        return type(outputs)((value, *outputs[1:])) if isinstance(outputs, tuple) else value


def drop_rates(layers: Sequence[Any], p: float) -> list[float]:
    """The probability of each layer of a stack to be skipped. Their mean is `p`."""
    scores = torch.cat([layer.layer_drop.score.detach() for layer in layers]).tolist()
    return [1 - rate for rate in keep_rates(scores, p)]


def draw(layers: Sequence[Any], p: float, uniform: Sequence[float]) -> None:
    """Skip each of `layers`, a stack, whose number of `uniform`, in 0..1, is below its rate; the mean of the rates is `p`.

    Raises ValueError for scores in shards, whose gradients other layers cannot reach.
    """
    keeps = [layer.layer_drop for layer in layers]
    if any(hasattr(keep.score, "full_tensor") for keep in keeps):
        raise ValueError(
            "LayerDrop(learned=True): the scores of layers cannot be in shards; train in one piece, or with DDP"
        )
    if keeps[0].score.is_meta:  # no values: as at the start
        for layer, number in zip(layers, uniform, strict=True):
            LearntSkip.of(layer).set(number < p, (), ())
        return
    dropped = drop_rates(layers, p)
    slopes = [rate * (1 - rate) for rate in dropped]  # of the sigmoids
    total = sum(slopes) or 1.0  # zero if all rates are 0 or 1 in float64
    weights = [slope / total for slope in slopes]  # by which c follows the scores
    for number, (layer, rate) in enumerate(zip(layers, dropped, strict=True)):
        active = uniform[number] < rate
        # The slope of the sigmoid, over twice the probability of what was drawn.
        factor = (1 - rate if active else rate) / 2
        LearntSkip.of(layer).set(active, keeps, [factor * ((n == number) - weight) for n, weight in enumerate(weights)])


def drop_scores(layers: Sequence[Any]) -> None:
    """Remove the scores; the layers are then as with Skipped."""
    for layer in layers:
        LearntSkip.of(layer).set(False, (), ())
        del layer.layer_drop
