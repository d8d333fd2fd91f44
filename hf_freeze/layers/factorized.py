"""What low rank, tensor train and Tucker share: two ways to compute the same product, and the choice between them.

Shapes: N tokens, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers.cost import costs_of, product
from hf_freeze.layers.derived import DerivedLinear, without_autocast

EXECUTIONS = ("auto", "dense", "factors")
_LARGEST_KEPT = 1 << 28  # numbers in a dense weight that "auto" makes: 1 GiB in fp32
_GAIN = 0.8  # the estimate is rough: factors must promise at most this share of the time of the dense product


class FactorizedLinear(DerivedLinear):
    """A weight that is a product of factors.

    `execution` says how to compute without gradients: `"dense"` multiplies the factors once and keeps the weight;
    `"factors"` never makes it, and saves its memory; `"auto"` takes what is faster for this number of tokens (`layers.cost`),
    and factors for a weight of more than 2^28 numbers. With gradients it is the cheaper of both, whatever `execution`, since
    the weight would have to be computed in every forward.

    The two round differently. So the choice depends on shapes, the kind of device and `execution` alone: the same model gives
    the same bits, however much memory is free.
    """

    def __init__(self, linear: nn.Module, execution: str = "auto") -> None:
        super().__init__(linear)
        self.execution = execution
        self._paths: dict[tuple[int, str, bool], str] = {}

    def factor_cost(self, tokens: int, device_type: str, *, training: bool) -> float:
        """Of the product with the factors, in the unit of `layers.cost`; while training, of making them ready too."""
        raise NotImplementedError

    def dense_cost(self, device_type: str) -> float:
        """Of computing the dense weight."""
        raise NotImplementedError

    def ready_factors(self, tokens: int, device_type: str) -> tuple[Any, Any]:
        """(key, function): what `multiply` needs of the parameters, and under which key it is kept for inference."""
        raise NotImplementedError

    def multiply(self, x: torch.Tensor, ready: Any) -> torch.Tensor:
        """(N, I) -> (N, O), without bias."""
        raise NotImplementedError

    def path(self, tokens: int, device_type: str, *, training: bool = False) -> str:
        """`"dense"` or `"factors"`: how a forward of so many tokens is computed."""
        key = (tokens, device_type, training)
        if key not in self._paths:
            if len(self._paths) > 10_000:
                self._paths.clear()
            self._paths[key] = self._choose(*key)
        return self._paths[key]

    def _choose(self, tokens: int, device_type: str, training: bool) -> str:
        if not training and self.execution != "auto":
            return self.execution
        if not training and self.in_features * self.out_features > _LARGEST_KEPT:
            return "factors"
        dense = product(costs_of(device_type), 1, tokens, self.in_features, self.out_features)
        if training:
            dense += self.dense_cost(device_type)
        factors = self.factor_cost(tokens, device_type, training=training)
        return "factors" if factors < _GAIN * dense else "dense"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        device_type = x.device.type
        training = self.needs_gradient()
        tokens = x.numel() // self.in_features
        if self.path(tokens, device_type, training=training) == "dense":
            weight = self._exactly(self.dense_weight, device_type) if training else self.kept_weight(device_type)
            return functional.linear(x, weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        key, make = self.ready_factors(tokens, device_type)
        if self.execution == "factors" and self._kept and key not in self._kept:
            self._kept = None  # what is for other numbers of tokens; together they may hold more than the dense weight
        ready = self._exactly(make, device_type) if training else self.keep(key, make)
        chunk = costs_of(device_type).chunk
        if torch.is_grad_enabled() or chunk is None or tokens <= chunk:
            y = self.multiply(rows, ready)
            y = y if self.bias is None else y + self.bias.to(y.dtype)  # that of autocast, as a dense linear's
        else:
            y = self._in_chunks(rows, ready, chunk)
        return y.view(*x.shape[:-1], self.out_features)

    @staticmethod
    def _exactly(make: Callable[[], Any], device_type: str) -> Any:
        """Autocast rounds the products with the input, not those among the factors."""
        with without_autocast(device_type):
            return make()

    def _in_chunks(self, rows: torch.Tensor, ready: Any, chunk: int) -> torch.Tensor:
        """What lies between the factors would not fit into the cache for all tokens at once."""
        y = None
        for start in range(0, rows.shape[0], chunk):
            part = self.multiply(rows[start : start + chunk], ready)
            if y is None:  # autocast has decided the dtype
                y = part.new_empty(rows.shape[0], self.out_features)
            if self.bias is None:
                y[start : start + chunk] = part
            else:
                torch.add(part, self.bias.to(part.dtype), out=y[start : start + chunk])
        return y  # type: ignore[return-value]


class TensorLinear(FactorizedLinear):
    """Factors of the tensor that the weight becomes when the I inputs are written as `in_modes` and the O outputs as
    `out_modes`. `std`: of an entry of the dense weight when it is fresh."""

    def __init__(
        self,
        linear: Any,
        in_modes: Sequence[int],
        out_modes: Sequence[int],
        ranks: Sequence[int],
        *,
        std: float,
        execution: str = "auto",
    ) -> None:
        super().__init__(linear, execution)
        self.in_modes, self.out_modes, self.ranks = tuple(in_modes), tuple(out_modes), tuple(ranks)
        self.std = std
        self.make_parameters(device=linear.weight.device, dtype=linear.weight.dtype)
        self.initialize_parameters()

    def make_parameters(self, **new: Any) -> None:
        """Register the factors, without values. Raises ValueError for ranks that do not fit the modes."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.in_modes} x {self.out_modes}, ranks={self.ranks}, execution={self.execution!r}"


def left_vectors(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Left singular vectors U (rows, rank), and Uᵀ times the matrix, whose rows have the singular values as norms, descending.

    Of a wide matrix, by the eigenvectors of its small Gram matrix: many times as fast as a singular value decomposition, and as
    good for what is kept. U is orthogonal whatever the singular values, so that nothing is lost at full rank; only among values
    below 1e-8 of the largest, which fp64 loses in a square, the order is not kept.
    """
    if matrix.shape[0] > matrix.shape[1]:
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        return u, s[:, None] * v
    u = torch.linalg.eigh(matrix @ matrix.T).eigenvectors.flip(1)
    return u, u.T @ matrix
