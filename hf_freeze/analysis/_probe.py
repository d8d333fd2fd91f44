"""Run a model on batches: its loss, also with parts changed, and the inputs of its linears."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compat.transformers import mapped_class
from hf_freeze.model.running import on_device
from hf_freeze.progress import track

P = TypeVar("P")


def check_model(model: Any) -> Architecture:
    """The architecture of `model`. Raises ValueError for other objects, a model on meta and an unknown architecture."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"needs a model with trained weights, not a {type(model).__name__}")
    architecture = architecture_for(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"this {type(model).__name__} is on meta and has no values: load it with its weights")
    return architecture


def check_scores(scores: Mapping[str, Any], owner: str, of: str) -> None:
    """Raises ValueError unless each name has finite numbers in a tensor with one dimension, of heads or neurons (`of`)."""
    if not scores:
        raise ValueError(f"{owner}: no scores")
    for name, values in scores.items():
        if not torch.is_tensor(values) or values.ndim != 1 or not values.numel() or not values.isfinite().all():
            raise ValueError(f"{owner}: the scores of {name!r} must be finite numbers in a tensor ({of},)")


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

    with ExitStack() as stack:
        for block, linear in linears.items():
            stack.enter_context(linear.register_forward_pre_hook(functools.partial(hook, block)))
        yield


def loss_of(model: Any, batch: dict[str, Any], owner: str) -> torch.Tensor:
    """The loss of `batch`. Raises ValueError for a batch without labels; `owner` is the function that needs the loss."""
    loss = model(**batch).get("loss")
    if loss is None:
        raise ValueError(f"{owner} needs a loss: batches with labels, not only {sorted(batch)}")
    return loss


def count_labels(model: Any, batch: Mapping[str, Any]) -> int:
    """The number of labels over which the loss of the batch is a mean."""
    labels = batch.get("labels")
    if not torch.is_tensor(labels) or labels.is_floating_point():
        return len(next(value for value in batch.values() if torch.is_tensor(value)))
    causal = mapped_class(AutoModelForCausalLM, type(model.config)) is type(model)
    return int(((labels[..., 1:] if causal else labels) != -100).sum())


def layer_places(model: Any, architecture: Architecture) -> list[tuple[str, int]]:
    """(stack, number) of each layer, in the order of the forward."""
    depths = architecture.depths(model.config)
    return [(stack, number) for stack, depth in depths.items() for number in range(depth)]


def loss_rises(
    model: Any,
    data: Any,
    changes: Mapping[P, tuple[Any, Callable[[], AbstractContextManager[Any]]]],
    owner: str,
    description: str,
) -> dict[P, float]:
    """Key -> rise of the loss by its change, as a mean over all labels. `changes`: key -> (a module of the layer that is changed,
    or the layer; what changes it, inside a context). The layers before it are computed once a batch."""
    architecture = architecture_for(model)
    layers = [
        surgery.layers_of(model, architecture, stack)[number] for stack, number in layer_places(model, architecture)
    ]
    place_of = {module: place for place, layer in enumerate(layers) for module in layer.modules()}
    rises, labels = dict.fromkeys(changes, 0.0), 0
    for batch in batches_on(model, data, description):
        with ExitStack() as stack:
            results: list[Any] = []
            for layer in layers:
                stack.enter_context(layer.register_forward_hook(lambda _, __, result, to=results: to.append(result)))
            loss = loss_of(model, batch, owner)
        count = count_labels(model, batch)
        labels += count
        for key, (module, change) in changes.items():
            earlier = layers[: place_of[module]] if len(results) == len(layers) else []  # else not all of them have run
            with _replayed(earlier, results), change():
                rises[key] += count * float(loss_of(model, batch, owner) - loss)
    return {key: rise / labels for key, rise in rises.items()}


@contextmanager
def _replayed(layers: list[Any], results: list[Any]) -> Iterator[None]:
    """Let each layer return its recorded result instead of computing."""
    forwards = [vars(layer).get("forward") for layer in layers]
    for layer, result in zip(layers, results, strict=False):
        layer.forward = lambda *_, _result=result, **__: _result
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            del layer.forward
            if forward is not None:  # a method, such as LayerDrop, has set it
                layer.forward = forward


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
