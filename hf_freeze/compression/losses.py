"""What smaller parts lose: closed forms for heads and neurons, and a few measurements of whole models for the rest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from hf_freeze import methods
from hf_freeze.analysis.answers import Answers, compare_answers
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compression.blocks import Block
from hf_freeze.compression.shape import methods_of, quantized, whole
from hf_freeze.methods.base import Method
from hf_freeze.model.fidelity import fidelity_on
from hf_freeze.model.make import make_variant
from hf_freeze.model.running import in_eval_mode, without_cache
from hf_freeze.model.samples import Samples, samples_of
from hf_freeze.publish.export.served import Served, answers
from hf_freeze.solvers.allocation import allocate

_GREEDY = 8  # layers of a stack up to which each removal is chosen anew
_DEPTHS = 6  # of a stack, whose loss is measured
_FEW = 4  # batches by which removals of a layer are compared
SHARES = (0.5, 0.25)  # of heads or neurons that stay when closed forms are checked


@dataclass(frozen=True)
class Subject:
    """A model with what it is calibrated and compared on. Its variants are compared with it on `held_out`, batches for it."""

    served: Served
    samples: Samples
    held_out: list[dict[str, Any]]

    @property
    def model(self) -> Any:
        return self.served.model

    @property
    def tokenizer(self) -> Any:
        return self.served.tokenizer

    def cut(self, found: Sequence[Method]) -> Any:
        """The variant that these methods make with the calibration; the model itself for none."""
        return make_variant(self.model, list(found), calibration=self.samples) if found else self.model

    def distance(self, variant: Any, batches: int | None = None) -> float:
        return fidelity_on(self.model, variant, self.held_out[:batches]).distance


@dataclass(frozen=True, kw_only=True)
class Losses:
    """`layers`: stack -> number of layers -> (which, loss); `factors`: kind of unit -> measured loss by that of the closed form;
    `four_bits`: block or "tables" -> loss; `tokens`: how many are kept -> loss. All are distances of outputs from the original's
    (`model.fidelity`), which are taken to add up."""

    layers: dict[str, dict[int, tuple[tuple[int, ...], float]]]
    factors: dict[str, float] = field(default_factory=dict)
    four_bits: dict[str, float] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)

    def of_units(self, block: Block, units: int) -> float:
        return self.factors.get(block.kind, 1.0) * float(block.order.losses[block.units - units])

    def of_bits(self, name: str, bits: int, share: float) -> float:
        """`share`: of the weights that stay."""
        return self.four_bits.get(name, 0.0) * share if bits == 4 else 0.0


def layer_losses(subject: Subject, stack: str, say: Callable[[str], Any]) -> dict[int, tuple[tuple[int, ...], float]]:
    """Number of layers -> (which stay, loss with calibration). The layer goes whose loss without calibration is least, one after
    another; in a deep stack, by one measurement of each."""
    depth = architecture_for(subject.model).depths(subject.model.config)[stack]
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
    result: dict[int, tuple[tuple[int, ...], float]] = {depth: (tuple(range(depth)), 0.0)}
    counts = sorted({depth - round(len(order) * step / _DEPTHS) for step in range(1, _DEPTHS + 1)} - {depth})
    for count in reversed(counts):
        stay = tuple(layer for layer in range(depth) if layer not in order[: depth - count])
        say(f"{stack}: {count} of {depth} layers")
        loss = subject.distance(subject.cut([methods.LayerSelection(keep={stack: list(stay)})]))
        result[count] = stay, max(loss, *(other for _, other in result.values()))  # fewer layers are never better
    return result


def factor_of(subject: Subject, blocks: Mapping[str, Block], kind: str, share: float) -> float | None:
    """How many times the loss of the closed forms is measured when this share of all heads or neurons stays."""
    some = [block for block in blocks.values() if block.kind == kind]
    curves = [block.order.losses.tolist() for block in some]
    most = [block.units - 1 for block in some]
    step = 8 if kind == "neurons" and min(block.units for block in some) >= 64 else 1
    removals = min(round((1 - share) * sum(block.units for block in some)), sum(count // step * step for count in most))
    removed = allocate(curves, removals, most=most, step=step)
    expected = sum(curve[gone] for curve, gone in zip(curves, removed, strict=True))
    depths = architecture_for(subject.model).depths(subject.model.config)
    if expected <= 0:
        return None
    shape = whole(depths, blocks, 8)
    units = {block.name: block.units - gone for block, gone in zip(some, removed, strict=True)}
    shape = replace(shape, units=shape.units | units)
    return subject.distance(subject.cut(methods_of(shape, blocks, depths))) / expected


def bit_losses(subject: Subject, blocks: Mapping[str, Block], say: Callable[[str], Any]) -> dict[str, float]:
    """Block or "tables" -> loss of 4 bits. That of all blocks together is measured and divided by their weights."""
    say("4 bits")
    tables = subject.distance(subject.cut([quantized(["embeddings"])]))
    linears = subject.distance(subject.cut([quantized(["ffn", "attention"])]))
    weights = sum(block.weights for block in blocks.values())
    return {"tables": tables} | {name: linears * block.weights / weights for name, block in blocks.items()}


class TokenLoss:
    """What fewer tokens cost on `items`, to which the original answers `expected`.

    Of models that predict tokens: how many more nats the trimmed one needs for the same texts, for each token of the original,
    since a text is in other tokens there. Of others: the distance of the answers.
    """

    def __init__(self, original: Served, items: Sequence[Any], expected: Answers) -> None:
        self._items, self._expected = items, expected
        if original.task == "seq2seq-lm":
            written = [(item, answer["text"]) for item, answer in zip(items, expected.items, strict=True)]
            self._items = [(item if isinstance(item, str) else item[0], text) for item, text in written if text]
        self._before = _nats(original, self._items) if original.task in ("causal-lm", "seq2seq-lm") else None

    def __call__(self, trimmed: Served) -> float:
        if self._before is None:
            return compare_answers(self._expected, answers(trimmed, self._items, like=self._expected)).distance
        before, count = self._before
        return (_nats(trimmed, self._items)[0] - before) / max(count, 1)


@torch.no_grad()
def _nats(served: Served, items: Sequence[Any]) -> tuple[float, int]:
    """(negative log-likelihood of all texts, predicted tokens)"""
    nats, count = 0.0, 0
    with in_eval_mode(served.model), without_cache(served.model):
        for batch in samples_of(served.model, items, served.tokenizer).whole().batches:
            targets = batch.get("labels")
            if targets is None:
                targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            logits = served.model(**batch).logits.float()
            if batch.get("labels") is None:
                logits, targets = logits[:, :-1], targets[:, 1:]
            nats += float(functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            count += int((targets != -100).sum())
    return nats, count
