"""The story of a compression: measure the model, find a shape within the budget, train it, and measure again."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from hf_freeze.analysis.sensitivity import SHARES, Sensitivity, sensitivity, total_loss
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.experiments.compress.allocation import KINDS, Losses, allocate, options_of_stack, smallest
from hf_freeze.experiments.compress.budget import Budget, in_bytes
from hf_freeze.experiments.compress.costs import Cost, Estimate, probes
from hf_freeze.experiments.compress.phases import Phases
from hf_freeze.experiments.compress.serving import ENGINES, Served, milliseconds, serve
from hf_freeze.experiments.compress.shapes import (
    Shape,
    StackShape,
    count_weights,
    methods_of,
    whole_shape,
)
from hf_freeze.experiments.compress.trainings import Student, Trained, Trainings
from hf_freeze.experiments.report.significance import compare
from hf_freeze.io import bytes_of, whole_folder
from hf_freeze.methods.registry import method_from_dict
from hf_freeze.model.make import make_variant

CANDIDATES = 3
_TRIES = 6  # shapes that are measured for one candidate before its limits are called out of reach
_LEAST = 0.01  # share of a loss that a short training is taken to leave at least: no kind of part is free
_SHORT = 1 / 24  # of all epochs, the training of one kind of part alone; candidates get twice that
_CHANGED = 4.0  # by which the price of one kind of part is raised and lowered for further candidates
_RESERVE = 0.1  # of the hours, for what comes after the last training


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """What came of it. `model`: the folder of the variant; `difference`: of the test scores, with the 95 % interval over the
    examples of the test split; `resolution`: half the width of that interval on the dev split, below which the dev split tells no
    difference."""

    shape: Shape
    words: str
    model: Path
    before: Served
    after: Served
    difference: tuple[float, float, float]
    resolution: float
    epochs: float
    seconds: float


class Compression:
    """One compression in the folder `out`; called again with the same settings, it goes on where it was stopped.

    Raises ValueError for a budget that cannot be met, or is met already, and a folder that holds another compression.
    """

    def __init__(
        self,
        source: str,
        recipe: Mapping[str, Any],
        budget: Budget,
        out: Path,
        *,
        engine: str = "ctranslate2",
        epochs: float | None = None,
        seed: int = 1,
        jobs: int = 1,
        console: Console | None = None,
        command: str = "",
        callback: Callable[[str, Any], Any] = lambda phase, result: None,
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}; choose from {list(ENGINES)}")
        self.budget, self.engine, self.out, self._callback = budget, ENGINES[engine], out, callback
        self.console = console or Console()
        self.epochs = 4 * recipe["training"]["epochs"] if epochs is None else epochs
        if not self.epochs > 0:
            raise ValueError(f"epochs={self.epochs}: must be above 0")
        data = {key: value for key, value in recipe["data"].items() if key != "root"}
        identity = {"model": _digest(source), "task": recipe["task"], "data": data, "training": recipe["training"]}
        identity |= {"decoding": recipe.get("decoding", {}), "budget": asdict(budget), "engine": engine}
        self.phases = Phases(out, identity | {"epochs": self.epochs, "seed": seed})
        self.trainings = Trainings(source, recipe, out, seed=seed, jobs=jobs, console=self.console, command=command)
        model = self.trainings.model(self.trainings.whole)
        self._architecture, self._config = architecture_for(model), model.config
        self._weights = count_weights(model, self._architecture)
        self.whole = whole_shape(self._architecture, model.config, self.trainings.whole)

    def run(self) -> Compressed:
        before = self._original()
        measured = self._sensitivity()
        tokens = self._tokens(measured)
        estimate = self._estimate(measured, tokens)
        self._check_reach(measured, tokens, estimate)
        remains, epochs_of_recoveries = self._once("remains", lambda: self._recoveries(measured, tokens))
        losses = Losses(measured=measured, tokens=tokens, remains=remains)
        shapes = self._once("candidates", lambda: [s.to_dict() for s in self._candidates(losses, estimate)])
        candidates = [Shape.from_dict(shape) for shape in shapes]
        best, epochs_of_candidates = self._once("chosen", lambda: self._best(candidates, measured))
        chosen, spent = candidates[best], epochs_of_recoveries + epochs_of_candidates
        trained = self._final(chosen, measured, spent)
        return self._end(chosen, trained, before, spent + trained.epochs)

    # -- before any training ---------------------------------------------------------------------------------------------------

    def _original(self) -> Served:
        """The model as it is, in the engine. Raises ValueError if it is within the budget, or below the score."""
        trained = self.trainings.original(self.trainings.whole)

        def measure() -> dict[str, Any]:
            folder = self._serve("whole", trained.folder)
            items = self._items(folder, "dev")
            np.save(self.out / "items-dev-whole.npy", items)
            ms = self._milliseconds({"whole": folder})["whole"] if self.budget.max_ms is not None else None
            return {"bytes": bytes_of(folder), "ms": ms, "score": self._score(items)}

        self._say("measuring the model in the engine")
        found = self._once("whole", measure)
        served = Served(
            folder=self.out / "engine" / "whole", bytes=found["bytes"], ms=found["ms"], dev_score=found["score"]
        )
        self._say(f"the model: {self._figures(served)}; the budget: {self.budget.words()}")
        if not self.budget.excess(served.bytes, served.ms):
            raise ValueError(
                f"the model is within the budget already: {self._figures(served)}. It is served from {served.folder}"
            )
        if self.budget.min_score is not None and served.dev_score < self.budget.min_score:
            raise ValueError(
                f"min_score={self.budget.min_score:g}: the model itself has {served.dev_score:.1f} on the dev split, and its "
                "variants learn from it; ask for less"
            )
        return served

    def _sensitivity(self) -> Sensitivity:
        whole, keeps = self.trainings.whole, self.engine.keeps_structure

        def measure() -> dict[str, Any]:
            self._say("measuring what layers, heads and neurons are worth")
            model = self.trainings.model(whole)
            return asdict(sensitivity(model, self.trainings.sample(whole, model), heads=keeps, ranks=keeps))

        return Sensitivity.from_json(self._once("sensitivity", measure))

    def _tokens(self, measured: Sensitivity) -> dict[int, float]:
        """Number of tokens kept -> loss, in nats summed over the sample."""
        whole = self.trainings.whole

        def measure() -> list[tuple[int, float]]:
            self._say("measuring smaller vocabularies")
            found = [(whole, measured.loss)]
            for size in sorted({round(whole * share) for share in SHARES}, reverse=True):
                try:
                    model = self.trainings.model(size)
                except ValueError:  # too few for the characters, or a tokenizer that cannot be trimmed
                    break
                found.append((size, total_loss(model, self.trainings.sample(size, model))[0]))
            return found

        return dict(map(tuple, self._once("tokens", measure)))

    def _estimate(self, measured: Sensitivity, tokens: dict[int, float]) -> Estimate:
        """Prices of parts in the engine, from folders of untrained shapes."""
        least = {}
        for name in self.whole.stacks:
            options = options_of_stack(measured, name)
            least[name] = StackShape(
                layers=min(one.layers for one in options),
                neurons=min(one.neurons for one in options),
                heads=min(one.heads for one in options),
            )
        fewest = min(tokens) if len(tokens) > 1 else None
        shapes = probes(self.whole, least, fewest, min(measured.ranks, default=None))

        def measure() -> dict[str, Any]:
            self._say(f"measuring {len(shapes)} shapes in the engine, untrained, for the prices of parts")
            return self._costs(shapes, measured)

        costs = self._once("prices", measure)
        known = [(shape, Cost(**costs[label])) for label, shape in shapes.items()]
        without = Estimate(self._weights, known[:-1]).cost(known[-1][0])
        errors = f"bytes {without.bytes / known[-1][1].bytes - 1:+.1%}"
        if without.ms is not None and known[-1][1].ms is not None:
            errors += f", ms {without.ms / known[-1][1].ms - 1:+.1%}"
        self._say(f"estimated for a shape that the prices do not know, against measured: {errors}")
        return Estimate(self._weights, known)

    def _check_reach(self, measured: Sensitivity, tokens: dict[int, float], estimate: Estimate) -> None:
        """Raise ValueError if no shape is within the budget, with the nearest that is possible."""
        losses = Losses(measured=measured, tokens=tokens, remains={})
        for cost, limit in (("bytes", self.budget.max_bytes), ("ms", self.budget.max_ms)):
            if limit is None:
                continue
            shape = smallest(self.whole, losses, estimate, cost)
            least = getattr(self._cost(shape, measured), cost)
            if least > limit:
                least_words, limit_words = (
                    in_bytes(value) if cost == "bytes" else f"{value:.2f} ms" for value in (least, limit)
                )
                tokenizer = ""
                if cost == "bytes":
                    folder = self.out / "engine" / _label(shape)
                    size = sum(
                        path.stat().st_size for path in folder.iterdir() if "token" in path.name or "vocab" in path.name
                    )
                    tokenizer = f", of which its tokenizer takes {in_bytes(size)}"
                raise ValueError(
                    f"the budget of {limit_words} is out of reach: the smallest shape ({shape.words(self.whole)}) has "
                    f"{least_words}{tokenizer}; give it at least that"
                )

    # -- trainings -------------------------------------------------------------------------------------------------------------

    def _recoveries(self, measured: Sensitivity, tokens: dict[int, float]) -> tuple[dict[str, float], float]:
        """Kind of part -> the share of its loss that a short training leaves, where half of that kind is removed; and the epochs
        of all these trainings."""
        epochs = self.epochs * _SHORT
        shapes = self._halves(measured, tokens)
        students = {"recover-nothing": self._student("everything kept, trained as long", self.whole, measured, epochs)}
        for kind, shape in shapes.items():
            label = f"half of the {kind}: {shape.words(self.whole)}"
            students[f"recover-{kind}"] = self._student(label, shape, measured, epochs)
        self._say(f"training {len(students)} models for {epochs:g} epochs each: how much of a loss does training mend?")
        trained = self.trainings.train(students)
        base, remains = trained["recover-nothing"].loss, {}
        losses = Losses(measured=measured, tokens=tokens, remains={})
        for kind, shape in shapes.items():
            untrained = losses.of(shape)
            left = trained[f"recover-{kind}"].loss - base
            remains[kind] = max(left / untrained, _LEAST) if untrained > 0 else 1.0
            self._say(f"half of the {kind}: loss {untrained:+.3f} before training, {left:+.3f} after it")
        return remains, sum(one.epochs for one in trained.values())

    def _halves(self, measured: Sensitivity, tokens: dict[int, float]) -> dict[str, Shape]:
        """Kind of part -> the whole with about half of that kind, for the kinds that can go."""

        def all_stacks(change: Callable[[str, StackShape], StackShape]) -> Shape:
            return replace(self.whole, stacks={n: change(n, stack) for n, stack in self.whole.stacks.items()})

        shapes = {
            "layers": all_stacks(
                lambda n, s: replace(s, layers=min(measured.layers[n], key=lambda k: (abs(k - s.layers / 2), k)))
            ),
            "neurons": all_stacks(lambda n, s: replace(s, neurons=0.5 if 0.5 in measured.neurons.get(n, ()) else 1.0)),
            "heads": all_stacks(lambda n, s: replace(s, heads=0.5 if 0.5 in measured.heads.get(n, ()) else 1.0)),
            "tokens": replace(
                self.whole, vocabulary=min(tokens, key=lambda size: abs(size - self.whole.vocabulary / 2))
            ),
            "ranks": replace(
                self.whole,
                rank=min(measured.ranks, key=lambda rank: abs(rank - self._weights.hidden / 2), default=None),
            ),
        }
        return {kind: shapes[kind] for kind in KINDS if shapes[kind] != self.whole}

    def _candidates(self, losses: Losses, estimate: Estimate) -> list[Shape]:
        """Different shapes that lose little within the budget, by different opinions about which kind of part is dear."""
        opinions = [dict(losses.remains)]
        for kind in losses.remains:
            opinions += [opinions[0] | {kind: losses.remains[kind] * factor} for factor in (_CHANGED, 1 / _CHANGED)]
        found: list[Shape] = []
        for remains in opinions:
            shape = self._within(replace(losses, remains=remains), estimate)
            if shape is not None and shape not in found:
                found.append(shape)
        if not found:
            raise ValueError(
                f"no shape was found within {self.budget.words()}: each limit can be met, but not all together; give one of them "
                "more room"
            )
        chosen = sorted(found, key=losses.of)[:CANDIDATES]
        for shape in chosen:
            self._say(f"candidate: {shape.words(self.whole)}")
        return chosen

    def _within(self, losses: Losses, estimate: Estimate) -> Shape | None:
        """The best shape that is within the budget as measured; the estimate's errors are corrected on the way."""
        limit = Cost(bytes=self.budget.max_bytes or np.inf, ms=self.budget.max_ms)
        for attempt in range(_TRIES):
            found = allocate(self.whole, losses, estimate, limit)
            if found is None:
                return None
            shape = found[0]
            cost = self._cost(shape, losses.measured)
            if not self.budget.excess(cost.bytes, cost.ms):
                return shape
            expected = estimate.cost(shape)
            factor = min(1.0, expected.bytes / cost.bytes) * 0.995
            ms = limit.ms
            if ms is not None and cost.ms is not None and expected.ms is not None:
                ms = self.budget.max_ms * min(1.0, expected.ms / cost.ms) * 0.99 ** (attempt + 1)
            limit = Cost(bytes=(self.budget.max_bytes or np.inf) * factor, ms=ms)
        return None

    def _best(self, candidates: list[Shape], measured: Sensitivity) -> tuple[int, float]:
        """The number of the candidate with the lowest dev loss after a short training, and the epochs of these trainings."""
        if len(candidates) == 1:
            return 0, 0.0
        epochs = 2 * self.epochs * _SHORT
        students = {
            f"candidate-{number}": self._student(shape.words(self.whole), shape, measured, epochs)
            for number, shape in enumerate(candidates, start=1)
        }
        self._say(f"training {len(students)} candidates for {epochs:g} epochs each")
        trained = list(self.trainings.train(students).values())
        losses = [one.loss for one in trained]
        for loss, shape in zip(losses, candidates, strict=True):
            self._say(f"dev loss {loss:.3f}: {shape.words(self.whole)}")
        return int(np.argmin(losses)), sum(one.epochs for one in trained)

    def _final(self, shape: Shape, measured: Sensitivity, spent: float) -> Trained:
        epochs = self._once("epochs", lambda: self._epochs_left(spent))
        self._say(f"training {shape.words(self.whole)} for {epochs:g} epochs")
        return self.trainings.train({"final": self._student(shape.words(self.whole), shape, measured, epochs)})["final"]

    def _epochs_left(self, spent: float) -> float:
        """What the short trainings, of `spent` epochs, have left of all epochs, and of the hours."""
        short = self.epochs * _SHORT
        left = max(self.epochs - spent, short)
        if self.budget.hours is not None:
            seconds = self.budget.hours * 3600 * (1 - _RESERVE) - self.phases.seconds
            left = max(min(left, seconds / self.trainings.seconds_per_epoch()), short)
        return round(left, 2)

    def _student(self, label: str, shape: Shape, measured: Sensitivity, epochs: float) -> Student:
        return Student(label=label, vocabulary=shape.vocabulary, methods=self._methods(shape, measured), epochs=epochs)

    # -- the end ---------------------------------------------------------------------------------------------------------------

    def _end(self, shape: Shape, trained: Trained, before: Served, epochs: float) -> Compressed:
        def measure() -> dict[str, Any]:
            self._say("measuring the compressed model in the engine")
            folder = serve(trained.folder, self.engine, self.out / "served")
            whole = self.out / "engine" / "whole"
            times = self._milliseconds({"whole": whole, "served": folder}) if self.budget.max_ms is not None else {}
            found = {"bytes": bytes_of(folder), "ms": times.get("served"), "ms_before": times.get("whole")}
            for split in ("dev", "test"):
                items = [np.load(self.out / "items-dev-whole.npy") if split == "dev" else self._items(whole, split)]
                items.append(self._items(folder, split))
                difference = compare({"whole": items[:1], "served": items[1:]}, self.trainings.score)[0]
                found[split] = {
                    "before": self._score(items[0]),
                    "after": self._score(items[1]),
                    "difference": [difference.difference, difference.low, difference.high],
                }
            return found

        found = self._once("end", measure)
        after = Served(
            folder=self.out / "served",
            bytes=found["bytes"],
            ms=found["ms"],
            dev_score=found["dev"]["after"],
            test_score=found["test"]["after"],
        )
        before = replace(before, test_score=found["test"]["before"], ms=found["ms_before"] or before.ms)
        misses = self.budget.excess(after.bytes, after.ms)
        if self.budget.min_score is not None and after.dev_score < self.budget.min_score:
            misses.append(f"a score of {after.dev_score:.1f}, at least {self.budget.min_score:g}")
        if misses:
            raise ValueError(
                f"the trained model misses the budget: {'; '.join(misses)}. It is in {after.folder}; give it more room, or more "
                "epochs"
            )
        _, low, high = found["dev"]["difference"]
        difference, lower, upper = found["test"]["difference"]
        return Compressed(
            shape=shape,
            words=shape.words(self.whole),
            model=trained.folder,
            before=before,
            after=after,
            difference=(difference, lower, upper),
            resolution=(high - low) / 2,
            epochs=epochs,
            seconds=self.phases.seconds,
        )

    # -- shared ----------------------------------------------------------------------------------------------------------------

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        result = self.phases.once(name, compute)
        self._callback(name, result)
        return result

    def _say(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def _methods(self, shape: Shape, measured: Sensitivity) -> list[dict[str, Any]]:
        return methods_of(shape, measured, self._architecture, self._config, uniform=not self.engine.keeps_structure)

    def _cost(self, shape: Shape, measured: Sensitivity) -> Cost:
        """As measured in the engine, untrained."""
        return Cost(**self._once(f"cost-{_label(shape)}", lambda: self._costs({"shape": shape}, measured)["shape"]))

    def _costs(self, shapes: Mapping[str, Shape], measured: Sensitivity) -> dict[str, dict[str, Any]]:
        """Bytes and ms of untrained models of these shapes in the engine."""
        folders = {}
        for label, shape in shapes.items():
            source = self.out / "shapes" / _label(shape)
            if not source.exists():
                found = [method_from_dict(method) for method in self._methods(shape, measured)]
                model = make_variant(self.trainings.model(shape.vocabulary), found)
                with whole_folder(source) as written:
                    for part in (model, self.trainings.tokenizer_of(shape.vocabulary)):
                        part.save_pretrained(written)
            folders[label] = self._serve(_label(shape), source)
        times = self._milliseconds(folders) if self.budget.max_ms is not None else {}
        return {label: {"bytes": bytes_of(folder), "ms": times.get(label)} for label, folder in folders.items()}

    def _serve(self, label: str, source: Path) -> Path:
        return serve(source, self.engine, self.out / "engine" / label)

    def _milliseconds(self, folders: Mapping[str, Path]) -> dict[str, float]:
        return milliseconds(folders, self.trainings.texts(), self.trainings.new_tokens(), self._say)

    def _items(self, folder: Path, split: str) -> np.ndarray:
        return self.trainings.items(folder, self.engine, split)

    def _score(self, items: np.ndarray) -> float:
        return float(self.trainings.score(items.sum(0)))

    def _figures(self, served: Served) -> str:
        ms = f", {served.ms:.2f} ms" if served.ms is not None else ""
        return f"{in_bytes(served.bytes)}{ms}, {self.trainings.score_name} {served.dev_score:.1f} on the dev split"


def _label(shape: Shape) -> str:
    """Of a folder."""
    return hashlib.sha256(json.dumps(shape.to_dict(), sort_keys=True).encode()).hexdigest()[:12]


def _digest(source: str) -> str:
    """Of the weights in a folder; the name of a model on the Hub."""
    files = sorted(Path(source).glob("*.safetensors"))
    if not files:
        return source
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()
