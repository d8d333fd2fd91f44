"""Token embeddings that a deep, group-wise network makes of a narrow table (Mehta et al., 2020, "DeFINE: Deep Factorized Input
Token Embeddings for Neural Sequence Modeling", https://arxiv.org/abs/1911.12385).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, base_name
from hf_freeze.layers.define import DeFINEEmbedding, group_counts, output_widths
from hf_freeze.layers.dextra import DExTraEmbedding, DExTraSizes, dextra_sizes
from hf_freeze.layers.expanded_embedding import ExpandedEmbedding
from hf_freeze.layers.factorized_embedding import LowRankOutput, nearest_factors
from hf_freeze.methods._tables import embedding_factor, make_dense, names_of_parameters, ties_beside_weights
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.checks import check_fields, check_positive, check_share_below_one, nearest_multiples, one_of
from hf_freeze.methods.registry import register_method

_DEEPEST = 64
_WIDEST = 16  # times the hidden size
_UNITS = ("define", "dextra")


@register_method(
    "define",
    example={"depth": 2, "width": 8, "groups": 2, "map_dim": 4, "dropout": 0.0},
    modes={"dextra": {"unit": "dextra", "depth": 2, "width": 8, "groups": 2, "map_dim": 4, "dropout": 0.0}},
    facts=Facts(needs={"blocks"}, shrinks=True),
)
@dataclass(frozen=True, kw_only=True)
class DeFINE(Method):
    """Replace each V x H table by a unit that maps, expands and reduces: a table of V x n with n = `map_dim`; N = `depth` group
    layers (group linear, norm, GELU, dropout), where layer l has g^l = max(floor(`groups` / 2^(l-1)), 1) groups; and a linear
    from k = `width` to H, with a bias (`layers/define.py`). From the second layer on, each group takes its part of the table's
    row and its part of the previous layer's output.

    Layer l has n + (k - n) l/N outputs, rounded up to a multiple of its groups and those of layer l + 1.

    Each table of the backbone gets a unit of its own; tables that the backbone ties share one. An output matrix that is tied to
    a table stays tied to it, as V x n: a matrix of its own, without a bias, first projects hidden states from H to n. An untied
    output matrix and the tables of positions and types stay unchanged. Eval mode computes all rows once and looks them up,
    which takes memory for V x H numbers.

    Trained weights only give a start for training: the table comes from the nearest matrix of rank n (singular value
    decomposition), the group layers are fresh, the last linear is the least-squares fit to the old table, and the projection of
    the output the least-squares fit to the old output matrix. The padding row, often zero, is treated as any other row.

    `unit="dextra"` has DeLighT's unit in place of this one (Mehta et al., 2021, https://arxiv.org/abs/2008.00623), with the sizes
    of its released code (`layers/dextra.py`): a linear from n to H/2; N = `depth` group layers of 2, 4, 8 ... groups, at most
    `groups`, that widen to `width` and narrow again; and a linear to H. It trains from scratch: the backbone is a config.

    `merge()` is exact. It unties a tied output (`tie_word_embeddings`), because table and output then differ.

    Raises ValueError for a `map_dim` outside 1..H or not divisible by every number of groups, a `width` above 16 H or not
    divisible by the groups of the last layer, a `depth` above 64, a `dropout` outside [0, 1), and a table that another method
    has replaced.
    """

    depth: int
    width: int
    groups: int
    map_dim: int
    dropout: float = 0.1
    unit: str = "define"

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("depth", "width", "groups", "map_dim"), check_positive)
        check_fields(self, **sizes, dropout=check_share_below_one, unit=one_of(_UNITS))
        if self.depth > _DEEPEST:
            raise ValueError(f"DeFINE(depth={self.depth}): must be in 1..{_DEEPEST}")
        if self.unit == "dextra":
            return  # the groups of its layers follow from the hidden size, too: `check`
        for name, value, step in (
            ("map_dim", self.map_dim, math.lcm(*self._group_counts)),
            ("width", self.width, self._group_counts[-1]),
        ):
            if value % step:
                raise ValueError(
                    f"DeFINE({name}={value}, groups={self.groups}): must be a multiple of {step}, for layers of "
                    f"{self._group_counts} groups; choose from {nearest_multiples(value, step)}, or other groups"
                )

    @property
    def facts(self) -> Facts:
        if self.unit == "define":
            return super().facts
        # The linears to H/2 and from there to H outweigh what a table of few rows saves.
        return replace(super().facts, from_scratch={"tables"}, shrinks=False)

    @property
    def _group_counts(self) -> list[int]:
        return group_counts(self.depth, self.groups)

    def check(self, architecture: Architecture, config: Any) -> None:
        hidden = config.hidden_size
        for name, limit, multiple in (("map_dim", hidden, ""), ("width", _WIDEST * hidden, f"{_WIDEST} times ")):
            if getattr(self, name) > limit:
                raise ValueError(
                    f"DeFINE({name}={getattr(self, name)}): must be in 1..{limit}, {multiple}the hidden size of this "
                    f"{architecture.model_type}"
                )
        if self.unit == "dextra":
            self._dextra_sizes(hidden).check("DeFINE")

    def _dextra_sizes(self, hidden: int) -> DExTraSizes:
        wider = self.width / self.map_dim
        sizes: dict[str, Any] = {"depth": self.depth, "multiplier": wider, "groups": self.groups}
        return dextra_sizes(self.map_dim, hidden, **sizes, spec="released", projected=hidden // 2)

    def restructure(self, model: Model, architecture: Architecture) -> None:
        tied = model.all_tied_weights_keys
        units: dict[str, ExpandedEmbedding] = {}
        for name in surgery.token_tables(model, architecture):
            table = surgery.native_table(model, name, self.name)
            first = units.get(tied.get(f"{name}.weight", "").removesuffix(".weight"))
            units[name] = self._unit(table, model.config, first)
            surgery.replace_by_full_name(model, name, units[name])
        output = surgery.output_name(model, architecture)
        if output is not None and f"{output}.weight" in tied:
            linear = surgery.native_module(model, output, nn.Linear, self.name)
            surgery.replace_by_full_name(model, output, LowRankOutput(linear, self.map_dim, surgery.drawn_std(linear)))

    def _unit(self, table: nn.Embedding, config: Any, first: ExpandedEmbedding | None) -> ExpandedEmbedding:
        if self.unit == "dextra":
            sizes = self._dextra_sizes(config.hidden_size)
            return DExTraEmbedding(table, sizes, dropout=self.dropout, scale=embedding_factor(config), first=first)
        widths = output_widths(self.map_dim, self.width, self._group_counts)
        std = table.embedding_dim**-0.5 if config.init == "marian" else surgery.drawn_std(table)
        return DeFINEEmbedding(
            table, self.map_dim, widths, self._group_counts, dropout=self.dropout, std=std, first=first
        )

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        """All parameters of a unit whose table is tied to that of another unit."""
        return ties_beside_weights(model, surgery.token_tables(model, architecture), names_of_parameters)

    @torch.no_grad()
    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        tied, projections = new.all_tied_weights_keys, {}
        for name, unit in surgery.token_tables(new, new.architecture).items():
            if f"{name}.weight" not in tied:
                weight = old.get_submodule(name).weight
                rows, (projections[f"{name}.weight"],) = nearest_factors([weight], self.map_dim)
                unit.fit(weight, rows, base_name(new, name))
        output = surgery.output_name(new, new.architecture)
        if output is not None and f"{output}.weight" in tied:
            # `rows` are coordinates of the old matrix on orthonormal axes: these axes are the least-squares projection.
            matrix: Any = new.get_submodule(output)
            matrix.projection.copy_(projections[tied[f"{output}.weight"]])

    def merge(self, model: Model, architecture: Architecture) -> None:
        output = surgery.output_name(model, architecture)
        if output is not None and isinstance(model.get_submodule(output), LowRankOutput):
            model.config.tie_word_embeddings = False
        make_dense(model, architecture)
