"""Sums over the tokens that a linear sees, of which its moments are the means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_freeze.architectures.roles import EXPERT_OUTPUT
from hf_freeze.model.watching import Routed
from hf_freeze.solvers.moments import Moments, working_dtype

_HALVES = (torch.float16, torch.bfloat16)
_ROWS = 1024  # of a Gram that are summed at once: of its symmetric halves, one is
_LEAST = 1e-12  # mean square of the states of a token that counts most


@dataclass
class Sums:
    """Sums over `count` tokens, of which `Moments` are the means. `reads_as`: those of another linear that reads the same states
    and comes first."""

    reads_as: "Sums | None" = None
    count: int = 0
    total: float = 0  # of the weights of tokens
    gram: Any = None  # above the diagonal blocks alone
    mean: Any = 0
    cross: Any = None
    outputs: Any = 0
    squares: Any = 0
    paired: bool = True
    _is_mean: bool = False

    def add(self, x: Tensor, y: Tensor | None, weights: Tensor | None = None) -> None:
        """x: (T, I) inputs; y: (T, O) outputs of the model before, if they are of the same tokens; weights: (T, 1) how much an
        error counts for each token.

        Inputs of 16 bits are multiplied in fp32, where their products are exact, and added up in the dtype of the solvers.
        """
        kept = working_dtype(x)
        x = x.to(torch.float32 if x.dtype in _HALVES else kept)
        weighted = x if weights is None else weights.to(x) * x
        self.count += len(x)
        self.total += len(x) if weights is None else float(weights.sum())
        if self.reads_as is None:
            self.gram = x.new_zeros(2 * x.shape[1:], dtype=kept) if self.gram is None else self.gram
            for start in range(0, len(self.gram), _ROWS):
                rows = slice(start, start + _ROWS)
                _add_product(self.gram[rows, start:], x[:, rows], weighted[:, start:])
            self.mean = self.mean + weighted.sum(0).to(kept)
        self.paired = self.paired and y is not None
        if y is not None and self.paired:
            y = y.to(x)
            self.cross = x.new_zeros(y.shape[1], x.shape[1], dtype=kept) if self.cross is None else self.cross
            _add_product(self.cross, y, weighted)
            self.outputs = self.outputs + (y if weights is None else weights.to(y) * y).sum(0).to(kept)
            self.squares = self.squares + (y.square() if weights is None else weights.to(y) * y.square()).sum(0).to(
                kept
            )

    def moments(self, name: str) -> Moments | None:
        """Those of the linear `name`, once: they take over its memory. Raises ValueError if they are not finite."""
        if not self.total:
            return None
        gram, mean = self.of_inputs()
        pairs = {"cross": self.cross, "output_mean": self.outputs, "output_square": self.squares} if self.paired else {}
        for value in pairs.values():
            value.div_(self.total)
        try:
            return Moments(gram, mean, self.count, weight=self.total / self.count, **pairs)
        except ValueError as error:
            raise ValueError(f"calibration: the inputs or outputs of {name!r} cannot be used: {error}") from None

    def of_inputs(self) -> tuple[Tensor, Tensor]:
        """The means of x xᵀ and of x."""
        if self.reads_as is not None:
            return self.reads_as.of_inputs()
        if not self._is_mean:
            self._is_mean = True
            for start in range(0, len(self.gram), _ROWS):
                rows, after = slice(start, start + _ROWS), slice(start + _ROWS, None)
                self.gram[after, rows] = self.gram[rows, after].T
            self.gram.div_(self.total)
            self.mean = self.mean / self.total
        return self.gram, self.mean


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (M, N) += left (T, M)ᵀ right (T, N), in place."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right


def error_weights(joined: Tensor) -> Tensor:
    """(T, O) states that outputs are a part of -> (T, 1): how much an error in them counts: as for the norm that follows, by
    1 / their mean square. In some models a few tokens have states a thousand times those of others, and would be all that
    counts."""
    return 1 / joined.to(working_dtype(joined)).square().mean(-1, keepdim=True).clamp_min(_LEAST)


def add_routed(
    sums: Mapping[str, Sums],
    x: Routed,
    y: Routed | None,
    rows: Tensor | None,
    joined: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Add a call of experts to the sums of their linears. The last ones are to give what they give in the call `y` of the model
    before.

    joined: (T, H) twice, what lacks in the states that their outputs are added to, and these states. Then the experts of a token
    are to add that, in proportion to their factors: so the outputs of each change least. An error of an expert counts by the
    square of its factor.
    """
    y = y if y is not None and y.states.shape == x.states.shape else None
    for name, of_expert in sums.items():
        _, parameter, last = name.rsplit(".", 2)
        number = int(last)
        tokens, factors = x.tokens(number, rows)
        weights = factors.square()
        if joined is not None:
            weights = weights * error_weights(joined[1][tokens])
        if parameter != EXPERT_OUTPUT:
            of_expert.add(x.states[tokens], None, weights)
            continue
        wanted = None if y is None else y.outputs(number, tokens)
        if wanted is not None and joined is not None:
            wanted = wanted + joined[0][tokens] * (factors / x.factors[tokens].square().sum(-1, keepdim=True))
        of_expert.add(x.neurons(number, tokens), wanted, weights)


def selected(x: Tensor, rows: Tensor | None) -> Tensor:
    """(T, F): the rows that count."""
    return x.reshape(-1, x.shape[-1]) if rows is None else x[rows]
