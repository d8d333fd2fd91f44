"""Token embeddings of a rank below the hidden size (Lan et al., 2020, "ALBERT: A Lite BERT for Self-supervised Learning of
Language Representations", https://arxiv.org/abs/1909.11942).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, NormedEmbeddings, full_name
from hf_freeze.layers.factorized_embedding import (
    LowRankEmbedding,
    LowRankOutput,
    ProjectedDropout,
    centred_axes,
    nearest_factors,
)
from hf_freeze.methods._linear import check_positive
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.parts import Part, ResizedTables
from hf_freeze.methods.registry import register_method


@register_method("factorized_embedding", example={"rank": 4}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class FactorizedEmbedding(Method):
    """Tables of V x E and a projection from E = `rank` to the hidden size H, in place of tables of V x H.

    Decoders and encoder-decoders: W ≈ table · projection, without a bias, for the lookup and, transposed, for a tied output
    matrix, which is never made in training. An output matrix of its own (Llama without tied embeddings) gets factors of its own.
    Where the backbone scales embeddings, as Marian does by sqrt(H), it scales what is projected. Source and target that have one
    table have one projection; where they are apart each has its own, unless `share`: one table with two projections.
    From trained weights: the nearest of this rank, by singular value decomposition. Fresh: the variance of the dense table.

    BERT: ALBERT's structure. Tables of tokens, positions and types and the norm of their sum are in E, then comes a linear to H
    with a bias; a masked-language-model head goes back to E before its activation, norm and (tied) output matrix. From trained
    weights this is but a start, exact for the embeddings where E = H, since a norm over E is another function, and `merge()`
    refuses.

    Raises ValueError for a rank outside 1..H (2..H for BERT: a norm of one number leaves nothing), for `share` where there are
    no two tables or they have unlike numbers of rows, and where another method has replaced a table.
    """

    rank: int
    share: bool = False

    def __post_init__(self) -> None:
        check_positive(self.rank, "FactorizedEmbedding: rank")
        if not isinstance(self.share, bool):
            raise ValueError(f"FactorizedEmbedding(share={self.share!r}): must be True or False")

    def check(self, architecture: Architecture, config: Any) -> None:
        least = 1 if architecture.normed_embeddings is None else 2
        if not least <= self.rank <= config.hidden_size:
            raise ValueError(
                f"FactorizedEmbedding(rank={self.rank}): must be in {least}..{config.hidden_size}, the hidden size of this "
                f"{architecture.model_type}"
            )
        if self.share and len(architecture.token_tables) < 2:
            raise ValueError(
                f"FactorizedEmbedding(share=True): {architecture.model_type} has one table; leave share out"
            )

    # -- shapes ----------------------------------------------------------------------------------------------------------

    def restructure(self, model: Model, architecture: Architecture) -> None:
        if architecture.normed_embeddings is not None:
            self._restructure_normed(model, architecture, architecture.normed_embeddings)
            return
        for name in surgery.token_tables(model, architecture):
            table = surgery.native_module(model, name, nn.Embedding, self.name)
            surgery.replace_by_full_name(model, name, LowRankEmbedding(table, self.rank))
        if (output := surgery.output_name(model, architecture)) is not None:
            linear = surgery.native_module(model, output, nn.Linear, self.name)
            std = None if f"{output}.weight" in model.all_tied_weights_keys else surgery.drawn_std(linear)
            surgery.replace_by_full_name(model, output, LowRankOutput(linear, self.rank, std))

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        if architecture.normed_embeddings is not None:
            return {}
        names = surgery.vocabulary_modules(model, architecture)
        ties = {target: source for name in names for target, source in _tie_projection(model, name).items()}
        return ties | (self._share(model, architecture, ties) if self.share else {})

    def _share(self, model: Model, architecture: Architecture, ties: dict[str, str]) -> dict[str, str]:
        """The ties that make one of the tables that `ties` leaves apart. Raises ValueError where it leaves one."""
        tables = _apart(surgery.token_tables(model, architecture), ties)
        if len(tables) < 2:
            raise ValueError(
                f"FactorizedEmbedding(share=True): this {architecture.model_type} has one table, {next(iter(tables))!r}, for "
                "source and target; leave share out"
            )
        rows = {name: table.num_embeddings for name, table in tables.items()}
        if len(set(rows.values())) > 1:
            raise ValueError(
                f"FactorizedEmbedding(share=True): the tables have {rows} rows, which must be equal; leave share out"
            )
        first, *others = tables
        return {f"{name}.weight": f"{first}.weight" for name in others}

    def _restructure_normed(self, model: Model, architecture: Architecture, normed: NormedEmbeddings) -> None:
        hidden = model.config.hidden_size
        last = surgery.native_module(model, full_name(model, normed.last), nn.Dropout, self.name)
        for name in (*architecture.token_tables, *normed.others):
            table = surgery.native_module(model, full_name(model, name), nn.Embedding, self.name)
            made = nn.Embedding(table.num_embeddings, self.rank, table.padding_idx, **_like(table))
            surgery.replace(model, name, made)
        norm: Any = model.base_model.get_submodule(normed.norm)
        surgery.replace(model, normed.norm, nn.LayerNorm(self.rank, norm.eps, **_like(norm)))
        surgery.replace(model, normed.last, ProjectedDropout(last, self.rank, hidden, **_like(norm)))
        if (output := surgery.output_name(model, architecture)) is not None:
            replaced = (normed.output_linear, normed.output_norm, output)
            modules: Any = [model.get_submodule(name) for name in replaced]
            linear, norm, matrix = modules
            made = (
                nn.Linear(hidden, self.rank, **_like(linear)),
                nn.LayerNorm(self.rank, norm.eps, **_like(norm)),
                nn.Linear(self.rank, matrix.out_features, **_like(matrix)),
            )
            for name, module in zip(replaced, made, strict=True):
                surgery.replace_by_full_name(model, name, module)

    # -- values ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def convert(self, old: Any, new: Model) -> None:
        architecture = new.architecture
        if architecture.normed_embeddings is not None:
            self._convert_normed(old, new, architecture.normed_embeddings)
            return
        own = _apart(surgery.vocabulary_modules(new, architecture), new.all_tied_weights_keys)
        tables = [name for name, module in own.items() if isinstance(module, LowRankEmbedding)]
        together = [tables, *([name] for name in own if name not in tables)] if self.share else [[name] for name in own]
        for names in together:
            table, projections = nearest_factors([old.get_submodule(name).weight for name in names], self.rank)
            for name, projection in zip(names, projections, strict=True):
                own[name].weight.copy_(table)
                own[name].projection.copy_(projection)

    def _convert_normed(self, old: Any, new: Any, normed: NormedEmbeddings) -> None:
        """Axes for the sum of all tables without its mean, which a norm takes away; the scale keeps its variance, and eps."""
        names = (*new.architecture.token_tables, *normed.others)
        weights = [old.base_model.get_submodule(name).weight.double() for name in names]
        axes = centred_axes(torch.cat(weights), self.rank)
        scale = (self.rank / axes.shape[0]) ** 0.5
        for name, weight in zip(names, weights, strict=True):
            new.base_model.get_submodule(name).weight.copy_(scale * weight @ axes)
        norm = old.base_model.get_submodule(normed.norm)
        _fill_norm(new.base_model.get_submodule(normed.norm), 1)
        projection = new.base_model.get_submodule(normed.last).projection
        projection.weight.copy_(norm.weight[:, None] * axes / scale)
        projection.bias.copy_(norm.bias)
        if (output := surgery.output_name(new, new.architecture)) is not None:
            linear, made = old.get_submodule(normed.output_linear), new.get_submodule(normed.output_linear)
            made.weight.copy_(axes.T @ linear.weight.double())
            made.bias.copy_(axes.T @ linear.bias.double())
            _fill_norm(new.get_submodule(normed.output_norm), 1 / scale)
            new.get_submodule(output).weight.copy_(scale * old.get_submodule(output).weight.double() @ axes)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_ResizedTables(self),)

    def merge(self, model: Model, architecture: Architecture) -> None:
        if architecture.normed_embeddings is not None:
            raise ValueError(
                f"method {self.name!r} cannot be merged on {architecture.model_type}: its norm over rank={self.rank} numbers is "
                "none over the hidden size"
            )
        for name, table in surgery.token_tables(model, architecture).items():
            surgery.replace_by_full_name(model, name, surgery.dense_table(table))
        if (output := surgery.output_name(model, architecture)) is not None:
            surgery.replace_by_full_name(model, output, surgery.dense_linear(model.get_submodule(output)))


class _ResizedTables(ResizedTables):
    def __init__(self, method: FactorizedEmbedding) -> None:
        self.method = method

    def follow_resize(self, model: Any, architecture: Architecture) -> None:
        if self.method.share:  # what holds the target's vocabulary, its bias and its size, is to follow the table
            model.resize_decoder_token_embeddings(model.get_input_embeddings().weight.shape[0])


def _tie_projection(model: Any, name: str) -> dict[str, str]:
    """The projection of what the backbone ties goes with the table."""
    source = model.all_tied_weights_keys.get(f"{name}.weight")
    return {} if source is None else {f"{name}.projection": f"{source.removesuffix('weight')}projection"}


def _apart(modules: dict[str, Any], ties: dict[str, str]) -> dict[str, Any]:
    """Those modules whose projection is tied to no other."""
    return {name: module for name, module in modules.items() if f"{name}.projection" not in ties}


def _like(module: Any) -> dict[str, Any]:
    return {"device": module.weight.device, "dtype": module.weight.dtype}


def _fill_norm(norm: Any, value: float) -> None:
    norm.weight.fill_(value)
    norm.bias.zero_()
