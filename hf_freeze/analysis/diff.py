"""Compare two models: their settings, and the values of their tensors, per tensor and per component."""

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

_FILE_FIELDS = (
    "transformers_version",
    "_name_or_path",
    "architectures",
    "methods",
    "digests",
    "model_type",
    "description",
)
SAME, CHANGED, RESIZED, FIRST, SECOND = "same", "changed", "of another shape", "of the first", "of the second"
KINDS = (SAME, CHANGED, RESIZED, FIRST, SECOND)


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A parameter of one or both models, or a weight that a layer computes from factors. `kind`: one of `KINDS`. `shapes`: one
    per model, None if the model lacks the tensor. `factor`: whether it is a factor of a computed weight. For tensors a and b of
    equal shape, in fp64: `distance` ||b - a||, `norm` ||a||, `largest` max |b - a|."""

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
        """||b - a|| / ||a||; infinite if a is zero and b is not."""
        return _ratio(self.distance, self.norm)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`settings`: (name, value in the first, value in the second) of config and method fields that differ; None if a model lacks
    the field."""

    settings: list[tuple[str, Any, Any]]
    tensors: list[TensorDifference]

    def by_component(self) -> dict[str, tuple[dict[str, int], float]]:
        """component -> (number of tensors of each kind, ||b - a|| / ||a||). The norms treat all tensors of equal shape as one
        vector; they include weights computed from factors, but not the factors."""
        differences = {}
        for component in TRAINED:
            if tensors := [tensor for tensor in self.tensors if tensor.component == component]:
                whole = [tensor for tensor in tensors if not tensor.factor]
                norms = (math.hypot(*(getattr(tensor, field) for tensor in whole)) for field in ("distance", "norm"))
                kinds = {kind: sum(tensor.kind == kind for tensor in tensors) for kind in KINDS}
                differences[component] = (kinds, _ratio(*norms))
        return differences


def _ratio(distance: float, norm: float) -> float:
    return distance / norm if norm else math.inf if distance else 0.0


def compare(first: Any, second: Any) -> Comparison:
    """Compare two models of one architecture, variants or native. Tied tensors count once; constants are left out.

    Linears that are factorised, quantised or stored sparse, and quantised tables, are compared by the weights that they compute;
    their factors are listed too.

    Raises ValueError if the architectures differ.
    """
    architectures = architecture_for(first), architecture_for(second)
    if architectures[0].model_type != architectures[1].model_type:
        raise ValueError(
            f"cannot compare {architectures[0].model_type!r} with {architectures[1].model_type!r}: different architectures have "
            "different names"
        )
    computed = [dict(_computed_weights(model)) for model in (first, second)]
    values = [
        dict(canonical_parameters(model)) | weights for model, weights in zip((first, second), computed, strict=True)
    ]
    for mine, theirs, model in ((values[0], values[1], first), (values[1], values[0], second)):
        # Marian's output bias is a parameter of a variant that trains it, and a buffer of the native class.
        mine |= {name: buffer for name, buffer in model.named_buffers() if name in theirs and name not in mine}
    layers = {name.removesuffix(".weight") for weights in computed for name in weights}
    tensors = []
    for name in dict.fromkeys([*values[0], *values[1]]):
        model, architecture = (first, architectures[0]) if name in values[0] else (second, architectures[1])
        component = architecture.component(base_name(model, name))
        if component != "constant":
            layer, _, last = name.rpartition(".")
            factor = last not in ("weight", "bias") and layer in layers
            compared = _compare_tensors(values[0].get(name), values[1].get(name))
            tensors.append(TensorDifference(name=name, component=component, factor=factor, **compared))
    return Comparison(settings=_compare_settings(first.config, second.config), tensors=tensors)


def _computed_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight) of each layer that computes its weight, in the layout of the replaced layer: (I, O) for a Conv1D."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for layer, module in model.named_modules():
        if isinstance(module, Computed) and f"{layer}.weight" not in tied:
            weight = module.dense_weight().detach()
            yield f"{layer}.weight", weight.T if dense_class(module) is Conv1D else weight


@torch.no_grad()
def _compare_tensors(a: torch.Tensor | None, b: torch.Tensor | None) -> dict[str, Any]:
    """The fields of a `TensorDifference` that depend on the values."""
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
    """(name, value in the first, value in the second) of each setting that differs."""
    a, b = _settings(first), _settings(second)
    return [(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]


def _settings(config: Any) -> dict[str, Any]:
    """The fields of the config, and those of each method as `method.field`, or `method 2.field` for its second use."""
    data = config.to_dict()
    settings = {name: value for name, value in data.items() if name not in _FILE_FIELDS}
    settings["model_type"] = config.model_type.removeprefix(VARIANT_PREFIX)
    numbers: dict[str, int] = defaultdict(int)
    for method in data.get("methods", ()):
        kind = method["method"]
        numbers[kind] += 1
        label = kind if numbers[kind] == 1 else f"{kind} {numbers[kind]}"
        settings[label] = "applied"
        settings |= {f"{label}.{name}": value for name, value in method.items() if name != "method"}
    return settings
