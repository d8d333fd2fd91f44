"""Heads that go during training: little by little, by their importance to recent steps, or by gates with a penalty."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_freeze.layers.masked_heads import MaskedHeads, settle
from hf_freeze.methods._checks import training_span
from hf_freeze.methods._ramps import ramp
from hf_freeze.methods.base import Model
from hf_freeze.methods.parts import Objective, Schedule, Step

HEAD_SCOPES = ("attention", "global")


class FewerHeads(Schedule):
    """The share of heads falls from 1 to that of the method."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        begin, end = training_span(self.method.begin, self.method.end)
        progress = ramp(self.method.ramp, (step / total_steps - begin) / (end - begin))
        return {"share of heads": 1 - (1 - self.method.share) * progress}

    def advance(self, model: Model, architecture: Any, step: int, total_steps: int) -> None:
        self.method.mask(model, architecture, self.values(step, total_steps)["share of heads"])


class OpenGates(Objective):
    """λ times the expected number of heads with open gates (Voita et al., 2019, equation 8)."""

    def __init__(self, method: Any, penalty: float) -> None:
        self.method, self.penalty = method, penalty

    def loss(self, model: Model, architecture: Any, step: Step | None = None) -> torch.Tensor | None:
        modules, attentions = self.method.masked(model, architecture), architecture.attentions(model.config)
        open_heads: Any = sum(
            module.open_probabilities().sum() * self.method.per_mask(model, attentions[name])
            for name, module in modules.items()
        )
        return self.penalty * open_heads if modules else None


def kept_count(share: float, heads: int, group: int) -> int:
    """The number of heads that `share` keeps of `heads`: whole groups of `group` heads, at least one."""
    return max(round(share * heads / group), 1) * group


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
