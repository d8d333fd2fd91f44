"""Gives the layers of `Quantize` their values: each weight rounded to the nearest, or by GPTQ for what its linear sees."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_freeze import surgery
from hf_freeze.layers import integer_experts
from hf_freeze.layers.factorized import FactorizedLinear, equal_columns
from hf_freeze.layers.grids import GROUP, Grid
from hf_freeze.layers.schemes import Scheme
from hf_freeze.methods.base import Statistics
from hf_freeze.solvers.moments import Moments, loss, projected, without_outputs
from hf_freeze.solvers.rounding import Rounded, Symmetric, gptq


@dataclass(frozen=True)
class Values:
    """The values of the layers that the method `name` has put into the model `new`, from `old`. `train`: the layers train for few
    bits, and have the values of native parameters already. `statistics`: of what linears see, or None."""

    name: str
    grid: Grid | Scheme
    train: bool
    old: Any
    new: Any
    statistics: Statistics | None

    def set_tables(self, tables: Mapping[str, Any]) -> None:
        """Set those of tables and output matrices, by full name."""
        for name, module in tables.items():
            old = self.old.get_submodule(name)
            weight = old.weight
            if hasattr(module, "projection"):
                weight, ratios = equal_columns(weight)
                surgery.set_values(module.projection, old.projection * ratios[:, None])
                if self.train:
                    surgery.set_values(module.weight, weight)
            if self.train:
                module.start()
            elif f"{name}.packed" not in self.new.all_tied_weights_keys:
                module.fill(weight)

    def set_linears(self, modules: Mapping[str, Any], experts: Iterable[str]) -> None:
        """Set those of linears and of experts, by name below the base model."""
        owners = {
            f"{owner}.{matrices}.{number}": owner
            for owner in experts
            for matrices, parameter in self.old.base_model.get_submodule(owner).named_parameters()
            for number in range(len(parameter))
        }
        matrix_of = {owner: name for name, owner in owners.items()}  # one stands for all of a module
        walk: Any = [dict.fromkeys(modules), *({name: None} for name in matrix_of.values())]
        if self.statistics is not None and (modules or owners):
            walk = self.statistics.walk([*modules, *owners], {name: (owner,) for name, owner in owners.items()})
        for moments in walk:
            if (owner := owners.get(next(iter(moments), ""))) is not None:
                self._round_experts(owner, moments)
                surgery.release(self.old, [owner])
                continue
            for name, moment in moments.items():
                linear = self.old.base_model.get_submodule(name)
                if moment is None or not surgery.restored(self.old, name):
                    self._fill(modules[name], linear)
                    if moment is not None and self.statistics is not None:
                        self._round(modules[name], linear, moment, name, self.statistics)
                surgery.release(self.old, [name])

    def _fill(self, module: Any, linear: Any) -> None:
        """Give the layer that replaces `linear` its values, each rounded to the nearest."""
        if factors := _factors(linear):
            module.set_parts(factors)
        elif not self.train:
            module.fill(surgery.effective_weight(linear))
        if self.train:
            module.start()

    def _round(self, module: Any, linear: Any, moments: Moments, name: str, statistics: Statistics) -> None:
        """Round `linear` again, so that what comes out of the layer changes least; its bias follows."""
        if not module.is_chain:
            statistics.note(f"{self.name}: a {type(linear).__name__} is rounded as without a calibration")
            return
        weight, bias = surgery.effective_weight(linear), linear.bias
        before = loss(weight, module.dense_weight(), moments, bias, bias)
        *inner, (last, part) = zip(module.holders(), _factors(linear) or [weight], strict=True)
        seen = moments
        for holder, factor in inner:
            self._set_rounded(holder, factor, None, without_outputs(seen))
            seen = projected(seen, holder.dense_weight(), weight, bias)
        new_bias = self._set_rounded(last, part, bias, seen)
        if new_bias is not None:
            surgery.set_values(module.bias, new_bias)
        statistics.record(name, before, loss(weight, module.dense_weight(), moments, bias, module.bias))

    def _round_experts(self, owner: str, moments: Mapping[str, Moments | None]) -> None:
        """Round the matrices of the experts `owner`: each to the nearest, or by its moments."""
        experts, integers = (model.base_model.get_submodule(owner) for model in (self.old, self.new))
        for name, module in integer_experts.held_matrices(integers):
            matrices = experts.get_parameter(name)
            module.fill(matrices.flatten(0, 1))
            plain = module.part()
            numbers, steps = (x.view(*matrices.shape[:2], -1).clone() for x in (module.integers(), module.steps()))
            for number, matrix in enumerate(matrices):
                moment = moments.get(place := f"{owner}.{name}.{number}")
                if moment is not None and self.statistics is not None:
                    rounded = self._gptq(matrix, None, moment)
                    numbers[number], steps[number] = rounded.numbers, rounded.steps
                    errors = (loss(matrix, each.to(matrix), moment) for each in (plain[number], rounded.weight()))
                    self.statistics.record(place, *errors)
            module.set_grid(numbers.flatten(0, 1), steps.flatten(0, 1))

    def _set_rounded(self, holder: Any, weight: Any, bias: Any, moments: Moments) -> torch.Tensor | None:
        """Round W (O, I) to the grid, and return its bias (O,) or None."""
        rounded = self._gptq(weight, bias, moments)
        holder.set_grid(rounded.numbers, rounded.steps)
        return rounded.bias

    def _gptq(self, weight: Any, bias: Any, moments: Moments) -> Rounded:
        group = None if self.grid.granularity == "channel" else GROUP
        return gptq(weight, bias, moments, Symmetric(self.grid.levels), group=group)  # type: ignore[union-attr]


def _factors(linear: Any) -> list[torch.Tensor]:
    """The balanced factors of a linear that has some."""
    return linear.balanced() if isinstance(linear, FactorizedLinear) else []
