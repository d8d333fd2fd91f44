"""What shapes cost in the engine: untrained models of them are exported and measured."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_freeze.analysis.sensitivity import Sensitivity
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compression.budget import TIME_RESERVE, Budget, in_bytes
from hf_freeze.experiments.compress.allocation import Losses, options_of_stack, smallest
from hf_freeze.experiments.compress.costs import Cost, Estimate, probes
from hf_freeze.experiments.compress.serving import Engine, milliseconds, serve
from hf_freeze.experiments.compress.shapes import Shape, StackShape, count_weights, methods_of, whole_shape
from hf_freeze.experiments.compress.trainings import Trainings
from hf_freeze.io import bytes_of, whole_folder
from hf_freeze.methods.registry import method_from_dict
from hf_freeze.model.make import make_variant
from hf_freeze.publish.latency import Worker

_TIMES = 3  # a result above the limit of time is measured at most


class Bench:
    """Exports and measures shapes of the model of `trainings`. `once(name, compute)` keeps a result; `say` gets a line before
    each slow step. Times are measured only where the budget limits them."""

    def __init__(
        self,
        trainings: Trainings,
        engine: Engine,
        budget: Budget,
        once: Callable[[str, Callable[[], Any]], Any],
        say: Callable[[str], Any],
    ) -> None:
        self._trainings, self._engine, self._once, self._say = trainings, engine, once, say
        self._worker: Worker | None = None  # for all measurements of times: it takes seconds to start
        self.budget = budget  # resolved when the original was measured
        self._out = trainings.out
        model = trainings.model(trainings.whole)
        self._architecture, self._config = architecture_for(model), model.config
        self.weights = count_weights(model, self._architecture)
        self.whole = whole_shape(self._architecture, model.config, trainings.whole)

    def estimate(self, measured: Sensitivity, tokens: Mapping[int, float]) -> Estimate:
        """Prices of parts in the engine, from folders of untrained shapes."""
        least = {}
        for name in self.whole.stacks:
            options = options_of_stack(measured, name)
            least[name] = StackShape(
                layers=min(one.layers for one in options),
                neurons=min(one.neurons for one in options),
                heads=min(one.heads for one in options),
                ffn_ranks=min(one.ffn_ranks for one in options),
                attention_ranks=min(one.attention_ranks for one in options),
            )
        fewest = min(tokens) if len(tokens) > 1 else None
        shapes = probes(self.whole, least, fewest, min(measured.ranks, default=None))

        def measure() -> dict[str, Any]:
            self._say(f"measuring {len(shapes)} shapes in the engine, untrained, for the prices of parts")
            return self._costs(shapes, measured)

        costs = self._once("prices", measure)
        known = [(shape, Cost(**costs[label])) for label, shape in shapes.items()]
        without = Estimate(self.weights, known[:-1]).cost(known[-1][0])
        errors = f"bytes {without.bytes / known[-1][1].bytes - 1:+.1%}"
        if without.ms is not None and known[-1][1].ms is not None:
            errors += f", ms {without.ms / known[-1][1].ms - 1:+.1%}"
        self._say(f"estimated for a shape that the prices do not know, against measured: {errors}")
        return Estimate(self.weights, known)

    def check_reach(self, measured: Sensitivity, tokens: Mapping[int, float], estimate: Estimate) -> list[Shape]:
        """The smallest shapes, by each limited cost. Raises ValueError if one is above its limit, with the nearest that is
        possible."""
        losses, shapes = Losses(measured=measured, tokens=tokens, remains={}), []
        for cost, limit in (("bytes", self.budget.max_bytes), ("ms", self.budget.max_ms)):
            if limit is None:
                continue
            shape = smallest(self.whole, losses, estimate, cost)
            shapes.append(shape)
            least = getattr(self.cost(shape, measured), cost)
            if cost == "ms":
                least /= 1 - TIME_RESERVE
            if least > limit:
                needed = self.budget.time(math.ceil(100 * least) / 100)
                tokenizer = ""
                if cost == "bytes":
                    needed = self.budget.size(least)
                    folder = self._out / "engine" / label_of(shape)
                    size = sum(
                        path.stat().st_size for path in folder.iterdir() if "token" in path.name or "vocab" in path.name
                    )
                    tokenizer = f", of which its tokenizer takes {in_bytes(size)}"
                takes = "needs" if cost == "ms" else "has"
                raise ValueError(
                    f"the budget of {self.budget.limit(cost)} is out of reach: the smallest shape "
                    f"({shape.words(self.whole)}) {takes} {needed}{tokenizer}; give it at least that"
                )
        return shapes

    def methods(self, shape: Shape, measured: Sensitivity) -> list[dict[str, Any]]:
        """The methods that cut the model, with the vocabulary of the shape, to `shape`, as a recipe writes them."""
        uniform = not self._engine.keeps_structure
        return methods_of(shape, measured, self._architecture, self._config, uniform=uniform)

    def cost(self, shape: Shape, measured: Sensitivity) -> Cost:
        """As measured in the engine, untrained."""
        return Cost(**self._once(phase_of(shape), lambda: self._costs({"shape": shape}, measured)["shape"]))

    def _costs(self, shapes: Mapping[str, Shape], measured: Sensitivity) -> dict[str, dict[str, Any]]:
        """Bytes and ms of untrained models of these shapes in the engine."""
        folders = {}
        for label, shape in shapes.items():
            if shape == self.whole:
                folders[label] = self._out / "engine" / "whole"
                continue
            source = self._out / "shapes" / label_of(shape)
            if not source.exists():
                found = [method_from_dict(method) for method in self.methods(shape, measured)]
                model = make_variant(self._trainings.model(shape.vocabulary), found)
                with whole_folder(source) as written:
                    for part in (model, self._trainings.tokenizer_of(shape.vocabulary)):
                        part.save_pretrained(written)
            folders[label] = self.serve(label_of(shape), source)
        times = self.milliseconds(folders) if self.budget.limits_time else {}
        return {label: {"bytes": bytes_of(folder), "ms": times.get(label)} for label, folder in folders.items()}

    def serve(self, label: str, source: Path) -> Path:
        """The folder for the engine, of the saved model in `source`."""
        return serve(source, self._engine, self._out / "engine" / label)

    def milliseconds(self, folders: Mapping[str, Path]) -> dict[str, float]:
        """Of one text alone in each folder; they take turns, also with the original where the limit is a share of its time."""
        task, dev = self._trainings.base["task"], self._trainings.splits["dev"]
        unit = None
        if self.budget.ms_share is not None and self.budget.max_ms is not None:
            unit = self._out / "engine" / "whole", self.budget.max_ms / self.budget.ms_share
        self._worker = self._worker or Worker()
        return milliseconds(*(folders, task, dev, self._trainings.tokenizer, self._say), unit=unit, worker=self._worker)

    def close(self) -> None:
        """End the process that answers when times are measured."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def times_at_the_end(self, whole: Path, served: Path) -> dict[str, float]:
        """The ms of "whole" and "served". Where that of `served` is above the limit it is measured again, since other work on the
        machine makes times longer, never shorter. Raises ValueError if it stays above."""
        tries = []
        for _ in range(_TIMES):
            tries.append(self.milliseconds({"whole": whole, "served": served}))
            best = min(tries, key=lambda times: times["served"])
            excess = self.budget.excess(0, best["served"])
            if not excess:
                return best
            self._say(f"above the limit: {excess[0]}, perhaps by other work on this machine")
        raise ValueError(
            f"the trained model misses the budget: {excess[0]}, in the shortest of {_TIMES} measurements. It is in {served}; "
            "give it more time, or run the same command when the machine is quiet, which only measures again"
        )


def phase_of(shape: Shape) -> str:
    """The name under which the measured cost of a shape is kept."""
    return f"cost-{label_of(shape)}"


def label_of(shape: Shape) -> str:
    """Of a folder."""
    return hashlib.sha256(json.dumps(shape.to_dict(), sort_keys=True).encode()).hexdigest()[:12]
