"""What attentions look at, and which embeddings are alike: numbers for pictures.

Shapes: B batch, N heads, Q query tokens, K key tokens, R reach, n tokens of a vocabulary, D columns of their embeddings,
F numbers that DeFINE computes for a token, P of its layers or groups.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from hf_freeze import surgery
from hf_freeze.analysis._probe import batches_on, check_model
from hf_freeze.architectures.base import Architecture
from hf_freeze.compat.transformers import attention_implementation
from hf_freeze.layers.define import DeFINEEmbedding
from hf_freeze.layers.fixed_heads import FixedHeads
from hf_freeze.methods.checks import check_positive
from hf_freeze.model.running import in_eval_mode, on_device, token_mask, without_cache


def attention_by_position(
    model: Any, dataloader: Iterable[Mapping[str, Any]], *, reach: int = 8
) -> dict[str, torch.Tensor]:
    """The mean attention of each head by relative position: attention, such as `"encoder.0.self"` -> fp32 on the CPU
    (N, 2R + 1). Column R + o is what a query gives on average to the key o places after it; in a cross-attention, to the source
    token whose position is o larger. What a row lacks to 1 lies beyond `reach`, R.

    `dataloader`: batches as for `head_importance`; padding does not count. Attentions without weights are left out, such as
    those that have lost all heads.

    Raises ValueError for a model on meta, an unknown architecture, a `reach` below 1, and a model without attention weights.
    """
    check_positive(reach, "attention_by_position", "reach")
    architecture = check_model(model)
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    for batch in batches_on(model, dataloader, "Mapping attention"):
        for name, weights in _weights(model, architecture, batch).items():
            mask = token_mask(architecture, model, batch, name, weights[:, 0])
            weights = weights.double() * mask[:, None, :, None]
            diagonals = [_diagonal_sum(weights, offset) for offset in range(-reach, reach + 1)]
            sums[name] = sums.get(name, 0) + torch.stack(diagonals, dim=-1)
            counts[name] = counts.get(name, 0) + int(mask.sum())
    return {name: (total / counts[name]).float().cpu() for name, total in sums.items()}


def _diagonal_sum(weights: torch.Tensor, offset: int) -> torch.Tensor:
    """(B, N, Q, K) -> (N,): the sum of the weights from each query to the key `offset` places after it."""
    return (
        torch.diagonal(weights, offset, 2, 3).sum((0, 2))
        if -weights.shape[2] < offset < weights.shape[3]
        else weights.new_zeros(weights.shape[1])
    )


def attention_weights(model: Any, batch: Mapping[str, Any], *, item: int = 0) -> dict[str, torch.Tensor]:
    """The attention of each head in one text of a batch, without padding: attention -> fp32 on the CPU (N, Q, K).

    Raises ValueError as `attention_by_position`, and for an `item` that the batch does not have.
    """
    architecture = check_model(model)
    batch = on_device(model, batch)
    found = {}
    for name, weights in _weights(model, architecture, batch).items():
        if not 0 <= item < len(weights):
            raise ValueError(
                f"attention_weights(item={item}): must be in 0..{len(weights) - 1}, the texts of the batch"
            )
        queries = token_mask(architecture, model, batch, name, weights[:, 0])[item]
        keys = queries
        if name.endswith(".cross"):
            source = batch.get("attention_mask")
            keys = torch.ones(weights.shape[-1]).bool() if source is None else source[item].bool()
        found[name] = weights[item][:, queries][:, :, keys].float().cpu()
    return found


def _weights(model: Any, architecture: Architecture, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Attention -> (B, N, Q, K), of one forward. Raises ValueError if no attention returns weights."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, module: Any, arguments: Any, named: dict[str, Any], result: Any) -> None:
        weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        if isinstance(module, FixedHeads):  # its forward returns those of the other heads
            fixed = module.fixed_weights(*arguments, **named)
            weights = fixed if weights is None else torch.cat([fixed, weights.to(fixed)], dim=1)
        if torch.is_tensor(weights) and weights.ndim == 4 and weights.shape[1]:  # some heads
            found[name] = weights

    with ExitStack() as stack:
        for name, attention in architecture.attentions(model.config).items():
            module = model.base_model.get_submodule(attention.module)
            stack.enter_context(module.register_forward_hook(functools.partial(keep, name), with_kwargs=True))
        with in_eval_mode(model), without_cache(model), torch.no_grad(), _eager(model):
            model(**batch)
    if not found:
        raise ValueError(f"this {type(model).__name__} has no attention weights to map")
    return found


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Attentions that return their weights; the implementation is restored."""
    before = attention_implementation(model.config)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def embedding_similarity(model: Any, tokens: Sequence[int], *, table: str | None = None) -> torch.Tensor:
    """Cosine similarities of the embeddings of `tokens`: fp32 on the CPU (n, n). Compressed tables count as what they compute.

    `table`: a token table below the base model; None: the first. Raises ValueError for a model on meta, an unknown
    architecture, an unknown table, and ids outside it.
    """
    rows, ids = _table_and_ids(model, tokens, table, "embedding_similarity")
    with in_eval_mode(model), torch.no_grad():
        vectors = torch.nn.functional.normalize(rows(ids).float(), dim=-1)
    return (vectors @ vectors.T).cpu()


