"""What is lost without an attention head, measured."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hf_freeze.analysis._probe import batches_on, check_model, in_eval_mode, inputs_seen, loss_of, track
from hf_freeze.analysis.head_importance import count_heads, count_labels, output_projections
from hf_freeze.architectures.base import Architecture
from hf_freeze.io import whole_lines, write_whole
from hf_freeze.seeded import fingerprint


def head_ablation(
    model: Any,
    data: Iterable[Mapping[str, Any]] | None = None,
    *,
    evaluate: Callable[[Any], float] | None = None,
    keep_one: bool = False,
    path: str | Path | None = None,
) -> dict[str, torch.Tensor]:
    """What is lost without each head alone, or with `keep_one` without all others of its attention: attention -> fp32 on the CPU
    (N,), as Michel et al. (2019, section 3) measure it. Larger is worse; negative is better than with all heads. As scores
    for `select_heads` they give the oracle's order.

    `evaluate` is given the model in eval mode and returns a score of which more is better (such as BLEU); it is called once, and
    once for each head. `path`: a file that holds what is done, from which a broken measurement goes on. With `data`,
    batches as for `head_importance`, it is the rise of the loss, a mean over all labels: what lies before the layer of a head
    is computed once a batch and not again.

    Raises ValueError for both or neither of data and evaluate, a path with data, what `head_importance` refuses, a score that is
    no number, and a file of another measurement.
    """
    architecture = check_model(model)
    if (data is None) == (evaluate is None):
        raise ValueError("head_ablation: give one of data and evaluate")
    if path is not None and evaluate is None:
        raise ValueError(f"head_ablation(path={str(path)!r}): is of measurements with evaluate; data needs none")
    outputs, sizes = output_projections(model, architecture)
    counts = count_heads(outputs, sizes)
    every = [(name, head) for name, count in counts.items() for head in range(count)]
    with in_eval_mode(model), torch.no_grad():
        if evaluate is not None:
            found = _score_drops(model, evaluate, outputs, sizes, every, keep_one, None if path is None else Path(path))
        else:
            found = _loss_rises(model, architecture, data, outputs, sizes, every, keep_one)
    return {name: torch.tensor([found[name, head] for head in range(count)]) for name, count in counts.items()}


@contextmanager
def _masked(output: Any, size: int, head: int, keep_one: bool) -> Iterator[None]:
    """The output projection without the context of this head, or of all others."""

    def mask(_: str, context: torch.Tensor) -> torch.Tensor:
        gates = torch.full(
            (context.shape[-1] // size,), float(not keep_one), device=context.device, dtype=context.dtype
        )
        gates[head] = float(keep_one)
        return context * gates.repeat_interleave(size)

    with inputs_seen({"": output}, mask):
        yield


def _score_drops(
    model: Any,
    evaluate: Callable[[Any], float],
    outputs: dict[str, Any],
    sizes: dict[str, int],
    every: list[tuple[str, int]],
    keep_one: bool,
    path: Path | None,
) -> dict[tuple[str, int], float]:
    of = {"keep_one": keep_one, "model": fingerprint(model)} if path else {}
    done: dict[tuple[str, int] | None, float] = {}
    if path is not None and path.exists():
        first, *lines = map(json.loads, whole_lines(path) or ["{}"])
        if first != of:
            raise ValueError(f"{path} is of another measurement: of {first}, not {of}; give another path, or delete it")
        done = {(line["attention"], line["head"]) if "head" in line else None: line["score"] for line in lines}
    elif path is not None:
        write_whole(path, json.dumps(of) + "\n")
    for place in track([None, *every], "Masking heads"):
        if place in done:
            continue
        with nullcontext() if place is None else _masked(outputs[place[0]], sizes[place[0]], place[1], keep_one):
            score = evaluate(model)
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError(
                f"head_ablation: evaluate returned {score!r}; it must be a finite number, of which more is better"
            )
        done[place] = float(score)
        if path is not None:
            named = {} if place is None else {"attention": place[0], "head": place[1]}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(named | {"score": float(score)}) + "\n")
    return {place: done[None] - done[place] for place in every}


def _loss_rises(
    model: Any,
    architecture: Architecture,
    data: Any,
    outputs: dict[str, Any],
    sizes: dict[str, int],
    every: list[tuple[str, int]],
    keep_one: bool,
) -> dict[tuple[str, int], float]:
    layers = [
        model.base_model.get_submodule(stack.layers.format(number))
        for name, stack in architecture.stacks.items()
        for number in range(architecture.depths(model.config)[name])
    ]
    place_of = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    rises, labels = dict.fromkeys(every, 0.0), 0
    for batch in batches_on(model, data, "Masking heads"):
        with _recorded(layers) as results:
            loss = loss_of(model, batch, "head_ablation")
        if len(results) != len(layers):
            raise ValueError(
                f"of {len(layers)} layers {len(results)} have run: without all, heads cannot be masked one by one"
            )
        count = count_labels(model, batch)
        labels += count
        for name, head in every:
            before = place_of[outputs[name]]
            with _replayed(layers[:before], results), _masked(outputs[name], sizes[name], head, keep_one):
                rises[name, head] += count * float(loss_of(model, batch, "head_ablation") - loss)
    return {place: rise / labels for place, rise in rises.items()}


@contextmanager
def _recorded(layers: list[Any]) -> Iterator[list[Any]]:
    """What they return, in order."""
    results: list[Any] = []
    handles = [layer.register_forward_hook(lambda _, __, result: results.append(result)) for layer in layers]
    try:
        yield results
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replayed(layers: list[Any], results: list[Any]) -> Iterator[None]:
    """Each layer returns what it has returned before, and computes nothing."""
    before = [vars(layer).get("forward") for layer in layers]
    for layer, result in zip(layers, results, strict=False):
        layer.forward = lambda *_, _result=result, **__: _result
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:  # of a method, such as LayerDrop
                layer.forward = forward
