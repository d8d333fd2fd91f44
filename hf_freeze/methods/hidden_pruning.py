"""Remove hidden channels: columns and rows of everything that reads or writes the residual stream (as the hidden sizes of
Muralidharan et al., 2024, "Compact Language Models via Pruning and Knowledge Distillation", https://arxiv.org/abs/2407.14679).
"""

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, hidden_size, set_fields
from hf_freeze.methods._checks import check_one_given, check_positive, is_ascending
from hf_freeze.methods.base import Method, Model, Statistics
from hf_freeze.methods.parts import Part, SeededValues, Selection, parts_of
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin


@register_method("hidden_pruning", example={"width": 8}, shrinks=True)
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

    `merge()` gives a native model of that hidden size where its class can have heads of the same size as before, and raises an
    error elsewhere: BERT's head size is the hidden size divided by the number of heads.

    Raises ValueError for a width or channel outside the hidden size, for a config that transformers refuses with this hidden
    size, for a family whose channels are not proved, and after a method that has put in layers which cannot lose channels: those
    of LowRank, FactorizedEmbedding without BERT's norm, and Quantize with int8 can.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    repeatable: ClassVar[bool] = False
    width: int | None = None
    keep: list[int] | None = None

    def __post_init__(self) -> None:
        check_one_given("HiddenPruning", width=self.width, keep=self.keep)
        if self.width is not None:
            check_positive(self.width, "HiddenPruning", "width")
        elif not isinstance(self.keep, list) or not self.keep or not is_ascending(self.keep):
            raise ValueError(
                f"HiddenPruning(keep={self.keep!r}): must be a list of different channels, at least one, in ascending order"
            )

    @property
    def kept(self) -> list[int]:
        """The channels that stay; of `width`, the first ones."""
        return list(range(self.width)) if self.keep is None else self.keep  # type: ignore[arg-type]

    @property
    def selects(self) -> bool:
        return self.keep is not None

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
        return {architecture.hidden_field: len(self.kept)}

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
        surgery.take_channels(new, old, self._largest(old) if self.keep is None else self.keep, self.name)

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
        return HiddenPruning(keep=self._largest(old)) if self.keep is None and fits else self

    def merge(self, model: Model, architecture: Architecture) -> None:
        surgery.widen_natively(model, architecture, self.name)
