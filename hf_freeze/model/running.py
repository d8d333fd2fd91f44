"""Run a model to look at it: without dropout and without a cache, on its device, and with padding told apart."""

import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_freeze.architectures.base import Architecture
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compat.transformers import mask_of_frames


def on_device(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch on the device of the model."""
    return {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}


def first_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of its first row alone; the same batch where its tensors have no common number of rows."""
    tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
    if len({len(value) if value.dim() else 0 for value in tensors.values()}) != 1:
        return dict(batch)
    return {**batch, **{name: value[:1] for name, value in tensors.items()}}


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


class RealTokens:
    """Tells which rows of what a linear of `model` sees are real tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model
        attentions = architecture_for(model).attentions(model.config)
        self._reads_encoder = {
            linear
            for name, attention in attentions.items()
            if name.endswith(".cross")
            for linear in (attention.k, attention.v)
        }

    def rows(
        self, name: str, place: tuple[str, int] | None, batch: Mapping[str, Any], x: torch.Tensor
    ) -> torch.Tensor | None:
        """bool, in the shape of `x`, what the linear `name` reads, without its last axis: the real tokens; None where the rows
        are not those of the batch, or it has no mask. `place`: (stack, layer) that the linear lies in, or None."""
        masks = [batch.get("attention_mask")]
        if self._model.config.is_encoder_decoder:
            of_encoder = name in self._reads_encoder or (place is not None and place[0] != "decoder")
            masks.insert(int(of_encoder), decoder_mask(batch))
        shape = x.shape[:-1]
        for mask in masks:
            if mask is None or mask.dim() != 2:
                continue
            if len(shape) == 2 and mask.shape[0] == shape[0] and mask.shape[1] > shape[1] and place is not None:
                mask = mask_of_frames(self._model, mask, shape[1])
            if mask.shape == shape or shape == (mask.numel(),):
                return mask.bool().reshape(shape)
        first = next((value for value in batch.values() if torch.is_tensor(value) and value.dim() == 2), None)
        if first is not None and shape == (first.numel(),):  # all tokens, one after another
            return torch.ones(shape, dtype=torch.bool, device=x.device)
        return None

    def of_ids(self, ids: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """The ids of real tokens among those that a table looks up."""
        read = batch.get("input_ids")
        of_source = read is not None and read.shape == ids.shape and torch.equal(read, ids)
        mask = batch.get("attention_mask") if of_source else decoder_mask(batch)
        return ids[mask.bool()] if mask is not None and mask.shape == ids.shape else ids


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


def fast_linears(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Inside, linears of 16 bits compute in fp32, on CPUs where that is faster: those with AVX2 alone take four times as long for
    products of bf16."""
    return _InSingle() if dtype in (torch.float16, torch.bfloat16) and _is_slow(dtype) else nullcontext()


class _InSingle(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.linear or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        x, *weights = (*args, *(kwargs or {}).values())
        return func(x.float(), *(each if each is None else each.float() for each in weights)).to(x.dtype)


@functools.cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies matrices of a dtype slower than those of fp32."""
    seconds = {}
    for each in (torch.float32, dtype):
        x, weight = torch.ones(256, 1024, dtype=each), torch.ones(1024, 1024, dtype=each)
        times = []
        for _ in range(4):  # the first one is not counted
            start = time.perf_counter()
            functional.linear(x, weight)
            times.append(time.perf_counter() - start)
        seconds[each] = min(times[1:])
    return seconds[dtype] > seconds[torch.float32]
