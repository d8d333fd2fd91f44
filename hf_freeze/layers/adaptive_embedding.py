"""Adaptive embeddings and outputs: frequent tokens get wide rows, rare tokens narrow ones (Grave et al., 2017, "Efficient
softmax approximation for GPUs", https://arxiv.org/abs/1609.04309; Baevski & Auli, 2019, "Adaptive Input Representations for
Neural Language Modeling", https://arxiv.org/abs/1809.10853).

The vocabulary is cut into bands: band i holds the ids from c_i to c_(i+1) - 1. The table of the first band is named `weight`,
the name by which native models tie. The other bands, the tails, are submodules.

Shapes: V tokens, n_i tokens of band i, d_i width of band i, H hidden size, N positions.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers.derived import is_compiled, is_traced
from hf_freeze.layers.factorized_embedding import Factors, LowRankEmbedding, LowRankOutput


def band_edges(cutoffs: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """(first id, last id + 1) of each band."""
    return list(zip((0, *cutoffs), (*cutoffs, rows), strict=True))


class _Banded(Factors):
    """Factors of several bands: `weight` and `projection` are those of the first band, `tails` has those of the others."""

    cutoffs: list[int]
    tails: nn.ModuleList

    @property
    def bands(self) -> list[Any]:
        """Modules with `weight` (n_i, d_i) and `projection` (d_i, H)."""
        return [self, *self.tails]

    def dense_weight(self) -> torch.Tensor:
        """(V, H)"""
        return torch.cat([band.weight @ band.projection for band in self.bands])

    def last_band_rows(self, rows: int) -> int:
        """Rows of the last band if all bands together have `rows`. Raises ValueError if the last band would be empty."""
        if rows <= self.cutoffs[-1]:
            raise ValueError(
                f"adaptive embeddings with cutoffs={self.cutoffs} cannot be resized to {rows} tokens: the last band begins at "
                f"{self.cutoffs[-1]}, so the size must be at least {self.cutoffs[-1] + 1}"
            )
        return rows - self.cutoffs[-1]

    def _bands_repr(self) -> str:
        return f"cutoffs={self.cutoffs}, widths={[band.weight.shape[1] for band in self.bands]}"


class AdaptiveInputEmbedding(_Banded, LowRankEmbedding):
    """Replaces `table` (V, H) by a table (n_i, d_i) and a projection (d_i, H), without bias, for each band.

    Resizing raises ValueError if the last band would be empty.
    """

    def __init__(self, table: nn.Embedding, cutoffs: Sequence[int], widths: Sequence[int]) -> None:
        edges = band_edges(cutoffs, table.num_embeddings)
        first, *others = (_rows_of_table(table, *edge) for edge in edges)
        super().__init__(first, widths[0])
        self.cutoffs = list(cutoffs)
        self.num_embeddings = table.num_embeddings
        self.tails = nn.ModuleList(map(LowRankEmbedding, others, widths[1:]))

    @property
    def dense_padding_idx(self) -> int | None:
        """The padding id in the dense table, in any band; None without padding."""
        starts = (0, *self.cutoffs)
        padding_ids = (s + b.padding_idx for s, b in zip(starts, self.bands, strict=True) if b.padding_idx is not None)
        return next(padding_ids, None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        ids = input.flatten()
        gathers = ids.device.type == "cpu" and not is_traced() and not is_compiled()
        embeddings = self._gathered(ids) if gathers else self._summed(ids)
        return embeddings.view(*input.shape, embeddings.shape[-1])

    def _gathered(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N, H): multiplies each token with the projection of its own band only.

        In training, a band without tokens still runs and gets zero gradients: DistributedDataParallel needs them.
        """
        training = torch.is_grad_enabled()
        embeddings = self.weight.new_empty(len(ids), self.projection.shape[1])
        for number, (start, band) in enumerate(zip((0, *self.cutoffs), self.bands, strict=True)):
            index = self._inside(ids, number).nonzero()[:, 0]
            if not len(index) and not training:
                continue
            rows = functional.embedding(ids[index] - start, band.weight, band.padding_idx)
            # As in LowRankEmbedding, the result has the dtype of the table, under autocast too.
            embeddings.index_copy_(0, index, (rows @ band.projection).to(rows.dtype))
        return embeddings

    def _summed(self, ids: torch.Tensor) -> torch.Tensor:
        """The same result with shapes that do not depend on the ids, so that a GPU need not synchronise with the CPU, and one
        graph serves all ids."""
        embeddings = self.weight.new_zeros(ids.shape[0], self.projection.shape[1])
        for number, (start, band) in enumerate(zip((0, *self.cutoffs), self.bands, strict=True)):
            inside = self._inside(ids, number)
            rows = functional.embedding(torch.where(inside, ids - start, 0), band.weight, band.padding_idx)
            rows = rows.masked_fill(~inside[:, None], 0)
            embeddings = embeddings + (rows @ band.projection).to(rows.dtype)
        return embeddings

    def _inside(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        """bool (N,): the ids of band `number`. Invalid ids count to the first or last band, which raises nn.Embedding's error."""
        if number == 0:
            return ids < self.cutoffs[0]
        inside = ids >= self.cutoffs[number - 1]
        return inside & (ids < self.cutoffs[number]) if number < len(self.cutoffs) else inside

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, hidden={self.projection.shape[1]}, {self._bands_repr()}"


class BandedOutput(_Banded, LowRankOutput):
    """Replaces `linear` (H -> V) by the logits x P_iᵀ E_iᵀ of all bands side by side, plus a bias (V) if `linear` has one.

    `std`: initial standard deviation of an entry of the dense matrix; None if the bands will be tied to an
    AdaptiveInputEmbedding's.
    """

    def __init__(self, linear: nn.Linear, cutoffs: Sequence[int], widths: Sequence[int], std: float | None) -> None:
        first, *others = (_rows_of_linear(linear, *edge) for edge in band_edges(cutoffs, linear.out_features))
        super().__init__(first, widths[0], std)
        self.cutoffs = list(cutoffs)
        self.tails = nn.ModuleList(
            LowRankOutput(rows, width, std) for rows, width in zip(others, widths[1:], strict=True)
        )
        if linear.bias is not None:
            self.bias = nn.Parameter(torch.zeros_like(linear.bias))

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return sum(band.weight.shape[0] for band in self.bands)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V)"""
        return torch.cat([self._logits(x, number, self.bias) for number in range(len(self.bands))], dim=-1)

    def _logits(self, x: torch.Tensor, number: int, bias: torch.Tensor | None) -> torch.Tensor:
        """(..., H) -> (..., n_i): the logits of one band, including its part of `bias` (V)."""
        band = self.bands[number]
        start = (0, *self.cutoffs)[number]
        band_bias = None if bias is None else bias[start : start + band.weight.shape[0]]
        return functional.linear(functional.linear(x, band.projection), band.weight, band_bias)

    @torch.no_grad()
    def resize_bias(self) -> None:
        """Resize the bias to the number of tokens; new values are zero."""
        if self.bias is not None and len(self.bias) != self.out_features:
            self.bias.data = functional.pad(self.bias.data, (0, self.out_features - len(self.bias)))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._bands_repr()}"


class AdaptiveSoftmax(BandedOutput):
    """Replaces `linear` (H -> V) and the softmax after it.

    The head is a softmax over the tokens of the first band and one logit for each tail, computed by `to_tails` (tails, H). Each
    tail distributes its probability over its tokens by a softmax of its own (Grave et al., 2017, section 4.2). Token biases,
    if any, are added inside these softmaxes.

    `external_bias`: (module, attribute) of a bias (..., V) that the backbone adds to the output. It is treated as a token bias:
    `forward` applies it inside the softmaxes and subtracts it from the result.
    """

    def __init__(
        self,
        linear: nn.Linear,
        cutoffs: Sequence[int],
        widths: Sequence[int],
        std: float | None,
        external_bias: tuple[nn.Module, str] | None = None,
    ) -> None:
        super().__init__(linear, cutoffs, widths, std)
        # A tuple, because nn.Module would register a plain attribute as a submodule, and the model contains this layer.
        self.external_bias = external_bias
        to_tails = nn.Linear(self.in_features, len(cutoffs), bias=False, device="meta")
        to_tails.weight = nn.Parameter(torch.zeros_like(linear.weight[: len(cutoffs)]))
        self.to_tails = to_tails  # an nn.Linear, so that the backbone's own initialisation draws it
        self._recorded: list[torch.Tensor] | None = None

    def dense_weight(self) -> torch.Tensor:
        raise NotImplementedError("an adaptive softmax has no dense weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V), log-probabilities in at least fp32. A softmax over them gives the same probabilities."""
        if self._recorded is not None:
            self._recorded.append(x)
            return x.new_zeros(1, 1, 1)
        bias = self._bias()
        head = self._head(x, bias)
        head_tokens = self.weight.shape[0]
        parts = [head[..., :head_tokens]]
        for number in range(1, len(self.bands)):
            within_band = _log_softmax(self._logits(x, number, bias))
            parts.append(within_band + head[..., head_tokens + number - 1, None])
        log_probs = torch.cat(parts, dim=-1)
        # The backbone adds an external bias again.
        return log_probs if self.external_bias is None or bias is None else log_probs - bias

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(N, H), (N,) token ids -> the sum of -log p. Each tail computes logits only for the positions whose label it holds.

        Every parameter gets a gradient, perhaps a zero one: DistributedDataParallel needs all of them.
        """
        bias = self._bias()
        head, head_tokens = self._head(x, bias), self.weight.shape[0]
        head_labels, total = labels, head.new_zeros(())
        for number, (start, end) in enumerate(band_edges(self.cutoffs, self.out_features)):
            if number == 0:
                continue
            inside = (labels >= start) & (labels < end)
            head_labels = torch.where(inside, head_tokens + number - 1, head_labels)
            index = inside.nonzero()[:, 0]
            log_probs = _log_softmax(self._logits(x[index], number, bias))
            total = total + functional.nll_loss(log_probs, labels[index] - start, reduction="sum")
        return total + functional.nll_loss(head, head_labels, reduction="sum")

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Inside this context, the forward appends its input to the list and returns a zero (1, 1, 1) instead of logits."""
        self._recorded = recorded = []
        try:
            yield recorded
        finally:
            self._recorded = None

    def _head(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(..., H) -> (..., n_0 + tails), log-probabilities."""
        tails = functional.linear(x, self.to_tails.weight)
        return _log_softmax(torch.cat([self._logits(x, 0, bias), tails], dim=-1))

    def _bias(self) -> torch.Tensor | None:
        """(V,)"""
        return self.bias if self.external_bias is None else getattr(*self.external_bias).flatten()


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return functional.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _rows_of_table(table: nn.Embedding, start: int, end: int) -> nn.Embedding:
    """A view of the rows from `start` to `end` - 1; its padding index counts from `start`."""
    padding = table.padding_idx
    band_padding = padding - start if padding is not None and start <= padding < end else None
    return nn.Embedding(end - start, table.embedding_dim, band_padding, _weight=table.weight.detach()[start:end])


def _rows_of_linear(linear: nn.Linear, start: int, end: int) -> nn.Linear:
    """A view of the outputs from `start` to `end` - 1, without the bias."""
    view = nn.Linear(linear.in_features, end - start, bias=False, device="meta")
    view.weight = nn.Parameter(linear.weight.detach()[start:end])
    return view
