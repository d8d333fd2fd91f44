"""How two models differ: in their settings, and in the values of which tensors and components by how much."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.base import TRAINED, base_name, canonical_parameters
from hf_freeze.architectures.registry import VARIANT_PREFIX, architecture_for
from hf_freeze.layers.derived import Computed, dense_class

_OF_THE_FILE = ("transformers_version", "_name_or_path", "architectures", "methods", "digests", "model_type")
SAME, CHANGED, RESIZED, FIRST, SECOND = "same", "changed", "of another shape", "of the first", "of the second"
KINDS = (SAME, CHANGED, RESIZED, FIRST, SECOND)


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A parameter of one or both models, or the weight that a layer computes of `factors`. `kind`: one of `KINDS`; shapes: None
    in the model that lacks it. For those of equal shape, in fp64: `distance` ||b - a||, `norm` ||a||, `largest` max |b - a|."""

    name: str
    component: str
    kind: str
    shapes: tuple[tuple[int, ...] | None, ...]
    distance: float = 0.0
    norm: float = 0.0
    largest: float = 0.0
    factor: bool = False

    @property
    def relative(self) -> float:
        """||b - a|| / ||a||; infinite where a is zero and b is not."""
        return _ratio(self.distance, self.norm)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`settings`: (name, value in the first, value in the second) of the configs and methods; None where one has it not."""

    settings: list[tuple[str, Any, Any]]
    tensors: list[TensorDifference]

    def by_component(self) -> dict[str, tuple[dict[str, int], float]]:
        """component -> numbers of tensors of each kind, and ||b - a|| / ||a|| of all its values of equal shape as one vector,
        with the weights that factors make and without the factors."""
        found = {}
        for component in TRAINED:
            if tensors := [each for each in self.tensors if each.component == component]:
                whole = [each for each in tensors if not each.factor]
                norms = (math.hypot(*(getattr(each, part) for each in whole)) for part in ("distance", "norm"))
                found[component] = (
                    {kind: sum(each.kind == kind for each in tensors) for kind in KINDS},
                    _ratio(*norms),
                )
        return found


def _ratio(distance: float, norm: float) -> float:
    return distance / norm if norm else math.inf if distance else 0.0


def compare(first: Any, second: Any) -> Comparison:
    """Compare two models of one architecture, variants or native. Tied tensors count once, constants never.

    A linear that is factorised, quantised or stored sparse, and a quantised table, is compared by the weight that it computes;
    its factors are listed too.

    Raises ValueError where the architectures differ.
    """
    one, other = architecture_for(first), architecture_for(second)
    if one.model_type != other.model_type:
        raise ValueError(
            f"cannot compare {one.model_type!r} with {other.model_type!r}: other architectures, other names"
        )
    computed = [dict(_computed_weights(model)) for model in (first, second)]
    values = [dict(canonical_parameters(model)) | made for model, made in zip((first, second), computed, strict=True)]
    layers = {name.removesuffix(".weight") for made in computed for name in made}
    tensors = []
    for name in dict.fromkeys([*values[0], *values[1]]):
        model, architecture = (first, one) if name in values[0] else (second, other)
        component = architecture.component(base_name(model, name))
        if component != "constant":
            layer, _, last = name.rpartition(".")
            factor = last not in ("weight", "bias") and layer in layers
            compared = _compare_tensors(values[0].get(name), values[1].get(name))
            tensors.append(TensorDifference(name=name, component=component, factor=factor, **compared))
    return Comparison(settings=_compare_settings(first.config, second.config), tensors=tensors)


def _computed_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight), as the layer that was replaced has it: of a Conv1D (I, O)."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for layer, module in model.named_modules():
        if isinstance(module, Computed) and f"{layer}.weight" not in tied:
            weight = module.dense_weight().detach()
            yield f"{layer}.weight", weight.T if dense_class(module) is Conv1D else weight


@torch.no_grad()
def _compare_tensors(a: torch.Tensor | None, b: torch.Tensor | None) -> dict[str, Any]:
    """The fields of a `TensorDifference` that the values decide."""
    shapes = tuple(None if value is None else tuple(value.shape) for value in (a, b))
    if a is None or b is None:
        return {"kind": SECOND if a is None else FIRST, "shapes": shapes}
    if a.shape != b.shape:
        return {"kind": RESIZED, "shapes": shapes}
    x, y = a.double(), b.to(a.device).double()
    return {
        "kind": SAME if a.dtype == b.dtype and torch.equal(x, y) else CHANGED,
        "shapes": shapes,
        "distance": (y - x).norm().item(),
        "norm": x.norm().item(),
        "largest": (y - x).abs().max().item() if x.numel() else 0.0,
    }


def _compare_settings(first: Any, second: Any) -> list[tuple[str, Any, Any]]:
    one, other = (_settings(config) for config in (first, second))
    names = dict.fromkeys([*one, *other])
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]


def _settings(config: Any) -> dict[str, Any]:
    """Fields of the config, and of each method as `method.field`; a second one of a kind is `method 2.field`."""
    data = config.to_dict()
    found = {name: value for name, value in data.items() if name not in _OF_THE_FILE}
    found["model_type"] = config.model_type.removeprefix(VARIANT_PREFIX)
    numbers: dict[str, int] = defaultdict(int)
    for method in data.get("methods", ()):
        kind = method["method"]
        numbers[kind] += 1
        label = kind if numbers[kind] == 1 else f"{kind} {numbers[kind]}"
        found[label] = "applied"
        found |= {f"{label}.{name}": value for name, value in method.items() if name != "method"}
    return found
