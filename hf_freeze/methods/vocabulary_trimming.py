"""Remove tokens: rows of the embeddings and of the output matrix (Abdaoui et al., 2020, "Load What You Need",
https://arxiv.org/abs/2010.05609).
"""

from dataclasses import dataclass, replace
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, read
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.parts import KeptTokens, Part, Selection
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin


@register_method(
    "vocabulary_trimming",
    example={"keep": [*range(26), 31, 39]},
    facts=Facts(needs={"vocabulary"}, shrinks=True, selects=True, renumbers="tokens"),
)
@dataclass(frozen=True, kw_only=True)
class VocabularyTrimming(Method):
    """Keep only the tokens with the ids `keep`, in ascending order, and renumber them from 0. Tables and output matrices of
    (V, D) become (len(keep), D), and a bias on the logits keeps the same entries. The logits of kept tokens do not change. The
    configs of the model and of generation get the new vocabulary size and token ids, and `merge()` gives a native model of that
    size. A model for one language then stores no rows of other languages (Abdaoui et al., 2020,
    https://arxiv.org/abs/2010.05609).

    Trim the tokenizer in the same way:

        trimming = analysis.choose_vocabulary(tokenizer, texts, coverage=0.999)
        model = make_variant(model, [trimming])
        tokenizer = data.trim_tokenizer(tokenizer, trimming.keep)

    If encoder and decoder have separate tables (Marian with `share_encoder_decoder_embeddings=False`), both keep the same ids, as
    both languages have one vocabulary. Models with two vocabularies cannot be trimmed.

    Some families compute with the number of a token: RoBERTa, XLM-R, MPNet and M2M100 count positions from that of the padding.
    This token keeps its number, so `keep` must have all ids up to it.

    Raises ValueError for ids that are repeated, not in ascending order or not in the vocabulary, for an empty `keep`, for a
    missing special token of the config, for a new number of a token whose number the model computes with, for two vocabularies of
    different sizes, and after a method that has replaced the embeddings, other than FactorizedEmbedding, DeFINE, DeLighT and a
    Quantize whose scales are each of one row.
    """

    keep: list[int]

    def __post_init__(self) -> None:
        if not isinstance(self.keep, list) or not self.keep or any(type(token) is not int for token in self.keep):
            raise ValueError(
                f"VocabularyTrimming(keep={_short(self.keep)}): must be a list of token ids, at least one, as integers"
            )
        if self.keep[0] < 0:
            raise ValueError(f"VocabularyTrimming: keep has the id {self.keep[0]}; ids are at least 0")
        for before, token in zip(self.keep, self.keep[1:], strict=False):
            if token <= before:
                position = "twice" if token == before else f"after {before}"
                raise ValueError(
                    f"VocabularyTrimming: keep has the id {token} {position}; it must hold different ids in ascending order"
                )

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_KeptTokens(self), Selection(self.origins))

    def check(self, architecture: Architecture, config: Any) -> None:
        sizes = {field: read(config, field) for field in architecture.token_tables.values()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"VocabularyTrimming: {sizes} are two vocabularies; only a vocabulary of both sides can be trimmed"
            )
        for size in sizes.values():
            if self.keep[-1] >= size:
                unknown = next(token for token in self.keep if token >= size)
                raise ValueError(f"VocabularyTrimming: keep has the id {unknown}; the vocabulary has 0..{size - 1}")

    def config_changes(self, architecture: Architecture, config: Any) -> dict[str, Any]:
        return dict.fromkeys(architecture.token_tables.values(), len(self.keep))

    def restructure(self, model: Model, architecture: Architecture) -> None:
        surgery.cut_vocabulary(model, architecture, len(self.keep), self.name)

    def origins(self, model: Model, architecture: Architecture) -> dict[str, Origin]:
        return surgery.token_origins(model, architecture, self.keep)

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        surgery.copy_tokens(old, new, new.architecture, self.keep)


class _KeptTokens(KeptTokens):
    def __init__(self, method: VocabularyTrimming) -> None:
        self.method, self.kept = method, method.keep

    def with_kept(self, kept: list[int]) -> VocabularyTrimming:
        return replace(self.method, keep=kept)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
