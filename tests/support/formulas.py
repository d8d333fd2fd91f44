"""Layers computed token by token from their papers' formulas."""

import torch


def by_formulas(module, x, mask=None):
    """§3 of Wu et al. (2019), with a GLU where kernels are dynamic, tap by tap. `x`: (batch, tokens, channels)."""
    channels = x.shape[-1]
    x = x @ module.expand.weight.T + module.expand.bias
    if module.dynamic:
        x = x[..., :channels] * torch.sigmoid(x[..., channels:])
    if mask is not None:
        x = torch.where(mask[..., None], x, 0)
    size, made = channels // module.heads, []
    for t in range(x.shape[1]):
        scores = x[:, t] @ module.kernel.weight.T if module.dynamic else module.kernel.flatten().expand(len(x), -1)
        kernels = torch.exp(scores).reshape(len(x), module.heads, module.taps)
        kernels = kernels / kernels.sum(-1, keepdim=True)
        total = torch.zeros_like(x[:, t])
        for k in range(module.taps):
            place = t - (module.taps - 1 - k if module.causal else (module.taps - 1) // 2 - k)
            if 0 <= place < x.shape[1]:
                total = total + kernels[:, :, k].repeat_interleave(size, dim=1) * x[:, place]
        made.append(total)
    return torch.stack(made, dim=1) @ module.project.weight.T + module.project.bias
