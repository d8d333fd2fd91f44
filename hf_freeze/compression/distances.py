"""How far smaller parts take outputs from the original's: closed forms for heads and neurons, a few measurements of whole
models for the rest."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from hf_freeze import methods
from hf_freeze.analysis.answers import compare_answers
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compression.bench import Bench
from hf_freeze.compression.blocks import Block
from hf_freeze.compression.original import PREDICT, Original, Subject
from hf_freeze.compression.progress import Progress
from hf_freeze.compression.shape import full_shape, methods_of, quantized
from hf_freeze.methods.ffn_pruning import neurons_at_once
from hf_freeze.model.make import make_variant
from hf_freeze.model.running import in_eval_mode, without_cache
from hf_freeze.model.samples import samples_of
from hf_freeze.publish.export.served import Served, answers
from hf_freeze.solvers.allocation import allocate

_GREEDY = 8  # layers of a stack up to which each removal is chosen anew
_DEPTHS = 6  # of a stack, whose distance is measured
_FEW = 4  # batches by which removals of a layer are compared
_SHARES = (0.5, 0.25)  # of heads or neurons that stay when closed forms are checked
_COVERAGES = (1.0, 0.999, 0.995, 0.98, 0.95)  # of all tokens of the texts
_RELEARNT = 0.1  # share of the distance of fewer tokens that counts where healing teaches how words are split now


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Of outputs from the original's (`model.fidelity`); they are taken to add up. `layers`: stack -> number of layers -> (which,
    distance); `factors`: kind of unit -> measured distance by that of the closed form; `four_bits`: block or "tables" ->
    distance; `tokens`: how many are kept -> distance."""

    layers: dict[str, dict[int, tuple[tuple[int, ...], float]]]
    factors: dict[str, float] = field(default_factory=dict)
    four_bits: dict[str, float] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)
    relearnt: float = 1.0  # share of `tokens` that counts

    def of_units(self, block: Block, units: int) -> float:
        return self.factors.get(block.kind, 1.0) * block.losses[block.units - units]

    def of_tokens(self, count: int) -> float:
        return self.relearnt * self.tokens[count]

    def of_bits(self, name: str, bits: int, share: float) -> float:
        """`share`: of the weights that stay."""
        return self.four_bits.get(name, 0.0) * share if bits == 4 else 0.0


def measured_distances(
    bench: Bench,
    may_go: frozenset[str],
    bits: Sequence[int],
    *,
    worst: Callable[[Distances], float],
    heals: bool,
) -> Distances:
    """Of the original of `bench`, where parts of these kinds may go. `worst`: from the distances of all other parts, the one
    above which it does not pay to remove layers; once a number of layers is above it, still fewer are not measured. `heals`:
    whether what is cut will be healed."""
    original, phases, progress = bench.original, bench.phases, bench.progress
    blocks = original.blocks
    depths = original.depths
    stacks = [stack for stack in depths if "layers" in may_go]
    kinds = [kind for kind in ("heads", "neurons") if kind in may_go and any(b.kind == kind for b in blocks.values())]
    planned = {f"factor-{kind}": len(_SHARES) for kind in kinds} | ({"four-bits": 1} if 4 in bits else {})
    planned |= {"tokens": len(_COVERAGES)} if "tokens" in may_go else {}
    planned |= {f"layers-{stack}-{count}": 1 for stack in stacks for count in _counts(depths[stack], depths[stack] - 1)}
    progress.plan(sum(count for name, count in planned.items() if not phases.done(name)))
    once = phases.once

    def factor(kind: str) -> float:
        found = []
        for share in _SHARES:
            progress.step(f"{share:.0%} of the {kind}")
            found.append(factor_of(original.subject(), blocks, kind, share))
        return max([one for one in found if one is not None], default=1.0)

    factors = {kind: once(f"factor-{kind}", lambda kind=kind: factor(kind)) for kind in kinds}
    four_bits = once("four-bits", lambda: bit_distances(original.subject(), blocks, progress.step)) if 4 in bits else {}
    tokens = {original.tokens: 0.0}
    if "tokens" in may_go:
        found = once("tokens", lambda: _token_distances(original, progress))
        tokens |= {int(count): distance for count, distance in found.items()}
    layers: dict[str, Any] = {stack: {depth: (tuple(range(depth)), 0.0)} for stack, depth in depths.items()}
    relearnt = _RELEARNT if heals and original.served.task in PREDICT else 1.0
    distances = Distances(layers=layers, factors=factors, four_bits=four_bits, tokens=tokens, relearnt=relearnt)
    limit = worst(distances) if stacks else 0.0
    for stack in stacks:
        layers[stack] = layer_distances(original.subject(), stack, progress.step, limit, once)
    return distances


def unmeasured_distances(original: Original, may_go: frozenset[str]) -> Distances:
    """The choices that `measured_distances` gives, each at distance 0: which shapes there are, before anything is measured."""
    layers: dict[str, Any] = {}
    for stack, depth in original.depths.items():
        least = 1 if "layers" in may_go else depth
        layers[stack] = {count: (tuple(range(count)), 0.0) for count in range(least, depth + 1)}
    sizes = original.sizes(_COVERAGES) if "tokens" in may_go else []
    return Distances(layers=layers, tokens=dict.fromkeys([original.tokens, *sizes], 0.0))


