"""Set the smallest weights to zero, at once or little by little (Zhu & Gupta, 2017, https://arxiv.org/abs/1710.01878)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.masked import Masked, prune_smallest
from hf_freeze.methods._checks import check_choice, check_share, check_training_span, training_span
from hf_freeze.methods._ramps import in_stages, ramp
from hf_freeze.methods._sparse import SparseMethod
from hf_freeze.methods.base import Model, Statistics
from hf_freeze.methods.parts import Part, Schedule
from hf_freeze.methods.registry import register_method
from hf_freeze.solvers.moments import Moments, loss
from hf_freeze.solvers.sparse import gradual, sparsegpt, refit_mask, wanda

_SCOPES = ("global", "layer")
_CRITERIA = ("magnitude", "wanda", "obs")


@register_method("magnitude_pruning", example={"sparsity": 0.5}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class MagnitudePruning(SparseMethod):
    """Zero the share `sparsity` of the weights with the smallest magnitudes, ranked over all chosen linears together
    (`scope="global"`) or in each linear (`"layer"`). The mask acts in the forward, so it holds after every step of every
    optimiser. Biases are not pruned.

    With neither `begin` nor `end`, `make_variant` prunes. Otherwise the sparsity rises as 1 - (1 - t)³ of its final value
    between these shares of training (None: 0 and 1), in a hundred stages of equal length, and pruned weights stay pruned. The
    rise needs `VariantCallback` or `model.advance`. `finalize()` prunes to the full sparsity and stores the remaining weights
    in a sparse format.

    Raises ValueError for a sparsity outside [0, 1), an unknown scope, component or layer, a begin or end outside 0..1 or in the
    wrong order, or a linear that another method has changed.
    """

    sparsity: float
    calibrates: ClassVar[bool] = True
    scope: str = "global"
    criterion: str = "magnitude"
    begin: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.sparsity, "MagnitudePruning", "sparsity", below_one=True)
        check_choice(self.scope, _SCOPES, "MagnitudePruning", "scope")
        check_choice(self.criterion, _CRITERIA, "MagnitudePruning", "criterion")
        if self.criterion != "magnitude" and (self.begin, self.end) != (None, None):
            raise ValueError(
                f"MagnitudePruning(criterion={self.criterion!r}, begin={self.begin}, end={self.end}): in training, magnitudes "
                "decide; leave begin and end out, or criterion"
            )
        check_training_span(self.begin, self.end, "MagnitudePruning")

    @property
    def parts(self) -> tuple[Part, ...]:
        gradual = self.finalizable and (self.begin, self.end) != (None, None)
        return (_RisingSparsity(self),) if gradual else ()

    def training_module(self, linear: Any) -> nn.Module:
        return Masked.from_linear(linear)

    @torch.no_grad()
    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        if statistics is None or self.parts or not self.finalizable:
            return
        modules = dict(self.modules(new, new.architecture))
        kept = self._kept_shares(old, modules, statistics)
        for moments in statistics.walk(list(modules)):
            for name, moment in moments.items():
                if moment is not None:
                    self._cut(old.base_model.get_submodule(name), modules[name], moment, kept[name], name, statistics)
                surgery.release(old, [name])

    def _cut(self, linear, module, moment, share, name, statistics):
        weight, bias = surgery.effective_weight(linear), linear.bias
        largest = _largest(weight, share)
        plain = loss(weight, torch.where(largest, weight, 0), moment, bias, bias)
        values, new_bias = gradual(weight, bias, moment, share)
        statistics.record(name, plain, loss(weight, values, moment, bias, new_bias))
        surgery.set_linear(module, values, new_bias)
        mask = values != 0
        module.keep(mask.T if isinstance(module, Conv1D) else mask)

    def _kept_shares(self, old, modules, statistics):
        return dict.fromkeys(modules, 1 - self.sparsity)

    def prepare(self, model: Model, architecture: Architecture) -> None:
        super().prepare(model, architecture)
        if self.criterion != "magnitude":
            return
        if not self.parts:
            self.prune(model, architecture, self.sparsity)

    def finalize(self, model: Model, architecture: Architecture) -> "MagnitudePruning":
        self.prune(model, architecture, self.sparsity)
        return super().finalize(model, architecture)

    def prune(self, model: Model, architecture: Architecture, sparsity: float) -> None:
        """Mask the weights with the smallest magnitudes, so that the share `sparsity` of all is zero."""
        prune_smallest([module for _, module in self.modules(model, architecture)], sparsity, self.scope)


def _largest(weight: torch.Tensor, share: float) -> torch.Tensor:
    """bool, in the shape of `weight`: the share of its entries with the largest magnitudes."""
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[weight.abs().flatten().topk(round(share * weight.numel()), sorted=False).indices] = True
    return mask.view_as(weight)


class _RisingSparsity(Schedule):
    """The sparsity by equation 1 of Zhu & Gupta (2017), in a hundred stages."""

    def __init__(self, method: MagnitudePruning) -> None:
        self.method = method

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        begin, end = training_span(self.method.begin, self.method.end)
        share = ramp("cubic", in_stages((step / total_steps - begin) / (end - begin)))
        return {"sparsity": self.method.sparsity * share}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        self.method.prune(model, architecture, self.values(step, total_steps)["sparsity"])
