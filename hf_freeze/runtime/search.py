"""Greedy search, sampling and beam search, which write what `generate` of transformers writes.

Shapes: B texts, K beams, C candidates, N new tokens, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from hf_freeze.runtime.decoding import Decoder
from hf_freeze.runtime.scores import adjust_, log_softmax, warped
from hf_freeze.runtime.settings import Settings

_WORST = np.float32(-1e9)


def write(
    decoder: Decoder,
    start: np.ndarray,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    settings: Settings,
    numbers: Sequence[int],
) -> list[list[list[int]]]:
    """ids of each text -> new ids of each sequence that is returned for it, with the end token if it was written.

    `start` (B, T): what the decoder reads first; `prompts`: the same without padding; `limits`: the most new tokens of each;
    `numbers`: of the texts, for the seeds of sampling.
    """
    rows, lengths, limit = [list(prompt) for prompt in prompts], np.array([*map(len, prompts)]), np.array(limits)
    if settings.num_beams > 1:
        return _Beams(decoder, start, rows, lengths, limit, settings).run()
    copies, each = settings.num_return_sequences, np.arange(len(rows)).repeat(settings.num_return_sequences)
    random = [np.random.default_rng([settings.seed, n, copy]) for n in numbers for copy in range(copies)]
    written = _one_by_one(decoder, start, [list(rows[i]) for i in each], lengths[each], limit[each], settings, random)
    return [written[i : i + copies] for i in range(0, len(written), copies)]


def _one_by_one(
    decoder: Decoder,
    start: np.ndarray,
    rows: list[list[int]],
    prompts: np.ndarray,
    limits: np.ndarray,
    settings: Settings,
    random: list[np.random.Generator],
) -> list[list[int]]:
    """Of each row the best token after the other, or a drawn one. Rows that have ended leave the batch."""
    running = np.arange(len(rows))
    scores = decoder.scores(start)
    if len(rows) != len(start):  # several of each text
        each = np.arange(len(start)).repeat(len(rows) // len(start))
        decoder.select(each)
        scores = scores[each]
    while True:
        scores = np.array(scores, np.float32)
        adjust_(scores, settings, [rows[i] for i in running], prompts[running], limits[running])
        if settings.do_sample:
            drawn = np.array([random[i].random() for i in running])
            rising = warped(scores, settings).cumsum(1)
            tokens = (rising <= drawn[:, None] * rising[:, -1:]).sum(1)
        else:
            tokens = scores.argmax(1)
        for i, token in zip(running, tokens.tolist(), strict=True):
            rows[i].append(token)
        new = np.array([len(rows[i]) for i in running]) - prompts[running]
        unfinished = ~np.isin(tokens, settings.ends) & (new < limits[running])
        running = running[unfinished]
        if not len(running):
            return [row[prompt:] for row, prompt in zip(rows, prompts, strict=True)]
        if not unfinished.all():
            decoder.select(np.flatnonzero(unfinished))
        scores = decoder.scores(tokens[unfinished, None])


class _Beams:
    """The beam search of transformers: in each step the best C = max(2, 1 + ends) * K continuations of a text are looked at, of
    which the best K that have not ended go on, and those of the first K that have ended are finished. Texts that are done leave
    the batch."""

    def __init__(
        self,
        decoder: Decoder,
        start: np.ndarray,
        rows: list[list[int]],
        prompts: np.ndarray,
        limits: np.ndarray,
        settings: Settings,
    ) -> None:
        self.decoder, self.start, self.settings = decoder, start, settings
        self.beams, self.prompts, self.limits = settings.num_beams, prompts, limits
        self.candidates = max(2, 1 + len(settings.ends)) * self.beams
        self.rows = [[list(row) for _ in range(self.beams)] for row in rows]  # of the running beams
        self.scores = np.full((len(rows), self.beams), _WORST, np.float32)
        self.scores[:, 0] = 0  # the beams of a text are the same in the beginning
        self.finished: list[list[tuple[np.float32, list[int] | None]]] = [[(_WORST, None)] * self.beams for _ in rows]

    def run(self) -> list[list[list[int]]]:
        running = np.arange(len(self.rows))
        scores = self.decoder.scores(self.start)
        each = np.arange(len(running)).repeat(self.beams)
        self.decoder.select(each)
        scores, new = scores[each], 0
        while True:
            totals = self._totals(scores, running)
            order = _best(totals, self.candidates)
            chosen, going_on = [], []
            vocabulary = totals.shape[1] // self.beams
            for place, i in enumerate(running.tolist()):
                beams, tokens = np.divmod(order[place], vocabulary)
                places = self._step(i, beams, tokens, totals[place, order[place]], new)
                if self._is_open(i, new + 1):
                    going_on.append(i)
                    chosen.append(place * self.beams + beams[places])
            new += 1
            running = np.array(going_on, dtype=np.int64)
            if not len(running):
                return [self._returned(i) for i in range(len(self.rows))]
            self.decoder.select(np.concatenate(chosen))
            scores = self.decoder.scores(np.array([[row[-1]] for i in running for row in self.rows[i]]))

    def _totals(self, scores: np.ndarray, running: np.ndarray) -> np.ndarray:
        """(B, K * V): log probabilities of the texts with each next token."""
        scores = log_softmax(np.asarray(scores, np.float32))
        rows, each = [row for i in running for row in self.rows[i]], running.repeat(self.beams)
        adjust_(scores, self.settings, rows, self.prompts[each], self.limits[each])
        if self.settings.renormalize_logits:
            scores = log_softmax(scores)
        return (scores + self.scores[running].reshape(-1, 1)).reshape(len(running), -1)

    def _step(self, i: int, beams: np.ndarray, tokens: np.ndarray, totals: np.ndarray, new: int) -> np.ndarray:
        """Take the step of text `i` with its best candidates, best first; returns the K that go on."""
        ended = np.isin(tokens, self.settings.ends) | (new + 1 >= self.limits[i])
        first = ended & (np.arange(len(ended)) < self.beams)
        scaled = totals / np.float32((new + 1) ** self.settings.length_penalty)
        merged = self.finished[i] + [
            (scaled[c], [*self.rows[i][beams[c]], int(tokens[c])]) for c in np.flatnonzero(first)
        ]
        # Those that are not finished stay below the places that nothing has taken yet.
        self.finished[i] = sorted(merged, key=lambda one: -one[0])[: self.beams]
        totals = totals + ended.astype(np.float32) * _WORST
        places = _best(totals[None], self.beams)[0]
        self.rows[i] = [[*self.rows[i][beams[c]], int(tokens[c])] for c in places]
        self.scores[i] = totals[places]
        self.all_ended = ended.all()
        return places

    def _is_open(self, i: int, new: int) -> bool:
        """Whether text `i`, with `new` tokens, may still get better."""
        stop, penalty = self.settings.early_stopping, self.settings.length_penalty
        is_full = all(row is not None for _, row in self.finished[i])
        if self.all_ended or (is_full and stop is True):
            return False
        length = self.limits[i] if stop == "never" and penalty > 0 else new
        worst = self.finished[i][-1][0] if self.finished[i][-1][1] is not None else _WORST
        return bool(self.scores[i, 0] / np.float32(length**penalty) > worst)

    def _returned(self, i: int) -> list[list[int]]:
        found = [row for _, row in self.finished[i][: self.settings.num_return_sequences]]
        return [row[self.prompts[i] :] if row is not None else [] for row in found]


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """(B, N) -> the places of the `count` best of each row, best first; of equals the first."""
    if scores.shape[1] > 4 * count:
        places = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    else:
        places = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    order = np.argsort(-np.take_along_axis(scores, places, 1), axis=1, kind="stable")[:, :count]
    return np.take_along_axis(places, order, 1)
