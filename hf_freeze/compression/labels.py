"""Held-out inputs with labels, and what a model's answers to them score: the metric of the task, with a paired interval."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_freeze import scores
from hf_freeze.analysis.answers import Answers
from hf_freeze.analysis.significance import compare
from hf_freeze.data.entities import entities
from hf_freeze.publish.export.served import Served

Labelled = Sequence[tuple[Any, Any]]  # (what the model reads, its label)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """`dev`: to choose by; `test`: for the final score alone. A label is, for
        classification of texts or images     the number of a class in `classes`
        token classification                  the tags of the words, which single spaces separate in the text
        multiple choice                       the number of the right answer
        question answering                    the right answers, at least one
        regression                            a number
        translation and summarisation         the right text
        language models                       anything: they predict the text itself
    `metric`: of two classes "f1" or "matthews", in place of accuracy.
    """

    dev: Labelled
    test: Labelled
    classes: Sequence[str] = ()
    metric: str = ""


@dataclass(frozen=True, kw_only=True)
class Score:
    """In points, of which more is better: accuracy and F1 in %, BLEU, -100 times the logarithm of a perplexity. `difference`: of
    `value` from that of the `original`, with the ends of its 95 % interval by a paired bootstrap over `count` inputs."""

    name: str
    value: float
    original: float
    difference: float
    low: float
    high: float
    count: int

    def shown(self, value: float) -> str:
        return f"{np.exp(-value / 100):.2f}" if self.name == "perplexity" else f"{value:.1f}"


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Of a model to an input. `original`: that of the original."""

    served: Served
    item: Any
    answer: Mapping[str, Any]
    original: Mapping[str, Any]


@dataclass(frozen=True)
class _Metric:
    """`row`: what an answer adds to `width` sums, given the label, of which `score` makes points."""

    name: str
    width: int
    row: Callable[[_Answer, Any], Sequence[float]]
    score: Callable[[np.ndarray], np.ndarray]


def check_labels(original: Served, labels: Labels) -> None:
    """Raises ValueError for no labels, a task without a metric, an unknown metric, and labels that the model has not."""
    metric_of(original, labels)
    if not labels.dev or not labels.test:
        raise ValueError(
            "labels need inputs to choose by (dev) and for the final score (test), better some hundred each"
        )
    for split in (labels.dev, labels.test):
        _read(original, labels, split)


def score_of(labels: Labels, split: Labelled, original: tuple[Served, Answers], found: tuple[Served, Answers]) -> Score:
    """Of a model and its answers to `split` beside the original and its answers."""
    metric, wanted = metric_of(original[0], labels), _read(original[0], labels, split)
    items = []
    for served, answers in (original, found):
        rows = np.zeros((len(split), metric.width))  # an input without an answer has zeros
        for number, (first, answer) in enumerate(zip(original[1].items, answers.items, strict=True)):
            if answer:
                one = _Answer(served=served, item=split[number][0], answer=answer, original=first)
                rows[number] = metric.row(one, wanted[number])
        items.append(rows)
    both = compare({"original": [items[0]], "found": [items[1]]}, metric.score)[0]
    before, after = (float(metric.score(each.sum(0))) for each in items)
    interval = {"difference": both.difference, "low": both.low, "high": both.high}
    return Score(name=metric.name, value=after, original=before, count=len(split), **interval)


def metric_of(original: Served, labels: Labels) -> _Metric:
    task, config = original.task, original.model.config
    if task not in _METRICS or getattr(config, "problem_type", None) == "multi_label_classification":
        raise ValueError(
            f"no labels for this {task} model: they are for {list(_METRICS)}, one label each; give texts alone"
        )
    if task in _BY_PLACE and not original.tokenizer.is_fast:
        raise ValueError(f"labels of {task} need a fast tokenizer, which knows the place of a token in its text")
    if task == "sequence-classification" and config.num_labels == 1:
        return _REGRESSION
    if labels.metric in ("", "accuracy"):
        return _METRICS[task]
    if labels.metric not in _OF_TWO or task != "sequence-classification" or config.num_labels != 2:
        raise ValueError(f"metric={labels.metric!r}: choose accuracy, or for texts of two classes {list(_OF_TWO)}")
    return _OF_TWO[labels.metric]


