"""Token embeddings whose width falls with the frequency of the token, and an adaptive softmax (Baevski & Auli, 2019, "Adaptive
Input Representations for Neural Language Modeling", https://arxiv.org/abs/1809.10853; Grave et al., 2017, "Efficient softmax
approximation for GPUs", https://arxiv.org/abs/1609.04309).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, full_name
from hf_freeze.layers.adaptive_embedding import AdaptiveInputEmbedding, AdaptiveSoftmax, BandedOutput, band_edges
from hf_freeze.layers.factorized_embedding import nearest_factors
from hf_freeze.methods._linear import check_positive, set_field
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.parts import Part, ResizedTables
from hf_freeze.methods.registry import register_method

OUTPUTS = ("adaptive", "dense")


@register_method("adaptive_embedding", example={"cutoffs": [12, 26], "factor": 2, "width": 8}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class AdaptiveEmbedding(Method):
    """Tables of several widths in place of one of V x H. Band i holds the token ids from `cutoffs[i - 1]` (0 for the first) to
    `cutoffs[i]` (V for the last), in a table of the width `width // factor**i` (`width` None: the hidden size H) and a projection
    from there to H, without a bias. Ids must be ordered by frequency, roughly: `analysis.choose_cutoffs` checks, and chooses.

    Where the backbone ties its output matrix, every band's table and projection are the output's too, else the output has bands
    of its own. With `output="dense"` the logits of the bands lie side by side and all is as ever. With `"adaptive"` they are the
    log-probabilities of an adaptive softmax, in fp32 at least: one over the first band and one logit for each other band (from a
    matrix of its own), and one within each of these. `generate` and every loss computed from them are right as they are. Called
    with `labels` in training mode, the model computes its loss from the parts that the labels need, which is faster;
    `outputs.logits` is then None (absent from the tuple of `return_dict=False`). A bias on the logits that the backbone adds,
    such as Marian's, counts inside the softmaxes, trained or not.

    Other embeddings, as BERT's of positions and types, stay. Where the backbone scales embeddings, it scales what is projected.
    Fresh: the variance of the dense table. From trained weights: the nearest of each band's rank, by singular value
    decomposition, exact where the width is H; the logit of a tail starts from the mean of its output rows, without the logarithm
    of their number, which a matrix cannot add: a start to train from. `merge()` gives dense tables, but refuses where there is
    an adaptive softmax, which is none of a single matrix.

    Raises ValueError for cutoffs that are not ascending ids within the vocabulary, a factor below 1, a width outside 1..H or too
    small for so many bands, an unknown output, where another method has replaced a table, and for a resizing that leaves
    nothing of the last band.
    """

    cutoffs: list[int]
    factor: int = 4
    width: int | None = None
    output: str = "adaptive"

    def __post_init__(self) -> None:
        integers = isinstance(self.cutoffs, list | tuple) and all(type(cutoff) is int for cutoff in self.cutoffs)
        if not integers or not self.cutoffs:
            raise ValueError(
                f"AdaptiveEmbedding(cutoffs={self.cutoffs!r}): must be a list of token ids such as [20000, 60000], at least one"
            )
        for before, cutoff in zip([0, *self.cutoffs], self.cutoffs, strict=False):
            if cutoff <= before:
                raise ValueError(
                    f"AdaptiveEmbedding(cutoffs={list(self.cutoffs)}): {cutoff} comes after {before}; they must ascend, from at "
                    "least 1"
                )
        set_field(self, "cutoffs", list(self.cutoffs))
        check_positive(self.factor, "AdaptiveEmbedding: factor")
        if self.width is not None:
            check_positive(self.width, "AdaptiveEmbedding: width")
        if self.output not in OUTPUTS:
            raise ValueError(f"AdaptiveEmbedding(output={self.output!r}): choose from {list(OUTPUTS)}")

    def widths(self, hidden: int) -> list[int]:
        """Of each band."""
        widest = hidden if self.width is None else self.width
        return [widest // self.factor**band for band in range(len(self.cutoffs) + 1)]

    def check(self, architecture: Architecture, config: Any) -> None:
        hidden = config.hidden_size
        if self.width is not None and self.width > hidden:
            raise ValueError(
                f"AdaptiveEmbedding(width={self.width}): must be in 1..{hidden}, the hidden size of this "
                f"{architecture.model_type}"
            )
        widths = self.widths(hidden)
        if widths[-1] == 0:
            raise ValueError(
                f"AdaptiveEmbedding(cutoffs={self.cutoffs}, factor={self.factor}, width={self.width}): the bands would have the "
                f"widths {widths}, which must be at least 1: give fewer cutoffs or a smaller factor"
            )
        for field in dict.fromkeys(architecture.token_tables.values()):
            size = getattr(config, field)
            if self.cutoffs[-1] >= size:
                raise ValueError(
                    f"AdaptiveEmbedding(cutoffs={self.cutoffs}): the last must be below {size}, the {field} of this "
                    f"{architecture.model_type}"
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
            made = BandedOutput(linear, self.cutoffs, widths, std)
        else:
            found = surgery.output_bias(model, architecture)
            external_bias = None if found is None or linear.bias is not None else found[:2]
            made = AdaptiveSoftmax(linear, self.cutoffs, widths, std, external_bias)
        surgery.replace_by_full_name(model, output, made)

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        """The factors of all bands go with the first table, which is the weight that the backbone ties."""
        found: dict[str, str] = {}
        tied: Any = model.all_tied_weights_keys
        for name in surgery.vocabulary_modules(model, architecture):
            source = tied.get(f"{name}.weight")
            if source is not None:
                found |= {
                    f"{name}.{factor}": f"{source.removesuffix('weight')}{factor}"
                    for factor in self._factors()
                    if factor != "weight"
                }
        return found

    def _factors(self) -> Iterator[str]:
        for prefix in ("", *(f"tails.{number}." for number in range(len(self.cutoffs)))):
            yield f"{prefix}weight"
            yield f"{prefix}projection"

    # -- values ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def convert(self, old: Any, new: Model) -> None:
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
        output = surgery.output_name(model, architecture)
        if output is not None and self.output == "adaptive":
            raise ValueError(
                f"method {self.name!r} cannot be merged: an adaptive softmax is none of a single matrix (output='dense' is)"
            )
        for name, table in surgery.token_tables(model, architecture).items():
            surgery.replace_by_full_name(model, name, surgery.dense_table(table))
        if output is not None:
            surgery.replace_by_full_name(model, output, surgery.dense_linear(model.get_submodule(output)))


class _ResizedTables(ResizedTables):
    def __init__(self, method: AdaptiveEmbedding) -> None:
        self.method = method

    def follow_resize(self, model: Any, architecture: Architecture) -> None:
        """Native models take the rows of the first band for all."""
        tables = surgery.token_tables(model, architecture)
        for name, field in architecture.token_tables.items():
            if (table := tables.get(full_name(model, name))) is not None:
                setattr(model.config, field, table.num_embeddings)
        model.vocab_size = model.get_input_embeddings().num_embeddings
