"""The perplexity of a causal language model on one long text, in windows, as papers on compression report it for WikiText-2."""

import torch
from torch import Tensor
from torch.nn import functional

from hf_freeze.model.running import in_eval_mode, without_cache


@torch.no_grad()
def window_losses(model: torch.nn.Module, ids: Tensor, window: int, *, batch_size: int = 1) -> Tensor:
    """(W,) float64: the mean negative log-likelihood of a token, in nats, in each of the W windows.

    `ids`: (T,) tokens of the whole text, cut into windows of `window` tokens that do not overlap. As in Frantar et al. (2022,
    GPTQ, section 4, https://arxiv.org/abs/2210.17323) and its code, each window is read alone: its first token is given and not
    predicted, and the last, incomplete window is dropped. `batch_size`: windows in a forward. The log-softmax is computed in
    fp32, for one window at a time, also where the model computes in half precision.

    Raises ValueError for a window below 2 tokens, a batch below 1 window, and fewer than 2 windows.
    """
    if window < 2 or batch_size < 1:
        raise ValueError(f"window {window}, batch_size {batch_size}: at least 2 tokens and 1 window")
    if len(ids) < 2 * window:
        hint = f"choose a window of at most {len(ids) // 2}" if len(ids) >= 4 else "give a longer text"
        raise ValueError(f"{len(ids):,} tokens are fewer than two windows of {window}: {hint}")
    windows = ids[: len(ids) // window * window].view(-1, window)
    losses = []
    with in_eval_mode(model), without_cache(model):
        for batch in windows.split(batch_size):
            batch = batch.to(next(model.parameters()).device)
            for logits, tokens in zip(model(input_ids=batch).logits, batch, strict=True):
                losses.append(functional.cross_entropy(logits[:-1].float(), tokens[1:]).item())
    return torch.tensor(losses, dtype=torch.float64)


def window_perplexity(model: torch.nn.Module, ids: Tensor, window: int, *, batch_size: int = 1) -> float:
    """exp of the mean of `window_losses`, for (T,) `ids`: every predicted token counts the same. Raises the same ValueErrors."""
    return float(window_losses(model, ids, window, batch_size=batch_size).mean().exp())
