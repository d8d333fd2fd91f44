"""A linear of which some weights are zero and stay so, whatever the optimiser does: the mask acts in the forward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers.bits import pack, packed_size, unpack
from hf_freeze.layers.derived import linear_like
from hf_freeze.layers.sparse import Sparsifiable


class Masked(Sparsifiable):
    """`mask`: the bits of `weight`, in its order."""

    mask: torch.Tensor

    @classmethod
    def take_place_of(cls, linear: Any) -> "Masked":
        """A fresh one of the same shapes; nothing is masked."""
        made: Any = linear_like(linear, classes=(MaskedLinear, MaskedConv1D))
        ones = torch.full((packed_size(linear.weight.numel()),), 255, dtype=torch.uint8, device=linear.weight.device)
        made.register_buffer("mask", ones)
        return made

    def kept_entries(self) -> torch.Tensor:
        return self.keep(
            "entries", lambda: unpack(self.mask, self.weight.numel()).view(self.weight.shape), (self.mask,)
        )

    def zeros(self) -> int:
        """How many weights are masked."""
        return self.keep("zeros", lambda: int((~self.kept_entries()).sum()), (self.mask,))


class MaskedLinear(Masked, nn.Linear):
    """An nn.Linear with a mask."""


class MaskedConv1D(Masked, Conv1D):
    """A Conv1D with a mask."""


@torch.no_grad()
def prune_smallest(modules: Sequence[Masked], sparsity: float, scope: str) -> None:
    """Mask the smallest weights of what is left until the share `sparsity` is masked, of all modules together (`"global"`) or of
    each (`"layer"`). What is masked stays masked. On meta it does nothing."""
    if any(module.mask.is_meta for module in modules):  # without values nothing is smaller than anything
        return
    for group in [modules] if scope == "global" else [[module] for module in modules]:
        removed = round(sparsity * sum(m.weight.numel() for m in group)) - sum(m.zeros() for m in group)
        if removed <= 0:
            continue
        kept = [module.kept_entries() for module in group]
        sizes = torch.cat([module.weight[entries].abs().float() for module, entries in zip(group, kept, strict=True)])
        limit = sizes.kthvalue(removed).values
        left = sizes >= limit
        ties = (sizes == limit).nonzero()[:, 0]
        left[ties[: removed - int((~left).sum())]] = False  # exactly so many, whatever ties there are
        start = 0
        for module, entries in zip(group, kept, strict=True):
            count = int(entries.sum())
            following = entries.clone()
            following[entries] = left[start : start + count]
            module.mask.copy_(pack(following))
            start += count
