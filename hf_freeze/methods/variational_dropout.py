"""Sparse variational dropout (Molchanov et al., 2017, https://arxiv.org/abs/1701.05369)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.variational import Variational
from hf_freeze.methods._linear import check_positive, check_share
from hf_freeze.methods._ramps import ramp
from hf_freeze.methods._sparse import SparseMethod
from hf_freeze.methods.base import Model
from hf_freeze.methods.parts import Objective, Part, Schedule, Step
from hf_freeze.methods.registry import register_method

_MOST_LOG_SIGMA = 40  # σ² stays a number of float32, and so of bfloat16
_MOST_THRESHOLD = 1e9  # beyond any log α: all weights are left, or none


def _check_number(value: Any, what: str, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -most <= value <= most:
        raise ValueError(f"{what}={value!r}: must be a number in {-most:g}..{most:g}")


@register_method(
    "variational_dropout",
    example={"training_size": 50, "threshold": -6.0, "warmup": 0.0},
    shrinks=True,
    stochastic=True,
)
@dataclass(frozen=True, kw_only=True)
class VariationalDropout(SparseMethod):
    """Train every weight as θ + σ ε and drop those with log α = log σ²/θ² of at least `threshold` (3: noise of 20 times the
    weight's square). θ starts at the weight; σ at exp(`log_sigma`).

    Training adds β / `training_size` · Σ KL to the mean loss of a label; `training_size` is the number of labels of one epoch
    (target tokens, or examples of a classifier). β rises linearly from 0 to 1 over the share `warmup` of training, which needs
    `VariantCallback` or `model.advance`, unless it is 0. A loss of your own finds the term in `outputs["auxiliary_loss"]`.
    Weight decay on these weights fights the prior: leave it off. In eval mode the dropped weights are zero and there is no
    noise. `finalize()` fixes the mask and stores what is left sparse; then fine-tune, if you like.

    Raises ValueError for a training_size below 1 or missing when training, a warmup outside 0..1, a threshold outside ±1e9, a
    log_sigma outside ±40, an unknown component or layer, or a linear that another method has changed.
    """

    training_size: int | None = None
    threshold: float = 3.0
    log_sigma: float = -5.0
    warmup: float = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training_size is not None:
            check_positive(self.training_size, "VariationalDropout: training_size")
        _check_number(self.threshold, "VariationalDropout: threshold", _MOST_THRESHOLD)
        _check_number(self.log_sigma, "VariationalDropout: log_sigma", _MOST_LOG_SIGMA)
        check_share(self.warmup, "VariationalDropout: warmup")

    @property
    def parts(self) -> tuple[Part, ...]:
        if not self.finalizable:
            return ()
        return (_Divergence(self), _WarmUp(self)) if self.warmup > 0 else (_Divergence(self),)

    def unfinished(self, linear: Any, name: str) -> nn.Module:
        return Variational.from_linear(linear, threshold=self.threshold, log_sigma=self.log_sigma)


class _Divergence(Objective):
    """The KL term of Molchanov et al. (2017), equation 14, per label."""

    def __init__(self, method: VariationalDropout) -> None:
        self.method = method

    def loss(self, model: Model, architecture: Architecture, step: Step | None = None) -> torch.Tensor | None:
        if self.method.training_size is None:
            raise ValueError(
                "VariationalDropout(training_size=None): training needs the number of labels of one epoch, to weigh the KL term"
            )
        return sum(module.kl() for _, module in self.method.modules(model, architecture)) / self.method.training_size  # type: ignore[return-value]


class _WarmUp(Schedule):
    """The factor β of the KL term, which rises from 0 to 1."""

    def __init__(self, method: VariationalDropout) -> None:
        self.method = method

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        return {"weight of the KL term": ramp("linear", step / total_steps / self.method.warmup)}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        (weight,) = self.values(step, total_steps).values()
        for _, module in self.method.modules(model, architecture):
            module.kl_weight = weight
