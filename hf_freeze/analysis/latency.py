"""How long the linears of a model take on this machine: measured, not estimated."""

import functools
import statistics
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.analysis._probe import check_model, track
from hf_freeze.architectures.base import LINEAR_COMPONENTS
from hf_freeze.layers.derived import Derived, DerivedLinear, features
from hf_freeze.layers.factorized import FactorizedLinear
from hf_freeze.layers.no_attention import NoHeads

_ROUNDS, _SECONDS = 5, 0.01  # how often each is measured, and for about how long


def median_ms(layers: Sequence[nn.Module], tokens: int) -> list[float]:
    """Median time of a forward of `tokens` tokens without gradients, in ms, of each of these linears of one shape.

    Warm, in the present mode, on the device and in the dtype of the layers, with torch's present number of threads; the layers
    take turns, so that what else the machine does slows all of them.
    """
    weight = next(layers[0].parameters())
    x = torch.randn(1, tokens, features(layers[0])[0], generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype)
    synchronize = torch.cuda.synchronize if weight.is_cuda else lambda: None
    timers = [timeit.Timer(functools.partial(_forward, layer, x, synchronize)) for layer in layers]
    times: list[list[float]] = [[] for _ in layers]
    with torch.no_grad():
        # One by one: a call that the machine interrupts is an outlier, and not a part of all. The first make what is kept.
        calls = [max(3, min(50, int(_SECONDS / min(timer.repeat(5, 1))))) for timer in timers]
        for _ in range(_ROUNDS):
            for timer, count, found in zip(timers, calls, times, strict=True):
                found.extend(timer.repeat(count, 1))
    return [1000 * statistics.median(found) for found in times]


def _forward(layer: nn.Module, x: torch.Tensor, synchronize: Callable[[], None]) -> None:
    layer(x)
    synchronize()


@dataclass(frozen=True, kw_only=True)
class LinearLatency:
    """`count` linears of a model that are alike: I `inputs`, O `outputs`, the class of the `layer` and its `setting`.

    `path`: how a forward of `tokens` tokens without gradients is computed: `"plain"` by a native linear, `"dense"` with a
    weight that is kept, `"factors"` without one. `ms`: its median time, of one of them; `plain_ms`: that of a native linear.
    """

    inputs: int
    outputs: int
    layer: str
    setting: str
    count: int
    tokens: int
    path: str
    ms: float
    plain_ms: float


def linear_latencies(model: Any, tokens: Iterable[int] = (1, 64)) -> list[LinearLatency]:
    """Measure each distinct linear that attention and FFN have, of a variant or a native model, for each number of `tokens`.

    The model is in eval mode meanwhile. Raises ValueError for a number of tokens below 1, a model on meta, and an unknown
    architecture.
    """
    architecture = check_model(model)
    numbers = [check_tokens(number) for number in tokens]
    names = surgery.linear_names(architecture, model.config, LINEAR_COMPONENTS, None)
    present = dict(model.base_model.named_modules(remove_duplicate=False))
    alike: dict[Any, list[nn.Module]] = {}
    for module in (present[name] for name in names if name in present):  # those of heads that are gone are not
        if isinstance(module, NoHeads):
            continue
        key = (features(module), type(module).__name__, _setting(module), module.bias is not None)
        alike.setdefault(key, []).append(module)
    found = []
    for ((inputs, outputs), layer, setting, _), group in track(alike.items(), "Measuring linears", len(alike)):
        module, was_training = group[0], group[0].training
        module.eval()
        plain = surgery.dense_linear(module).eval() if isinstance(module, Derived) else None
        for number in numbers:
            ms, plain_ms = median_ms([module, plain], number) if plain is not None else median_ms([module], number) * 2
            found.append(
                LinearLatency(
                    inputs=inputs,
                    outputs=outputs,
                    layer=layer,
                    setting=setting,
                    count=len(group),
                    tokens=number,
                    path=_path(module, number),
                    ms=ms,
                    plain_ms=plain_ms,
                )
            )
        module.train(was_training)
    return found


def check_tokens(tokens: Any) -> int:
    """Raise ValueError unless it is an integer of at least 1."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens={tokens!r}: must be an integer of at least 1")
    return tokens


def _setting(module: nn.Module) -> str:
    """What the class of factors says of itself, besides its shape."""
    if not isinstance(module, FactorizedLinear):
        return ""
    own = module.extra_repr().removeprefix(DerivedLinear.extra_repr(module)).removeprefix(", ")
    return own.removesuffix(", execution='auto'")


def _path(module: nn.Module, tokens: int) -> str:
    if isinstance(module, FactorizedLinear):
        return module.path(tokens, next(module.parameters()).device.type)
    return "dense" if isinstance(module, Derived) else "plain"
