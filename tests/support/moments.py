"""Random linears with what they have seen: raw activations, to compare solvers with, and their moments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_freeze.solvers.moments import RIDGE, Moments


@dataclass
class Seen:
    """A linear of the original model, W (O, I) and b (O,) or None, the outputs y (T, O) that it has there, and the inputs
    x (T, I) that it has in the model as compressed so far."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    y: Tensor
    moments: Moments

    def lstsq(self, kept: list[int] | None = None, ridge: float = RIDGE) -> tuple[Tensor, Tensor | None]:
        """The least squares of y on the columns `kept` of x by torch.linalg.lstsq on rows. The ridge is I more rows, which
        draw to the weight as it was; with a bias, rows are centred."""
        x, y = self.x, self.y
        if self.bias is not None:
            x, y = x - x.mean(0), y - y.mean(0)
        strength = (ridge * x.square().mean() * len(x)).sqrt()
        x = torch.cat([x, strength * torch.eye(x.shape[1], dtype=x.dtype)])
        y = torch.cat([y, strength * self.weight.T])
        columns = list(range(x.shape[1])) if kept is None else kept
        new = torch.linalg.lstsq(x[:, columns], y, driver="gelsd").solution.T
        return new, None if self.bias is None else self.y.mean(0) - new @ self.x.mean(0)[columns]


def seen(
    outputs: int = 5,
    inputs: int = 8,
    *,
    bias: bool = False,
    pairs: bool = False,
    curvature: bool = False,
    seed: int = 0,
) -> Seen:
    """Correlated inputs with a mean. `pairs`: the outputs are those of other inputs, near x."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    tokens = 20 * inputs
    x = normal(tokens, inputs) @ normal(inputs, inputs) + 3 * normal(inputs)
    weight, b = normal(outputs, inputs), normal(outputs) if bias else None
    original = x + normal(tokens, inputs) if pairs else x
    y = original @ weight.T if b is None else original @ weight.T + b
    gradients = normal(tokens, outputs) @ normal(outputs, outputs)
    moments = Moments(
        gram=x.T @ x / tokens,
        mean=x.mean(0),
        count=tokens,
        cross=y.T @ x / tokens if pairs else None,
        output_mean=y.mean(0) if pairs else None,
        curvature=gradients.T @ gradients / tokens if curvature else None,
        output_square=y.square().mean(0) if pairs else None,
    )
    return Seen(weight, b, x, y, moments)
