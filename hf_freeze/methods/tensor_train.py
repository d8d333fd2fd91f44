"""Linears as tensor trains (Novikov et al., 2015, https://arxiv.org/abs/1509.06569; "Compressed Transformer")."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_freeze.layers import TensorTrainLinear
from hf_freeze.layers.derived import features
from hf_freeze.layers.shapes import modes_of
from hf_freeze.layers.tensor_train import check_ranks, full_ranks
from hf_freeze.methods.linear import ShapedMethod, factors, glorot_std
from hf_freeze.methods.registry import register_method


@register_method("tensor_train", example={"rank": 4}, facts=factors("ranks"))
@dataclass(frozen=True, kw_only=True)
class TensorTrain(ShapedMethod):
    """Replace each weight by a TT-matrix: d cores of (r_{k-1}, n_k, m_k, r_k), with Σ r_{k-1} n_k m_k r_k parameters.

    `rank`: the rank of every bond, limited to the full rank of the bond. Or `ranks`: the ranks of all bonds,
    `[1, r_1, ..., r_{d-1}, 1]`, or a dict from the name of a linear to such a list; linears outside the dict stay dense.
    `shape`: two lists with the same number of factors, such as `((2, 4, 8, 4, 2), (4, 4, 8, 4, 4))` for 512 and 2048. Each
    dimension takes the list whose product it is, so that one setting serves both matrices of an FFN. None: balanced factors, of
    about 4 for the smaller dimension.
    From trained weights: TT-SVD; a calibration then fits the cores, by alternating least squares, and the bias to the outputs of
    the linear on what it sees. Fresh: cores of equal variance, so that the weight has Glorot's variance,
    2 / (inputs + outputs).
    `components`, `layers`: which linears. `execution`: how inference computes (`hf_freeze.layers.factorized`).

    Raises ValueError for ranks below 1, above the full rank or of the wrong number, a shape whose products are not the
    dimensions, a dimension that is prime, an unknown linear, component, layer or execution, or a linear that another method has
    changed.
    """

    def make(self, linear: Any, name: str, model: Any) -> nn.Module:
        in_modes, out_modes = modes_of(*features(linear), self.shape)
        check_ranks(in_modes, out_modes, [1] * (len(in_modes) + 1))
        ranks = self.ranks_of(name, full_ranks(in_modes, out_modes))
        return TensorTrainLinear(linear, in_modes, out_modes, ranks, std=glorot_std(linear), execution=self.execution)
