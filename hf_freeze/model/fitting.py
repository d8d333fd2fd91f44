"""Fit the parameters of a layer together (`solvers/descent.py`): in the coordinates of its linears, by what they read, and by
what their outputs change in those of the layer."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_freeze import surgery
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.layers.derived import SelfInitialized
from hf_freeze.layers.low_rank import LowRankLinear
from hf_freeze.layers.masked import MaskedConv1D, MaskedLinear
from hf_freeze.model.watching import hooked, remembering
from hf_freeze.solvers.descent import Coordinates, descend

_LINEARS = (nn.Linear, Conv1D, LowRankLinear, MaskedLinear, MaskedConv1D)


def fit_together(
    layer: nn.Module,
    parameters: list[nn.Parameter],
    run: Callable[[int], Tensor],
    targets: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> bool:
    """Fit parameters of a layer so that `run` of each batch gives its target (B, T, H), where an error of a token counts by its
    weight (B, T, 1). Whether there are as many values as parameters; otherwise nothing changes."""
    size = sum(float((w * t.square()).sum()) for w, t in zip(weights, targets, strict=True))
    values = sum(int(w.count_nonzero()) for w in weights) * targets[0].shape[-1]
    if values < sum(p.numel() for p in parameters):
        return False

    def errors() -> Iterator[Tensor]:
        for number, (weight, target) in enumerate(zip(weights, targets, strict=True)):
            begin(number)
            yield (weight * (run(number) - target).square()).sum() / size

    def outputs() -> Iterator[Tensor]:
        for number, weight in enumerate(weights):
            begin(number)
            yield (weight / size).sqrt() * run(number)

    with remembering(layer, parameters) as begin:
        descend(parameters, errors, coordinates_of(layer, parameters, outputs))
    return True


def may_be_fitted(old: Any, new: Any, modules: Sequence[str], stack: str, number: int) -> list[nn.Parameter]:
    """Of these modules, those parameters of a layer of `new` that may be fitted: in fp32 or fp64, not seeded, of no other layer,
    and not of a layer that another method has made."""
    architecture = architecture_for(new)
    layers = surgery.layers_of(new, architecture, stack)
    prefix = f"{architecture.stacks[stack].layers.format(number)}."
    uses = Counter(id(p) for layer in layers for p in {*layer.parameters()})
    fixed = {id(p) for name, p in new.named_parameters() if name in getattr(new, "seeded_tensors", ())}
    names = tuple(name for name in modules if name.startswith(prefix))
    before = dict(old.base_model.named_modules())
    found: dict[int, nn.Parameter] = {}
    for name, part in new.base_model.named_modules():
        ours = isinstance(part, SelfInitialized) and type(part) is type(before.get(name))
        if not ours and any(name == each or name.startswith(f"{each}.") for each in names):
            found |= {id(p): p for p in part.parameters(recurse=False) if p.dtype in (torch.float32, torch.float64)}
    return [p for key, p in found.items() if uses[key] == 1 and key not in fixed]


def coordinates_of(
    layer: nn.Module, parameters: Sequence[nn.Parameter], outputs: Callable[[], Iterable[Tensor]]
) -> list[Coordinates]:
    """`outputs()`: those of the layer for each batch, weighted as in the error. With noise as the gradient of these, that of the
    outputs of a linear has the second moments that the Gauss-Newton matrix of the error has there. Parameters of other modules
    have one number: the root mean square of their own gradients.
    """
    chosen = {id(parameter) for parameter in parameters}
    linears = [
        part for part in layer.modules() if type(part) in _LINEARS and chosen & {*map(id, part.parameters(False))}
    ]
    grams = {id(linear): _Grams() for linear in linears}

    def watch(linear: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(functools.partial(grams[id(linear)].add, args[0].detach()))

    generator = torch.Generator().manual_seed(0)
    with hooked([(linear, watch) for linear in linears]), torch.enable_grad():
        for values in outputs():
            noise = torch.randn(values.shape, generator=generator).to(values)
            (values * noise).sum().backward()
    found: dict[int, Coordinates] = {}
    for linear in linears:
        if grams[id(linear)].count:
            found |= _of_linear(linear, grams[id(linear)])
    result = [found[id(each)] if id(each) in found else Coordinates(scale=_size_of(each.grad)) for each in parameters]
    for parameter in parameters:
        parameter.grad = None
    return result


@dataclass
class _Grams:
    """Sums over `count` tokens: of what a linear reads, (I, I), and of the gradients of its outputs, (O, O)."""

    count: int = 0
    read: Any = 0.0
    changed: Any = 0.0

    def add(self, inputs: Tensor, gradient: Tensor) -> None:
        inputs, gradient = inputs.flatten(0, -2), gradient.flatten(0, -2)
        rows = gradient.abs().sum(-1) > 0  # of padding it is 0
        self.count += int(rows.sum())
        self.read = self.read + inputs[rows].T @ inputs[rows]
        self.changed = self.changed + gradient.T @ gradient


@torch.no_grad()
def _of_linear(linear: Any, grams: _Grams) -> dict[int, Coordinates]:
    """id of a parameter -> its coordinates."""
    read, changed = grams.read / grams.count, grams.changed
    if isinstance(linear, LowRankLinear):
        up, down = linear.up, linear.down
        found = {
            id(down): Coordinates.of(up.T @ changed @ up, read),
            id(up): Coordinates.of(changed, down @ read @ down.T),
        }
    else:
        sides = (read, changed) if isinstance(linear, Conv1D) else (changed, read)
        found = {id(linear.weight): Coordinates.of(*sides)}
    return found if linear.bias is None else found | {id(linear.bias): Coordinates.of(changed)}


def _size_of(gradient: Tensor | None) -> float:
    """The root mean square of a gradient, 1 where there is none."""
    return 1.0 if gradient is None else float(gradient.square().mean().sqrt()) or 1.0
