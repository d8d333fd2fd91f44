"""A linear in which every weight is a normal random variable (Molchanov et al., 2017, "Variational dropout sparsifies deep
neural networks", https://arxiv.org/abs/1701.05369).

w = θ + σ ε, and α = σ² / θ². A weight with large α is mostly noise and is dropped.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers.derived import linear_like, without_autocast
from hf_freeze.layers.sparse import Sparsifiable

_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695  # Molchanov et al., equation 14


def negative_kl(log_alpha: torch.Tensor) -> torch.Tensor:
    """-KL of a weight to the log-uniform prior, in nats, up to a constant: it is 0 for α → ∞ (equation 14)."""
    # softplus(-log α) by operations that the tensors of load_sharded have in torch 2.8 as well.
    softplus = torch.logaddexp(-log_alpha, torch.zeros_like(log_alpha))
    return _K1 * torch.sigmoid(_K2 + _K3 * log_alpha) - 0.5 * softplus - _K1


class Variational(Sparsifiable):
    """`weight` is θ; `log_sigma` has the same shape.

    `kl_weight`: β, set by the method's warm-up. Train θ and log σ without weight decay.
    """

    log_sigma: nn.Parameter
    threshold: float
    initial: float
    kl_weight = 1.0

    @classmethod
    def from_linear(cls, linear: Any, *, threshold: float, log_sigma: float) -> "Variational":
        """A fresh layer with the shapes of `linear` and σ = exp(`log_sigma`)."""
        variational: Any = linear_like(linear, classes=(VariationalLinear, VariationalConv1D))
        variational.log_sigma = nn.Parameter(torch.full_like(variational.weight, log_sigma))
        variational.threshold, variational.initial = threshold, log_sigma
        return variational

    def initialize_parameters(self) -> None:
        initialization.constant_(self.log_sigma, self.initial)

    def log_alpha(self) -> torch.Tensor:
        """log α = log σ² - log θ², fp32, in the shape of `weight`."""
        return 2 * self.log_sigma.float() - 2 * torch.log(self.weight.float().abs() + 1e-16)

    def kept_entries(self) -> torch.Tensor:
        """bool, in the shape of `weight`: True where log α is below the threshold."""
        return (self.log_alpha() < self.threshold).detach()

    def kl(self) -> torch.Tensor:
        """β times the KL divergence of all weights, in nats; log α is clipped to ±10."""
        with without_autocast(self.weight.device.type):
            return -self.kl_weight * negative_kl(self.log_alpha().clamp(-10, 10)).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O). In training, each output is drawn from a normal distribution with mean xθᵀ + b and variance
        x² (σ²)ᵀ (local reparametrisation)."""
        if not self.training:
            return super().forward(x)
        theta, variances = self.weight, (2 * self.log_sigma).exp()
        if isinstance(self, Conv1D):
            theta, variances = theta.T, variances.T
        mean = functional.linear(x, theta, self.bias)
        variance = functional.linear(x.square(), variances)
        return mean + (variance + 1e-8).sqrt() * torch.randn_like(mean)


class VariationalLinear(Variational, nn.Linear):
    """An nn.Linear with variational dropout."""


class VariationalConv1D(Variational, Conv1D):
    """A Conv1D with variational dropout."""
