"""Remove hidden channels: columns and rows of everything that reads or writes the residual stream (as the hidden sizes of
Muralidharan et al., 2024, "Compact Language Models via Pruning and Knowledge Distillation", https://arxiv.org/abs/2407.14679).
"""

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_freeze import surgery
from hf_freeze.architectures.base import LINEAR_COMPONENTS, Architecture, base_name, hidden_size, set_fields
from hf_freeze.architectures.fields import hidden_sizes
from hf_freeze.architectures.probe import adds_one
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.roles import is_norm
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.checks import check_one_given, check_positive, is_ascending, wrong
from hf_freeze.methods.parts import Part, SeededValues, Selection, parts_of
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin
from hf_freeze.solvers.moments import Moments, best_dense, best_scale, loss


@register_method(
    "hidden_pruning",
    example={"width": 8},
    facts=Facts(needs={"hidden"}, shrinks=True, calibration="used", repeatable=False),
)
@dataclass(frozen=True, kw_only=True)
class HiddenPruning(Method):
    """Keep the `width` channels of the largest magnitude of the hidden states, everywhere: the residual stream of the whole model
    becomes narrower. Or `keep`, the channels to keep, in ascending order.

    Tables, norms, and the linears that read or write the stream lose the same channels, in all stacks, and so does the output
    matrix. The sizes of heads and FFNs stay, and so do the scales that the backbone has derived from its hidden size. A pooler
    or the inner layer of a task head reads fewer channels and is as wide as before. The hidden states that the model returns
    have `width` numbers.

    The magnitude of a channel is √(w r). w sums over all matrices that write it the mean square of their weights for this
    channel, divided by that of the whole matrix; r does so over those that read it. Which parameters these are is found and
    proved on a small model of the family when the method is used. Of fresh weights, `width` keeps the first channels; of trained
    weights, the config names them.

    With a calibration, those channels stay that add most to the outputs of what reads them, and all linears in layers are
    refitted; so are the weights and biases of their norms, which see another mean square of fewer channels.

    `merge()` gives a native model of that hidden size where its class can have heads of the same size as before, and raises an
    error elsewhere: BERT's head size is the hidden size divided by the number of heads.

    Raises ValueError for a width or channel outside the hidden size, for a config that transformers refuses with this hidden
    size, for a family whose channels are not proved, and after a method that has put in layers which cannot lose channels: those
    of LowRank, FactorizedEmbedding without BERT's norm, and Quantize with int8 can.
    """

    width: int | None = None
    keep: list[int] | None = None

    def __post_init__(self) -> None:
        check_one_given("HiddenPruning", width=self.width, keep=self.keep)
        if self.width is not None:
            check_positive(self.width, "HiddenPruning", "width")
        elif not isinstance(self.keep, list) or not self.keep or not is_ascending(self.keep):
            raise wrong(self, "must be a list of different channels, at least one, in ascending order", "keep")

    @property
    def kept(self) -> list[int]:
        """The channels that stay; of `width`, the first ones."""
        return list(range(self.width)) if self.keep is None else self.keep  # type: ignore[arg-type]

    @property
    def facts(self) -> Facts:
        return replace(super().facts, selects=self.keep is not None)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Selection(self.origins, self.decided, must_decide=lambda architecture, config: True),)

    def check(self, architecture: Architecture, config: Any) -> None:
        size = hidden_size(config)
        if self.width is not None and self.width > size:
            raise ValueError(f"HiddenPruning(width={self.width}): must be in 1..{size}, the hidden size")
        if self.kept[-1] >= size:
            raise ValueError(f"HiddenPruning: channel {self.kept[-1]}: must be in 0..{size - 1}")
        trial = copy.deepcopy(config)
        set_fields(trial, self.config_changes(architecture, config))
        try:
            trial.validate()
        except Exception as error:  # whatever the native class raises
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ValueError(
                f"HiddenPruning(width={len(self.kept)}): transformers refuses this hidden size: {reason}"
            ) from error

    def config_changes(self, architecture: Architecture, config: Any) -> dict[str, Any]:
        return hidden_sizes(config, architecture.hidden_field, len(self.kept))

    def describe(self, architecture: Architecture, config: Any) -> Architecture:
        """Heads keep their size, which a description may derive from the hidden size."""
        stacks = {}
        for name, stack in architecture.stacks.items():
            present = stack.attentions_in(config)
            attentions = {
                kind: replace(attention, size=attention.head_size(config)) if kind in present else attention
                for kind, attention in stack.attentions.items()
            }
            stacks[name] = replace(stack, attentions=attentions)
        return replace(architecture, stacks=stacks)

    def restructure(self, model: Model, architecture: Architecture) -> None:
        if len(self.kept) == surgery.hidden_channels(model):
            warnings.warn(f"{self.name!r} keeps all hidden channels: nothing is removed", stacklevel=2)
        surgery.keep_channels(model, architecture, self.kept, self.name)

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        kept = self._largest(old) if self.keep is None else self.keep
        surgery.take_channels(new, old, kept, self.name)
        if statistics is None:
            return
        linears, norms = _linears(old, self.name), _norms(old, self.name)
        for moments in statistics.walk(list(linears), norms=norms, channels=kept):
            for name, moment in moments.items():
                linear = new.base_model.get_submodule(name)
                if name in norms and moment is not None:
                    _refit_norm(linear, moment)
                if moment is None or not surgery.is_dense(linear):
                    continue
                weight, bias = surgery.effective_weight(linear), linear.bias
                fitted, fitted_bias = best_dense(weight, bias, moment)
                before, after = (
                    loss(weight, weight, moment, bias, bias),
                    loss(weight, fitted, moment, bias, fitted_bias),
                )
                statistics.record(name, before, after)
                surgery.set_linear(linear, fitted, fitted_bias)

    def _largest(self, model: Any) -> list[int]:
        scores = surgery.channel_magnitudes(model, self.name)
        return scores.argsort(descending=True, stable=True)[: self.width].sort().values.tolist()

    def origins(self, model: Model, architecture: Architecture) -> dict[str, Origin]:
        seeded = {name for _, part in parts_of(getattr(model, "methods", ()), SeededValues) for name in part.components}
        return surgery.channel_origins(model, architecture, self.kept, self.name, seeded)

    def decided(self, old: Any, architecture: Architecture, statistics: Statistics | None = None) -> "HiddenPruning":
        fits = self.refusal(architecture) is None and (self.width or 0) <= hidden_size(
            old.config
        )  # else it is refused later
        if self.keep is not None or not fits:
            return self
        return HiddenPruning(keep=self._largest(old) if statistics is None else self._most_read(old, statistics))

    def _most_read(self, old: Any, statistics: Statistics) -> list[int]:
        """The channels that add most to the outputs of what reads them: Σ over linears of ‖W_j‖² E[x_j²], as a share of all
        its channels."""
        readers = [name for name, channels in _linears(old, self.name).items() if channels.reads]
        scores: Any = 0
        for moments in statistics.walk(readers):
            for name, moment in moments.items():
                if moment is not None:
                    weight = surgery.effective_weight(old.base_model.get_submodule(name)).to(moment.gram)
                    energy = weight.square().sum(0) * moment.gram.diagonal()
                    scores = scores + energy / energy.sum().clamp_min(1e-30)
        return scores.argsort(descending=True, stable=True)[: self.width].sort().values.tolist()

    def merge(self, model: Model, architecture: Architecture) -> None:
        surgery.widen_natively(model, architecture, self.name)


