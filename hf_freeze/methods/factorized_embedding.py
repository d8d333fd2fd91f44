"""Token embeddings of a rank below the hidden size (Lan et al., 2020, "ALBERT: A Lite BERT for Self-supervised Learning of
Language Representations", https://arxiv.org/abs/1909.11942).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, NormedEmbeddings, full_name, hidden_size
from hf_freeze.layers.factorized_embedding import (
    Factors,
    LowRankEmbedding,
    LowRankOutput,
    ProjectedDropout,
    centred_axes,
    nearest_factors,
)
from hf_freeze.methods._tables import make_dense, ties_beside_weights
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.checks import check_bool, check_fields, check_positive
from hf_freeze.methods.parts import Part, ResizedTables
from hf_freeze.methods.registry import register_method
from hf_freeze.solvers.tables import weighted_table


@register_method(
    "factorized_embedding", example={"rank": 4}, facts=Facts(needs={"vocabulary"}, shrinks=True, calibration="used")
)
@dataclass(frozen=True, kw_only=True)
class FactorizedEmbedding(Method):
    """Replace each V x H table by a table of V x E and a projection from E = `rank` to the hidden size H.

    Decoders and encoder-decoders: W ≈ table · projection, without a bias, for the lookup and, transposed, for a tied output
    matrix; training never computes the product. An untied output matrix (Llama without tied embeddings) gets factors of its
    own. If the backbone scales embeddings, as Marian does by sqrt(H), it scales the projected ones. If source and target share
    one table, they share its projection. Otherwise each has its own table and projection; `share` gives them one table with two
    projections. From trained weights: the nearest matrix of this rank, by singular value decomposition; with a calibration,
    nearest for the tokens of the texts, and for the logits that a tied output computes. Fresh: the variance of the dense table.

    BERT: ALBERT's structure. The tables of tokens, positions and types and the norm of their sum have size E, and a linear with
    a bias follows from E to H. A masked-language-model head goes back to E before its activation, norm and (tied) output matrix.
    A norm over E differs from a norm over H, so trained weights only give a start for training (exact for the embeddings if
    E = H), and `merge()` raises an error.

    Raises ValueError for a rank outside 1..H (2..H for BERT: a norm over one number is constant), for `share` without two
    tables or with tables of different numbers of rows, and for a table that another method has replaced. A factorised table may
    get a smaller rank, except in BERT.
    """

    rank: int
    share: bool = False

    def __post_init__(self) -> None:
        check_fields(self, rank=check_positive, share=check_bool)

    def check(self, architecture: Architecture, config: Any) -> None:
        least = 1 if architecture.normed_embeddings is None else 2
        if not least <= self.rank <= hidden_size(config):
            raise ValueError(
                f"FactorizedEmbedding(rank={self.rank}): must be in {least}..{hidden_size(config)}, the hidden size of this "
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
            table: Any = surgery.native_module(model, name, nn.Embedding, self.name, LowRankEmbedding)
            self._check_rank(table, name)
            surgery.replace_by_full_name(model, name, LowRankEmbedding(table, self.rank))
        if (output := surgery.output_name(model, architecture)) is not None:
            linear: Any = surgery.native_module(model, output, nn.Linear, self.name, LowRankOutput)
            self._check_rank(linear, output)
            std = linear.std if isinstance(linear, LowRankOutput) else surgery.drawn_std(linear)
            if f"{output}.weight" in model.all_tied_weights_keys:
                std = None
            surgery.replace_by_full_name(model, output, LowRankOutput(linear, self.rank, std))

    def _check_rank(self, module: Any, name: str) -> None:
        """Raise ValueError if `module` has factors of a smaller rank."""
        if isinstance(module, Factors) and self.rank > len(module.projection):
            raise ValueError(
                f"FactorizedEmbedding(rank={self.rank}): {name!r} has the rank {len(module.projection)} already; give one in "
                f"1..{len(module.projection)}"
            )

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        if architecture.normed_embeddings is not None:
            return {}
        modules = surgery.vocabulary_modules(model, architecture)
        ties = ties_beside_weights(model, modules, lambda module: ["projection"])
        return ties | (self._table_ties(model, architecture, ties) if self.share else {})

    def _table_ties(self, model: Model, architecture: Architecture, ties: dict[str, str]) -> dict[str, str]:
        """Ties between the tables that `ties` leaves separate. Raises ValueError if there is only one such table."""
        tables = _untied(surgery.token_tables(model, architecture), ties)
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
        # The weight, or the integers that Quantize has made of it.
        held = [tensor for tensor in tables[first].state_dict() if tensor != "projection"]
        return {f"{name}.{tensor}": f"{first}.{tensor}" for name in others for tensor in held}

    def _restructure_normed(self, model: Model, architecture: Architecture, normed: NormedEmbeddings) -> None:
        hidden = model.config.hidden_size
        if isinstance(model.base_model.get_submodule(normed.last), ProjectedDropout):
            raise ValueError(
                f"FactorizedEmbedding(rank={self.rank}): the tables of this {architecture.model_type} have a lower rank already, "
                "and a norm over it; give the first FactorizedEmbedding the rank that you want"
            )
        last = surgery.native_module(model, full_name(model, normed.last), nn.Dropout, self.name)
        for name in (*architecture.token_tables, *normed.others):
            table = surgery.native_module(model, full_name(model, name), nn.Embedding, self.name)
            narrow = nn.Embedding(table.num_embeddings, self.rank, table.padding_idx, **_device_and_dtype(table))
            surgery.replace(model, name, narrow)
        norm: Any = model.base_model.get_submodule(normed.norm)
        surgery.replace(model, normed.norm, nn.LayerNorm(self.rank, norm.eps, **_device_and_dtype(norm)))
        surgery.replace(model, normed.last, ProjectedDropout(last, self.rank, hidden, **_device_and_dtype(norm)))
        if (output := surgery.output_name(model, architecture)) is not None:
            names = (normed.output_linear, normed.output_norm, output)
            modules: Any = [model.get_submodule(name) for name in names]
            linear, norm, matrix = modules
            replacements = (
                nn.Linear(hidden, self.rank, **_device_and_dtype(linear)),
                nn.LayerNorm(self.rank, norm.eps, **_device_and_dtype(norm)),
                nn.Linear(self.rank, matrix.out_features, **_device_and_dtype(matrix)),
            )
            for name, module in zip(names, replacements, strict=True):
                surgery.replace_by_full_name(model, name, module)

    # -- values ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        architecture = new.architecture
        if architecture.normed_embeddings is not None:
            self._convert_normed(old, new, architecture.normed_embeddings)
            if statistics is not None:
                statistics.note(f"{self.name}: tables below a norm are the same with a calibration as without")
            return
        modules = _untied(surgery.vocabulary_modules(new, architecture), new.all_tied_weights_keys)
        groups: dict[str, list[str]] = {}  # one decomposition of tables that are one: by `share`
        for name in modules:
            groups.setdefault(new.all_tied_weights_keys.get(f"{name}.weight", f"{name}.weight"), []).append(name)
        for names in groups.values():
            weights = [_dense(old.get_submodule(name)) for name in names]
            if statistics is None:
                table, projections = nearest_factors(weights, self.rank)
            else:
                table, projections = self._fitted(names, weights, new, statistics)
            for name, projection in zip(names, projections, strict=True):
                surgery.set_values(modules[name].weight, table)
                surgery.set_values(modules[name].projection, projection)

    def _fitted(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], new: Model, statistics: Statistics
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `nearest_factors`, for the tokens that the texts have, and for the logits where the output is one of the tables."""
        users = {name: [name] for name in names}  # with those that are tied to it
        for name in surgery.vocabulary_modules(new, new.architecture):
            source = new.all_tied_weights_keys.get(f"{name}.projection", "").removesuffix(".projection")
            users.get(source, []).append(name)
        every = [name for tied in users.values() for name in tied]
        output = surgery.output_name(new, new.architecture)
        tables = list(surgery.token_tables(new, new.architecture))
        counts = statistics.lookups([name for name in tables if name in every] or tables)
        if counts is None:
            counts = torch.ones(len(weights[0]))
        gram = None
        if output in every and (moments := statistics.output_moments()) is not None:
            sizes = [weight.shape[1] for weight in weights]
            blocks = [torch.zeros(size, size, dtype=moments.gram.dtype) for size in sizes]
            blocks[next(at for at, tied in enumerate(users.values()) if output in tied)] = moments.gram.cpu()
            gram = torch.block_diag(*blocks)
        fitted = weighted_table(torch.cat(list(weights), 1), counts, output_gram=gram)
        table, projection = fitted.factors(self.rank)
        return table, list(projection.split([weight.shape[1] for weight in weights], 1))

    def _convert_normed(self, old: Any, new: Any, normed: NormedEmbeddings) -> None:
        """Project all tables to the principal axes of their rows, each without its mean, which a norm removes. `scale` keeps the
        variance that the norm sees, so that its eps has the same effect."""
        names = (*new.architecture.token_tables, *normed.others)
        weights = [old.base_model.get_submodule(name).weight.double() for name in names]
        axes = centred_axes(torch.cat(weights), self.rank)
        scale = (self.rank / axes.shape[0]) ** 0.5
        for name, weight in zip(names, weights, strict=True):
            surgery.set_values(new.base_model.get_submodule(name).weight, scale * weight @ axes)
        norm = old.base_model.get_submodule(normed.norm)
        _fill_norm(new.base_model.get_submodule(normed.norm), 1)
        projection = new.base_model.get_submodule(normed.last).projection
        surgery.set_values(projection.weight, norm.weight[:, None] * axes / scale)
        surgery.set_values(projection.bias, norm.bias)
        if (output := surgery.output_name(new, new.architecture)) is not None:
            linear, narrow = old.get_submodule(normed.output_linear), new.get_submodule(normed.output_linear)
            matrix = old.get_submodule(output).weight
            if f"{output}.weight" not in new.all_tied_weights_keys:
                axes = centred_axes(matrix.double(), self.rank)  # a table of its own, which may have another width
                scale = (self.rank / axes.shape[0]) ** 0.5
            surgery.set_values(narrow.weight, axes.T @ linear.weight.double())
            surgery.set_values(narrow.bias, axes.T @ linear.bias.double())
            _fill_norm(new.get_submodule(normed.output_norm), 1 / scale)
            surgery.set_values(new.get_submodule(output).weight, scale * matrix.double() @ axes)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_ResizedTables(self),)

    def merge(self, model: Model, architecture: Architecture) -> None:
        if architecture.normed_embeddings is not None:
            raise ValueError(
                f"method {self.name!r} cannot be merged on {architecture.model_type}: its norm over rank={self.rank} numbers "
                "cannot be written as a norm over the hidden size"
            )
        make_dense(model, architecture)


class _ResizedTables(ResizedTables):
    def follow_resize(self, model: Any, architecture: Architecture) -> None:
        if self.method.share:  # the target's output bias and vocabulary size must follow the shared table
            model.resize_decoder_token_embeddings(model.get_input_embeddings().weight.shape[0])


def _untied(modules: dict[str, Any], ties: dict[str, str]) -> dict[str, Any]:
    """The modules whose projection is not tied to another one."""
    return {name: module for name, module in modules.items() if f"{name}.projection" not in ties}


def _dense(module: Any) -> torch.Tensor:
    """(V, H): the weight of a table or output matrix."""
    return module.dense_weight() if isinstance(module, Factors) else module.weight


def _device_and_dtype(module: Any) -> dict[str, Any]:
    return {"device": module.weight.device, "dtype": module.weight.dtype}


def _fill_norm(norm: Any, value: float) -> None:
    surgery.set_values(norm.weight, torch.full_like(norm.weight, value))
    surgery.set_values(norm.bias, torch.zeros_like(norm.bias))
