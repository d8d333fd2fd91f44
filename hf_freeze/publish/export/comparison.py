"""Whether an engine computes what PyTorch does.

No two programs round alike. How much that matters depends on the model: differences grow with its depth, with the size of its
outputs, and with how strongly the outputs depend on the weights. So the model itself says what is too much. Each weight is moved
to a neighbouring number of fp32, up or down at random, and PyTorch computes the outputs again. Rounding anywhere in a forward has
an effect of this kind and size, so an engine may be off by `_ROUNDINGS` times as much. A wrong graph is off by far more.

Where inputs of linears are rounded, a difference in the last bit before the rounding may become one of a whole step after it.
That is seldom and large. So weights are moved several times, and an engine may be off by twice the most that this has caused, or
by `_STEP` if that is more.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_freeze.publish.export.caches import PAST
from hf_freeze.publish.export.engine_parts import Part, positions, samples
from hf_freeze.publish.export.trained_grid import rounds_inputs
from hf_freeze.runtime.shortlists import TOKENS

Runner = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]  # inputs by name -> outputs by name

_LONG = 40  # tokens: more than a tile of any layer
_ROUNDINGS = 16
_STEP = 0.1  # absolute and relative, of outputs
_MOVES = 4  # of the weights, where inputs are rounded


def tolerance(model: Any, parts: list[Part]) -> float:
    """How far the outputs of an engine may be from PyTorch's, in the measure of `largest_difference`."""
    rounds = rounds_inputs(model)
    expected = [[(inputs, _outputs(part, inputs)) for inputs in _examples(part)] for part in parts]
    differences = [torch.finfo(torch.float32).eps]
    for seed in range(_MOVES if rounds else 1):
        with _moved(model, seed):
            for part, pairs in zip(parts, expected, strict=True):
                for inputs, outputs in pairs:
                    moved = _outputs(part, inputs)
                    differences += [_difference(moved[name], value) for name, value in outputs.items()]
    return max(2 * max(differences), _STEP) if rounds else min(_ROUNDINGS * max(differences), _STEP)


@contextlib.contextmanager
def _moved(model: Any, seed: int) -> Iterator[None]:
    """Inside, each weight of `model` has the next larger or next smaller value."""
    generator = torch.Generator().manual_seed(seed)
    weights = {p: p.detach().clone() for p in model.parameters() if p.is_floating_point()}
    with torch.no_grad():
        try:
            for parameter, value in weights.items():
                towards = torch.randint(2, value.shape, generator=generator).mul(2).sub(1) * math.inf
                parameter.copy_(torch.nextafter(value, towards))
            yield
        finally:
            for parameter, value in weights.items():
                parameter.copy_(value)


@torch.no_grad()
def largest_difference(parts: list[Part], runners: Mapping[str, Runner]) -> float:
    """The largest difference of what an engine computes for each part from what PyTorch does, for several numbers of rows and
    lengths: absolute for values below 1, relative above. Raises ValueError for other shapes."""
    differences = [0.0]
    for part in parts:
        for inputs in _examples(part):
            found = runners[part.name](inputs)
            for name, expected in _outputs(part, inputs).items():
                if found[name].shape != expected.shape:
                    raise ValueError(
                        f"the engine does not compute the same as PyTorch for the {part.name}: its {name} has the shape "
                        f"{tuple(found[name].shape)} instead of {tuple(expected.shape)}"
                    )
                differences.append(_difference(found[name], expected))
    return math.nan if any(map(math.isnan, differences)) else max(differences)


@torch.no_grad()
def _outputs(part: Part, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        return dict(zip(part.outputs, part.module(*inputs.values()), strict=True))
    except Exception as error:  # of any kind: from the code of any family
        shapes = {name: tuple(value.shape) for name, value in inputs.items() if not name.startswith(PAST)}
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(
            f"the {part.name} cannot run on inputs of the shapes {shapes}: {reason}; choose --format dense"
        ) from error


def _difference(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs() / expected.abs().clamp(min=1)).max()) if expected.numel() else 0.0


# -- inputs ------------------------------------------------------------------------------------------------------------------


def _examples(part: Part) -> Iterator[dict[str, Tensor]]:
    """Of several numbers of rows and lengths; of a part with a past also a first step of many tokens, and a later one of one."""
    long = _long(part)
    yield from (_resized(part, rows, size, size - 1) for rows, size in ((1, 1), (4, 5), (2, long)))
    if any("past_length" in axes.values() for axes in part.axes.values()):
        yield from (_resized(part, 2, size, past) for size, past in ((5, 0), (1, long)))


def _long(part: Part) -> int:
    """A length above that of the example. The model must have positions for twice as many tokens, and for a few special ones."""
    return max(1, min([_LONG, *(limit // 2 - 2 for limit in positions(part.module.model.config))]))  # type: ignore[union-attr]


def _resized(part: Part, rows: int, size: int, past: int) -> dict[str, Tensor]:
    """Inputs of a part with so many rows, where every length that varies is `size`, that of the past is `past`, and those of both
    old and new tokens are their sum. With several rows, half of the last row of a source is padding."""
    lengths = dict.fromkeys(("length", "source_length", "new_length", TOKENS), size)
    lengths |= {"batch": rows, "past_length": past}
    varying = {name for axes in part.axes.values() for name in axes.values()}
    if "new_length" in varying:
        lengths["length"] = lengths["new_length"] + lengths["past_length"]
    if "samples" in varying:
        lengths["samples"] = samples(part.module.model.config, size)  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(size)
    inputs = {}
    for name, tensor in part.inputs.items():
        shape = [
            lengths[part.axes[name][axis]] if axis in part.axes[name] else n for axis, n in enumerate(tensor.shape)
        ]
        if tensor.is_floating_point():
            inputs[name] = torch.randn(shape, generator=generator)
        elif name.endswith("mask"):
            inputs[name] = torch.ones(shape, dtype=torch.long)
            if rows > 1 and name == "attention_mask" and any(other.startswith(PAST) for other in part.inputs):
                # A language model is padded on the left. A row that attends to no token has no defined output.
                inputs[name][-1, :1] = int(not past)
            elif rows > 1:
                inputs[name][-1, (shape[1] + 1) // 2 :] = 0
        elif name == "position_ids":
            inputs[name] = torch.arange(lengths["past_length"], lengths["past_length"] + shape[1]).expand(shape)
        else:
            inputs[name] = torch.randint(int(tensor.max()) + 1, shape, generator=generator)
    return inputs
