"""What settings of generation do to the scores of the next token, as the processors of transformers do it, in its order.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from hf_freeze.runtime.settings import Settings, ids_of

_NEVER = np.float32(-np.inf)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis, in the type of `scores`."""
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis, in the type of `scores`."""
    exponents = np.exp(scores - scores.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def adjust_(
    scores: np.ndarray, settings: Settings, rows: Sequence[list[int]], prompts: np.ndarray, limits: np.ndarray
) -> None:
    """Change `scores` (R, V), logits or log probabilities, in place. `rows`: the tokens of each so far; `prompts` (R,): how many
    of them it was given; `limits` (R,): the most new tokens of each."""
    ends, banned = (
        settings.ends,
        [word for word in settings.bad_words_ids or [] if word not in [[e] for e in settings.ends]],
    )
    for row, tokens in enumerate(rows):
        new, score = len(tokens) - prompts[row], scores[row]
        if settings.repetition_penalty != 1:
            used = np.unique(tokens)
            factor = np.float32(settings.repetition_penalty)
            score[used] = np.where(score[used] < 0, score[used] * factor, score[used] / factor)
        if size := settings.no_repeat_ngram_size:
            score[_repeating(tokens, size)] = _NEVER
        for *start, last in banned:
            if not start or tokens[-len(start) :] == start:
                score[last] = _NEVER
        least = settings.min_length - prompts[row] if settings.min_new_tokens is None else settings.min_new_tokens
        if new < least:
            score[ends] = _NEVER
        if settings.forced_bos_token_id is not None and len(tokens) == 1:
            _force_(score, [settings.forced_bos_token_id])
        if settings.forced_eos_token_id is not None and new == limits[row] - 1:
            _force_(score, ids_of(settings.forced_eos_token_id))
        score[ids_of(settings.suppress_tokens)] = _NEVER
        after_language = len(tokens) - new == 1 and settings.forced_bos_token_id is not None
        if settings.begin_suppress_tokens and new == int(after_language):
            score[ids_of(settings.begin_suppress_tokens)] = _NEVER


def _force_(score: np.ndarray, ids: list[int]) -> None:
    score[:] = _NEVER
    score[ids] = 0


def _repeating(tokens: list[int], size: int) -> list[int]:
    """The tokens that would repeat a sequence of `size` tokens."""
    start = tokens[len(tokens) + 1 - size :] if size > 1 else []
    ends = range(size - 1, len(tokens))
    return [tokens[i] for i in ends if len(start) == size - 1 and tokens[i + 1 - size : i] == start]


def warped(scores: np.ndarray, settings: Settings) -> np.ndarray:
    """Probabilities (R, V), in double precision, that sampling draws from: after the temperature, of the `top_k` best tokens, and
    of those the fewest whose probabilities add up to `top_p`."""
    scores = scores.astype(np.float64) / settings.temperature
    if 0 < settings.top_k < scores.shape[1]:
        least = np.partition(scores, -settings.top_k, axis=1)[:, -settings.top_k, None]
        scores[scores < least] = -np.inf
    if settings.top_p < 1:
        order = np.argsort(scores, axis=1, kind="stable")
        rising = np.cumsum(np.take_along_axis(softmax(scores), order, 1), axis=1)
        dropped = rising <= 1 - settings.top_p
        dropped[:, -1] = False
        np.put_along_axis(scores, order, np.where(dropped, -np.inf, np.take_along_axis(scores, order, 1)), 1)
    return softmax(scores)
