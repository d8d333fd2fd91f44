"""The base class of low rank, tensor train and Tucker: computes products by the dense weight or by the factors, and chooses
between the two.

Shapes: N tokens, I inputs, O outputs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.layers.cost import costs_of, product
from hf_freeze.layers.derived import DerivedLinear, first_float_tensor, is_compiled, is_traced, without_autocast

EXECUTIONS = ("auto", "dense", "factors")
_LARGEST_DENSE = 1 << 28  # the most entries of a dense weight that "auto" caches: 1 GiB in fp32
_GAIN = (
    0.8  # estimates are rough: factors are chosen if their estimated time is below this share of the dense product's
)

_TRACED_FOR = (1, 1024)  # numbers of tokens for which the way of an exported forward is chosen


class FactorizedLinear(DerivedLinear):
    """A linear whose weight is a product of factors.

    `execution` selects the computation without gradients. `"dense"` multiplies the factors once and caches the weight.
    `"factors"` never computes the weight, which saves memory. `"auto"` chooses the faster way for the number of tokens
    (`layers.cost`), but factors for a weight with more than 2^28 entries. With gradients, the cheaper way is chosen whatever
    `execution` is, because the dense weight would be recomputed in every forward.

    The two ways round differently. The choice depends only on shapes, the kind of device and `execution`, so that the same model
    gives the same bits, however much memory is free.
    """

    prepares = True  # whether `prepared_factors` computes anything
    part_names: Sequence[str]  # of the parameters that are factors

    def __init__(self, linear: nn.Module, execution: str = "auto") -> None:
        super().__init__(linear)
        self.execution = execution
        self._paths: dict[tuple[int, str, bool], str] = {}

    def parts(self) -> list[Any]:
        """The factors."""
        return [getattr(self, name) for name in self.part_names]

    @torch.no_grad()
    def set_parts(self, values: Iterable[torch.Tensor]) -> None:
        """Set the factors, in memory of their own: the old memory may belong to the model that is converted."""
        self.forget()
        for part, value in zip(self.parts(), values, strict=True):
            part.data = value.to(part, copy=True).contiguous()

    def used_parts(self) -> list[torch.Tensor]:
        """The factors that products are computed with."""
        return self.parts()

    def dense_weight(self) -> torch.Tensor:
        return self.product(self.used_parts())

    def product(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """(O, I): the dense weight of these factors, linear in each of them."""
        raise NotImplementedError

    def shape_like(self, linear: Any) -> None:
        """Make this layer one of the shape of `linear`, with fresh factors."""
        raise NotImplementedError

    def balanced(self) -> list[torch.Tensor]:
        """The factors of the same weight that lose least if each row gets a step of its own, fp32: a factor has columns of equal
        norm where another one can take up the rest."""
        raise NotImplementedError

    def factor_cost(self, tokens: int, device_type: str, *, training: bool) -> float:
        """The cost of the product with the factors, in the unit of `layers.cost`; in training, including their preparation."""
        raise NotImplementedError

    def dense_cost(self, device_type: str) -> float:
        """The cost of computing the dense weight."""
        raise NotImplementedError

    def prepared_factors(self, tokens: int, device_type: str) -> tuple[Any, Any]:
        """(cache key, function that computes the `factors` argument of `multiply` from the parameters)."""
        raise NotImplementedError

    def multiply(self, x: torch.Tensor, factors: Any) -> torch.Tensor:
        """(N, I) -> (N, O), without bias. `factors` come from the function of `prepared_factors`."""
        raise NotImplementedError

    def path(self, tokens: int, device_type: str, *, training: bool = False) -> str:
        """`"dense"` or `"factors"`: the way in which a forward of `tokens` tokens is computed."""
        key = (tokens, device_type, training)
        if is_compiled():
            return self._choose(*key)
        if key not in self._paths:
            if len(self._paths) > 10_000:
                self._paths.clear()
            self._paths[key] = self._choose(*key)
        return self._paths[key]

    def _choose(self, tokens: int, device_type: str, training: bool) -> str:
        if not training and self.execution != "auto":
            return self.execution
        if not training and self.in_features * self.out_features > _LARGEST_DENSE:
            return "factors"
        dense = product(costs_of(device_type), 1, tokens, self.in_features, self.out_features)
        if training:
            dense += self.dense_cost(device_type)
        factors = self.factor_cost(tokens, device_type, training=training)
        return "factors" if factors < _GAIN * dense else "dense"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        if is_traced():
            return self._traced(x)
        device_type = x.device.type
        training = self.needs_gradient()
        tokens = x.numel() // self.in_features
        if self.path(tokens, device_type, training=training) == "dense":
            weight = self._exactly(self.dense_weight, device_type) if training else self.cached_weight(device_type)
            return functional.linear(x, weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        key, prepare = self.prepared_factors(tokens, device_type)
        if self.execution == "factors" and not is_compiled() and self._cache and key not in self._cache:
            # Drop the factors prepared for other numbers of tokens: together they may need more memory than the dense weight.
            self._cache = None
        anew = training or (is_compiled() and not self.prepares)
        factors = self._exactly(prepare, device_type) if anew else self.cached(key, prepare)
        chunk = None if is_compiled() else costs_of(device_type).chunk  # a compiler divides its loops itself
        if torch.is_grad_enabled() or chunk is None or tokens <= chunk:
            y = self.multiply(rows, factors)
            # Under autocast the result has autocast's dtype, as with a dense linear.
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        else:
            y = self._in_chunks(rows, factors, chunk)
        return y.view(*x.shape[:-1], self.out_features)

    def _traced(self, x: torch.Tensor) -> torch.Tensor:
        """The forward for torch.export, whose number of tokens is unknown: by the factors if this is the faster way for one token
        and for many, or else by the dense weight. An engine can compute that from the factors once, when it opens the file."""
        if not self.traced_as_factors():
            return functional.linear(x, self.dense_weight(), self.bias)
        _, prepare = self.prepared_factors(max(_TRACED_FOR), "cpu")
        y = self.multiply(x.reshape(-1, self.in_features), prepare())
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        new = super().selected(kept, outputs=outputs)
        new._paths = {}  # the faster way depends on the sizes
        return new

    def traced_as_factors(self) -> bool:
        """Whether an exported forward is computed by the factors."""
        return {self.path(tokens, "cpu") for tokens in _TRACED_FOR} == {"factors"}

    @staticmethod
    def _exactly(compute: Callable[[], Any], device_type: str) -> Any:
        """Compute without autocast, which should round only the products with the input, not those among the factors."""
        with without_autocast(device_type):
            return compute()

    def _in_chunks(self, rows: torch.Tensor, factors: Any, chunk: int) -> torch.Tensor:
        """Multiply `chunk` rows at a time, so that intermediate results fit into the processor cache."""
        y = None
        for start in range(0, rows.shape[0], chunk):
            part = self.multiply(rows[start : start + chunk], factors)
            if y is None:  # only now is the dtype known, which autocast may choose
                y = part.new_empty(rows.shape[0], self.out_features)
            if self.bias is None:
                y[start : start + chunk] = part
            else:
                torch.add(part, self.bias.to(part.dtype), out=y[start : start + chunk])
        return y  # type: ignore[return-value]


class TensorLinear(FactorizedLinear):
    """A linear whose weight, reshaped to a tensor with the modes `in_modes` of the inputs and `out_modes` of the outputs, is a
    product of factors. `std`: initial standard deviation of an entry of the dense weight. `matrices` gives what a plan of
    contractions, the cheapest of which `_plan` finds, multiplies by."""

    _plan: Any
    matrices: Any

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
        reference = first_float_tensor(linear)  # not its weight: a replaced linear would compute that
        self.make_parameters(device=reference.device, dtype=reference.dtype)
        self.initialize_parameters()

    def shape_like(self, linear: Any) -> None:
        settings = (linear.in_modes, linear.out_modes, linear.ranks)
        TensorLinear.__init__(self, linear, *settings, std=linear.std, execution=linear.execution)

    def make_parameters(self, **new: Any) -> None:
        """Register the uninitialised factors. Raises ValueError for ranks that do not fit the modes."""
        raise NotImplementedError

    def initialize_parameters(self) -> None:
        """Draw all factors with equal variance such that Var(W), the product of all ranks and variances, is std²."""
        variance = (self.std**2 / math.prod(self.ranks)) ** (1 / len(self.part_names))
        for part in self.parts():
            initialization.normal_(part, std=variance**0.5)
        if self.bias is not None:
            initialization.zeros_(self.bias)

    def factor_cost(self, tokens: int, device_type: str, *, training: bool) -> float:
        return self._plan(tokens, device_type, training).cost

    def prepared_factors(self, tokens: int, device_type: str) -> tuple[Any, Any]:
        plan = self._plan(tokens, device_type, self.needs_gradient())
        return plan.key, lambda: (plan, self.matrices(plan))

    def multiply(self, x: torch.Tensor, factors: Any) -> torch.Tensor:
        plan, matrices = factors
        return plan.multiply(x, matrices)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.in_modes} x {self.out_modes}, ranks={self.ranks}, execution={self.execution!r}"


def equal_columns(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A factor (O, R), fp32, with columns of equal norm, and the numbers (R,) that its columns were divided by.

    The step of a row is too coarse for a small column, and those of a truncated decomposition fall; the other factor has a step
    for each of these numbers.
    """
    matrix = matrix.float()
    norms = matrix.norm(dim=0)
    ratios = torch.where(norms > 0, norms / norms.mean(), 1)
    return matrix / ratios, ratios


def left_vectors(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Left singular vectors U (rows, rank), and Uᵀ · matrix. The norms of the rows of this product are the singular values,
    descending.

    For a wide matrix, U consists of the eigenvectors of its small Gram matrix, which is many times faster than a singular value
    decomposition and as accurate for the leading vectors. U is orthogonal in any case, so nothing is lost at full rank. Only
    singular values below 1e-8 of the largest may be out of order, because their squares vanish in fp64.
    """
    if matrix.shape[0] > matrix.shape[1]:
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        return u, s[:, None] * v
    u = torch.linalg.eigh(matrix @ matrix.T).eigenvectors.flip(1)
    return u, u.T @ matrix