def _token_distances(original: Original, progress: Progress) -> dict[int, float]:
    """Number of tokens that are kept -> distance on the inputs that are compared, never less for fewer ones.

    Of models that predict tokens: how many more nats the trimmed one needs for the same texts, for each token of the original,
    since a text is in other tokens there. Of others: the distance of the answers.
    """
    items, expected = original.inputs.dev_subset, original.expected("dev_subset")
    predicts = original.served.task in PREDICT
    if original.served.task == "seq2seq-lm":
        items = original.written
    before, count = _nats(original.served, items) if predicts else (0.0, 0)
    found: dict[int, float] = {}
    for size in original.sizes(_COVERAGES):
        progress.step(f"{size:,} of {original.tokens:,} tokens")
        trimmed = original.trimmed(size)
        if predicts:
            distance = (_nats(trimmed, items)[0] - before) / max(count, 1)
        else:
            distance = compare_answers(expected, answers(trimmed, items, like=expected)).distance
        found[size] = max([distance, 0.0, *found.values()])
    return found


def layer_distances(
    subject: Subject,
    stack: str,
    say: Callable[[str], Any],
    limit: float = math.inf,
    once: Callable[[str, Callable[[], Any]], Any] = lambda _, compute: compute(),
) -> dict[int, tuple[tuple[int, ...], float]]:
    """Number of layers -> (which stay, distance with calibration), down to the first one above the limit. `once`: that of the
    phases, for the order in which layers go and for each number of them."""
    depth = architecture_for(subject.model).depths(subject.model.config)[stack]
    order = once(f"order-{stack}", lambda: _removal_order(subject, stack, depth))
    result: dict[int, tuple[tuple[int, ...], float]] = {depth: (tuple(range(depth)), 0.0)}
    for count in _counts(depth, len(order)):
        stay = tuple(layer for layer in range(depth) if layer not in order[: depth - count])

        def measure(count: int = count, stay: tuple[int, ...] = stay) -> float:
            say(f"{stack}: {count} of {depth} layers")
            return subject.distance(subject.cut([methods.LayerSelection(keep={stack: list(stay)})]))

        distance = once(f"layers-{stack}-{count}", measure)
        result[count] = stay, max(distance, *(other for _, other in result.values()))  # fewer layers are never better
        if distance > limit:
            break
    return result


def _counts(depth: int, removable: int) -> list[int]:
    """The numbers of layers that are measured, from the most to the fewest."""
    return sorted({depth - round(removable * step / _DEPTHS) for step in range(1, _DEPTHS + 1)} - {depth}, reverse=True)


def _removal_order(subject: Subject, stack: str, depth: int) -> list[int]:
    """The layer goes without which an uncalibrated model is nearest, one after another; in a deep stack, by one measurement of
    each."""
    kept, order, ranking = list(range(depth)), [], []
    for _ in range(depth - 1):
        if depth <= _GREEDY or not ranking:
            found = {}
            for layer in kept:
                fewer = [other for other in kept if other != layer]
                try:
                    variant = make_variant(subject.model, [methods.LayerSelection(keep={stack: fewer})])
                except ValueError:  # a layer that must stay
                    continue
                found[layer] = subject.distance(variant, _FEW)
            ranking = sorted(found, key=lambda layer: found[layer])
        if not ranking:
            break
        order.append(ranking.pop(0))
        kept.remove(order[-1])
    return order


def factor_of(subject: Subject, blocks: Mapping[str, Block], kind: str, share: float) -> float | None:
    """How many times the distance of the closed forms is measured when this share of all heads or neurons stays."""
    some = [block for block in blocks.values() if block.kind == kind]
    curves = [block.losses for block in some]
    most = [block.units - 1 for block in some]
    step = neurons_at_once(block.units for block in some) if kind == "neurons" else 1
    removals = min(round((1 - share) * sum(block.units for block in some)), sum(count // step * step for count in most))
    removed = allocate(curves, removals, most=most, step=step)
    expected = sum(curve[gone] for curve, gone in zip(curves, removed, strict=True))
    depths = architecture_for(subject.model).depths(subject.model.config)
    if expected <= 0:
        return None
    shape = full_shape(depths, blocks, 8)
    units = {block.name: block.units - gone for block, gone in zip(some, removed, strict=True)}
    shape = replace(shape, units=shape.units | units)
    return subject.distance(subject.cut(methods_of(shape, blocks, depths))) / expected


def bit_distances(subject: Subject, blocks: Mapping[str, Block], say: Callable[[str], Any]) -> dict[str, float]:
    """Block or "tables" -> distance of 4 bits. That of all blocks together is measured and divided by their weights."""
    say("4 bits")
    tables = subject.distance(subject.cut([quantized(["embeddings"])]))
    linears = subject.distance(subject.cut([quantized(["ffn", "attention"])]))
    weights = sum(block.weights for block in blocks.values())
    return {"tables": tables} | {name: linears * block.weights / weights for name, block in blocks.items()}


@torch.no_grad()
def _nats(served: Served, items: Sequence[Any]) -> tuple[float, int]:
    """(negative log-likelihood of all texts, predicted tokens)"""
    nats, count = 0.0, 0
    with in_eval_mode(served.model), without_cache(served.model):
        for batch in samples_of(served.model, items, served.tokenizer).undivided().batches:
            targets = batch.get("labels")
            if targets is None:
                targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            logits = served.model(**batch).logits.float()
            if batch.get("labels") is None:
                logits, targets = logits[:, :-1], targets[:, 1:]
            nats += float(functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            count += int((targets != -100).sum())
    return nats, count