def _norms(model: Any, method: str) -> list[str]:
    """The norms in layers that scale hidden channels, below the base model."""
    names = {one.name: base_name(model, one.name) for one in surgery.channels_in(model, method)}
    layer_of = architecture_for(model).layer_of
    return [
        name
        for full, name in names.items()
        if is_norm(module := model.get_submodule(full)) and layer_of(f"{name}.") and hasattr(module, "weight")
    ]


@torch.no_grad()
def _refit_norm(norm: Any, moments: Moments) -> None:
    """Scale and shift each channel of a norm, so that it gives what the old one gave there. `moments`: of its outputs now."""
    if moments.cross is None or moments.output_mean is None:
        return
    has_bias, one = getattr(norm, "bias", None) is not None, int(adds_one(norm))
    scale, shift = best_scale(moments, shifts=has_bias)
    surgery.set_values(norm.weight, (norm.weight + one).to(scale) * scale - one)
    if has_bias:
        surgery.set_values(norm.bias, norm.bias.to(scale) * scale + shift)


def _linears(model: Any, method: str) -> dict[str, surgery.Channels]:
    """Name, below the base model -> hidden channels, of the linears in layers that read or write them."""
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    found = {
        one.name.removeprefix(prefix): one for one in surgery.channels_in(model, method) if one.name.startswith(prefix)
    }
    names = [
        name
        for component in LINEAR_COMPONENTS
        for _, _, name in architecture_for(model).linears(model.config, component)
    ]
    return {name: found[name] for name in names if name in found}
