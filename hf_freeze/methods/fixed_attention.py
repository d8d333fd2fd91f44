"""Self-attention by fixed patterns of positions (Raganato et al., 2020, https://arxiv.org/abs/2002.10260)."""

from dataclasses import dataclass, replace
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention, check_layers_type
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers.fixed_heads import EMPTY_ROWS, PATTERNS, UNITS, Words
from hf_freeze.methods._heads import chosen_attentions
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.checks import check_any_selected, check_fields, is_ascending, one_of, wrong
from hf_freeze.methods.parts import Part, Selection
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin


@register_method("fixed_attention", example={"patterns": [5]}, facts=Facts(needs={"blocks"}, shrinks=True))
@dataclass(frozen=True, kw_only=True)
class FixedAttention(Method):
    """Let the first heads of the encoder's self-attention, in `layers` (None: all), attend by position alone. These heads have
    no queries and keys; each follows one of `patterns`: a list of numbers in 1..8, or 7 for the first seven (the remaining heads
    learn, as in "7 fixed + 1 learnable"), or 8 for all. `layers.fixed_heads` has the formulas. Values and outputs are trained as
    before, and keep the weights of a trained model.

    A pattern such as "the previous token" defines no weight for some rows, such as that of the first token. Such rows are zero
    (`empty_rows="zero"`) or attend to the first or last token (`"boundary"`); the paper leaves this open. Positions count the
    tokens of each sentence without its padding, or its words (`unit="word"`). `continuations`: the ids of the tokens that
    continue a word, as `analysis.word_continuations(tokenizer)` returns them.

    `merge()` raises an error, because no native model has such heads.

    Raises ValueError for `unit="word"` without `continuations` or `continuations` without it, a pattern outside 1..8, more
    patterns than heads, an unknown `empty_rows` or layer, and an attention that is causal or that another method has changed.
    """

    patterns: int | list[int] = 7
    unit: str = "token"
    continuations: list[int] | None = None
    empty_rows: str = "zero"
    layers: dict[str, list[int]] | None = None

    def __post_init__(self) -> None:
        check_layers_type(self.layers)
        listed = isinstance(self.patterns, list) and self.patterns and all(type(n) is int for n in self.patterns)
        if not (listed or (type(self.patterns) is int and self.patterns in (7, 8))):
            raise ValueError(f"FixedAttention(patterns={self.patterns!r}): must be 7, 8 or a list such as [1, 2, 3]")
        for number in self._numbers:
            if number not in PATTERNS:
                raise ValueError(f"FixedAttention(patterns={self.patterns!r}): {number} is outside 1..{PATTERNS[-1]}")
        check_fields(self, unit=one_of(UNITS), empty_rows=one_of(EMPTY_ROWS))
        if self.continuations is not None and not is_ascending(self.continuations):
            raise ValueError("FixedAttention: continuations must be a list of different token ids, in ascending order")
        if (self.unit == "word") != (self.continuations is not None):
            raise wrong(
                self, "unit='word' and continuations=analysis.word_continuations(tokenizer) go together", "unit"
            )

    @property
    def facts(self) -> Facts:
        facts = super().facts
        return replace(facts, refers_to={"tokens", *facts.refers_to}) if self.continuations else facts

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        if not _has_bidirectional(architecture):
            return f"it supports {[name for name, by_hand in sorted(ARCHITECTURES.items()) if _has_bidirectional(by_hand)]}"
        return super().refusal(architecture)

    @property
    def _numbers(self) -> list[int]:
        return self.patterns if isinstance(self.patterns, list) else list(range(1, self.patterns + 1))

    def _attentions(self, architecture: Architecture, config: Any) -> dict[str, Attention]:
        attentions = chosen_attentions(None, self.layers, architecture, config)
        return {name: attention for name, attention in attentions.items() if attention.bidirectional}

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Selection(self.origins),)

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        bidirectional = [name for name, stack in architecture.stacks.items() if _is_bidirectional(stack)]
        for stack in self.layers or ():
            if stack not in bidirectional:
                raise ValueError(
                    f"FixedAttention: the attentions of stack {stack!r} are causal; choose from {bidirectional}"
                )
        if not bidirectional or getattr(config, "is_decoder", False):
            raise ValueError(
                f"FixedAttention: this {architecture.model_type} is a decoder, whose attentions are causal"
            )
        check_any_selected(self._attentions(architecture, config), self.layers, "FixedAttention")

    def restructure(self, model: Model, architecture: Architecture) -> None:
        words = None if self.continuations is None else Words(self.continuations)
        for stack in architecture.stacks.values():
            if words is not None and _is_bidirectional(stack):
                reader = model.base_model.get_submodule(stack.reads)
                reader.register_forward_pre_hook(words.read, with_kwargs=True)
        for name, attention in self._attentions(architecture, model.config).items():
            heads = surgery.count_heads(model, attention, self.name)
            if len(self._numbers) > heads:
                raise wrong(self, f"{len(self._numbers)} patterns for the {heads} heads of {name!r}", "patterns")
            surgery.fix_heads(model, attention, self._numbers, self.empty_rows, words, heads)

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        for attention in self._attentions(new.architecture, new.config).values():
            heads = surgery.count_heads(old, attention, self.name)
            surgery.copy_heads(
                old, new, attention, range(len(self._numbers), heads), heads, only=(attention.q, attention.k)
            )

    def origins(self, model: Model, architecture: Architecture) -> dict[str, Origin]:
        origins: dict[str, Origin] = {}
        for attention in self._attentions(architecture, model.config).values():
            heads = surgery.count_heads(model, attention, self.name)
            learnt = range(len(self._numbers), heads)
            origins |= surgery.head_origins(model, attention, learnt, heads, only=(attention.q, attention.k))
        return origins

    def merge(self, model: Model, architecture: Architecture) -> None:
        raise ValueError("fixed_attention: no native model has heads without queries and keys; it cannot be merged")


def _is_bidirectional(stack: Any) -> bool:
    return any(attention.bidirectional for attention in stack.attentions.values())


def _has_bidirectional(architecture: Architecture) -> bool:
    stacks = architecture.stacks.values()
    return any(attention.bidirectional for stack in stacks for attention in stack.attentions.values())
