"""Token tables of several widths, and the output matrices that go with them: frequent tokens get wide rows, rare ones narrow
ones (Grave et al., 2017, "Efficient softmax approximation for GPUs", https://arxiv.org/abs/1609.04309; Baevski & Auli, 2019,
"Adaptive Input Representations for Neural Language Modeling", https://arxiv.org/abs/1809.10853).

Band i holds the ids from c_i to c_(i+1) - 1. The table of the first band has the name `weight` that native models tie by; the
others, the tails, are modules that hold factors only.

Shapes: V tokens, n_i of band i, d_i its width, H hidden size, N positions.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers.factorized_embedding import Factors, LowRankEmbedding, LowRankOutput


def band_edges(cutoffs: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """The first id of each band and the one after its last."""
    return list(zip((0, *cutoffs), (*cutoffs, rows), strict=True))


class _Banded(Factors):
    """Holds the factors of the first band itself, and in `tails` those of the others."""

    cutoffs: list[int]
    tails: nn.ModuleList

    @property
    def bands(self) -> list[Any]:
        """Modules with `weight` (n_i, d_i) and `projection` (d_i, H)."""
        return [self, *self.tails]

    def dense_weight(self) -> torch.Tensor:
        """(V, H)"""
        return torch.cat([band.weight @ band.projection for band in self.bands])

    def rows_of_last(self, rows: int) -> int:
        """Of the last band when all have so many. Raises ValueError where it would have none."""
        if rows <= self.cutoffs[-1]:
            raise ValueError(
                f"adaptive embeddings with cutoffs={self.cutoffs} cannot be resized to {rows} tokens: the last band begins at "
                f"{self.cutoffs[-1]}, so at least {self.cutoffs[-1] + 1} must be left"
            )
        return rows - self.cutoffs[-1]

    def _bands_repr(self) -> str:
        return f"cutoffs={self.cutoffs}, widths={[band.weight.shape[1] for band in self.bands]}"


class AdaptiveEmbedding(_Banded, LowRankEmbedding):
    """Takes the place of `table` (V, H): a table (n_i, d_i) and a projection (d_i, H), without bias, for each band.

    Raises ValueError for a resizing to no row of the last band.
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
        """That of the dense table, whatever band it is in."""
        starts = (0, *self.cutoffs)
        found = (s + b.padding_idx for s, b in zip(starts, self.bands, strict=True) if b.padding_idx is not None)
        return next(found, None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        ids = input.flatten()
        found = self._gathered(ids) if ids.device.type == "cpu" else self._summed(ids)
        return found.view(*input.shape, found.shape[-1])

    def _gathered(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N, H), each token multiplied with its band's projection only.

        In training, a band without tokens gets zero gradients: DistributedDataParallel waits for them.
        """
        trained = torch.is_grad_enabled()
        found = self.weight.new_empty(len(ids), self.projection.shape[1])
        for number, (start, band) in enumerate(zip((0, *self.cutoffs), self.bands, strict=True)):
            index = self._inside(ids, number).nonzero()[:, 0]
            if not len(index) and not trained:
                continue
            rows = functional.embedding(ids[index] - start, band.weight, band.padding_idx)
            # As in LowRankEmbedding: the precision of the table, under autocast too.
            found.index_copy_(0, index, (rows @ band.projection).to(rows.dtype))
        return found

    def _summed(self, ids: torch.Tensor) -> torch.Tensor:
        """The same with shapes that do not depend on the ids, whose numbers a GPU would have to be waited for."""
        found = self.weight.new_zeros(len(ids), self.projection.shape[1])
        for number, (start, band) in enumerate(zip((0, *self.cutoffs), self.bands, strict=True)):
            inside = self._inside(ids, number)
            rows = functional.embedding(torch.where(inside, ids - start, 0), band.weight, band.padding_idx)
            rows = rows.masked_fill(~inside[:, None], 0)
            found = found + (rows @ band.projection).to(rows.dtype)
        return found

    def _inside(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        """Which ids band `number` looks up. What is no id falls to the first or last, which raise the error of nn.Embedding."""
        if number == 0:
            return ids < self.cutoffs[0]
        inside = ids >= self.cutoffs[number - 1]
        return inside & (ids < self.cutoffs[number]) if number < len(self.cutoffs) else inside

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, hidden={self.projection.shape[1]}, {self._bands_repr()}"


class BandedOutput(_Banded, LowRankOutput):
    """Takes the place of `linear` (H -> V): x P_iᵀ E_iᵀ of every band, side by side, with a bias (V) if `linear` has one.

    `std`: of an entry of the dense matrix when it is fresh; None where the bands will be tied to an AdaptiveEmbedding's.
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
        """(..., H) -> (..., n_i) of one band, its part of `bias` (V) included."""
        band = self.bands[number]
        start = (0, *self.cutoffs)[number]
        own = None if bias is None else bias[start : start + band.weight.shape[0]]
        return functional.linear(functional.linear(x, band.projection), band.weight, own)

    @torch.no_grad()
    def resize_bias(self) -> None:
        """To as many values as there are tokens: new ones are zero."""
        if self.bias is not None and len(self.bias) != self.out_features:
            self.bias.data = functional.pad(self.bias.data, (0, self.out_features - len(self.bias)))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._bands_repr()}"


