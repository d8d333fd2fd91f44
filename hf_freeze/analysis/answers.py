"""How faithful the answers of a model are to those of its original, on the same inputs and without labels.

`Fidelity.score`, from 0 to 1, is for
    feature-extraction                          the mean cosine of the vectors of texts
    translation and summarisation               BLEU / 100 of the texts, where those of the original are the references
    speech recognition                          1 - character error rate, to the transcripts of the original
    regressions                                 the share of the variance of the original's outputs that is explained
    the rest                                    the share of equal top choices
Intervals are of a bootstrap over inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from hf_freeze.analysis.significance import resampled_sums
from hf_freeze.model.fidelity import Fidelity
from hf_freeze.scores import bleu, bleu_items, mean

SPEECH = ("ctc", "speech-seq2seq")
_SMALLEST = 1e-6  # of the probability of all further tokens together, beyond which fp32 says nothing


@dataclass(frozen=True)
class Answers:
    """What a model answers, with a dict for each input; an empty one where it has nothing to answer, as for an empty text.

    "vector": (D,). "values": (O,) of a regression. "text": what was written or heard. Of N positions: "tokens": what is there;
    "log_probs": (N, C) of all classes, or (N, K) of the tokens "top", ids of the original; "best": (N,) top choices. Of a
    question: "log_probs" (2, N) of start and end. "at": the positions of the original that these are, if not all. "nats": (M,),
    the negative log-likelihood of the tokens that are there.

    `vocabulary`: the token of each id, for models that choose among tokens.
    """

    task: str
    items: list[dict[str, Any]]
    vocabulary: list[str] = field(default_factory=list)

    def numbers_in(self, other: "Answers") -> np.ndarray:
        """Id of each token of this vocabulary in the other one, -1 if it is not there."""
        ids = {token: number for number, token in enumerate(other.vocabulary)}
        return np.array([ids.get(token, -1) for token in self.vocabulary], dtype=np.int64)


def compare_answers(original: Answers, served: Answers) -> Fidelity:
    """See `Fidelity`. Where tokens are predicted, `served` must be given for the tokens of `original`, as by
    `answers(served, items, like=original)`.

    Texts that the tokenizers split differently are compared after the tokens that both have there; perplexities are those of
    the whole texts, in the number of the original's tokens. KL is of the most probable tokens of the original and of all others
    as one, which is at most that of all. If the served model lacks tokens, it is that of the most probable ones that it has.

    Raises ValueError for answers to other inputs or of another task, and if no input can be compared.
    """
    if original.task != served.task or len(original.items) != len(served.items):
        sizes = [f"{len(each.items)} of {each.task}" for each in (original, served)]
        raise ValueError(f"answers to different questions cannot be compared: {' and '.join(sizes)}")
    numbers = original.numbers_in(served)
    found = [_sums(original.task, a, b, numbers) for a, b in zip(original.items, served.items, strict=True)]
    known = [sums for sums in found if sums]
    if not known:
        reason = "they are empty, or the tokenizers split each of them differently" if found else "there are none"
        raise ValueError(f"none of the {len(found)} inputs can be compared: {reason}")
    names = sorted({name for sums in known for name in sums})
    items = np.array([[sums.get(name, 0.0) for name in names] for sums in known], float)
    drawn, total = resampled_sums(items), items.sum(0)
    values: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for measure, (columns, score) in _MEASURES.items():
        if not {*columns} <= {*names}:
            continue
        places = [names.index(name) for name in columns]
        values[measure] = value = float(score(total[places]))
        low, high = np.quantile(score(drawn[:, places]), [0.025, 0.975])
        intervals[measure] = min(float(low), value), max(float(high), value)
    main = next(measure for measure in _SCORES if measure in values)
    kept = ("kl", "agreement", "cosine", "perplexity", "original_perplexity")
    return Fidelity(
        score=values[main],
        **{name: values[name] for name in kept if name in values},
        intervals={"score": intervals[main]} | {name: intervals[name] for name in kept if name in intervals},
        compared=len(known),
        left_out=len(found) - len(known),
    )


def _sums(task: str, a: Mapping[str, Any], b: Mapping[str, Any], numbers: np.ndarray) -> dict[str, float]:
    """What an input adds to the sums from which each measure is computed; empty if it cannot be compared."""
    sums: dict[str, float] = {}
    if "vector" in a and "vector" in b:
        x, y = (np.asarray(each["vector"], float) for each in (a, b))
        sums |= {"cosine": float(x @ y / max(np.linalg.norm(x) * np.linalg.norm(y), 1e-300)), "inputs": 1.0}
    if "values" in a and "values" in b:
        x, y = (np.asarray(each["values"], float) for each in (a, b))
        sums |= {"wrong": np.square(y - x).sum(), "x": x.sum(), "xx": np.square(x).sum(), "outputs": float(x.size)}
    if "log_probs" in a and "log_probs" in b:
        sums |= _of_choices(a, b, numbers)
    if "nats" in a and "nats" in b:
        theirs = a["nats"][b["at"]] if task == "masked-lm" else a["nats"]
        sums |= {"nats": float(b["nats"].sum()), "original_nats": float(theirs.sum()), "targets": len(theirs)}
    if "text" in a and "text" in b:
        if task in SPEECH:
            sums |= {"edits": _edits(a["text"], b["text"]), "letters": max(len(a["text"]), 1)}
        else:
            counts = bleu_items([b["text"]], [a["text"]])[0].tolist()
            sums |= dict(zip(_BLEU, counts, strict=True)) | {"differs": a["text"] != b["text"]}
    return sums


def _of_choices(a: Mapping[str, Any], b: Mapping[str, Any], numbers: np.ndarray) -> dict[str, float]:
    p, q = (np.asarray(each["log_probs"], float) for each in (a, b))
    if "top" in a:
        p, top, best = p[b["at"]], a["top"][b["at"]], numbers[a["best"][b["at"]]]
        if (numbers < 0).any():
            known = numbers[top] >= 0
            some = known.any(-1)
            p, q = (_normalised(np.where(known, each, -np.inf)[some]) for each in (p, q))
            # The original's first choice of those that are kept.
            kept = numbers[np.take_along_axis(top[some], p.argmax(-1)[:, None], 1)[:, 0]]
            same = np.where(best[some] < 0, kept, best[some]) == b["best"][some]
        else:
            same = best == b["best"]
            rests = (np.log(np.maximum(1 - np.exp(each).sum(-1, keepdims=True), _SMALLEST)) for each in (p, q))
            p, q = (np.hstack(pair) for pair in zip((p, q), rests, strict=True))
    else:
        if "tokens" in a:
            rows, theirs = aligned(a["tokens"], b["tokens"])
            if "choices" not in a:
                p, q = p[rows], q[theirs]
            elif rows:  # the positions of a question are its choices
                p, q = _normalised(p[:, rows]), _normalised(q[:, theirs])
        if p.shape != q.shape:
            return {}
        same = p.argmax(-1) == q.argmax(-1)
    if not p.size:
        return {}
    kl = float((np.exp(p) * np.where(np.isfinite(p), p, 0)).sum() - (np.exp(p) * np.where(np.isfinite(p), q, 0)).sum())
    return {"kl": max(kl, 0.0), "same": float(same.sum()), "positions": float(len(p))}


def aligned(tokens: list[str], others: list[str]) -> tuple[list[int], list[int]]:
    """Where two tokenizers have the same tokens of a text: positions among `tokens`, and among `others`."""
    if tokens == others:
        return [*range(len(tokens))], [*range(len(tokens))]
    blocks = SequenceMatcher(None, tokens, others, autojunk=False).get_matching_blocks()
    return tuple([i for block in blocks for i in range(block[side], block[side] + block.size)] for side in (0, 1))  # type: ignore[return-value]


def _normalised(log_probs: np.ndarray) -> np.ndarray:
    return log_probs - np.logaddexp.reduce(log_probs, -1, keepdims=True)


def _edits(reference: str, text: str) -> int:
    """Letters to insert, delete or replace (Levenshtein)."""
    row = list(range(len(text) + 1))
    for i, letter in enumerate(reference, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(text, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1]


def _explained(sums: np.ndarray) -> np.ndarray:
    wrong, x, xx, count = (sums[..., i] for i in range(4))
    variance = xx - x * x / count
    share = 1 - wrong / np.where(variance > 0, variance, 1)
    return np.clip(np.where(variance > 0, share, wrong == 0), 0, 1)


_BLEU = [f"bleu {number}" for number in range(10)]
_MEASURES: dict[str, tuple[list[str], Any]] = {  # the sums that each is computed from, and how
    "cosine": (["cosine", "inputs"], mean),
    "kl": (["kl", "positions"], mean),
    "agreement": (["same", "positions"], mean),
    "perplexity": (["nats", "targets"], lambda sums: np.exp(np.minimum(mean(sums), 700))),
    "original_perplexity": (["original_nats", "targets"], lambda sums: np.exp(np.minimum(mean(sums), 700))),
    # Equal texts without four words in a row have no BLEU.
    "bleu": ([*_BLEU, "differs"], lambda sums: np.where(sums[..., -1] == 0, 1.0, bleu(sums[..., :-1]) / 100)),
    "transcripts": (["edits", "letters"], lambda sums: np.clip(1 - mean(sums), 0, 1)),
    "explained": (["wrong", "x", "xx", "outputs"], _explained),
}
_SCORES = ("bleu", "transcripts", "cosine", "explained", "agreement")  # the first that there is is the score
