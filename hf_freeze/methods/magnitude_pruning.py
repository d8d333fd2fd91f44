"""Set the smallest weights to zero, at once or little by little (Zhu & Gupta, 2017, https://arxiv.org/abs/1710.01878), or those
that the outputs need least (Frantar & Alistarh, 2023, "SparseGPT", https://arxiv.org/abs/2301.00774).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.masked import Masked, prune_smallest
from hf_freeze.methods._ramps import in_stages, ramp
from hf_freeze.methods._sparse import SPARSE, SparseMethod
from hf_freeze.methods.base import Facts, Model, Statistics
from hf_freeze.methods.checks import check_fields, check_share_below_one, one_of, training_span
from hf_freeze.methods.parts import Part, Schedule
from hf_freeze.methods.registry import register_method
from hf_freeze.solvers.allocation import allocate
from hf_freeze.solvers.moments import Moments, loss
from hf_freeze.solvers.sparse import gradual, losses, refit_mask, wanda

_SCOPES = ("global", "layer")
_CRITERIA = ("magnitude", "wanda", "obs")
_STEPS = 64  # of conjugate gradients, when weights are refitted
_SHARES = (
    0.8,
    0.65,
    0.5,
    0.4,
    0.3,
    0.2,
    0.13,
    0.08,
    0.04,
)  # of a linear, at which its error is found for an allocation
_UNITS = 64  # that the smallest linear is divided into


@register_method("magnitude_pruning", example={"sparsity": 0.5}, facts=replace(SPARSE, calibration="used"))
@dataclass(frozen=True, kw_only=True)
class MagnitudePruning(SparseMethod):
    """Zero the share `sparsity` of the weights with the smallest magnitudes, ranked over all chosen linears together
    (`scope="global"`) or in each linear (`"layer"`). The mask acts in the forward, so it holds after every step of every
    optimiser. Biases are not pruned.

    With neither `begin` nor `end`, `make_variant` prunes. Otherwise the sparsity rises as 1 - (1 - t)³ of its final value
    between these shares of training (None: 0 and 1), in a hundred stages of equal length, and pruned weights stay pruned. The
    rise needs `VariantCallback` or `model.advance`. `finalize()` prunes to the full sparsity and stores the remaining weights
    in a sparse format.

    With a calibration, the weights that stay and the bias are refitted to the outputs of each linear on what it sees, and
    `criterion` says how they are chosen. `"magnitude"`: as without. `"wanda"`: in each row, those with the largest |w| √(mean x²)
    of their input x (Sun et al., 2023, https://arxiv.org/abs/2306.11695). `"obs"`: in rounds, those go that change the
    predictions least, and the others are refitted (`hf_freeze.solvers.sparse.gradual`); `scope="global"` also chooses the share
    of each linear, `"layer"` gives the same share to all.

    Raises ValueError for a sparsity outside [0, 1), an unknown scope or criterion, a criterion other than `"magnitude"` without a
    calibration or in training, an unknown component or layer, a begin or end outside 0..1 or in the
    wrong order, or a linear that another method has changed.
    """

    sparsity: float
    scope: str = "global"
    criterion: str = "magnitude"
    begin: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, sparsity=check_share_below_one, scope=one_of(_SCOPES), criterion=one_of(_CRITERIA))
        if self.criterion != "magnitude" and (self.begin, self.end) != (None, None):
            raise ValueError(
                f"MagnitudePruning(criterion={self.criterion!r}, begin={self.begin}, end={self.end}): in training, magnitudes "
                "decide; leave begin and end out, or criterion"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        gradual = self.nonzeros is None and (self.begin, self.end) != (None, None)
        return (_RisingSparsity(self),) if gradual else ()

    @property
    def facts(self) -> Facts:
        return replace(super().facts, calibration="used" if self.criterion == "magnitude" else "needed")

    def training_module(self, linear: Any) -> nn.Module:
        return Masked.from_linear(linear)

    @torch.no_grad()
    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        if statistics is None or self.parts or self.nonzeros is not None:
            return
        modules = dict(self.modules(new, new.architecture))
        shares = dict.fromkeys(modules, 1 - self.sparsity)
        if self.criterion == "magnitude":
            self.prune(new, new.architecture, self.sparsity)
        elif self.criterion == "obs" and self.scope == "global":
            shares = self._allocated(old, modules, statistics)
        for moments in statistics.walk(list(modules), curvature=self.criterion == "obs", fit=True):
            for name, moment in moments.items():
                module, linear = modules[name], old.base_model.get_submodule(name)
                if not surgery.restored(old, name):
                    if self.criterion != "magnitude":
                        prune_smallest([module], 1 - shares[name], "layer")
                    if moment is not None:
                        self._fit(module, linear, moment, shares[name], name, statistics)
                surgery.release(old, [name])

    def _fit(self, module: Any, linear: Any, moments: Moments, share: float, name: str, statistics: Statistics) -> None:
        """Choose the weights that stay, unless their magnitudes have, and refit them. `module` has the mask of magnitudes."""
        weight, bias = surgery.effective_weight(linear), linear.bias
        before = loss(weight, module.dense_weight(), moments, bias, bias)
        if self.criterion == "obs":
            new_weight, new_bias = gradual(weight, bias, moments, share)
            mask = new_weight != 0
        else:
            mask = _of_weight(module, module.kept_entries())
            mask = mask if self.criterion == "magnitude" else wanda(weight, moments, share)
            new_weight, new_bias = refit_mask(weight, bias, moments, mask, steps=_STEPS)
        surgery.set_linear(module, new_weight, new_bias)
        module.keep(_of_weight(module, mask))
        statistics.record(name, before, loss(weight, new_weight, moments, bias, new_bias))

    def _allocated(self, old: Any, modules: dict[str, Any], statistics: Statistics) -> dict[str, float]:
        """The share of the weights of each linear that stays, so that the predictions change least."""
        sizes = {name: module.weight.numel() for name, module in modules.items()}
        unit = max(1, min(sizes.values()) // _UNITS)
        curves = {name: [0.0] * (size // unit + 1) for name, size in sizes.items()}
        for moments in statistics.walk(list(modules), curvature=True, resumes=False):
            for name, moment in moments.items():
                if moment is not None and moment.curvature is None:  # nothing tells which linear matters more
                    return dict.fromkeys(modules, 1 - self.sparsity)
                if moment is not None:
                    linear = old.base_model.get_submodule(name)
                    errors = losses(surgery.effective_weight(linear), linear.bias, moment, _SHARES)
                    curves[name] = _interpolated([0.0, *errors], [1.0, *_SHARES], unit / sizes[name])
        most = [len(curve) - 1 for curve in curves.values()]
        removals = round(self.sparsity * sum(sizes.values()) / unit)
        comparable = all(map(any, curves.values()))
        if removals > sum(most) or not comparable:
            return dict.fromkeys(modules, 1 - self.sparsity)
        removed = allocate(list(curves.values()), removals, most=most)
        return {name: 1 - gone * unit / sizes[name] for name, gone in zip(curves, removed, strict=True)}

    def prepare(self, model: Model, architecture: Architecture) -> None:
        super().prepare(model, architecture)
        if not self.parts and self.criterion == "magnitude":
            self.prune(model, architecture, self.sparsity)

    def finalize(self, model: Model, architecture: Architecture) -> "MagnitudePruning":
        if self.criterion == "magnitude":
            self.prune(model, architecture, self.sparsity)
        return super().finalize(model, architecture)

    def prune(self, model: Model, architecture: Architecture, sparsity: float) -> None:
        """Mask the weights with the smallest magnitudes, so that the share `sparsity` of all is zero."""
        prune_smallest([module for _, module in self.modules(model, architecture)], sparsity, self.scope)


def _of_weight(module: Any, entries: torch.Tensor) -> torch.Tensor:
    """Between the layout of W (O, I) and that of the weight of a Masked, which may be Conv1D's, in both directions."""
    return entries.T if isinstance(module, Conv1D) else entries


def _interpolated(errors: Sequence[float], shares: Sequence[float], step: float) -> list[float]:
    """The error after 0, 1, 2 … steps of the share that stays, from errors at falling `shares`; their roots are interpolated."""
    curve, at = [], 0
    for number in range(int((1 - shares[-1]) / step) + 1):
        share = 1 - number * step
        while at < len(shares) - 2 and shares[at + 1] > share:
            at += 1
        part = (shares[at] - share) / (shares[at] - shares[at + 1])
        low, high = (max(error, 0) ** 0.5 for error in errors[at : at + 2])
        curve.append((low + part * (high - low)) ** 2)
    return curve


class _RisingSparsity(Schedule):
    """The sparsity by equation 1 of Zhu & Gupta (2017), in a hundred stages."""

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        begin, end = training_span(self.method.begin, self.method.end)
        share = ramp("cubic", in_stages((step / total_steps - begin) / (end - begin)))
        return {"sparsity": self.method.sparsity * share}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        self.method.prune(model, architecture, self.values(step, total_steps)["sparsity"])
