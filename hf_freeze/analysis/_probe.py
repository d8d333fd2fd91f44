"""Run a model on batches, and observe or replace the inputs of its linears."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_freeze.architectures.base import Architecture
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.model.running import on_device
from hf_freeze.progress import track


def check_model(model: Any) -> Architecture:
    """The architecture of `model`. Raises ValueError for other objects, a model on meta and an unknown architecture."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"needs a model with trained weights, not a {type(model).__name__}")
    architecture = architecture_for(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"this {type(model).__name__} is on meta and has no values: load it with its weights")
    return architecture


def batches_on(model: Any, dataloader: Any, description: str) -> Iterator[dict[str, Any]]:
    """The batches on the device of the model, with a progress bar. Raises ValueError for a batch that is no dict, and for an
    empty dataloader."""
    number, total = 0, len(dataloader) if hasattr(dataloader, "__len__") else None
    for number, batch in enumerate(track(dataloader, description, total), 1):  # noqa: B007
        if not isinstance(batch, Mapping):
            raise ValueError(f"a batch is a dict of tensors for the forward, not a {type(batch).__name__}")
        yield on_device(model, batch)
    if not number:
        raise ValueError("the dataloader is empty (or was used up before)")


@contextmanager
def input_hooks(
    linears: dict[str, nn.Module], observe: Callable[[str, torch.Tensor], torch.Tensor | None]
) -> Iterator[None]:
    """Call `observe(block, input)` before every forward of the linear of a block. A returned tensor replaces the input."""

    def hook(block: str, module: nn.Module, arguments: tuple[torch.Tensor]) -> Any:
        return observe(block, arguments[0])

    handles = [linear.register_forward_pre_hook(functools.partial(hook, block)) for block, linear in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loss_of(model: Any, batch: dict[str, Any], owner: str) -> torch.Tensor:
    """The loss of `batch`. Raises ValueError for a batch without labels; `owner` is the function that needs the loss."""
    loss = model(**batch).get("loss")
    if loss is None:
        raise ValueError(f"{owner} needs a loss: batches with labels, not only {sorted(batch)}")
    return loss


def inputs_and_gradients(
    model: Any, batch: dict[str, Any], linears: dict[str, nn.Module], owner: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Block -> (input of its linear, gradient of the loss of `batch` with respect to this input), for blocks that have run.

    Raises ValueError for a batch without labels; `owner` is the function that needs them.
    """
    inputs: dict[str, torch.Tensor] = {}

    def observe(block: str, x: torch.Tensor) -> torch.Tensor:
        inputs[block] = x if x.requires_grad else x.detach().requires_grad_()  # all earlier parameters may be frozen
        return inputs[block]

    with input_hooks(linears, observe), torch.enable_grad():
        loss = loss_of(model, batch, owner)
    gradients = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
    return {block: (x.detach(), gradient) for (block, x), gradient in zip(inputs.items(), gradients, strict=True)}
