"""What a linear sees, and what follows from it for every solver: the problem of least squares that a new weight solves.

A linear y = W x + b is replaced by W' x + b'. With H the Gram of the inputs plus a ridge, and T the best dense weight,
the error of any W', with the best b', is tr((T - W') H (T - W')ᵀ) plus a constant. Without pairs, T is W.

Shapes: O outputs, I inputs.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

RIDGE = 1e-3  # share of the mean diagonal of the Gram
FEW_TOKENS_RIDGE = 1e-2  # at least this share where there are fewer tokens than inputs
_EXACT_INPUTS = 4096  # up to this number of inputs, solvers compute in fp64


@dataclass(frozen=True)
class Moments:
    """Means over real tokens of the inputs of a linear y = W x + b, W (O, I): of the model as compressed so far (x) and of the
    outputs y that the original model has there.

    Raises ValueError for a tensor that is not finite, for shapes that do not fit, and for no tokens.
    """

    gram: Tensor  # (I, I) mean of x xᵀ, fp64 or fp32
    mean: Tensor  # (I,) mean of x
    count: int  # tokens
    cross: Tensor | None = (
        None  # (O, I) mean of y xᵀ, y: the output of this linear in the original model, its bias included
    )
    output_mean: Tensor | None = None  # (O,) mean of y
    curvature: Tensor | None = None  # (O, O) E[g gᵀ] of gradients to y
    output_square: Tensor | None = None  # (O,) mean of y²
    weight: float = 1.0  # mean of the weights by which tokens count in these means

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count={self.count}: moments need at least one token")
        inputs = len(self.mean)
        of_outputs = (self.output_mean, self.curvature, self.cross, self.output_square)
        known = [value for value in of_outputs if value is not None]
        outputs = len(known[0]) if known else 0
        shapes = {
            "gram": (inputs, inputs),
            "mean": (inputs,),
            "cross": (outputs, inputs),
            "output_mean": (outputs,),
            "curvature": (outputs, outputs),
            "output_square": (outputs,),
        }
        for name, shape in shapes.items():
            value = getattr(self, name)
            if value is None:
                continue
            if tuple(value.shape) != shape:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, but must have {shape}")
            if not value.isfinite().all():
                wrong = int((~value.isfinite()).sum())
                raise ValueError(f"{name} has {wrong} values that are not finite, of {value.numel()}")


@dataclass(frozen=True)
class Problem:
    """min over W' of tr((T - W') H (T - W')ᵀ), and the bias that goes with a solution."""

    target: Tensor  # (O, I) T
    gram: Tensor  # (I, I) H, with its ridge; of centred inputs if the linear has a bias
    cross: Tensor  # (O, I) T H
    curvature: Tensor | None  # (O, O) with a ridge
    mean: Tensor  # (I,)
    output_mean: Tensor | None  # (O,) None without a bias
    dtype: torch.dtype  # of the weight

    def result(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """(O, I) -> W' in the dtype of the original weight, and its bias b' = ȳ - W' m, (O,), or None."""
        new = weight.to(self.dtype)
        return new, self.bias(new)

    def bias(self, weight: Tensor, kept: Tensor | None = None) -> Tensor | None:
        """(O, K) -> (O,): the best bias of a weight on the inputs `kept`, or on all; None without a bias."""
        if self.output_mean is None:
            return None
        mean = self.mean if kept is None else self.mean[kept]
        return (self.output_mean - weight.to(mean.dtype) @ mean).to(self.dtype)


def problem(weight: Tensor, bias: Tensor | None, moments: Moments, ridge: float = RIDGE) -> Problem:
    """The problem of a linear, W (O, I) and b (O,) or None, in the `working_dtype`.

    Least squares with an intercept is least squares on centred moments, so with a bias H = G - m mᵀ + λ 1. λ is the share
    `ridge` of the mean diagonal. It draws towards the weight as it was, not to zero: T = (C + λ W) H⁻¹ with C the cross moments,
    which is W itself without pairs.

    Warns if there are fewer tokens than inputs, and raises the ridge. Raises ValueError for a weight that does not fit, or that
    is not finite.
    """
    if moments.mean.shape != weight.shape[1:]:
        raise ValueError(f"the weight has {weight.shape[1]} inputs, but the moments have {len(moments.mean)}")
    for name in ("cross", "output_mean", "curvature"):
        value = getattr(moments, name)
        if value is not None and len(value) != len(weight):
            raise ValueError(f"the weight has {len(weight)} outputs, but {name} has {len(value)}")
    if not weight.isfinite().all():
        raise ValueError(f"the weight of shape {tuple(weight.shape)} has values that are not finite")
    dtype = working_dtype(weight)
    w, gram, mean = (value.to(weight.device, dtype) for value in (weight, moments.gram, moments.mean))
    gram = (gram + gram.T).div_(2)
    output_mean = None
    if bias is not None:
        gram.addr_(mean, mean, alpha=-1)
        if moments.output_mean is not None:
            output_mean = moments.output_mean.to(w)
        elif moments.cross is None:
            output_mean = w @ mean + bias.to(w)
        else:
            raise ValueError("cross needs output_mean where the linear has a bias")
    added = add_ridge(gram, _share(moments, ridge))
    if moments.cross is None:
        target, cross = w, w @ gram
    else:
        cross = moments.cross.to(w)
        if output_mean is not None:
            cross = cross - output_mean.outer(mean)
        cross = cross + added * w
        target = solve(gram, cross)
    curvature = None
    if moments.curvature is not None:
        curvature = moments.curvature.to(w)
        curvature = (curvature + curvature.T) / 2
        add_ridge(curvature, ridge)
    return Problem(target, gram, cross, curvature, mean, output_mean, weight.dtype)


def without_outputs(moments: Moments) -> Moments:
    """What a linear sees, without what the original model has behind it."""
    return replace(moments, cross=None, output_mean=None, curvature=None, output_square=None)


def together(places: Sequence[Moments]) -> Moments:
    """What a linear sees that is in several places of a model, and what the original has there: means over the tokens of all
    places. Each has pairs, and inputs and outputs of the same sizes."""
    count = sum(each.count for each in places)

    def mean(name: str) -> Any:
        return sum(each.count / count * getattr(each, name) for each in places)

    of_outputs = {name: mean(name) for name in ("cross", "output_mean", "output_square")}
    return Moments(mean("gram"), mean("mean"), count, **of_outputs)


def projected(moments: Moments, down: Tensor, weight: Tensor, bias: Tensor | None) -> Moments:
    """What a linear sees behind a matrix D (R, I) whose inputs x are those of y = W x + b, W (O, I) and b (O,) or None, which it
    is to give: the outputs are y, without pairs too."""
    dtype = working_dtype(weight)
    d, w, gram, mean = (value.to(weight.device, dtype) for value in (down, weight, moments.gram, moments.mean))
    cross, output_mean = moments.cross, moments.output_mean
    if cross is None:
        cross, output_mean = w @ gram, w @ mean
        if bias is not None:
            cross, output_mean = cross + bias.to(w).outer(mean), output_mean + bias.to(w)
    return Moments(d @ gram @ d.T, d @ mean, moments.count, cross.to(w) @ d.T, output_mean, moments.curvature)


def behind(weight: Tensor, bias: Tensor | None, read: Moments, gram: Tensor) -> Moments:
    """What a linear sees, and what y = W x + b gave there, W (O, I) and b (O,) or None: from `read`, whose outputs are the inputs
    x of the original model, and the mean of x xᵀ, `gram` (I, I)."""
    if read.cross is None or read.output_mean is None:
        raise ValueError("the inputs of both models must be those of the same tokens")
    w = weight.to(gram)
    cross, mean, square = w @ read.cross.to(gram), w @ read.output_mean.to(gram), (w @ gram).mul_(w).sum(1)
    if bias is not None:
        b = bias.to(gram)
        square = square + 2 * b * mean + b.square()
        cross, mean = cross.addr_(b, read.mean.to(gram)), mean + b
    return replace(read, cross=cross, output_mean=mean, output_square=square)


def working_dtype(weight: Tensor) -> torch.dtype:
    """fp64 for at most 4,096 inputs, else fp32; always fp32 for values of 16 bits, and on devices without fp64."""
    is_exact = weight.shape[-1] <= _EXACT_INPUTS and weight.dtype.itemsize > 2 and weight.device.type != "mps"
    return torch.float64 if is_exact else torch.float32


def _share(moments: Moments, ridge: float) -> float:
    inputs = len(moments.mean)
    if moments.count >= inputs:
        return ridge
    share = max(ridge, FEW_TOKENS_RIDGE)
    warnings.warn(
        f"calibration has {moments.count} tokens for a linear of {inputs} inputs: give at least {inputs}, better {10 * inputs}; "
        f"a ridge of {share:.0%} of the mean diagonal is used",
        stacklevel=2,
    )
    return share


def add_ridge(gram: Tensor, share: float) -> float:
    """Add the share of its mean diagonal to the diagonal of a Gram (I, I), in place, and return the number that was added. That
    of zeros alone becomes the identity: then all directions count alike."""
    added = share * float(gram.diagonal().mean())
    if added <= torch.finfo(gram.dtype).tiny:
        added = 1.0
    gram.diagonal().add_(added)
    return added


def cholesky(gram: Tensor) -> Tensor:
    """(I, I) -> (I, I): lower L with L Lᵀ = G. Where rounding has left G indefinite, a growing ridge is added first."""
    factor, failed = torch.linalg.cholesky_ex(gram)
    added = float(gram.diagonal().mean()) * torch.finfo(gram.dtype).eps
    while failed and added < float("inf"):
        added *= 10
        factor, failed = torch.linalg.cholesky_ex(
            gram + added * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        )
    return factor


def solve(gram: Tensor, right: Tensor) -> Tensor:
    """X (O, I) with X G = R (O, I)."""
    lower = cholesky(gram)  # torch.cholesky_solve would copy it, and of wide layers it takes half a gigabyte
    half = torch.linalg.solve_triangular(lower, right.T, upper=False)
    return torch.linalg.solve_triangular(lower.T, half, upper=True).T


def inverse(gram: Tensor) -> Tensor:
    """(I, I) -> (I, I), symmetric"""
    factor = cholesky(gram)
    return torch.cholesky_inverse(factor, out=factor).mT.contiguous()  # it is in the order of LAPACK


def descending(square: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (n,), descending and not negative, and eigenvectors (n, n) in columns."""
    values, vectors = torch.linalg.eigh((square + square.T) / 2)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def tails(energies: Tensor) -> Tensor:
    """(n,) -> (n + 1,): the sum of the energies from each place on."""
    return torch.cat([energies.flip(0).cumsum(0).flip(0), energies.new_zeros(1)])


def best_dense(
    weight: Tensor, bias: Tensor | None, moments: Moments, *, ridge: float = RIDGE
) -> tuple[Tensor, Tensor | None]:
    """(O, I), (O,) or None -> the dense weight and bias whose outputs are nearest those of the original model, for the inputs of
    the model as compressed so far. Without pairs (`cross`), the weight as it is."""
    solved = problem(weight, bias, moments, ridge)
    return solved.result(solved.target)


def best_scale(moments: Moments, *, shifts: bool, ridge: float = RIDGE) -> tuple[Tensor, Tensor | None]:
    """For each input x_i, the s_i and, if it `shifts`, the t_i with the least E(y_i - s_i x_i - t_i)². (I,), (I,) or None; the
    ridge draws towards s = 1. Needs pairs."""
    if moments.cross is None or moments.output_mean is None:
        raise ValueError("a scale needs pairs")
    cross, square, wanted = moments.cross.diagonal(), moments.gram.diagonal(), moments.output_mean
    if shifts:
        cross, square = cross - wanted * moments.mean, square - moments.mean.square()
    added = (ridge * square.mean()).clamp_min(torch.finfo(square.dtype).tiny)
    scale = (cross + added) / (square + added)
    return scale, wanted - scale * moments.mean if shifts else None


def loss(
    weight: Tensor, new: Tensor, moments: Moments, bias: Tensor | None = None, new_bias: Tensor | None = None
) -> float:
    """E‖(W - W') x + b - b'‖² / E‖W x + b‖², exact; without biases tr((W - W') G (W - W')ᵀ) / tr(W G Wᵀ). Both weights (O, I).
    With pairs E‖y - W' x - b'‖² / E‖y‖²."""
    if moments.cross is not None and moments.output_square is not None:
        total, w = float(moments.output_square.sum()), new.to(working_dtype(new))
        common = (w * moments.cross.to(w)).sum()
        if new_bias is not None and moments.output_mean is not None:
            common = common + new_bias.to(w) @ moments.output_mean.to(w)
        error = max(total - 2 * float(common) + _energy(new, new_bias, moments), 0.0)
        return error / total if total > 0 else float(error > 0)
    total = _energy(weight, bias, moments)
    dtype = working_dtype(weight)
    difference = None
    if bias is not None or new_bias is not None:
        old, other = (weight.new_zeros(len(weight)) if b is None else b for b in (bias, new_bias))
        difference = old.to(dtype) - other.to(dtype)
    error = _energy(weight.to(dtype) - new.to(dtype), difference, moments)
    return error / total if total > 0 else float(error > 0)


def _energy(weight: Tensor, bias: Tensor | None, moments: Moments) -> float:
    """E‖W x + b‖²"""
    w = weight.to(working_dtype(weight))
    energy = (w @ moments.gram.to(w)).mul(w).sum()
    if bias is not None:
        b = bias.to(w)
        energy = energy + 2 * (w @ moments.mean.to(w)) @ b + b @ b
    return max(float(energy), 0.0)
