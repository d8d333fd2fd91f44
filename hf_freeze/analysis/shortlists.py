"""Lexical shortlists: compute them from parallel texts, and translate with them. `runtime.shortlists` has their class.

Shapes: V tokens of the vocabulary; P pairs of a source and a target token, over all pairs of texts.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hf_freeze import surgery
from hf_freeze.analysis.vocabulary import token_batches
from hf_freeze.data.trimming import special_tokens
from hf_freeze.methods.checks import check_integer, check_positive
from hf_freeze.runtime.shortlists import Shortlist

_SPECIAL = ("eos", "pad", "bos", "decoder_start", "forced_bos", "forced_eos")  # of generation, with "_token_id"


def shortlist(
    tokenizer: Any,
    texts: Sequence[str],
    targets: Sequence[str],
    *,
    best: int = 50,
    first: int = 50,
    steps: int = 5,
    alignments: Iterable[Iterable[tuple[int, int]]] | None = None,
) -> Shortlist:
    """For each source token its `best` most probable target tokens, and for all texts the `first` most frequent target tokens
    and the special tokens (Jean et al., 2015, https://arxiv.org/abs/1412.2007; settings as in Marian).

        shortlist = analysis.shortlist(tokenizer, ["Guten Morgen"], ["good morning"])
        with analysis.shortlisted(model, shortlist):
            model.generate(tokenizer("Guten Morgen", return_tensors="pt").input_ids)

    `texts` and `targets`: translations of each other. Probabilities p(target | source) are those of IBM model 1 with an empty
    source word, after `steps` steps of EM from uniform ones (Brown et al., 1993). With `alignments`, they are relative
    frequencies of its links: for each pair of texts the pairs (position in the source, position in the target), counted in
    tokens from 0, without special tokens. Pairs that never occur are left out, so a token may have fewer than `best`.

    Memory: about 60 bytes for each of P, so take a sample of a corpus of millions of sentences.

    Raises ValueError for a string in place of texts, numbers of texts that differ or are 0, texts without a token, links that
    lie outside the texts, `best` or `steps` below 1, and `first` below 0.
    """
    check_positive(best, "shortlist", "best")
    check_integer(first, 0, "shortlist", "first")
    check_positive(steps, "shortlist", "steps")
    source_ids, target_ids = _all_ids(tokenizer, texts, target=False), _all_ids(tokenizer, targets, target=True)
    if len(source_ids) != len(target_ids) or not source_ids:
        raise ValueError(
            f"shortlist: {len(source_ids)} texts and {len(target_ids)} targets must be pairs, and at least one"
        )
    occurrences = np.bincount(np.concatenate(target_ids), minlength=len(tokenizer))
    size = max(len(tokenizer), len(occurrences), 1 + max(int(ids.max(initial=0)) for ids in source_ids))
    if not occurrences.any():
        raise ValueError("the targets hold no token")
    if alignments is None:
        probabilities = _model_1(source_ids, target_ids, size, steps)
    else:
        probabilities = _relative_frequencies(source_ids, target_ids, list(alignments), size)
    frequent = np.argsort(-occurrences, kind="stable")[: min(first, np.count_nonzero(occurrences))]
    specials = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *special_tokens(tokenizer).values()}
    return Shortlist(always=np.unique([*frequent, *specials]).astype(np.int64), **_best(*probabilities, size, best))


@contextmanager
def shortlisted(model: Any, shortlist: Shortlist) -> Iterator[None]:
    """Within it, `model.generate` computes the logits of the shortlist's tokens for each batch alone; those of other tokens are
    -inf. So pipelines, beam search and every setting of `generate` work as they do otherwise. The tokens that the settings of
    generation name, such as `eos_token_id`, are always in. Batches with few distinct tokens have short lists.

    Only one thread may use the model at a time.

    Raises ValueError for a model that is no encoder-decoder, that lacks an output matrix, or whose softmax needs all of it, and
    for a shortlist of another vocabulary; `generate` raises it if it gets no token ids.
    """
    name = type(model).__name__
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not getattr(model.config, "is_encoder_decoder", False) or output is None:
        raise ValueError(f"shortlisted: {name} must be an encoder-decoder of PyTorch with an output matrix")
    if getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None):
        raise ValueError(f"shortlisted: {name} caps its logits, which would give tokens outside the shortlist a chance")
    surgery.check_rows(output, shortlist.largest, name)
    generate, previous = model.generate, vars(model).get("generate")

    def shortlisted_generate(*inputs: Any, **settings: Any) -> Any:
        ids = inputs[0] if inputs else settings.get("inputs", settings.get("input_ids"))
        if ids is None:
            raise ValueError("shortlisted: generate needs input_ids, from which the shortlist chooses tokens")
        special = _special_tokens(settings.get("generation_config") or model.generation_config, settings)
        tokens = shortlist.tokens(ids.cpu().numpy(), special)
        with surgery.only_rows(output, tokens.tolist()):
            return generate(*inputs, **settings)

    model.generate = shortlisted_generate
    try:
        yield
    finally:
        del model.generate
        if previous is not None:
            model.generate = previous


def _special_tokens(config: Any, settings: dict[str, Any]) -> list[int]:
    """The ids that the settings of generation name."""
    values = [settings.get(f"{name}_token_id", getattr(config, f"{name}_token_id", None)) for name in _SPECIAL]
    return [int(token) for value in values if value is not None for token in np.ravel(value)]


def _all_ids(tokenizer: Any, texts: Iterable[str], *, target: bool) -> list[np.ndarray]:
    """The ids of each text, without special tokens."""
    batches = token_batches(tokenizer, () if target else texts, texts if target else ())
    return [np.array(ids, dtype=np.int64) for batch in batches for ids in batch]


# -- probabilities: (source tokens, target tokens, p) of all pairs that occur, each (cells,) ------------------------------------


def _model_1(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], size: int, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p(target | source) by IBM model 1. `size`: V, which is also the number of the empty source word."""
    # Of each of P: the cell source * V + target, and the number of the target's position.
    keys: list[np.ndarray] = []
    places: list[np.ndarray] = []
    first = 0
    for source, target in zip(sources, targets, strict=True):
        keys.append(((np.append(source, size) * size)[:, None] + target).ravel())
        places.append(np.tile(np.arange(first, first + len(target)), len(source) + 1))
        first += len(target)
    cells, index = np.unique(np.concatenate(keys), return_inverse=True)
    place = np.concatenate(places)
    source, target = np.divmod(cells, size)
    p = np.ones(len(cells))
    for _ in range(steps):
        shares = p[index]
        shares /= np.bincount(place, shares)[place]
        p = _normalized(np.bincount(index, shares), source)
    real = source < size
    return source[real], target[real], p[real]


def _relative_frequencies(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], links: Sequence[Iterable[tuple[int, int]]], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p(target | source) among the links."""
    if len(links) != len(sources):
        raise ValueError(
            f"shortlist: {len(links)} alignments for {len(sources)} pairs of texts; give one for each pair"
        )
    keys = []
    for number, (source, target, pairs) in enumerate(zip(sources, targets, links, strict=True)):
        for i, j in pairs:
            if not (0 <= i < len(source) and 0 <= j < len(target)):
                raise ValueError(
                    f"shortlist: alignments[{number}] links {i}-{j}, and the texts have {len(source)} and {len(target)} tokens"
                )
            keys.append(source[i] * size + target[j])
    cells, counts = np.unique(np.array(keys, dtype=np.int64), return_counts=True)
    source, target = np.divmod(cells, size)
    return source, target, _normalized(counts.astype(np.float64), source)


def _normalized(counts: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Divided by their sum over each source token."""
    return counts / np.bincount(source, counts)[source]


def _best(source: np.ndarray, target: np.ndarray, p: np.ndarray, size: int, best: int) -> dict[str, np.ndarray]:
    """The starts and targets of a shortlist: of each source token the `best` targets, of equal ones that with the lower id."""
    order = np.lexsort((target, -p, source))
    source, target = source[order], target[order]
    starts = np.searchsorted(source, np.arange(size + 1))
    kept = np.arange(len(source)) - starts[source] < best
    lengths = np.minimum(np.diff(starts), best)
    return {"starts": np.append(0, lengths.cumsum()), "targets": target[kept]}
