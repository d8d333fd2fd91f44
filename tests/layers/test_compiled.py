"""torch.compile: layers of one shape share one graph, and a graph does not keep what has changed."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import initialization

from hf_freeze.layers import LowRankLinear, TensorTrainLinear, TuckerLinear
from hf_freeze.layers.adaptive_embedding import AdaptiveInputEmbedding
from hf_freeze.layers.grids import Grid
from hf_freeze.layers.quantized import QuantizedEmbedding, QuantizedLinear
from hf_freeze.layers.quantized_factors import QuantizedSparseLinear
from hf_freeze.layers.sparse import SparseLinear

LINEARS = {
    "low rank": lambda linear: LowRankLinear(linear, 4, std=0.1, execution="dense"),
    "tensor train": lambda linear: TensorTrainLinear(linear, (4, 4), (2, 8), (1, 2, 1), std=0.1, execution="factors"),
    "Tucker": lambda linear: TuckerLinear(linear, (4, 4), (2, 8), (2, 2, 2, 2), std=0.1, execution="factors"),
}
BLOCKS = 9  # more than the 8 graphs of one function at which dynamo gives up


class Block(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return x + self.linear(x)


@pytest.mark.parametrize("kind", LINEARS)
@torch.no_grad()
def test_layers_of_one_shape_share_one_graph(kind):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(LINEARS[kind](nn.Linear(16, 16))) for _ in range(BLOCKS))).eval()
    x, graphs = torch.randn(3, 16), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain = blocks(x)
    for block in blocks:
        block.compile(backend=backend)
    for _ in range(3):
        torch.testing.assert_close(blocks(x), plain)
    assert not counters["graph_break"]
    assert len(graphs) <= 2  # one computes what later forwards get as an input
    count = len(graphs)
    blocks(torch.randn(5, 16))
    blocks(torch.randn(7, 16))
    assert len(graphs) <= 2 * count + 1, "at most once more, for any number of tokens"
    state = {name: 2 * value for name, value in blocks.state_dict().items()}
    blocks.load_state_dict(state)
    changed = blocks(x)
    for block in blocks:
        block._compiled_call_impl = None
    torch.testing.assert_close(changed, blocks(x))
    assert not torch.allclose(changed, plain)


def sparse(linear, share):
    return SparseLinear.of(linear, torch.rand(linear.weight.shape) < share)


def quantized(layer, linear):
    layer.fill(linear.weight)
    if layer.bias is not None:
        layer.bias.data = linear.bias.data
    return layer


def integers(linear, **grid):
    return quantized(QuantizedLinear(linear, Grid(weights="int4", **grid)), linear)


def sparse_integers(linear):
    linear = sparse(linear, 0.5)
    with initialization.no_init_weights():
        layer = QuantizedSparseLinear(linear, Grid(weights="int4"))
    layer.get_buffer("mask").copy_(linear.get_buffer("mask"))
    return quantized(layer, linear)


WHOLE = {
    "mask": lambda: sparse(nn.Linear(70, 9), 0.5),
    "columns": lambda: sparse(nn.Linear(70, 9), 0.02),
    "int4": lambda: integers(nn.Linear(70, 9)),
    "int4 in groups": lambda: integers(nn.Linear(131, 9, bias=False), granularity="group-64"),
    "sparse integers": lambda: sparse_integers(nn.Linear(70, 9)),
    "bitsandbytes int8": lambda: quantized(QuantizedLinear(linear := nn.Linear(70, 9), "int8"), linear),
    "bitsandbytes nf4": lambda: quantized(QuantizedLinear(linear := nn.Linear(70, 9), "nf4"), linear),
    "table": lambda: QuantizedEmbedding(nn.Embedding(30, 64), "nf4"),
    "bands": lambda: AdaptiveInputEmbedding(nn.Embedding(30, 8), [5, 12], [8, 4, 2]),
}


@pytest.mark.parametrize("kind", WHOLE)
@torch.no_grad()
def test_one_graph_without_breaks(kind):
    if "bitsandbytes" in kind or kind == "table":
        pytest.importorskip("bitsandbytes")
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = WHOLE[kind]().eval()
    x = torch.randint(30, (2, 7)) if isinstance(layer, nn.Embedding) else torch.randn(2, 7, layer.in_features)
    expected = layer(x)
    graph = torch.compile(layer, backend="eager", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(graph(x), expected)
