"""torch.compile: layers of one shape share one graph, and a graph does not keep what has changed."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from hf_freeze.layers import LowRankLinear, TensorTrainLinear, TuckerLinear

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
