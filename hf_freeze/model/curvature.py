"""What an error in the outputs of a linear does to the outputs of the model, without labels."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_freeze.model.fidelity import compared_output, real_tokens
from hf_freeze.model.watching import hooked

_ROWS = 128  # texts: means over their tokens settle early


def curvatures(model: Any, batches: Sequence[Mapping[str, Any]], linears: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Linear -> (O, O) fp64, A: an error e of its output, (O,), at each token adds about eᵀAe / 2 to the KL between the model's
    predictions without and with it, summed over a text and divided by its tokens.

    A is the mean of g gᵀ over tokens, with g the gradient of the log-likelihood of predictions that are drawn from the model
    itself: the Fisher information (Martens, 2020, https://arxiv.org/abs/1412.1193, section 8.2). For models that give states
    in place of logits, of the squared error of these, with g the gradient of their sum with random signs. Linears that do not run
    are missing. Both models of a pair get the same draws. Raises ValueError for outputs that are not finite.
    """
    sums: dict[str, Tensor] = {}
    tokens = rows = 0
    with torch.enable_grad(), torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(0)
        for batch in batches:
            outputs: dict[str, Tensor] = {}

            def keep(
                name: str, module: nn.Module, args: Any, kwargs: Any, output: Tensor, outputs: Any = outputs
            ) -> Tensor:
                _check_finite(output, repr(name))
                outputs[name] = output if output.requires_grad else output.detach().requires_grad_()
                return outputs[name]

            with hooked([(module, functools.partial(keep, name)) for name, module in linears.items()]):
                result = model(**batch)
            output, kind = compared_output(result)
            _check_finite(output, "the model")
            real = real_tokens(batch, output)
            gradients = torch.autograd.grad(
                _drawn_loss(output[real.to(output.device)], kind), list(outputs.values()), materialize_grads=True
            )
            for name, gradient in zip(outputs, gradients, strict=True):
                g = gradient.detach().reshape(-1, gradient.shape[-1]).double()
                sums[name] = sums.get(name, 0) + g.T @ g
            tokens, rows = tokens + int(real.sum()), rows + len(output)
            if rows >= _ROWS:
                break
    return {name: total / max(tokens, 1) for name, total in sums.items()}


def _check_finite(output: Tensor, whose: str) -> None:
    if not output.isfinite().all():
        raise ValueError(f"calibration: the outputs of {whose} are not finite")


def _drawn_loss(output: Tensor, kind: str) -> Tensor:
    """The scalar whose gradients are taken; `output`: (T, F) of real tokens."""
    output = output.float()
    if kind == "logits" and output.shape[-1] > 1:
        logarithms = output.log_softmax(-1)
        drawn = torch.distributions.Categorical(logits=logarithms.detach()).sample()
        return -logarithms.gather(-1, drawn[..., None]).sum()
    return (output * torch.randint_like(output, 0, 2).mul(2).sub(1)).sum()