def _read(original: Served, labels: Labels, split: Labelled) -> list[Any]:
    """The labels as `row` takes them: with the model's numbers of classes, which go by their names where both have the same."""
    found, config = [label for _, label in split], original.model.config
    if original.task == "multiple-choice" or original.task not in _CLASSES or config.num_labels == 1:
        return found
    theirs = dict(config.id2label)
    if len(labels.classes) > len(theirs):
        raise ValueError(f"the labels have the classes {list(labels.classes)}, the model {list(theirs.values())}")
    numbers = {name: number for number, name in theirs.items()}
    if set(numbers) != set(labels.classes):
        numbers = {name: number for number, name in enumerate(labels.classes)}
    if original.task == "token-classification":
        names = {number: name for name, number in numbers.items()}
        return [(tags, names) for tags in found]
    if wrong := [label for label in found if not 0 <= int(label) < len(labels.classes or theirs)]:
        raise ValueError(
            f"label {wrong[0]!r} is no class: they have the numbers 0 to {len(labels.classes or theirs) - 1}"
        )
    return [numbers[labels.classes[int(label)]] for label in found] if labels.classes else found


def _right(one: _Answer, label: int) -> list[float]:
    return [float(one.answer["log_probs"][0].argmax() == label), 1.0]


def _confusion(one: _Answer, label: int) -> list[float]:
    said = int(one.answer["log_probs"][0].argmax())
    return [float((said, label) == pair) for pair in ((1, 1), (1, 0), (0, 1), (0, 0))]


def _moments(one: _Answer, y: float) -> list[float]:
    x = float(one.answer["values"][0])
    return [1.0, x, x * x, x * y, y * y, y]


def _bleu(one: _Answer, text: str) -> list[float]:
    return scores.bleu_items([one.answer["text"]], [text])[0].tolist()


def _nats(one: _Answer, _: Any) -> list[float]:
    """A text counts as many tokens as the original has for it, and masked words those that were asked."""
    nats = one.answer.get("nats", ())
    return [float(np.sum(nats)), float(len(nats if "places" in one.answer else one.original.get("nats", ())))]


def _entities(one: _Answer, label: tuple[Sequence[str], Mapping[int, str]]) -> list[float]:
    """(right, found, true). A word has the tag of its first token, and none where it was cut off."""
    tags, names = label
    encoded = _encoded(one, one.item)
    ends = [getattr(one.served.tokenizer, f"{name}_token_id") for name in ("bos", "eos", "cls", "sep", "pad")]
    both = zip(encoded["offset_mapping"], encoded["input_ids"], strict=True)
    places = [place for place, token in both if token not in ends]
    best, said, start = one.answer["log_probs"].argmax(-1), [], 0
    for word in one.item.split(" "):
        number = next((n for n, (begin, end) in enumerate(places) if begin <= start < end), None)
        said.append("O" if number is None else names.get(int(best[number]), "O"))
        start += len(word) + 1
    found, true = entities(said), entities(tags)
    return [float(len(found & true)), float(len(found)), float(len(true))]


def _words(one: _Answer, right: Sequence[str]) -> list[float]:
    """(F1 of words, 1) of the most probable span."""
    encoded = _encoded(one, *one.item)
    places = [place for place, side in zip(encoded["offset_mapping"], encoded.sequence_ids(), strict=True) if side == 1]
    start, end = one.answer["log_probs"]
    both = np.triu(start[:, None] + end[None, :]) + np.tril(np.full((len(end), len(end)), -np.inf), -1)
    first, last = np.unravel_index(both.argmax(), both.shape)
    return [scores.squad(one.item[1][places[first][0] : places[last][1]], right)[0], 1.0]


def _encoded(one: _Answer, *texts: str) -> Any:
    tokenizer: Any = one.served.tokenizer
    return tokenizer(*texts, truncation=True, max_length=one.served.longest, return_offsets_mapping=True)


def _in_percent(score: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda sums: 100 * score(sums)


_ACCURACY = _Metric("accuracy", 2, _right, _in_percent(scores.mean))
_PERPLEXITY = _Metric("perplexity", 2, _nats, lambda sums: -100 * scores.mean(sums))
_REGRESSION = _Metric("Pearson correlation", 6, _moments, _in_percent(scores.pearson))
_OF_TWO = {
    "f1": _Metric("F1", 4, _confusion, _in_percent(scores.f1)),
    "matthews": _Metric("Matthews correlation", 4, _confusion, _in_percent(scores.matthews)),
}
_METRICS = {
    "seq2seq-lm": _Metric("BLEU", 10, _bleu, scores.bleu),
    "causal-lm": _PERPLEXITY,
    "masked-lm": _PERPLEXITY,
    "sequence-classification": _ACCURACY,
    "image-classification": _ACCURACY,
    "multiple-choice": _ACCURACY,
    "token-classification": _Metric("F1 of entities", 3, _entities, _in_percent(scores.of_spans)),
    "question-answering": _Metric("F1 of words", 2, _words, _in_percent(scores.mean)),
}
_BY_PLACE = ("token-classification", "question-answering")
_CLASSES = ("sequence-classification", "image-classification", "token-classification")
