"""Checks, progress, and what is seen of a model while it runs, for everything here."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from transformers import PreTrainedModel

from hf_freeze.architectures.base import Architecture
from hf_freeze.architectures.registry import architecture_for

T = TypeVar("T")


def check_model(model: Any) -> Architecture:
    """The architecture. Raises ValueError for what is no model, for one on meta and for an unknown architecture."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"needs a model with trained weights, not a {type(model).__name__}")
    architecture = architecture_for(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"this {type(model).__name__} is on meta and has no values: load it with its weights")
    return architecture


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Seen on a terminal only, and gone when all is done."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar."""
    with progress_bar() as progress:
        yield from progress.track(items, description=description, total=total)


def batches_on(model: Any, dataloader: Any, doing: str) -> Iterator[dict[str, Any]]:
    """Each on the device of the model. Raises ValueError for a batch that is no dict, and where there is none."""
    number, total = 0, len(dataloader) if hasattr(dataloader, "__len__") else None
    for number, batch in enumerate(track(dataloader, doing, total), 1):  # noqa: B007
        if not isinstance(batch, Mapping):
            raise ValueError(f"a batch is a dict of tensors for the forward, not a {type(batch).__name__}")
        yield {name: v.to(model.device) if torch.is_tensor(v) else v for name, v in batch.items()}
    if not number:
        raise ValueError("the dataloader is empty (or was used up before)")


@contextmanager
def inputs_seen(
    linears: dict[str, nn.Module], note: Callable[[str, torch.Tensor], torch.Tensor | None]
) -> Iterator[None]:
    """`note(block, input)` in every forward of the linear of this block; what it returns takes the place of the input."""

    def hook(block: str, module: nn.Module, arguments: tuple[torch.Tensor]) -> Any:
        return note(block, arguments[0])

    handles = [linear.register_forward_pre_hook(functools.partial(hook, block)) for block, linear in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loss_of(model: Any, batch: dict[str, Any], what: str) -> torch.Tensor:
    """Raises ValueError for a batch without labels, which names `what` needs them."""
    loss = model(**batch).get("loss")
    if loss is None:
        raise ValueError(f"{what} needs a loss: batches with labels, not only {sorted(batch)}")
    return loss


def inputs_and_gradients(
    model: Any, batch: dict[str, Any], linears: dict[str, nn.Module], what: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of the linear of each block that has run: its input and the gradient of the loss of `batch` with respect to it.

    Raises ValueError for a batch without labels, which names `what` needs them.
    """
    seen: dict[str, torch.Tensor] = {}

    def note(block: str, x: torch.Tensor) -> torch.Tensor:
        seen[block] = x if x.requires_grad else x.detach().requires_grad_()  # below it, all may be frozen
        return seen[block]

    with inputs_seen(linears, note), torch.enable_grad():
        loss = loss_of(model, batch, what)
    gradients = torch.autograd.grad(loss, list(seen.values()), materialize_grads=True)
    return {block: (x.detach(), gradient) for (block, x), gradient in zip(seen.items(), gradients, strict=True)}


def token_mask(architecture: Architecture, model: Any, batch: Any, block: str, x: torch.Tensor) -> torch.Tensor:
    """bool (B, T): the tokens of this stack that are not padding; `x` is (B, T, F)."""
    mask = batch.get("attention_mask")
    if model.config.is_encoder_decoder and block.split(".")[0] == "decoder":
        mask = batch.get("decoder_attention_mask")
        if mask is None and batch.get("labels") is not None:
            mask = batch["labels"] != -100
    if mask is None:
        return torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if mask.shape != x.shape[:-1]:
        raise ValueError(
            f"the padding mask of {block!r} has the shape {tuple(mask.shape)}, its tokens have {tuple(x.shape[:-1])}"
        )
    return mask.bool()


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # from the outside inwards
            module.train(mode)
