"""The story of a compression: measure the model, find a shape within the budget, train it, and measure again."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from hf_freeze.analysis.sensitivity import SHARES, Sensitivity, sensitivity, total_loss
from hf_freeze.compression.budget import Budget, in_bytes
from hf_freeze.compression.phases import Phases, digest_of
from hf_freeze.experiments.compress.allocation import Losses, half_in_words, halves_of
from hf_freeze.experiments.compress.bench import Bench
from hf_freeze.experiments.compress.candidates import candidates_of
from hf_freeze.experiments.compress.costs import Cost, Estimate
from hf_freeze.experiments.compress.progress import Callback, Progress
from hf_freeze.experiments.compress.scores import Metric, Scoring
from hf_freeze.experiments.compress.serving import ENGINES, Served, serve
from hf_freeze.experiments.compress.shapes import Part, Shape, parts_of_shape
from hf_freeze.experiments.compress.targets import check_targets, taught_data
from hf_freeze.experiments.compress.trainings import Student, Trained, Trainings
from hf_freeze.experiments.compress.trials import CANDIDATE, FINAL, MODEL, PART, TAUGHT
from hf_freeze.io import bytes_of
from hf_freeze.training import TokenBatchTrainer

_LEAST = 0.01  # share of a loss that a short training is taken to leave at least: no kind of part is free
_SHORT = 1 / 24  # of all epochs, the training of one kind of part alone; candidates get twice that
_NOT_MEASURING = ("taught", "remains", "chosen")  # phases that make targets, or train models
_RESERVE = 0.1  # of the hours, for what comes after the last training


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """What came of it. `model`: the folder of the variant; `difference`: of the test scores, with the 95 % interval over the
    examples of the test split; `resolution`: half the width of that interval on the dev split, below which the dev split tells no
    difference; `seconds`: of all work, and `measuring`: of what is no training."""

    shape: Shape
    words: str
    model: Path
    before: Served
    after: Served
    difference: tuple[float, float, float]
    resolution: float
    epochs: float
    seconds: float
    measuring: float


class Compression:
    """One compression in the folder `out`; called again with the same settings, it goes on where it was stopped.

    `hours`: for all of the work; it shortens trainings and stops none. `targets`: "model" to train on its own translations.
    `metric`, `trainer_class`: of the user's own. `callback`: called with each `Step`; `watch`: with this compression after each
    phase and each training.

    Raises ValueError for a budget that cannot be met, or is met already, and a folder that holds another compression; Stopped
    where the callback has stopped it.
    """

    def __init__(
        self,
        source: str,
        recipe: Mapping[str, Any],
        budget: Budget,
        out: Path,
        *,
        hours: float | None = None,
        engine: str = "ctranslate2",
        epochs: float | None = None,
        seed: int = 1,
        jobs: int = 1,
        targets: str = "data",
        console: Console | None = None,
        command: str = "",
        metric: Metric | None = None,
        trainer_class: type[TokenBatchTrainer] | None = None,
        callback: Callback | None = None,
        watch: Callable[["Compression"], Any] = lambda compression: None,
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}; choose from {list(ENGINES)}")
        if engine == "ctranslate2" and recipe["task"] != "translation":
            raise ValueError(f"engine 'ctranslate2' serves translators, not {recipe['task']}; choose onnx or torch")
        self.budget, self.hours, self.engine, self.out, self.command = budget, hours, ENGINES[engine], out, command
        self.console = console or Console()
        self.epochs = 4 * recipe["training"]["epochs"] if epochs is None else epochs
        for name, value in (("epochs", self.epochs), ("hours", hours)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: must be above 0")
        check_targets(targets, recipe["task"])
        self.targets = targets
        self.trainings = Trainings(
            *(source, recipe, out),
            seed=seed,
            jobs=jobs,
            console=self.console,
            command=command,
            trainer_class=trainer_class,
            watch=lambda run, message: self.progress.heard(run, message),
        )
        self.scoring = Scoring(recipe["task"], recipe.get("decoding", {}), metric)
        data = {key: value for key, value in recipe["data"].items() if key != "root"}
        identity = {"model": digest_of(source), "task": recipe["task"], "data": data, "training": recipe["training"]}
        limits = budget.to_dict() | {"hours": hours}
        identity |= {"decoding": recipe.get("decoding", {}), "budget": limits, "engine": engine}
        own = {"metric": self.scoring.name if metric else None, "trainer": self.trainings.trainer}
        own["targets"] = targets if targets != "data" else None  # older compressions have none
        identity |= {"epochs": self.epochs, "seed": seed} | {name: value for name, value in own.items() if value}
        self.phases = Phases(out, identity)
        self.progress = Progress(
            *(self.trainings, self.scoring, self.phases),
            epochs=self.epochs,
            hours=hours,
            callback=callback,
            write=lambda: watch(self),
        )
        self.bench = Bench(self.trainings, self.engine, budget, self._once, self.say)
        self.whole, self.hidden = self.bench.whole, self.bench.weights.hidden
        self.chosen: Shape | None = None

    def run(self) -> Compressed:
        try:
            return self._run()
        finally:
            self.bench.close()

    def _run(self) -> Compressed:
        before = self._original()
        if self.targets == "model":
            self.trainings.learn_from(self._taught(before))
        measured = self._sensitivity()
        tokens = self._tokens(measured)
        estimate = self.bench.estimate(measured, tokens)
        smallest = self.bench.check_reach(measured, tokens, estimate)
        halves = halves_of(self.whole, measured, tokens, self.hidden)
        self._plan("recover-nothing", TAUGHT, self.whole, estimate.cost(self.whole), estimated=True)
        for kind, shape in halves.items():
            self._plan(f"recover-{kind}", PART, shape, estimate.cost(shape), estimated=True)
        remains, epochs_of_recoveries = self._once("remains", lambda: self._recoveries(halves, measured, tokens))
        losses = Losses(measured=measured, tokens=tokens, remains=remains)
        shapes = self._once("candidates", lambda: self._candidates(losses, estimate, smallest))
        candidates = [Shape.from_dict(shape) for shape in shapes]
        for number, shape in enumerate(candidates if len(candidates) > 1 else [], start=1):  # one alone is not compared
            self._plan(f"candidate-{number}", CANDIDATE, shape, self.bench.cost(shape, measured))
        best, epochs_of_candidates = self._once("chosen", lambda: self._best(candidates, measured))
        chosen, spent = candidates[best], epochs_of_recoveries + epochs_of_candidates
        self.chosen = chosen
        self._plan("final", FINAL, chosen, self.bench.cost(chosen, measured))
        trained = self._final(chosen, measured, spent)
        return self._end(chosen, trained, before, spent + trained.epochs)

    # -- before any training ---------------------------------------------------------------------------------------------------

    def _original(self) -> Served:
        """The model as it is, in the engine. Raises ValueError if it is within the budget, or below the score."""
        trained = self.trainings.original(self.trainings.whole)

        def measure() -> dict[str, Any]:
            folder = self.bench.serve("whole", trained.folder)
            items = self._measure(folder, "dev")
            np.save(self.out / "items-dev-whole.npy", items)
            ms = self.bench.milliseconds({"whole": folder})["whole"] if self.budget.limits_time else None
            return {"bytes": bytes_of(folder), "ms": ms, "score": self._score(items, "dev")}

        self.say("measuring the model in the engine")
        found = self._once("whole", measure)
        served = Served(
            folder=self.out / "engine" / "whole", bytes=found["bytes"], ms=found["ms"], dev_score=found["score"]
        )
        self.budget = self.bench.budget = self.budget.resolved(served.bytes, served.ms)
        self._plan(
            f"tokens-{self.trainings.whole}",
            MODEL,
            self.whole,
            Cost(bytes=served.bytes, ms=served.ms),
            score=served.dev_score,
        )
        self.say(f"the model: {self._figures(served)}; the budget: {self.budget.words()}")
        if not self.budget.excess(served.bytes, served.ms):
            raise ValueError(
                f"the model is within the budget already: {self._figures(served)}. It is served from {served.folder}"
            )
        least = self.budget.min_score
        if least is not None and served.dev_score < least:
            raise ValueError(
                f"min_score={least:g}: the model itself has {self.scoring.shown(served.dev_score)} on the dev split, and its "
                "variants learn from it; ask for less"
            )
        return served

    def _taught(self, original: Served) -> dict[str, Any]:
        """The data with the model's own translations for training."""
        splits, decoding = self.trainings.splits, self.trainings.base.get("decoding", {})

        def translate() -> dict[str, Any]:
            self.say(f"translating {len(splits['train']):,} training texts by the model, in the engine")
            return taught_data(
                *(original.folder, self.engine, splits, decoding, self.out / "taught"),
                model=digest_of(self.trainings.source),
                console=self.console,
            )

        return self._once("taught", translate) | {"root": str(self.out / "taught")}  # the folder may have moved

    def _sensitivity(self) -> Sensitivity:
        whole, keeps = self.trainings.whole, self.engine.keeps_structure

        def measure() -> dict[str, Any]:
            self.say("measuring what layers, heads, neurons and ranks are worth")
            model = self.trainings.model(whole)
            batches, tell = self.trainings.sample(whole, model), partial(self.progress.goes_on, "sensitivity")
            return asdict(sensitivity(model, batches, heads=keeps, ranks=keeps, watch=tell))

        return Sensitivity.from_json(self._once("sensitivity", measure))

    def _tokens(self, measured: Sensitivity) -> dict[int, float]:
        """Number of tokens kept -> loss, in nats summed over the sample."""
        whole = self.trainings.whole

        def measure() -> list[tuple[int, float]]:
            self.say("measuring smaller vocabularies")
            found = [(whole, measured.loss)]
            for size in sorted({round(whole * share) for share in SHARES}, reverse=True):
                try:
                    model = self.trainings.model(size)
                except ValueError:  # too few for the characters, or a tokenizer that cannot be trimmed
                    break
                found.append((size, total_loss(model, self.trainings.sample(size, model))[0]))
            return found

        return dict(map(tuple, self._once("tokens", measure)))

    # -- trainings -------------------------------------------------------------------------------------------------------------

    def _recoveries(
        self, shapes: Mapping[str, Shape], measured: Sensitivity, tokens: dict[int, float]
    ) -> tuple[dict[str, float], float]:
        """Kind of part -> the share of its loss that a short training leaves, where half of that kind is removed; and the epochs
        of all these trainings. `shapes`: of `halves_of`."""
        epochs = self.epochs * _SHORT
        students = {"recover-nothing": self._student("everything kept, trained as long", self.whole, measured, epochs)}
        for kind, shape in shapes.items():
            label = f"{half_in_words(kind)}: {shape.words(self.whole)}"
            students[f"recover-{kind}"] = self._student(label, shape, measured, epochs)
        self.say(f"training {len(students)} models for {epochs:g} epochs each: how much of a loss does training mend?")
        trained = self.trainings.train(students)
        base, remains = trained["recover-nothing"].loss, {}
        losses = Losses(measured=measured, tokens=tokens, remains={})
        for kind, shape in shapes.items():
            untrained = losses.of(shape)
            left = trained[f"recover-{kind}"].loss - base
            remains[kind] = max(left / untrained, _LEAST) if untrained > 0 else 1.0
            self.say(f"{half_in_words(kind)}: loss {untrained:+.3f} before training, {left:+.3f} after it")
        return remains, sum(one.epochs for one in trained.values())

    def _candidates(self, losses: Losses, estimate: Estimate, smallest: list[Shape]) -> list[dict[str, Any]]:
        shapes = candidates_of(self.bench, losses, estimate, smallest)
        for shape in shapes:
            cost = self.bench.cost(shape, losses.measured)
            figures = [self.budget.size(cost.bytes), *([self.budget.time(cost.ms)] if cost.ms is not None else [])]
            self.say(f"candidate: {shape.words(self.whole)}: {'; '.join(figures)}")
        return [shape.to_dict() for shape in shapes]

    def _best(self, candidates: list[Shape], measured: Sensitivity) -> tuple[int, float]:
        """The number of the candidate with the lowest dev loss after a short training, or the best score by a metric of the
        user's own; and the epochs of these trainings."""
        if len(candidates) == 1:
            return 0, 0.0
        epochs = 2 * self.epochs * _SHORT
        students = {
            f"candidate-{number}": self._student(shape.words(self.whole), shape, measured, epochs)
            for number, shape in enumerate(candidates, start=1)
        }
        self.say(f"training {len(students)} candidates for {epochs:g} epochs each")
        trained = self.trainings.train(students)
        epochs, ranks = sum(one.epochs for one in trained.values()), []
        for (name, one), shape in zip(trained.items(), candidates, strict=True):
            figures, score = f"dev loss {one.loss:.3f}", None
            if self.scoring.metric is not None:
                score = self._once(f"score-{name}", lambda name=name, one=one: self._score_of(name, one))
                figures += f", {self.scoring.name} {self.scoring.shown(score)}"
            ranks.append(one.loss if score is None else -score)
            self.say(f"{figures}: {shape.words(self.whole)}")
        return int(np.argmin(ranks)), epochs

    def _final(self, shape: Shape, measured: Sensitivity, spent: float) -> Trained:
        epochs = self._once("epochs", lambda: self._epochs_left(spent))
        self.say(f"training {shape.words(self.whole)} for {epochs:g} epochs")
        return self.trainings.train({"final": self._student(shape.words(self.whole), shape, measured, epochs)})["final"]

    def _epochs_left(self, spent: float) -> float:
        """What the short trainings, of `spent` epochs, have left of all epochs, and of the hours."""
        short = self.epochs * _SHORT
        left = max(self.epochs - spent, short)
        if self.hours is not None:
            seconds = self.hours * 3600 * (1 - _RESERVE) - self.phases.seconds
            left = max(min(left, seconds / self.trainings.seconds_per_epoch()), short)
        return round(left, 2)

    def _student(self, label: str, shape: Shape, measured: Sensitivity, epochs: float) -> Student:
        return Student(
            label=label, vocabulary=shape.vocabulary, methods=self.bench.methods(shape, measured), epochs=epochs
        )

    # -- the end ---------------------------------------------------------------------------------------------------------------

    def _end(self, shape: Shape, trained: Trained, before: Served, epochs: float) -> Compressed:
        def measure() -> dict[str, Any]:
            self.say("measuring the compressed model in the engine")
            folder = serve(trained.folder, self.engine, self.out / "served")
            whole = self.out / "engine" / "whole"
            times = self.bench.times_at_the_end(whole, folder) if self.budget.max_ms is not None else {}
            found = {"bytes": bytes_of(folder), "ms": times.get("served"), "ms_before": times.get("whole")}
            for split in ("dev", "test"):
                first = np.load(self.out / "items-dev-whole.npy") if split == "dev" else self._measure(whole, split)
                second = self._measure(folder, split)
                found[split] = {
                    "before": self._score(first, split),
                    "after": self._score(second, split),
                    "difference": list(self.scoring.difference(first, second, self.trainings.splits[split])),
                }
            return found

        found = self._once("end", measure)
        self._plan("final", FINAL, shape, Cost(bytes=found["bytes"], ms=found["ms"]), score=found["dev"]["after"])
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
            misses.append(f"a score of {self.scoring.shown(after.dev_score)}, at least {self.budget.min_score:g}")
        if misses:
            raise ValueError(
                f"the trained model misses the budget: {'; '.join(misses)}. It is in {after.folder}; give it more room, or more "
                "epochs"
            )
        _, low, high = found["dev"]["difference"]
        original = self.trainings.original(self.trainings.whole).seconds
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
            seconds=self.phases.seconds + original + trained.seconds,
            measuring=self.phases.seconds_but(*_NOT_MEASURING) + self.trainings.seconds_untrained(),
        )

    # -- shared ----------------------------------------------------------------------------------------------------------------

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        is_new = self.phases.kept(name) is None
        result = self.phases.once(name, compute)
        if is_new:
            self.progress.phase_ended(name)
        return result

    def say(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def parts(self) -> list[Part]:
        """What is kept of each kind of part; empty until a shape is chosen."""
        return [] if self.chosen is None else parts_of_shape(self.chosen, self.whole, self.hidden, self.engine.bits)

    def _plan(self, name: str, kind: str, shape: Shape, cost: Cost, **known: Any) -> None:
        self.progress.plan(name, kind, shape.words(self.whole), shape.vocabulary, cost, **known)

    def _score_of(self, name: str, trained: Trained) -> float:
        """By a metric of the user's own, in the engine."""
        return self._score(self._measure(self.bench.serve(name, trained.folder), "dev"), "dev")

    def _measure(self, folder: Path, split: str) -> np.ndarray:
        return self.scoring.measure(folder, self.engine, self.trainings.splits[split])

    def _score(self, measured: np.ndarray, split: str) -> float:
        return self.scoring.score(measured, self.trainings.splits[split])

    def _figures(self, served: Served) -> str:
        score = f"{self.scoring.name} {self.scoring.shown(served.dev_score)} on the dev split"
        return f"{in_bytes(served.bytes)}{'' if served.ms is None else f', {served.ms:.2f} ms'}, {score}"
