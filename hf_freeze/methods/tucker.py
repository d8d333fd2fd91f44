"""Linears as Tucker decompositions (Tucker, 1966; Khakhulin et al., "Compressed Transformer")."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_freeze.layers import TuckerLinear
from hf_freeze.layers.derived import features
from hf_freeze.layers.shapes import modes_of
from hf_freeze.methods.linear import ShapedMethod, factors, glorot_std
from hf_freeze.methods.registry import register_method


@register_method("tucker", example={"rank": 2}, facts=factors("ranks"))
@dataclass(frozen=True, kw_only=True)
class Tucker(ShapedMethod):
    """Replace each weight by a Tucker decomposition: a core with one rank per mode and a factor (mode, rank) for each mode. The
    modes are the factors of the two dimensions.

    `rank`: the rank of every mode, limited to the size of the mode. Or `ranks`: one for each factor of the inputs, then one for
    each factor of the outputs; or a dict from the name of a linear to such a list; linears outside the dict stay dense.
    `shape`: two lists of factors, such as `((2, 4, 8, 4, 2), (4, 4, 8, 4, 4))` for 512 and 2048. Each dimension takes the list
    whose product it is. None: balanced factors, of about 4 for the smaller dimension.
    From trained weights: HOSVD and three sweeps of HOOI; a calibration then fits core and factors, by alternating least squares,
    and the bias to the outputs of the linear on what it sees. Fresh: core and factors of equal variance, so that the weight has
    Glorot's variance, 2 / (inputs + outputs). `components`, `layers`: which linears. `execution`: how inference computes
    (`hf_freeze.layers.factorized`).

    Raises ValueError for ranks below 1, above the mode or of the wrong number, a shape whose products are not the dimensions, a
    dimension that is prime, an unknown linear, component, layer or execution, or a linear that another method has changed.
    """

    def make(self, linear: Any, name: str, model: Any) -> nn.Module:
        in_modes, out_modes = modes_of(*features(linear), self.shape)
        ranks = self.ranks_of(name, (*in_modes, *out_modes))
        return TuckerLinear(linear, in_modes, out_modes, ranks, std=glorot_std(linear), execution=self.execution)