class AdaptiveSoftmax(BandedOutput):
    """Takes the place of `linear` (H -> V) and of the softmax after it.

    The head is a softmax over the tokens of the first band and one logit for each tail, of a matrix `to_tails` (tails, H); a tail
    divides what it gets among its tokens by a softmax of its own (Grave et al., 2017, section 4.2). Biases of tokens, where
    there are some, lie inside these softmaxes.

    `outside`: (module, attribute) of a bias (..., V) that the backbone adds to what comes out; it counts as one of these too.
    """

    def __init__(
        self,
        linear: nn.Linear,
        cutoffs: Sequence[int],
        widths: Sequence[int],
        std: float | None,
        outside: tuple[nn.Module, str] | None = None,
    ) -> None:
        super().__init__(linear, cutoffs, widths, std)
        self.outside = outside  # a tuple: as a plain attribute, the model would become a module inside itself
        made = nn.Linear(self.in_features, len(cutoffs), bias=False, device="meta")
        made.weight = nn.Parameter(torch.zeros_like(linear.weight[: len(cutoffs)]))
        self.to_tails = made  # a linear, so that it is drawn as the backbone draws its own
        self._recorded: list[torch.Tensor] | None = None

    def dense_weight(self) -> torch.Tensor:
        raise NotImplementedError("no one matrix computes an adaptive softmax")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V), log-probabilities in at least fp32, which a further softmax leaves as they are."""
        if self._recorded is not None:
            self._recorded.append(x)
            return x.new_zeros(1, 1, 1)
        bias = self._biases()
        head = self._head(x, bias)
        first = self.weight.shape[0]
        parts = [head[..., :first]]
        for number in range(1, len(self.bands)):
            inside = _log_softmax(self._logits(x, number, bias))
            parts.append(inside + head[..., first + number - 1, None])
        found = torch.cat(parts, dim=-1)
        return found if self.outside is None or bias is None else found - bias  # the backbone adds it again

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(N, H), (N,) token ids -> the sum of -log p, without the logits of tails in which no label lies.

        Every parameter gets a gradient, which is zero where there is nothing to learn: DistributedDataParallel waits for it.
        """
        bias = self._biases()
        head, first = self._head(x, bias), self.weight.shape[0]
        place, total = labels, head.new_zeros(())
        for number, (start, end) in enumerate(band_edges(self.cutoffs, self.out_features)):
            if number == 0:
                continue
            inside = (labels >= start) & (labels < end)
            place = torch.where(inside, first + number - 1, place)
            index = inside.nonzero()[:, 0]
            scores = _log_softmax(self._logits(x[index], number, bias))
            total = total + functional.nll_loss(scores, labels[index] - start, reduction="sum")
        return total + functional.nll_loss(head, place, reduction="sum")

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Inside, the forward keeps what it is given, in the list, and returns one zero, to which a bias can be added."""
        self._recorded = recorded = []
        try:
            yield recorded
        finally:
            self._recorded = None

    def _head(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(..., H) -> (..., n_0 + tails), log-probabilities."""
        tails = functional.linear(x, self.to_tails.weight)
        return _log_softmax(torch.cat([self._logits(x, 0, bias), tails], dim=-1))

    def _biases(self) -> torch.Tensor | None:
        """(V,)"""
        return self.bias if self.outside is None else getattr(*self.outside).flatten()


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return functional.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _rows_of_table(table: nn.Embedding, start: int, end: int) -> nn.Embedding:
    """A view of these rows, in which the padding row has its number there."""
    padding = table.padding_idx
    own = padding - start if padding is not None and start <= padding < end else None
    return nn.Embedding(end - start, table.embedding_dim, own, _weight=table.weight.detach()[start:end])


def _rows_of_linear(linear: nn.Linear, start: int, end: int) -> nn.Linear:
    """A view of these outputs, without the bias."""
    made = nn.Linear(linear.in_features, end - start, bias=False, device="meta")
    made.weight = nn.Parameter(linear.weight.detach()[start:end])
    return made
