"""Weights that are pruned or dropped, and where the changed linears of a model are zero."""

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers.masked import Masked
from hf_freeze.layers.sparse import SparseLinear
from hf_freeze.layers.variational import Variational
from hf_freeze.methods import MagnitudePruning, VariationalDropout
from hf_freeze.surgery import effective_weight

BATCH = ARCHITECTURES["marian"].tiny_inputs("seq2seq-lm")
WEIGHTS = 4 * 2 * 16 * 24  # of all FFN matrices
RAMP = MagnitudePruning(sparsity=0.8, begin=0.25, end=0.75)
WARM_UP = VariationalDropout(training_size=30, threshold=-6.0, warmup=0.5)


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, Masked | Variational | SparseLinear)]


def zeros(model):
    """Where the weights that the model computes with are zero, of each changed linear (O, I)."""
    return [effective_weight(module) == 0 for module in layers_of(model)]


def sparsity(model):
    found = zeros(model)
    return sum(int(z.sum()) for z in found) / sum(z.numel() for z in found)


def is_within(smaller, larger):
    return all(bool((a <= b).all()) for a, b in zip(smaller, larger, strict=True))
