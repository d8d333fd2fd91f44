"""Small linears of low rank, tensor trains and Tucker decompositions, and the formulas of their weights."""

import math
import string

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers import LowRankLinear, TensorTrainLinear, TuckerLinear

N512, M2048 = (2, 4, 8, 4, 2), (4, 4, 8, 4, 4)  # the factors of Khakhulin et al.
CLASSES = (LowRankLinear, TensorTrainLinear, TuckerLinear)
SETTINGS = [  # class, what it takes besides the linear; small enough for loops and finite differences
    (LowRankLinear, (24, 16), (3,)),
    (LowRankLinear, (5, 7), (5,)),
    (TensorTrainLinear, (24, 16), ((2, 3, 4), (4, 2, 2), (1, 3, 2, 1))),
    (TensorTrainLinear, (12, 35), ((1, 6, 2), (5, 1, 7), (1, 2, 3, 1))),
    (TensorTrainLinear, (16, 16), ((4, 4), (2, 8), (1, 1, 1))),
    (TuckerLinear, (24, 16), ((2, 3, 4), (4, 4), (2, 1, 3, 2, 4))),
    (TuckerLinear, (6, 35), ((6,), (5, 7), (4, 3, 2))),
    (TuckerLinear, (16, 6), ((4, 4), (3, 2), (1, 1, 1, 1))),
]
LARGE = [
    (LowRankLinear, (512, 2048), (8,)),
    (TensorTrainLinear, (512, 2048), (N512, M2048, (1, 2, 4, 4, 2, 1))),
    (TensorTrainLinear, (2048, 512), (M2048, N512, (1, 4, 4, 4, 4, 1))),
    (TuckerLinear, (512, 2048), (N512, M2048, (2,) * 10)),
]


def named(settings):
    return [pytest.param(*s, id=f"{s[0].__name__}-{s[1][0]}x{s[1][1]}-{s[2][-1]}".replace(" ", "")) for s in settings]


every_setting = pytest.mark.parametrize(("cls", "size", "arguments"), named(SETTINGS))
large_and_small = pytest.mark.parametrize(("cls", "size", "arguments"), named(SETTINGS + LARGE))
every_class = pytest.mark.parametrize(("cls", "size", "arguments"), named([SETTINGS[i] for i in (0, 2, 5)]))


def make(cls, size, arguments, *, dense=nn.Linear, bias=True, **options):
    """Fresh, in eval mode, with outputs of about 1 and a bias that is not zero."""
    inputs, outputs = size
    linear = Conv1D(outputs, inputs) if dense is Conv1D else nn.Linear(inputs, outputs, bias=bias)
    layer = cls(linear, *arguments, std=(2 / sum(size)) ** 0.5, **options).eval()
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer


def densify(layer):
    """(O, I) by one einsum, the formula as it stands."""
    if isinstance(layer, LowRankLinear):
        return torch.einsum("or,ri->oi", layer.up, layer.down)
    letters = iter(string.ascii_letters)
    if isinstance(layer, TuckerLinear):
        modes = (*layer.in_modes, *layer.out_modes)
        ranks, axes = ([next(letters) for _ in modes] for _ in range(2))
        terms = ["".join(ranks)] + [axis + rank for axis, rank in zip(axes, ranks, strict=True)]
        operands = [layer.core.reshape(layer.ranks), *layer.factors]
        tensor = torch.einsum(f"{','.join(terms)}->{''.join(axes)}", *operands)
    else:
        d = len(layer.in_modes)
        bonds, ins, outs = ([next(letters) for _ in range(n)] for n in (d + 1, d, d))
        terms = [bonds[k] + ins[k] + outs[k] + bonds[k + 1] for k in range(d)]
        tensor = torch.einsum(f"{','.join(terms)}->{''.join(ins + outs)}", *layer.cores)
    return tensor.reshape(layer.in_features, layer.out_features).T


def entry(layer, i, j):
    """One entry of Wᵀ by loops, in numpy."""
    if isinstance(layer, LowRankLinear):
        return sum((layer.up[j, r] * layer.down[r, i]).item() for r in range(layer.rank))
    at, to = np.unravel_index(i, layer.in_modes), np.unravel_index(j, layer.out_modes)
    if isinstance(layer, TensorTrainLinear):
        row = np.ones((1, 1))
        for core, n, m in zip(layer.cores, at, to, strict=True):
            row = row @ core[:, n, m].detach().numpy()
        return row.item()
    core, total = layer.core.detach().reshape(layer.ranks), 0.0
    for index in np.ndindex(*layer.ranks):
        total += float(core[index]) * math.prod(
            f[mode, r].item() for f, mode, r in zip(layer.factors, (*at, *to), index, strict=True)
        )
    return total


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made, and all shapes without their ones; those on meta left out."""

    def __init__(self):
        super().__init__()
        self.seen, self.shapes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if torch.is_tensor(tensor) and tensor.device.type != "meta":
                self.seen = max(self.seen, tensor.numel())
                self.shapes.add(tuple(sorted(n for n in tensor.shape if n > 1)))
        return out
