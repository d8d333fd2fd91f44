"""Batches with about the same number of tokens, from sentences of similar length."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of indices whose padded targets hold at most `max_tokens` tokens.

    Sentences are sorted by target length, then roughly by source length. Ties and the order of batches are drawn again in each
    epoch from (seed, epoch) alone, so a resumed run sees the same data. The number of batches is the same in every epoch,
    because batch boundaries depend only on the target lengths. `multiple_of` repeats a few batches so that every process gets
    the same number.

    Raises ValueError for an empty list of sentences, and if `max_tokens` is below the longest target.
    """

    def __init__(
        self,
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        multiple_of: int = 1,
    ) -> None:
        self.sources, self.targets = np.asarray(source_lengths), np.asarray(target_lengths)
        if len(self.targets) == 0:
            raise ValueError("no sentences to batch")
        if len(self.sources) != len(self.targets):
            raise ValueError(f"{len(self.sources)} source lengths, but {len(self.targets)} target lengths")
        longest = int(self.targets.max())
        if longest > max_tokens:
            raise ValueError(f"max_tokens={max_tokens} is below the longest target, {longest} tokens")
        self.seed, self.shuffle, self.multiple_of, self.epoch = seed, shuffle, multiple_of, 0
        self.bounds = _bounds(self.targets, max_tokens)

    def set_epoch(self, epoch: int) -> None:
        """Draw the batches of this epoch, counted from 0, from now on."""
        self.epoch = epoch

    @property
    def sampler(self) -> "TokenBatchSampler":
        """The sampler itself: accelerate shards a batch sampler among processes and calls `set_epoch` on its `.sampler` only."""
        return self

    def __len__(self) -> int:
        batches = len(self.bounds) - 1
        return -(-batches // self.multiple_of) * self.multiple_of

    def __iter__(self) -> Iterator[list[int]]:
        order, batches = self._plan()
        for batch in np.resize(batches, len(self)):  # which repeats the first ones
            yield order[self.bounds[batch] : self.bounds[batch + 1]].tolist()

    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        """The sentences in the order of their lengths, and the order of the batches."""
        rng = np.random.default_rng((self.seed, self.epoch))
        ties = rng.random(len(self.targets)) if self.shuffle else np.zeros(len(self.targets))
        # A random shift of the source-length buckets puts neighbouring sentences into different batches in different epochs.
        bucket = (self.sources + (int(rng.integers(4)) if self.shuffle else 0)) // 4
        order = np.lexsort((ties, _short(bucket), _short(self.targets)))
        count = len(self.bounds) - 1
        batches = rng.permutation(count) if self.shuffle else np.arange(count)
        return order.astype(np.min_scalar_type(len(order))), batches


def _bounds(targets: np.ndarray, max_tokens: int) -> list[int]:
    """Where batches begin and end among the sentences in order of their length."""
    lengths, bounds = np.sort(targets), [0]
    while bounds[-1] < len(lengths):
        bounds.append(_end(lengths, bounds[-1], max_tokens))
    return bounds


def _end(lengths: np.ndarray, start: int, max_tokens: int) -> int:
    """Of the batch that begins at `start`. `lengths` ascend, so the last sentence of a batch is its longest."""
    return bisect_right(
        range(len(lengths)), max_tokens, start, key=lambda last: (last + 1 - start) * int(lengths[last])
    )


def _short(lengths: np.ndarray) -> np.ndarray:
    """NumPy sorts 16 bits by counting, in linear time."""
    return lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths
