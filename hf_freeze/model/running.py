"""Run a model to look at it: without dropout and without a cache, on its device, and with padding told apart."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture


def on_device(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch on the device of the model."""
    return {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}


def decoder_mask(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """(B, T): the real tokens of the decoder, by its mask or by the labels; None if the batch has neither."""
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    return labels != -100 if mask is None and labels is not None else mask


def token_mask(architecture: Architecture, model: Any, batch: Any, block: str, x: torch.Tensor) -> torch.Tensor:
    """bool (B, T): True for the tokens of the block's stack that are not padding. `x`: the block's input, (B, T, F)."""
    mask = batch.get("attention_mask")
    if model.config.is_encoder_decoder and block.split(".")[0] == "decoder":
        mask = decoder_mask(batch)
    if mask is None:
        return torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if mask.shape != x.shape[:-1]:
        raise ValueError(
            f"the padding mask of {block!r} has the shape {tuple(mask.shape)}, its tokens have {tuple(x.shape[:-1])}"
        )
    return mask.bool()


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # parents first: train() also sets the mode of submodules
            module.train(mode)


@contextmanager
def without_cache(model: Any) -> Iterator[None]:
    """Forwards that keep no keys and values for a next token, and restore the setting afterwards: an encoder-decoder copies its
    config for each such cache, with all token ids of a trimmed vocabulary. Some decoders, as T5's, have a config of their own."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    using = list({id(config): config for config in configs if getattr(config, "use_cache", False)}.values())
    for config in using:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        for config in using:
            config.use_cache = True  # type: ignore[union-attr]
