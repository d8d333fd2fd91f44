"""Measure how much a model loses without an attention head, and whether that is more than chance."""

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_freeze.analysis._probe import check_model, input_hooks, loss_rises
from hf_freeze.analysis.head_importance import Heads, heads_of
from hf_freeze.analysis.significance import Difference, compare, enough_replicates
from hf_freeze.io import whole_lines, write_whole
from hf_freeze.model.running import in_eval_mode
from hf_freeze.progress import track
from hf_freeze.seeded import fingerprint

Head = tuple[str, int]  # attention, such as "encoder.0.self", and number of the head
HEAD_LEVEL = 0.01  # below this corrected p, a single head counts, as in table 1 of Michel et al.


def head_ablation(
    model: Any,
    data: Iterable[Mapping[str, Any]] | None = None,
    *,
    evaluate: Callable[[Any], Any] | None = None,
    keep_one: bool = False,
    path: str | Path | None = None,
) -> dict[str, torch.Tensor]:
    """The loss of quality without each single head, or with `keep_one` without all other heads of its attention, as Michel et al.
    (2019, section 3) measure it: attention -> fp32 on the CPU (N,). Larger values are worse; a negative value means that the
    model is better without the head. As scores for `select_heads` they give the oracle order.

    `evaluate` receives the model in eval mode and returns a score where more is better, such as BLEU. It is called once for the
    whole model and once for each head. It may return a pair instead: the score, and an array (items, k) of the sums that each
    test item adds to it. `path`: a file of finished measurements, from which an interrupted call resumes; with items in it,
    `head_ablation_tests` says which heads count.

    With `data`, batches as for `head_importance`, the result is the rise of the loss, as a mean over all labels. The layers
    before a head's layer are computed once per batch.

    Raises ValueError for both or neither of data and evaluate, a path with data, the inputs that `head_importance` refuses, a
    score that is not a finite number, and a file of another measurement.
    """
    architecture = check_model(model)
    if (data is None) == (evaluate is None):
        raise ValueError("head_ablation: give one of data and evaluate")
    if path is not None and evaluate is None:
        raise ValueError(f"head_ablation(path={str(path)!r}): only works with evaluate; with data, leave path out")
    attentions = heads_of(model, architecture)
    masks = {
        (name, head): (one.output, functools.partial(_masked, one, head, keep_one))
        for name, one in attentions.items()
        for head in range(one.count)
    }
    with in_eval_mode(model), torch.no_grad():
        if evaluate is None:
            losses = loss_rises(model, data, masks, "head_ablation", "Masking heads")
        else:
            measurement = {"keep_one": keep_one, "model": fingerprint(model)} if path else {}
            scores = _scores(model, evaluate, masks, None if path is None else Path(path), measurement)
            losses = {head: scores[None] - scores[head] for head in masks}
    return {name: torch.tensor([losses[name, head] for head in range(one.count)]) for name, one in attentions.items()}


def head_ablation_tests(path: str | Path, score: Callable[[np.ndarray], np.ndarray]) -> dict[str, list[Difference]]:
    """Which single heads count: attention -> a comparison for each head of the model without it and the whole model, of what
    `head_ablation` measured into `path`. A paired bootstrap over the items, as in `compare`, with Holm's correction over all
    heads in `p_corrected`; Michel et al. (2019, table 1) underline p < 0.01.

    `score`: sums of items, (..., k), to the score, (...).

    Raises ValueError for a file without items.
    """
    _, *lines = map(json.loads, whole_lines(Path(path)))
    lacking = next((line for line in lines if "items" not in line), None)
    if lacking is not None or not any("head" in line for line in lines):
        raise ValueError(
            f"{path} has no items of a test set to compare: let evaluate of head_ablation return (score, items)"
        )
    rows = {_head(line): [np.array(line["items"], float)] for line in lines}
    names = {head: "whole" if head is None else f"{head[0]} {head[1]}" for head in rows}
    found = compare(
        {names[head]: items for head, items in rows.items()},
        score,
        replicates=enough_replicates(len(rows) - 1, HEAD_LEVEL),
        to_first=True,
    )
    tests: dict[str, list[Difference]] = {}
    for head, test in zip([head for head in rows if head is not None], found, strict=True):
        tests.setdefault(head[0], []).append(test)
    return tests


@contextmanager
def _masked(heads: Heads, head: int, keep_one: bool) -> Iterator[None]:
    """Mask the context of this head, or with `keep_one` of all other heads, before the projection."""

    def mask(_: str, context: torch.Tensor) -> torch.Tensor:
        gates = context.new_full((heads.count,), float(not keep_one))
        gates[head] = float(keep_one)
        return context * gates.repeat_interleave(heads.size)

    with input_hooks({"": heads.output}, mask):
        yield


def _scores(
    model: Any,
    evaluate: Callable[[Any], Any],
    masks: Mapping[Head, tuple[Any, Callable[[], Any]]],
    path: Path | None,
    measurement: dict[str, Any],
) -> dict[Head | None, float]:
    """Head, or None for the whole model -> score. The first line of the file is the `measurement`; each other holds one score."""
    scores: dict[Head | None, float] = {}
    if path is not None and path.exists():
        first, *lines = map(json.loads, whole_lines(path) or ["{}"])
        if first != measurement:
            raise ValueError(
                f"{path} is of another measurement: of {first}, not {measurement}; give another path, or delete it"
            )
        scores = {_head(line): line["score"] for line in lines}
    elif path is not None:
        write_whole(path, json.dumps(measurement) + "\n")
    for head in track([None, *masks], "Masking heads"):
        if head in scores:
            continue
        with nullcontext() if head is None else masks[head][1]():
            result = evaluate(model)
        score, items = result if isinstance(result, tuple) else (result, None)
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError(
                f"head_ablation: evaluate returned {score!r}; it must be a finite number, where more is better"
            )
        scores[head] = float(score)
        if path is not None:
            fields: dict[str, Any] = {} if head is None else {"attention": head[0], "head": head[1]}
            fields |= {"score": float(score)} | ({} if items is None else {"items": np.asarray(items).tolist()})
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")
    return scores


def _head(line: Mapping[str, Any]) -> Head | None:
    """The head that a line of the file is about; None for the whole model."""
    return (line["attention"], line["head"]) if "head" in line else None
