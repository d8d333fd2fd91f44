"""Sparse variational dropout (Molchanov et al., 2017, https://arxiv.org/abs/1701.05369)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.variational import Variational
from hf_freeze.methods._ramps import ramp
from hf_freeze.methods._sparse import SPARSE, SparseMethod
from hf_freeze.methods.base import Model
from hf_freeze.methods.checks import check_fields, check_positive, check_share, number_in
from hf_freeze.methods.parts import Objective, Part, Schedule, Step
from hf_freeze.methods.registry import register_method

_MOST_LOG_SIGMA = 40  # keeps σ² finite and above 0 in float32, and so in bfloat16
_MOST_KL = 1e9
_MOST_THRESHOLD = 1e9  # exceeds any log α: at this threshold all weights remain, at minus this none


@register_method(
    "variational_dropout",
    example={"training_size": 50, "threshold": -6.0, "warmup": 0.0},
    facts=replace(SPARSE, stochastic=True),
)
@dataclass(frozen=True, kw_only=True)
class VariationalDropout(SparseMethod):
    """Train every weight as θ + σ ε and drop weights with log α = log σ²/θ² of at least `threshold` (3: the noise has a
    variance of 20 times the squared weight). θ starts at the weight, σ at exp(`log_sigma`).

    Training adds β · λ · Σ KL to the mean loss per label. λ is `kl_weight` / `training_size`, where `training_size` is the
    number of labels of one epoch (target tokens, or examples of a classifier) and a `kl_weight` of 1 is the bound of the paper;
    or `kl_lambda` itself, whatever the size of the data. β rises linearly from 0 to 1 over the share `warmup` of training; unless
    `warmup` is 0, this needs `VariantCallback` or `model.advance`. A custom loss must add `outputs["auxiliary_loss"]`.
    Weight decay on these weights works against the prior: switch it off. In eval mode the dropped weights are zero and there is
    no noise. `finalize()` fixes the mask and stores the remaining weights in a sparse format; you may fine-tune afterwards.

    Raises ValueError for a training_size below 1 or, without kl_lambda, missing when training, a kl_weight or kl_lambda outside
    0..1e9, kl_lambda together with training_size or kl_weight, a warmup outside 0..1, a threshold outside ±1e9, a
    log_sigma outside ±40, an unknown component or layer, or a linear that another method has changed.
    """

    training_size: int | None = None
    threshold: float = 3.0
    log_sigma: float = -5.0
    warmup: float = 1 / 3
    kl_weight: float = 1.0
    kl_lambda: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        divergence = dict.fromkeys(("kl_weight", "kl_lambda"), number_in(0, _MOST_KL))
        log_sigma, threshold = (number_in(-most, most) for most in (_MOST_LOG_SIGMA, _MOST_THRESHOLD))
        check_fields(self, **divergence, log_sigma=log_sigma, threshold=threshold)
        check_fields(self, training_size=check_positive, warmup=check_share)
        if self.kl_lambda is not None and (self.training_size is not None or self.kl_weight != 1):
            raise ValueError(
                f"VariationalDropout(kl_lambda={self.kl_lambda!r}): stands for kl_weight / training_size; leave out "
                f"training_size={self.training_size!r} and kl_weight={self.kl_weight!r}"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        if self.nonzeros is not None:
            return ()
        return (_Divergence(self), _WarmUp(self)) if self.warmup > 0 else (_Divergence(self),)

    def training_module(self, linear: Any) -> nn.Module:
        return Variational.from_linear(linear, threshold=self.threshold, log_sigma=self.log_sigma)


class _Divergence(Objective):
    """The KL term of Molchanov et al. (2017), equation 14, times λ."""

    def loss(self, model: Model, architecture: Architecture, step: Step | None = None) -> torch.Tensor | None:
        method = self.method
        if method.kl_lambda is None and method.training_size is None:
            raise ValueError(
                "VariationalDropout(training_size=None): training needs the number of labels of one epoch, to weigh the KL "
                "term, or kl_lambda"
            )
        total: Any = sum(module.kl() for _, module in method.modules(model, architecture))
        if method.training_size is None:
            return total * method.kl_lambda
        return total * method.kl_weight / method.training_size


class _WarmUp(Schedule):
    """The factor β of the KL term: it rises from 0 to 1."""

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        return {"weight of the KL term": ramp("linear", step / total_steps / self.method.warmup)}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        (weight,) = self.values(step, total_steps).values()
        for _, module in self.method.modules(model, architecture):
            module.kl_weight = weight