def _table_and_ids(model: Any, tokens: Sequence[int], table: str | None, function: str) -> tuple[Any, torch.Tensor]:
    architecture = check_model(model)
    tables = dict(zip(architecture.token_tables, surgery.token_tables(model, architecture).values(), strict=False))
    if table is not None and table not in tables:
        raise ValueError(f"{function}(table={table!r}): choose from {list(tables)}")
    ids = torch.tensor(list(tokens), device=model.device)
    if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < model.config.vocab_size:
        raise ValueError(f"{function}: tokens must be ids in 0..{model.config.vocab_size - 1}, at least one")
    return tables[table] if table is not None else next(iter(tables.values())), ids


@dataclass(frozen=True)
class EmbeddingCorrelations:
    """`values`: fp32 on the CPU (F, F), Pearson's correlation of each two of the F numbers that DeFINE computes for a token.
    `groups`: layer -> how many of them each of its groups has, in their order. The layers are "table", the row of the token,
    "layer 1", "layer 2" ..., and "embedding"."""

    values: torch.Tensor
    groups: dict[str, list[int]]

    def means(self, *, of_groups: bool = False) -> tuple[list[str], torch.Tensor]:
        """Names of the P layers, or of all their groups, and the mean absolute correlation of the numbers of one with those of
        another: fp32 (P, P). That of a number with itself, which is 1, is left out."""
        parts = {layer: sum(sizes) for layer, sizes in self.groups.items()}
        if of_groups:
            parts = {
                f"{layer}, group {number}" if len(sizes) > 1 else layer: size
                for layer, sizes in self.groups.items()
                for number, size in enumerate(sizes, 1)
            }
        sizes = torch.tensor(list(parts.values()))
        member = torch.eye(len(sizes), dtype=torch.double).repeat_interleave(sizes, dim=0)  # (F, P)
        others = self.values.double().abs().fill_diagonal_(0)
        pairs = torch.outer(sizes, sizes) - torch.diag(sizes)
        return list(parts), (member.T @ others @ member / pairs.clamp(min=1)).float()


def embedding_correlations(model: Any, tokens: Sequence[int], *, table: str | None = None) -> EmbeddingCorrelations:
    """How far the layers of DeFINE, and the groups of a layer, compute the same: correlations, over `tokens`, of all numbers that
    it computes for one (as in the correlation maps of Mehta et al., 2020, https://arxiv.org/abs/1911.12385).

    A number that is the same for all tokens has a correlation of 0 with the others.

    `table`: a token table below the base model; None: the first. Raises ValueError for a model on meta, an unknown architecture,
    an unknown table, one that is not DeFINE's, fewer than two tokens, and ids outside it.
    """
    unit, ids = _table_and_ids(model, tokens, table, "embedding_correlations")
    if not isinstance(unit, DeFINEEmbedding):
        raise ValueError(
            f"embedding_correlations: the table is a {type(unit).__name__}; its layers are known for methods.DeFINE alone, with "
            "unit='define'"
        )
    if len(ids) < 2:
        raise ValueError(f"embedding_correlations: correlations need at least 2 tokens, not {len(ids)}")
    with torch.no_grad():
        rows = unit.weight[ids]
        found = [rows, *unit.layer_outputs(rows), unit.expand(rows)]
    groups = {"table": [rows.shape[1]]}
    for number, layer in enumerate(unit.layers, 1):
        groups[f"layer {number}"] = [layer.linear.out_features // layer.linear.groups] * layer.linear.groups
    groups["embedding"] = [found[-1].shape[1]]
    values = torch.corrcoef(torch.cat(found, dim=1).double().T).nan_to_num()
    return EmbeddingCorrelations(values.fill_diagonal_(1).float().cpu(), groups)


def random_similarity(tokens: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    """What `embedding_similarity` gives on average for a random table: of normal vectors with D = `columns` numbers. Off the
    diagonal, the mean is 0 and the standard deviation 1/sqrt(D)."""
    vectors = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    vectors = torch.nn.functional.normalize(vectors, dim=-1)
    return vectors @ vectors.T


def clustered(similarity: torch.Tensor) -> list[int]:
    """An order of the rows of (n, n) similarities in which similar ones are neighbours: the leaves of a hierarchical clustering
    by average linkage of 1 - similarity."""
    if len(similarity) < 3:
        return list(range(len(similarity)))
    distances = (1 - similarity.double()).clamp(min=0).fill_diagonal_(0).numpy()
    distances = (distances + distances.T) / 2
    return leaves_list(linkage(squareform(distances), "average", optimal_ordering=True)).tolist()


def most_frequent(counts: np.ndarray, number: int, leave_out: Iterable[int] = ()) -> list[int]:
    """The `number` ids with the largest `counts`, as of `count_tokens`, most frequent first; those in `leave_out`, such as the
    special ones, and those that do not occur are left out."""
    unwanted = set(leave_out)
    order = np.argsort(-counts, kind="stable").tolist()
    return [token for token in order if counts[token] and token not in unwanted][:number]
