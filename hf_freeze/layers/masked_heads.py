"""An output projection of attention whose heads are masked while it is trained, and which measures what they are worth.

Shapes: B batch, T tokens, I inputs, N heads. The context of a head is its part of the input.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers.derived import DerivedWeight, linear_like

_MEMORY = 0.99  # what each step leaves of the importance of earlier ones: it is that of about the last hundred


class MaskedHeads(DerivedWeight):
    """A mixin for nn.Linear or Conv1D. `mask` (N,): whether each head is kept. `importance` (N,): by the gradients of recent
    steps. `recent` (N,): what this process has added since `settle` was last called. A save keeps all three, so that a resumed
    training continues exactly.
    """

    until_finalize = True
    own_to_each_process = ("recent",)  # DistributedDataParallel must not send it
    kept_in_fp32 = ("importance", "recent")  # sums over a hundred steps, also in a model that is cast
    weight: nn.Parameter
    mask: torch.Tensor
    importance: torch.Tensor
    recent: torch.Tensor

    @classmethod
    def from_linear(cls, linear: Any, heads: int) -> "MaskedHeads":
        """A fresh layer with the shapes of `linear`; nothing is masked."""
        masked: Any = linear_like(linear, classes=(MaskedHeadsLinear, MaskedHeadsConv1D))
        device = linear.weight.device
        masked.register_buffer("mask", torch.ones(heads, dtype=torch.bool, device=device))
        for name in ("importance", "recent"):
            masked.register_buffer(name, torch.zeros(heads, dtype=torch.float32, device=device))
        return masked

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = {name: self._buffers.get(name) for name in self.kept_in_fp32}
        super()._apply(fn, recurse)
        for name, values in before.items():
            if values is not None and (cast := self.get_buffer(name)).dtype != values.dtype:
                self._buffers[name] = values.to(cast.device)
        return self

    def dense_weight(self) -> torch.Tensor:
        return self.of_heads(self.mask)

    def _sources(self) -> Iterable[Any]:
        return self.weight, self.mask

    def kept(self) -> list[int]:
        """The heads that are not masked."""
        return self.cached("kept", lambda: self.mask.nonzero()[:, 0].tolist(), (self.mask,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        if self.training and torch.is_grad_enabled():
            x = x if x.requires_grad else x.detach().requires_grad_()  # everything before it may be frozen
            x = _Measured.apply(x, self)
        return super().forward(x)

    @torch.no_grad()
    def measure(self, context: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add |Σ over tokens ⟨context, ∂L/∂context⟩| of each head, summed over the examples; both (B, ..., I)."""
        product = (context.float() * gradient).unflatten(-1, (self.mask.numel(), -1)).sum(-1)  # (B, ..., N)
        self.recent += product.flatten(1, -2).sum(1).abs().sum(0) if product.ndim > 2 else product.abs().sum(0)


class MaskedHeadsLinear(MaskedHeads, nn.Linear):
    """An nn.Linear with masked heads."""


class MaskedHeadsConv1D(MaskedHeads, Conv1D):
    """A Conv1D with masked heads."""


class _Measured(torch.autograd.Function):
    """The identity; its backward has `module` measure. A hook on the tensor would keep what checkpointing computes again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: MaskedHeads) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.module.measure(*ctx.saved_tensors, gradient)
        return gradient, None


@torch.no_grad()
def settle(modules: Sequence[MaskedHeads]) -> None:
    """Add what a step has measured, in all processes, to the importance: with several, each of them must call this. A second call
    changes nothing before the next backward, and a step with an infinite gradient does not count."""
    if not modules or modules[0].mask.is_meta:
        return
    sizes, device = [module.mask.numel() for module in modules], modules[0].recent.device
    fresh = torch.cat([module.recent.to(device) for module in modules])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(fresh)
    counts = fresh.isfinite().all() & fresh.any()
    for module, own in zip(modules, fresh.split(sizes), strict=True):
        updated = _MEMORY * module.importance + own.to(module.importance)
        module.importance.copy_(torch.where(counts.to(updated.device), updated, module.importance))
        module.recent.zero_()
