"""Heads that go during training: little by little, by their importance to recent steps, or by gates with a penalty."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_freeze import surgery
from hf_freeze.architectures.base import Attention
from hf_freeze.layers.hard_concrete import HardConcrete
from hf_freeze.layers.masked_heads import MaskedHeads, settle
from hf_freeze.methods._heads import has_more_than_linears, kept_count, removed_together
from hf_freeze.methods._ramps import ramp
from hf_freeze.methods.base import Model
from hf_freeze.methods.checks import training_span
from hf_freeze.methods.parts import Objective, Part, Schedule, Step

HEAD_SCOPES = ("attention", "global")


def marked(model: Any, attentions: Mapping[str, Attention]) -> dict[str, Any]:
    """Attention -> its output projection, for those that have a mask or gates."""
    modules = {name: model.base_model.get_submodule(attention.o) for name, attention in attentions.items()}
    return {name: module for name, module in modules.items() if isinstance(module, MaskedHeads | HardConcrete)}


class HeadsInTraining(Part):
    """Masks or gates at the output projections of attentions, until `finalize()`. `method`: a HeadPruning."""

    layer: Any

    def per_mark(self, model: Any, attention: Attention) -> int:
        """The number of heads for each mask or gate."""
        raise NotImplementedError

    def mark(self, model: Any, attention: Attention, heads: int) -> None:
        """Put in the masks or gates of an attention of so many heads."""
        linear = surgery.dense_module(model, attention.o, self.method.name, advice="leave it out by layers=")
        surgery.replace(model, attention.o, self.layer.from_linear(linear, heads // self.per_mark(model, attention)))

    def kept(self, model: Any, attentions: Mapping[str, Attention]) -> dict[str, list[int]]:
        """Attention -> the heads that stay when training ends."""
        kept = {}
        for name, module in marked(model, attentions).items():
            each = self.per_mark(model, attentions[name])
            numbers = module.kept() or ([module.largest()] if has_more_than_linears(model, attentions[name]) else [])
            kept[name] = [number * each + head for number in numbers for head in range(each)]
        return kept


class FewerHeads(HeadsInTraining, Schedule):
    """The share of heads falls from 1 to that of the method."""

    layer = MaskedHeads

    def per_mark(self, model: Any, attention: Attention) -> int:
        return 1

    def kept(self, model: Any, attentions: Mapping[str, Attention]) -> dict[str, list[int]]:
        self._mask(model, attentions, self.method.share)
        return super().kept(model, attentions)

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        begin, end = training_span(self.method.begin, self.method.end)
        progress = ramp(self.method.ramp, (step / total_steps - begin) / (end - begin))
        return {"share of heads": 1 - (1 - self.method.share) * progress}

    def advance(self, model: Model, architecture: Any, step: int, total_steps: int) -> None:
        attentions = self.method.chosen(architecture, model.config)
        self._mask(model, attentions, self.values(step, total_steps)["share of heads"])

    def _mask(self, model: Any, attentions: Mapping[str, Attention], share: float) -> None:
        """Mask the least important heads, so that `share` of them is kept."""
        modules = marked(model, attentions)

        def magnitudes(name: str) -> torch.Tensor:
            return surgery.head_magnitudes(model, attentions[name], modules[name].mask.numel())

        groups = {name: removed_together(model, attentions[name]) for name in modules}
        mask_least(modules, groups, magnitudes, share, self.method.scope)


class OpenGates(HeadsInTraining, Objective):
    """λ times the expected number of heads with open gates (Voita et al., 2019, equation 8)."""

    layer = HardConcrete

    def per_mark(self, model: Any, attention: Attention) -> int:
        return removed_together(model, attention)

    def loss(self, model: Model, architecture: Any, step: Step | None = None) -> torch.Tensor | None:
        attentions = self.method.chosen(architecture, model.config)
        counts: Any = [
            module.open_probabilities().sum() * self.per_mark(model, attentions[name])
            for name, module in marked(model, attentions).items()
        ]
        return self.method.penalty * sum(counts) if counts else None


def mask_least(
    modules: Mapping[str, MaskedHeads],
    groups: Mapping[str, int],
    magnitudes: Callable[[str], torch.Tensor],
    share: float,
    scope: str,
) -> None:
    """Mask heads until `share` of them is kept: of each attention ("attention"), or of all together ("global"), which leaves each
    one group at least. Masked heads stay masked. Does nothing on meta.

    `groups`: attention -> number of heads that share keys and values, and are kept together. `magnitudes(name)`: scores (N,) of
    an attention whose importance has not been measured.
    """
    if any(module.mask.is_meta for module in modules.values()):
        return
    settle([*modules.values()])
    kept = {name: len(module.kept()) // groups[name] for name, module in modules.items()}
    heads = {name: module.mask.numel() for name, module in modules.items()}
    if scope == "global":
        total = sum(count // groups[name] for name, count in heads.items())
        wanted = {"": sum(kept.values()) - max(round(share * total), len(heads))}
    else:
        wanted = {name: kept[name] - kept_count(share, heads[name], groups[name]) // groups[name] for name in heads}
    if all(count <= 0 for count in wanted.values()):
        return
    scores = {name: _scores(module, groups[name], lambda n=name: magnitudes(n)) for name, module in modules.items()}
    ranking = sorted((score, name, number) for name, of in scores.items() for number, score in of.items())
    for _, name, number in ranking:
        pool = "" if scope == "global" else name
        if wanted[pool] > 0 and kept[name] > 1:
            group = groups[name]
            modules[name].mask[number * group : (number + 1) * group] = False
            wanted[pool], kept[name] = wanted[pool] - 1, kept[name] - 1


def _scores(module: MaskedHeads, group: int, magnitudes: Callable[[], torch.Tensor]) -> dict[int, float]:
    """Number of a group of heads -> its share of the L2 norm of the kept heads of this attention; masked ones are left out."""
    importance = module.importance.double() * module.mask
    if not importance.any():
        importance = magnitudes().to(importance) * module.mask
    importance = importance / importance.norm().clamp(min=torch.finfo(importance.dtype).tiny)
    kept = {head // group for head in module.kept()}
    return {number: score for number, score in enumerate(importance.view(-1, group).sum(1).tolist()) if number in kept}
