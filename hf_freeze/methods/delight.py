"""Deep and light blocks (Mehta et al., 2021, "DeLighT: Deep and Light-weight Transformer", https://arxiv.org/abs/2008.00623)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention
from hf_freeze.layers.dextra import SPECS, STEP, DExTraAttention, DExTraEmbedding, DExTraSizes, dextra_sizes
from hf_freeze.layers.factorized_embedding import LowRankOutput
from hf_freeze.methods._blocks import check_blocks, with_blocks
from hf_freeze.methods._tables import embedding_factor, names_of_parameters
from hf_freeze.methods.base import Facts, Method, Model
from hf_freeze.methods.checks import (
    check_bool,
    check_fields,
    check_positive,
    check_share_below_one,
    nearest_multiples,
    number_in,
    one_of,
    wrong,
)
from hf_freeze.methods.registry import register_method

_DEEPEST = 64
_WIDEST = 16  # times the hidden size


@register_method(
    "delight",
    example={"n_min": 1, "n_max": 2, "map_dim": 4, "groups": 2, "dropout": 0.0},
    facts=Facts(needs={"blocks"}, architectures={"marian", "gpt2"}, from_scratch={"blocks", "tables"}, shrinks=True),
)
@dataclass(frozen=True, kw_only=True)
class DeLighT(Method):
    """Replace every self-attention by a DExTra unit from H to H/2 (`layers/dextra.py`) and an attention with one head of H/2.
    Every cross-attention gets one head of H/2; FFNs get H/4 neurons and swish. The norms stay where the backbone has them:
    post-norm for translation, pre-norm for language models.

    Each stack has B = `n_max` blocks; a backbone of another depth raises an error. Block b = 0..B-1 has a unit of
    N_b = ⌊N_min + (N_max - N_min) b/(B - 1)⌋ group layers, at most m_w + (N_max/N_min - 1) b/(B - 1) times as wide as H
    ("block-wise scaling"). With an `n_min` above `n_max`, B is `n_min`, and the blocks of (`n_max`, `n_min`) come in the opposite
    order, the deepest and widest one first. Without `block_wise`, every unit has the smaller number of group layers and the
    factor m_w. `groups`: the largest
    number of groups in a layer; None: 2 to the power ⌈log2(H/32)⌉, or with `spec="paper"` ⌈I/32⌉ for a unit of I inputs. `spec`:
    "released" has the units of the released code, with the published sizes; "paper" follows the equations of the paper.

    `map_dim` n: each token table becomes a table of n columns and a unit of N_min group layers from n to H, at most m_w n wide.
    Encoder and decoder have a unit each, and share the table if the backbone ties it. A tied output first projects hidden states
    from H to n, unless n = H. With None, tables and output stay unchanged; positions always do. `width`: H, checked against the
    backbone. `dropout`: within all units, those of the tables included.

    The blocks train from scratch: the backbone is a config; `init="marian"` draws all weights after Glorot, as the paper does.
    `merge()` raises an error, because no native model has such blocks.

    Raises ValueError for a `width` that is not the hidden size, a `map_dim` above 16 H, a depth of the backbone that is not B,
    widths that the groups do not divide, and an attention, FFN or table that another method has changed.
    """

    n_min: int = 4
    n_max: int = 8
    m_w: float = 2.0
    width: int | None = None
    block_wise: bool = True
    map_dim: int | None = 128
    groups: int | None = None
    dropout: float = 0.1
    spec: str = "released"

    def __post_init__(self) -> None:
        tables = () if self.map_dim is None else ("map_dim",)
        sizes = dict.fromkeys(("n_min", "n_max", "width", "groups", *tables), check_positive)
        switches = {"block_wise": check_bool, "dropout": check_share_below_one, "spec": one_of(SPECS)}
        check_fields(self, **sizes, m_w=number_in(1, _WIDEST), **switches)
        if self.depth > _DEEPEST:
            raise ValueError(f"DeLighT(n_min={self.n_min}, n_max={self.n_max}): both must be at most {_DEEPEST}")

    @property
    def depth(self) -> int:
        """B, the number of blocks in each stack."""
        return max(self.n_min, self.n_max)

    @property
    def _shallowest(self) -> int:
        return min(self.n_min, self.n_max)

    def blocks(self) -> list[tuple[int, float]]:
        """(number of group layers N_b, multiplier of the width) of each block."""
        least, most = self._shallowest, self.depth
        if not self.block_wise:
            return [(least, self.m_w)] * most
        steps, deeper, wider = max(most - 1, 1), most - least, most / least - 1
        blocks = [(least + deeper * block // steps, self.m_w + wider * block / steps) for block in range(most)]
        return blocks if self.n_min <= self.n_max else blocks[::-1]

    def check(self, architecture: Architecture, config: Any) -> None:
        check_blocks(architecture, config, "DeLighT")
        hidden = config.hidden_size
        if self.width not in (None, hidden):
            raise ValueError(
                f"DeLighT(width={self.width}): the hidden size of this {architecture.model_type} is {hidden}; make them equal"
            )
        for stack, depth in architecture.depths(config).items():
            if depth != self.depth:
                larger = "n_max" if self.n_max >= self.n_min else "n_min"
                raise ValueError(
                    f"DeLighT({larger}={self.depth}): each stack must have {larger} layers, but {stack!r} has {depth}; set "
                    f"{architecture.stacks[stack].depth}={self.depth}, or {larger}={depth}"
                )
        if self.map_dim is not None and self.map_dim > _WIDEST * hidden:
            raise wrong(self, f"must be at most {_WIDEST} times the hidden size {hidden}", "map_dim")
        all_sizes = list(self._all_sizes(hidden))
        step = 2 * math.lcm(STEP, *(groups for sizes in all_sizes for groups in sizes.groups))
        if hidden % step:
            raise ValueError(
                f"DeLighT: the hidden size {hidden} must be a multiple of {step}, for groups that divide half of it; choose from "
                f"{nearest_multiples(hidden, step)}, or fewer groups"
            )
        for sizes in all_sizes:
            sizes.check("DeLighT")

    def _all_sizes(self, hidden: int) -> Iterator[DExTraSizes]:
        yield from (self._sizes(hidden, hidden // 2, hidden, *block) for block in self.blocks())
        if self.map_dim is not None:
            yield self._sizes(self.map_dim, hidden, hidden, self._shallowest, self.m_w)

    def _sizes(self, inputs: int, outputs: int, hidden: int, depth: int, multiplier: float) -> DExTraSizes:
        groups = self.groups
        if groups is None:
            groups = max(1, -(-inputs // 32) if self.spec == "paper" else 2 ** math.ceil(math.log2(hidden / 32)))
        return dextra_sizes(
            inputs, outputs, depth=depth, multiplier=multiplier, groups=groups, spec=self.spec, projected=hidden // 2
        )

    def restructure(self, model: Model, architecture: Architecture) -> None:
        hidden = model.config.hidden_size
        for name, attention in architecture.attentions(model.config).items():
            if not name.endswith(".self"):
                surgery.resize_attention(model, attention, 1, hidden // 2, self.name)
                continue
            sizes = self._sizes(hidden, hidden // 2, hidden, *self.blocks()[int(name.split(".")[1])])
            surgery.resize_attention(model, attention, 1, hidden // 2, self.name, inputs=hidden // 2)
            new = surgery.device_and_dtype(model, attention.o)
            unit = DExTraAttention(model.base_model.get_submodule(attention.module), sizes, self.dropout, **new)
            surgery.replace(model, attention.module, unit)
        surgery.resize_ffns(model, architecture, hidden // 4, self.name)
        for stack in architecture.stacks.values():
            for layer in range(getattr(model.config, stack.depth)):
                surgery.replace(model, f"{stack.layers.format(layer)}.{stack.activation}", nn.SiLU())
        if self.map_dim is not None:
            self._restructure_tables(model, architecture, hidden)

    def _restructure_tables(self, model: Model, architecture: Architecture, hidden: int) -> None:
        scale = embedding_factor(model.config)
        sizes = self._sizes(self.map_dim or 0, hidden, hidden, self._shallowest, self.m_w)
        for name in surgery.token_tables(model, architecture):
            table = surgery.native_table(model, name, self.name)
            surgery.replace_by_full_name(model, name, DExTraEmbedding(table, sizes, dropout=self.dropout, scale=scale))
        output = surgery.output_name(model, architecture)
        if output is not None and f"{output}.weight" in model.all_tied_weights_keys and self.map_dim != hidden:
            linear = surgery.native_module(model, output, nn.Linear, self.name)
            surgery.replace_by_full_name(
                model, output, LowRankOutput(linear, self.map_dim or 0, surgery.drawn_std(linear))
            )

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        """The first table tied to a source (such as Marian's `shared`) shares the source's unit; later ones keep a unit of their
        own."""
        if self.map_dim is None:
            return {}
        ties, sources = {}, set()
        for name, unit in surgery.token_tables(model, architecture).items():
            source = model.all_tied_weights_keys.get(f"{name}.weight")
            if source is not None and source not in sources:
                sources.add(source)
                ties |= surgery.ties_to_module(name, source, names_of_parameters(unit))
        return ties

    def describe(self, architecture: Architecture, config: Any) -> Architecture:
        sizes: dict[str, Any] = {"heads": 1, "size": config.hidden_size // 2}

        def describe_attention(kind: str, attention: Attention) -> Attention:
            if kind != "self":
                return replace(attention, **sizes)
            return attention.inside("attention", others=(f"{attention.module}.dextra.layers.*.linear.*",), **sizes)

        norms = (*architecture.norms, "*.dextra.layers.*.norm.*")
        return with_blocks(architecture, describe_attention, norms=norms)

    def merge(self, model: Model, architecture: Architecture) -> None:
        raise ValueError("delight: no native model has DExTra units; it cannot be merged")
