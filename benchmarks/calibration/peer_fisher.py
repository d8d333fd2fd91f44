"""Fisher masks (Kwon et al., 2022, https://arxiv.org/abs/2204.09656), written anew from the paper for this comparison.

Each unit (neuron, head) has a mask of 1. Its importance is the sum over texts of the squared gradient of the loss to it (diagonal
Fisher information); the units of least importance go, over all sublayers together (of heads and neurons together, by the number
of heads that makes the sum least within the weights of the cut). Within each sublayer, units are then swapped greedily by the
whole Fisher matrix of the sublayer, and the masks that stay are fitted so that the sublayer's outputs, with what is added to
them, are those of the whole model (least squares, sublayer by sublayer; one with masks beyond ±10 stays unfitted).
"""

from typing import Any

import blocks
import torch
from torch import nn

PACKAGES: list[str] = []
REQUIREMENTS: list[str] = []
METHODS = {"Fisher masks, rescaled": {"neurons", "heads"}}
CANNOT: dict[tuple[str, ...], str] = {}
_RIDGE, _MOST = 1e-3, 10.0


def compress(model: Any, batches: list[blocks.Batch], job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    chosen = [block for block in blocks.blocks(model) if ("heads" if block.attention else "neurons") in job["cut"]]
    gradients = mask_gradients(model, chosen, batches)
    masks = search(gradients, chosen, job["cut"])
    masks = [rearrange(gradient, mask) for gradient, mask in zip(gradients, masks, strict=True)]
    skipped = tune(model, chosen, masks, batches)
    counts = [int(mask.sum()) for mask in masks]
    return model.state_dict(), {"counts": counts, "unfitted": skipped}


def mask_gradients(model: Any, chosen: list[blocks.Block], batches: list[blocks.Batch]) -> list[torch.Tensor]:
    """For each sublayer the gradient of the loss to each unit's mask, (texts, units)."""
    gathered: list[list[torch.Tensor]] = [[] for _ in chosen]
    masks: list[torch.Tensor] = []

    def hook(number: int, block: blocks.Block) -> Any:
        def multiply(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            states = inputs[0]
            mask = torch.ones(len(states), 1, block.units, requires_grad=True)
            masks.append(mask)
            return (states * mask.repeat_interleave(block.size, -1),)

        return multiply

    handles = [
        model.get_submodule(block.out).register_forward_pre_hook(hook(number, block))
        for number, block in enumerate(chosen)
    ]
    for batch in batches:
        masks.clear()
        loss = blocks.loss_of(model, batch)
        for number, gradient in enumerate(torch.autograd.grad(loss * len(batch["input_ids"]), masks)):
            gathered[number].append(gradient[:, 0])
    for handle in handles:
        handle.remove()
    return [torch.cat(parts).double() for parts in gathered]


def search(gradients: list[torch.Tensor], chosen: list[blocks.Block], cut: dict[str, float]) -> list[torch.Tensor]:
    """Masks of 0 and 1 with the least sum of the importance of what is removed."""
    importance = [
        _grouped((gradient**2).sum(0), block.shared) for gradient, block in zip(gradients, chosen, strict=True)
    ]
    kinds = {kind: [i for i, block in enumerate(chosen) if block.attention == kind] for kind in (True, False)}
    size = {kind: _weights(chosen[kinds[kind][0]]) if kinds[kind] else 0 for kind in kinds}
    ranked = {
        kind: torch.cat([importance[i] for i in kinds[kind]]).sort(descending=True).values
        for kind in kinds
        if kinds[kind]
    }
    shares = {True: cut.get("heads", 0), False: cut.get("neurons", 0)}
    counts = {kind: int(shares[kind] * len(ranked[kind])) for kind in ranked}
    if len(counts) == 2:
        budget = sum(size[kind] * counts[kind] for kind in counts)
        options = []
        for heads in range(len(ranked[True]) + 1):
            neurons = min(int((budget - heads * size[True]) // size[False]), len(ranked[False]))
            if neurons >= 0:
                options.append((float(ranked[True][heads:].sum() + ranked[False][neurons:].sum()), heads, neurons))
        _, heads, neurons = min(options)
        counts = {True: heads, False: neurons}
    masks = [torch.zeros(block.units, dtype=torch.bool) for block in chosen]
    for kind, count in counts.items():
        places = [(float(importance[i][unit]), i, unit) for i in kinds[kind] for unit in range(len(importance[i]))]
        for _, i, unit in sorted(places, reverse=True)[:count]:
            masks[i][unit * chosen[i].shared : (unit + 1) * chosen[i].shared] = True
    return masks


def _grouped(values: torch.Tensor, shared: int) -> torch.Tensor:
    return values.unflatten(0, (-1, shared)).sum(-1)


def _weights(block: blocks.Block) -> int:
    return len(block.linears) * block.size * block.shared


def rearrange(gradient: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Swap units so that the squared sum of the removed units' gradients gets smaller, as many as before: from the least
    important unit that stays upwards, each is removed in turn, and the unit whose return makes the sum least comes back."""
    fisher = gradient.T @ gradient
    removed = ~mask
    if removed.all() or mask.all():
        return mask
    total = fisher[:, removed].sum(1)
    for unit in fisher.diag().argsort().tolist():
        if removed[unit]:
            continue
        removed[unit] = True
        total = total + fisher[unit]
        change = fisher.diag() - 2 * total  # of the squared sum, if a unit comes back
        change[~removed] = float("inf")
        back = int(change.argmin())
        removed[back] = False
        total = total - fisher[back]
    return ~removed


def tune(model: Any, chosen: list[blocks.Block], masks: list[torch.Tensor], batches: list[blocks.Batch]) -> int:
    """Fit the masks that stay, sublayer by sublayer, and multiply them into the output matrices. Returns how many were left."""
    targets = [_targets(model, block, batches) for block in chosen]
    skipped = 0
    for block, mask, target in zip(chosen, masks, targets, strict=True):
        blocks.remove_units(model, block, mask.nonzero()[:, 0].tolist())
        if not mask.any():
            continue
        weight = blocks.weight(model, block.out).double()
        gram, cross = torch.zeros(weight.shape[1], weight.shape[1]).double(), torch.zeros(*weight.shape).double()
        for (residual, state), wanted in zip(blocks.inputs_of(model, _names(block), batches), target, strict=True):
            state = state.double()
            gram += state.T @ state
            cross += (wanted - residual.double()).T @ state  # (O, I)
        products = (
            ((weight.T @ weight) * gram).unflatten(0, (-1, block.size)).sum(1).unflatten(1, (-1, block.size)).sum(-1)
        )
        right = (weight * cross).sum(0).unflatten(0, (-1, block.size)).sum(-1)
        products, right = products[mask][:, mask], right[mask]
        ridge = _RIDGE * products.diag().mean()
        fitted = torch.linalg.solve(products + ridge * torch.eye(len(products)).double(), right + ridge)
        if fitted.abs().max() > _MOST:
            skipped += 1
            continue
        scale = torch.zeros(block.units).double()
        scale[mask] = fitted
        blocks.weight(model, block.out).copy_(weight * scale.repeat_interleave(block.size))
    return skipped


def _targets(model: Any, block: blocks.Block, batches: list[blocks.Batch]) -> list[torch.Tensor]:
    """What the whole sublayer adds (without its bias), and what it is added to: for each batch (tokens, D)."""
    weight = blocks.weight(model, block.out).clone()
    inputs = blocks.inputs_of(model, _names(block), batches)
    return [(state @ weight.T + residual).double() for residual, state in inputs]


def _names(block: blocks.Block) -> tuple[str, str]:
    return block.residual, block.out
