"""A linear with masked weights. The mask is applied in the forward, so that masked weights act as zero whatever the optimiser
does."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers.bits import pack, packed_size, unpack
from hf_freeze.layers.derived import linear_like
from hf_freeze.layers.sparse import Sparsifiable


class Masked(Sparsifiable):
    """`mask` has one bit for each entry of `weight`, in the same order; 1 keeps the entry."""

    mask: torch.Tensor

    @classmethod
    def from_linear(cls, linear: Any) -> "Masked":
        """A fresh layer with the shapes of `linear`; nothing is masked."""
        masked: Any = linear_like(linear, classes=(MaskedLinear, MaskedConv1D))
        ones = torch.full((packed_size(linear.weight.numel()),), 255, dtype=torch.uint8, device=linear.weight.device)
        masked.register_buffer("mask", ones)
        return masked

    def kept_entries(self) -> torch.Tensor:
        return self.cached(
            "entries", lambda: unpack(self.mask, self.weight.numel()).view(self.weight.shape), (self.mask,)
        )

    @torch.no_grad()
    def keep(self, entries: torch.Tensor) -> None:
        """Mask all entries but these: bool, in the shape of `weight`."""
        self.mask.copy_(pack(entries))

    def zeros(self) -> int:
        """The number of masked weights."""
        return self.cached("zeros", lambda: int((~self.kept_entries()).sum()), (self.mask,))


class MaskedLinear(Masked, nn.Linear):
    """An nn.Linear with a mask."""


class MaskedConv1D(Masked, Conv1D):
    """A Conv1D with a mask."""


@torch.no_grad()
def prune_smallest(modules: Sequence[Masked], sparsity: float, scope: str) -> None:
    """Mask the smallest unmasked weights until the share `sparsity` of all weights is masked.

    `scope`: `"global"` compares and counts weights over all modules together, `"layer"` in each module separately. Masked
    weights stay masked. Does nothing on meta.
    """
    if any(module.mask.is_meta for module in modules):  # there are no values to compare
        return
    for group in [modules] if scope == "global" else [[module] for module in modules]:
        to_mask = round(sparsity * sum(m.weight.numel() for m in group)) - sum(m.zeros() for m in group)
        if to_mask <= 0:
            continue
        kept = [module.kept_entries() for module in group]
        sizes = torch.cat([module.weight[entries].abs().float() for module, entries in zip(group, kept, strict=True)])
        threshold = sizes.kthvalue(to_mask).values
        survives = sizes >= threshold
        ties = (sizes == threshold).nonzero()[:, 0]
        survives[ties[: to_mask - int((~survives).sum())]] = False  # mask exactly `to_mask` weights despite ties
        start = 0
        for module, entries in zip(group, kept, strict=True):
            count = int(entries.sum())
            new_mask = entries.clone()
            new_mask[entries] = survives[start : start + count]
            module.keep(new_mask)
            start += count
