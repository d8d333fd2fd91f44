"""Token embeddings whose width falls with the frequency of the token, and an adaptive softmax (Baevski & Auli, 2019, "Adaptive
Input Representations for Neural Language Modeling", https://arxiv.org/abs/1809.10853; Grave et al., 2017, "Efficient softmax
approximation for GPUs", https://arxiv.org/abs/1609.04309).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, full_name
from hf_freeze.layers.adaptive_embedding import AdaptiveInputEmbedding, AdaptiveSoftmax, BandedOutput, band_edges
from hf_freeze.layers.factorized_embedding import nearest_factors
from hf_freeze.methods._tables import make_dense, ties_beside_weights
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.checks import check_fields, check_positive, one_of, wrong
from hf_freeze.methods.linear import set_field
from hf_freeze.methods.parts import Part, ResizedTables
from hf_freeze.methods.registry import register_method

OUTPUTS = ("adaptive", "dense")


@register_method(
    "adaptive_embedding",
    example={"cutoffs": [12, 26], "factor": 2, "width": 8},
    facts=Facts(needs={"blocks"}, shrinks=True),
)
@dataclass(frozen=True, kw_only=True)
class AdaptiveEmbedding(Method):
    """Replace each V x H table by bands of different widths. Band i holds the token ids from `cutoffs[i - 1]` (0 for the first
    band) to `cutoffs[i]` (V for the last), as a table of width `width // factor**i` (`width` None: the hidden size H) and a
    projection from that width to H, without a bias. The ids must be roughly in the order of falling frequency:
    `analysis.choose_cutoffs` checks that, and chooses cut-offs.

    If the backbone ties its output matrix, the output shares the table and projection of every band; otherwise it has bands of
    its own. With `output="dense"` the logits of the bands are concatenated, as those of a dense output. With `"adaptive"` the
    logits are the log-probabilities of an adaptive softmax, in fp32 at least: one softmax over the first band and one logit per
    further band (from a matrix of its own), and one softmax within each further band. `generate` and losses computed from the
    logits work unchanged. In training mode and with `labels`, the model computes its loss from only the parts that the labels
    need, which is faster; `outputs.logits` is then None (absent from the tuple of `return_dict=False`). A bias that the
    backbone adds to the logits, such as Marian's, is applied inside the softmaxes, trained or not.

    Other embeddings, such as BERT's of positions and types, stay. If the backbone scales embeddings, it scales the projected
    ones. Fresh: the variance of the dense table. From trained weights: for each band the nearest matrix of its width as rank,
    by singular value decomposition; exact if the width is H. The logit of a tail band starts from the mean of the band's
    output rows. It lacks the logarithm of their number, which a matrix cannot add, so this is only a start for training.
    `merge()` gives dense tables; it refuses an adaptive softmax, which no single matrix computes.

    Raises ValueError for cutoffs that are not ascending ids within the vocabulary, a factor below 1, a width outside 1..H or too
    small for this number of bands, an unknown output, a table that another method has replaced, and a resizing that removes
    the whole last band.
    """

    cutoffs: list[int]
    factor: int = 4
    width: int | None = None
    output: str = "adaptive"

    def __post_init__(self) -> None:
        integers = isinstance(self.cutoffs, list | tuple) and all(type(cutoff) is int for cutoff in self.cutoffs)
        if not integers or not self.cutoffs:
            raise wrong(self, "must be a list of token ids such as [20000, 60000], at least one", "cutoffs")
        for before, cutoff in zip([0, *self.cutoffs], self.cutoffs, strict=False):
            if cutoff <= before:
                raise ValueError(
                    f"AdaptiveEmbedding(cutoffs={list(self.cutoffs)}): {cutoff} comes after {before}; they must ascend, from at "
                    "least 1"
                )
        set_field(self, "cutoffs", list(self.cutoffs))
        check_fields(self, factor=check_positive, width=check_positive, output=one_of(OUTPUTS))

    def widths(self, hidden: int) -> list[int]:
        """The width of each band, for the hidden size `hidden`."""
        widest = hidden if self.width is None else self.width
        return [widest // self.factor**band for band in range(len(self.cutoffs) + 1)]

    def check(self, architecture: Architecture, config: Any) -> None:
        hidden = config.hidden_size
        if self.width is not None and self.width > hidden:
            raise wrong(self, f"must be in 1..{hidden}, the hidden size of this {architecture.model_type}", "width")
        widths = self.widths(hidden)
        if widths[-1] == 0:
            raise ValueError(
                f"AdaptiveEmbedding(cutoffs={self.cutoffs}, factor={self.factor}, width={self.width}): the bands would have the "
                f"widths {widths}, which must be at least 1: give fewer cutoffs or a smaller factor"
            )
        for field in dict.fromkeys(architecture.token_tables.values()):
            size = getattr(config, field)
            if self.cutoffs[-1] >= size:
                raise wrong(
                    self, f"the last must be below {size}, the {field} of this {architecture.model_type}", "cutoffs"
                )

    # -- shapes ----------------------------------------------------------------------------------------------------------

    def restructure(self, model: Model, architecture: Architecture) -> None:
        widths = self.widths(model.config.hidden_size)
        for name in surgery.token_tables(model, architecture):
            table = surgery.native_table(model, name, self.name)
            surgery.replace_by_full_name(model, name, AdaptiveInputEmbedding(table, self.cutoffs, widths))
        if (output := surgery.output_name(model, architecture)) is None:
            return
        linear = surgery.native_module(model, output, nn.Linear, self.name)
        std = None if f"{output}.weight" in model.all_tied_weights_keys else surgery.drawn_std(linear)
        if self.output == "dense":
            replacement = BandedOutput(linear, self.cutoffs, widths, std)
        else:
            bias = surgery.output_bias(model, architecture)
            external_bias = None if bias is None or linear.bias is not None else bias[:2]
            replacement = AdaptiveSoftmax(linear, self.cutoffs, widths, std, external_bias)
        surgery.replace_by_full_name(model, output, replacement)

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        """All factors of a tied table. The backbone ties only `weight`, which is the table of the first band."""
        bands = ["", *(f"tails.{number}." for number in range(len(self.cutoffs)))]
        factors = [f"{band}{factor}" for band in bands for factor in ("weight", "projection")]
        return ties_beside_weights(model, surgery.vocabulary_modules(model, architecture), lambda module: factors)

    # -- values ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        for name, module in surgery.vocabulary_modules(new, new.architecture).items():
            dense = old.get_submodule(name).weight
            edges = band_edges(self.cutoffs, dense.shape[0])
            if isinstance(module, AdaptiveSoftmax):
                module.to_tails.weight.copy_(torch.stack([dense[start:end].mean(0) for start, end in edges[1:]]))
            if f"{name}.projection" in new.all_tied_weights_keys:
                continue
            for band, (start, end) in zip(module.bands, edges, strict=True):
                table, (projection,) = nearest_factors([dense[start:end]], band.weight.shape[1])
                band.weight.copy_(table)
                band.projection.copy_(projection)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_ResizedTables(self),)

    def merge(self, model: Model, architecture: Architecture) -> None:
        if surgery.output_name(model, architecture) is not None and self.output == "adaptive":
            raise ValueError(
                f"method {self.name!r} cannot be merged: no single matrix computes an adaptive softmax (output='dense' can be "
                "merged)"
            )
        make_dense(model, architecture)


class _ResizedTables(ResizedTables):
    def follow_resize(self, model: Any, architecture: Architecture) -> None:
        """Correct the vocabulary size: native models read the number of rows of the first band."""
        tables = surgery.token_tables(model, architecture)
        for name, field in architecture.token_tables.items():
            if (table := tables.get(full_name(model, name))) is not None:
                setattr(model.config, field, table.num_embeddings)
        model.vocab_size = model.get_input_embeddings().num_embeddings
