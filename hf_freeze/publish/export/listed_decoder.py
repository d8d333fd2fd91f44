"""The decoder of a translator with a lexical shortlist: its last input, `tokens` (C,), says which logits it computes.

Shapes: B rows, T new tokens, C tokens of the shortlist, V vocabulary, H hidden size.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_freeze import surgery
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.layers.factorized_embedding import LowRankOutput
from hf_freeze.publish.export.engine_parts import Part
from hf_freeze.runtime.shortlists import DECODER, TOKENS, Shortlist


def listed_decoder(decoder: Part, shortlist: Shortlist) -> Part:
    """The part DECODER, whose logits are (B, T, C). Raises ValueError for a shortlist of another vocabulary and for an output
    whose rows cannot be computed one by one."""
    model: Any = decoder.module.model
    output = model.get_output_embeddings()
    surgery.check_rows(output, shortlist.largest, type(model).__name__)
    if not surgery.is_dense(output) and type(output) is not LowRankOutput:
        raise ValueError(
            f"a shortlist in onnx needs an output matrix of numbers or of low rank, not {type(output).__name__}: use merge() "
            "first, or the shortlist in PyTorch"
        )
    inputs = decoder.inputs | {TOKENS: torch.arange(min(5, output.out_features))}
    return Part(DECODER, _ListedDecoder(decoder), inputs, decoder.outputs, decoder.axes | {TOKENS: {0: TOKENS}})


class _ListedDecoder(nn.Module):
    def __init__(self, decoder: Part) -> None:
        super().__init__()
        self.decoder: Any = decoder.module
        self.model: Any = self.decoder.model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with _listed_output(self.model, inputs[-1]):
            return self.decoder(*inputs[:-1])


@contextlib.contextmanager
def _listed_output(model: Any, tokens: Tensor) -> Iterator[None]:
    """Inside, the output matrix of `model` and its bias on the logits have the rows `tokens` alone."""
    output, outside = model.get_output_embeddings(), surgery.output_bias(model, architecture_for(model))

    def forward(x: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, C)"""
        if hasattr(output, "projection"):  # of LowRankOutput; tracing gives modules other classes
            x = functional.linear(x, output.projection)
        bias = None if output.bias is None else output.bias.index_select(0, tokens)
        return functional.linear(x, output.weight.index_select(0, tokens), bias)

    output.forward = forward
    values: Any = {}
    if outside is not None:
        owner, name, value = outside
        values = owner._parameters if name in owner._parameters else owner._buffers
        values[name] = value.index_select(-1, tokens)
    try:
        yield
    finally:
        del output.forward
        if outside is not None:
            values[name] = value
