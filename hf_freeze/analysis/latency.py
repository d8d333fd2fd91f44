"""Measure how long the linears of a model take on this machine."""

import functools
import statistics
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.analysis._probe import check_model
from hf_freeze.architectures.base import LINEAR_COMPONENTS
from hf_freeze.layers.derived import Derived, DerivedLinear, features, first_float_tensor
from hf_freeze.layers.factorized import FactorizedLinear
from hf_freeze.layers.no_attention import NoHeads
from hf_freeze.progress import track

_ROUNDS, _SECONDS = 5, 0.01  # rounds per layer, and the approximate length of one


def median_ms(layers: Sequence[nn.Module], tokens: int) -> list[float]:
    """The median time in ms of a forward of `tokens` tokens without gradients, for each of `layers`, which have one shape.

    The layers are warm and keep their mode, device and dtype; torch keeps its number of threads. The layers take turns, so that
    other load on the machine affects all of them.
    """
    weight = next(layers[0].parameters())
    x = torch.randn(1, tokens, features(layers[0])[0], generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype)
    synchronize = torch.cuda.synchronize if weight.is_cuda else lambda: None
    timers = [timeit.Timer(functools.partial(_forward, layer, x, synchronize)) for layer in layers]
    times: list[list[float]] = [[] for _ in layers]
    with torch.no_grad():
        # Calls are timed one by one, so that an interrupted call is an outlier. The first calls also fill the layers' caches.
        calls = [max(3, min(50, int(_SECONDS / min(timer.repeat(5, 1))))) for timer in timers]
        for _ in range(_ROUNDS):
            for timer, count, seconds in zip(timers, calls, times, strict=True):
                seconds.extend(timer.repeat(count, 1))
    return [1000 * statistics.median(seconds) for seconds in times]


def _forward(layer: nn.Module, x: torch.Tensor, synchronize: Callable[[], None]) -> None:
    layer(x)
    synchronize()


@dataclass(frozen=True, kw_only=True)
class LinearLatency:
    """The measured time of `count` equal linears of a model: their `inputs`, `outputs`, class (`layer`) and its `setting`.

    `path`: how a forward of `tokens` tokens without gradients is computed: `"plain"` by a native linear, `"dense"` with a cached
    weight, `"factors"` without one. `ms`: the median time of one of them; `plain_ms`: that of a native linear of this shape.
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
    """Measure each distinct linear of attention and FFN, of a variant or a native model, for each number of `tokens`.

    The linears are measured in eval mode. Raises ValueError for a number of tokens below 1, a model on meta, and an unknown
    architecture.
    """
    architecture = check_model(model)
    numbers = [check_tokens(number) for number in tokens]
    names = surgery.linear_names(architecture, model.config, LINEAR_COMPONENTS, None)
    present = dict(model.base_model.named_modules(remove_duplicate=False))
    groups: dict[Any, list[nn.Module]] = {}
    for module in (present[name] for name in names if name in present):  # removed heads leave no modules
        if isinstance(module, NoHeads):
            continue
        key = (features(module), type(module).__name__, _setting(module), module.bias is not None)
        groups.setdefault(key, []).append(module)
    latencies = []
    for ((inputs, outputs), layer, setting, _), group in track(groups.items(), "Measuring linears", len(groups)):
        module, was_training = group[0], group[0].training
        module.eval()
        plain = surgery.dense_linear(module).eval() if isinstance(module, Derived) else None
        for number in numbers:
            ms, plain_ms = median_ms([module, plain], number) if plain is not None else median_ms([module], number) * 2
            latencies.append(
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
    return latencies


def check_tokens(tokens: Any) -> int:
    """Return `tokens`. Raises ValueError unless it is an integer of at least 1."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens={tokens!r}: must be an integer of at least 1")
    return tokens


def _setting(module: nn.Module) -> str:
    """The settings of a replaced linear besides its shape, such as a rank, as its repr shows them; "" for other linears."""
    if not isinstance(module, DerivedLinear):
        return ""
    own = module.extra_repr().removeprefix(DerivedLinear.extra_repr(module)).removeprefix(", ")
    return own.removesuffix(", execution='auto'")


def _path(module: nn.Module, tokens: int) -> str:
    if isinstance(module, FactorizedLinear):
        return module.path(tokens, first_float_tensor(module).device.type)
    return "dense" if isinstance(module, Derived) else "plain"
