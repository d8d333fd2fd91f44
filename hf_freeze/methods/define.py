"""Token embeddings that a deep, group-wise network makes of a narrow table (Mehta et al., 2020, "DeFINE: Deep Factorized Input
Token Embeddings for Neural Sequence Modeling", https://arxiv.org/abs/1911.12385).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, base_name
from hf_freeze.layers.define import DeFINEEmbedding, group_counts, output_widths
from hf_freeze.layers.factorized_embedding import LowRankOutput, nearest_factors
from hf_freeze.methods._linear import check_positive, check_share
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.registry import register_method

_DEEPEST = 64
_WIDEST = 16  # times the hidden size


@register_method("define", example={"depth": 2, "width": 8, "groups": 2, "map_dim": 4, "dropout": 0.0}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class DeFINE(Method):
    """Map, expand, reduce, in place of a table of V x H: a table of V x n, n = `map_dim`; N = `depth` group layers (group linear,
    norm, GELU, dropout) of g^l = max(floor(`groups` / 2^(l-1)), 1) groups, each of which, after the first, gets its part of the
    row of the table beside that of the layer before; and a linear from k = `width` to H, with a bias (`layers/define.py`).

    Layer l has n + (k - n) l/N outputs, rounded up to a multiple of its groups and those of layer l + 1.

    Each table of the backbone gets its own; those that the backbone ties are one. An output matrix that is tied to a table stays
    tied to it, in V x n: hidden states are projected from H to n first, without a bias, by a matrix of its own. One that is not
    tied stays as it is; so do positions and types. In eval mode all rows are made once and looked up (V x H numbers of memory).

    From trained weights, a start that is to be trained: the table is that of the nearest matrix of rank n, by singular value
    decomposition, the group layers are fresh, the last linear is the one of least squares to the old table, and the projection
    of the output that to the old matrix. The padding row, often zero, is a row like any other there. `merge()` is exact; it
    unties an output that was tied (`tie_word_embeddings`), since table and output are two matrices then.

    Raises ValueError for a `map_dim` outside 1..H or that a number of groups does not divide, a `width` above 16 H or that the
    groups of the last layer do not divide, a `depth` above 64, a `dropout` outside [0, 1), and where another method has replaced
    a table.
    """

    depth: int
    width: int
    groups: int
    map_dim: int
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("depth", "width", "groups", "map_dim"):
            check_positive(getattr(self, name), f"DeFINE: {name}")
        check_share(self.dropout, "DeFINE: dropout", below_one=True)
        if self.depth > _DEEPEST:
            raise ValueError(f"DeFINE(depth={self.depth}): must be in 1..{_DEEPEST}")
        for name, value, step in (
            ("map_dim", self.map_dim, math.lcm(*self._counts)),
            ("width", self.width, self._counts[-1]),
        ):
            if value % step:
                near = [each for each in (value // step * step, (value // step + 1) * step) if each]
                raise ValueError(
                    f"DeFINE({name}={value}, groups={self.groups}): must be a multiple of {step}, for layers of "
                    f"{self._counts} groups; choose from {near}, or other groups"
                )

    @property
    def _counts(self) -> list[int]:
        return group_counts(self.depth, self.groups)

    def check(self, architecture: Architecture, config: Any) -> None:
        hidden = config.hidden_size
        for name, limit, what in (("map_dim", hidden, ""), ("width", _WIDEST * hidden, f"{_WIDEST} times ")):
            if getattr(self, name) > limit:
                raise ValueError(
                    f"DeFINE({name}={getattr(self, name)}): must be in 1..{limit}, {what}the hidden size of this "
                    f"{architecture.model_type}"
                )

    def restructure(self, model: Model, architecture: Architecture) -> None:
        tied = model.all_tied_weights_keys
        widths, made = output_widths(self.map_dim, self.width, self._counts), {}
        for name in surgery.token_tables(model, architecture):
            table = surgery.native_table(model, name, self.name)
            std = table.embedding_dim**-0.5 if model.config.init == "marian" else surgery.drawn_std(table)
            first = made.get(tied.get(f"{name}.weight", "").removesuffix(".weight"))
            made[name] = DeFINEEmbedding(
                table, self.map_dim, widths, self._counts, dropout=self.dropout, std=std, first=first
            )
            surgery.replace_by_full_name(model, name, made[name])
        output = surgery.output_name(model, architecture)
        if output is not None and f"{output}.weight" in tied:
            linear = surgery.native_module(model, output, nn.Linear, self.name)
            surgery.replace_by_full_name(model, output, LowRankOutput(linear, self.map_dim, surgery.drawn_std(linear)))

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        """All parameters of a unit whose table is tied to another's."""
        tied, found = model.all_tied_weights_keys, {}
        for name, unit in surgery.token_tables(model, architecture).items():
            if (source := tied.get(f"{name}.weight")) is not None:
                others = (parameter for parameter, _ in unit.named_parameters() if parameter != "weight")
                found |= {f"{name}.{other}": f"{source.removesuffix('weight')}{other}" for other in others}
        return found

    @torch.no_grad()
    def convert(self, old: Any, new: Model) -> None:
        tied, projections = new.all_tied_weights_keys, {}
        for name, unit in surgery.token_tables(new, new.architecture).items():
            if f"{name}.weight" not in tied:
                weight = old.get_submodule(name).weight
                rows, (projections[f"{name}.weight"],) = nearest_factors([weight], self.map_dim)
                unit.fit(weight, rows, base_name(new, name))
        output = surgery.output_name(new, new.architecture)
        if output is not None and f"{output}.weight" in tied:
            # Of least squares: the axes that `rows` are the old matrix's coordinates on are orthonormal.
            matrix: Any = new.get_submodule(output)
            matrix.projection.copy_(projections[tied[f"{output}.weight"]])

    def merge(self, model: Model, architecture: Architecture) -> None:
        for name, unit in surgery.token_tables(model, architecture).items():
            surgery.replace_by_full_name(model, name, surgery.dense_table(unit))
        output = surgery.output_name(model, architecture)
        if output is not None and isinstance(module := model.get_submodule(output), LowRankOutput):
            surgery.replace_by_full_name(model, output, surgery.dense_linear(module))
            model.config.tie_word_embeddings = False
