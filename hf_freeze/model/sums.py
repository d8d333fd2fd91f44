"""Sums over the tokens that a linear sees, of which its moments are the means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_freeze.architectures.roles import EXPERT_OUTPUT
from hf_freeze.model.watching import Routed
from hf_freeze.solvers.moments import Moments, working_dtype

_LEAST = 1e-12  # mean square of the states of a token that counts most


@dataclass
class Sums:
    """Sums over `count` tokens, of which `Moments` are the means."""

    count: int = 0
    total: float = 0  # of the weights of tokens
    gram: Any = 0
    mean: Any = 0
    cross: Any = 0
    outputs: Any = 0
    squares: Any = 0
    paired: bool = True

    def add(self, x: Tensor, y: Tensor | None, weights: Tensor | None = None) -> None:
        """x: (T, I) inputs; y: (T, O) outputs of the model before, if they are of the same tokens; weights: (T, 1) how much an
        error counts for each token."""
        x = x.to(working_dtype(x))
        weights = x.new_ones(len(x), 1) if weights is None else weights.to(x)
        weighted = weights * x
        self.count += len(x)
        self.total += float(weights.sum())
        self.gram = self.gram + x.T @ weighted
        self.mean = self.mean + weighted.sum(0)
        self.paired = self.paired and y is not None
        if y is not None and self.paired:
            y = y.to(x)
            self.cross = self.cross + y.T @ weighted
            self.outputs = self.outputs + (weights * y).sum(0)
            self.squares = self.squares + (weights * y.square()).sum(0)

    def moments(self, name: str) -> Moments | None:
        """Those of the linear `name`. Raises ValueError if they are not finite."""
        if not self.total:
            return None
        pairs = {"cross": self.cross, "output_mean": self.outputs, "output_square": self.squares} if self.paired else {}
        means = {name: value / self.total for name, value in pairs.items()}
        try:
            return Moments(self.gram / self.total, self.mean / self.total, self.count, **means)
        except ValueError as error:
            raise ValueError(f"calibration: the inputs or outputs of {name!r} cannot be used: {error}") from None


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
