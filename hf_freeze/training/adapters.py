"""Adapters of low rank in a model (LoRA, Hu et al., 2021, https://arxiv.org/abs/2106.09685), over weights that may be integers as
in QLoRA (Dettmers et al., 2023, https://arxiv.org/abs/2305.14314): put in, and merged into the weights. PEFT has the layers.

Each forward and each backward of a linear in integers computes its dense weight (`layers.quantized`), one at a time. One byte for
each weight stays in memory.
"""

import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_freeze import surgery
from hf_freeze.layers.grids import Grid
from hf_freeze.layers.quantized import STORED, Quantized, QuantizedLinear
from hf_freeze.model.paging import Paged, page_out
from hf_freeze.model.weights import no_draws


def with_adapters(student: Any, seed: int) -> Any:
    """PEFT's model of the student, with LoRA in its trainable dense linears and in those of few bits, in place, except in its
    output layer. Raises ValueError if there are none."""
    from peft import LoraConfig, get_peft_model

    output = student.get_output_embeddings()
    linears = [
        name
        for name, module in student.named_modules()
        if module is not output
        and (isinstance(module, QuantizedLinear) or (surgery.is_dense(module) and module.weight.requires_grad))
    ]
    if not linears:
        raise ValueError(f"no linear of the {type(student).__name__} is trainable: adapters have no place")
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # PEFT then sets it as each linear needs
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT reads the old name
        return get_peft_model(student, LoraConfig(r=16, lora_alpha=32, target_modules=linears))


def put_on_int8(model: Any, paged: Paged) -> dict[Any, Any]:
    """Let the adapters of `model` lie on weights that are rounded to 8 bits, in files of `paged`; those that they stand for need
    no memory then. Returns {layer of PEFT: its linear}."""
    linears = {layer: layer.get_base_layer() for layer in _layers(model) if surgery.is_dense(layer.get_base_layer())}
    for layer, linear in linears.items():
        with no_draws():
            layer.base_layer = rounded = QuantizedLinear(linear, Grid(weights="int8"))
        rounded.fill(surgery.effective_weight(linear))
        rounded.bias = linear.bias
        paged.move(rounded)
    page_out()
    return linears


def leave_int8(linears: dict[Any, Any]) -> None:
    """Undo `put_on_int8`."""
    for layer, linear in linears.items():
        layer.base_layer = linear


def take_out(model: Any, student: Any, learns: Collection[str], *, merged: bool, paged: Paged | None) -> dict[Any, Any]:
    """Merge the adapters, or drop them, in place: the layers are those of the student, of which `learns` train again. If that has
    rounded weights of few bits, returns {linear: its tensors before}, for `put_back`."""
    layers = list(_layers(model)) if merged else []
    rounds = any(isinstance(layer.get_base_layer(), Quantized) for layer in layers)
    before: dict[Any, Any] = {}
    for layer in layers:
        base = layer.get_base_layer()
        if rounds:
            before[base] = _tensors(base)
        if isinstance(base, Quantized):
            base._buffers |= {name: value.clone() for name, value in _tensors(base).items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "merging an adapter into .* rounds it")  # the caller measures it
            layer.merge(safe_merge=True)  # as new tensors: those of files are not written to
        if paged is not None:
            paged.move(base)
    model.unload()
    for name, p in student.named_parameters():
        p.requires_grad_(name in learns)
    return before


def put_back(before: dict[Any, dict[str, Tensor]]) -> None:
    """Give linears the tensors that they had."""
    for linear, tensors in before.items():
        if isinstance(linear, Quantized):
            linear._buffers |= tensors
        else:
            linear.weight.data = tensors["weight"]


def _tensors(linear: Any) -> dict[str, Tensor]:
    """Those that hold its weight."""
    if isinstance(linear, Quantized):
        return {name: linear._buffers[name] for name in STORED}  # type: ignore[misc]
    return {"weight": linear.weight.detach()}


def _layers(model: Any) -> Iterator[Any]:
    """The layers that PEFT has put around linears."""
    from peft.tuners.lora import LoraLayer

    return (module for module in model.modules() if isinstance(module, LoraLayer))
