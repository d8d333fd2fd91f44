"""Models in their engine: exported, timed, and compared with the original."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_freeze.analysis.answers import compare_answers
from hf_freeze.compression.engine import Engine, Stopwatch, new_tokens_of, serve
from hf_freeze.compression.inputs import Inputs
from hf_freeze.compression.labels import Score, score_of
from hf_freeze.compression.original import Original
from hf_freeze.compression.phases import Phases
from hf_freeze.compression.progress import Progress
from hf_freeze.compression.results import Build, Measured, points_lost
from hf_freeze.compression.shape import Shape, full_shape
from hf_freeze.io import bytes_of
from hf_freeze.model.fidelity import Fidelity
from hf_freeze.model.make import make_variant
from hf_freeze.publish.export.served import answers, opened


class Bench:
    """Measures `original` and smaller models in an engine, each once, in the folder `out`; `close` it. `times`: whether they are
    timed."""

    def __init__(
        self, original: Original, engine: Engine, out: Path, phases: Phases, progress: Progress, *, times: bool
    ) -> None:
        self.original, self.engine, self.out = original, engine, out
        self.phases, self.progress, self._times = phases, progress, times
        self.whole: Measured | None = None  # the model as it is, in the engine
        self._stopwatch: Stopwatch | None = None

    def close(self) -> None:
        if self._stopwatch is not None:
            self._stopwatch.close()

    def everything(self) -> Build:
        """The whole model in the engine, measured."""
        shape = full_shape(self.original.depths, {}, self.engine.bits[0])
        build = self.export(shape, "whole", self.original.folder)
        self.whole = self.measured(build)
        return build

    def export(self, shape: Shape, name: str, source: Path) -> Build:
        """The saved model in `source` in the engine, with what it costs."""

        def measure() -> dict[str, Any]:
            self.progress.tell("engine", f"measuring in {self.engine.name}")
            folder = self._served(name, source)
            return {"bytes": bytes_of(folder), "ms": self._milliseconds({name: folder})[name] if self._times else None}

        return Build(shape=shape, folder=self.out / "engine" / name, **self.phases.once(f"made-{name}", measure))

    def milliseconds_of(self, shapes: Mapping[str, Shape]) -> dict[str, float]:
        """Of shapes by their names in words, cut without calibration."""
        folders = {}
        for name, shape in shapes.items():
            self.progress.tell("engine", f"exporting {name}, to learn what it costs in {self.engine.name}")
            model = make_variant(self.original.model, self.original.methods_of(shape))
            with tempfile.TemporaryDirectory(dir=self.out) as temporary:
                saved = self.original.save(model, self.original.served.tokenizer, Path(temporary) / "model")
                folders[name] = self._served(f"probe-{shape.digest}", saved)
        return self._milliseconds(folders)

    def points_lost(self, build: Build) -> float:
        """In points, on the inputs that shapes are chosen by."""
        return points_lost(*self._judged(build, "dev"))

    def measured(self, build: Build) -> Measured:
        """Compared on the inputs that nothing was chosen by."""
        fidelity, score = self._judged(build, "test")
        return Measured(folder=build.folder, bytes=build.bytes, ms=build.ms, fidelity=fidelity, score=score)

    def _served(self, name: str, source: Path) -> Path:
        return serve(source, self.engine.format, self.engine.quantization, self.out / "engine" / name)

    def _milliseconds(self, folders: Mapping[str, Path]) -> dict[str, float]:
        inputs = self.original.inputs
        texts = [item if isinstance(item, str) else " ".join(Inputs.words(item)) for item in inputs.dev_subset]
        if not any(texts):
            raise ValueError("max_ms: times are measured of models that read texts; give max_bytes")
        if self._stopwatch is None:
            written = [item["text"] for item in self.original.expected("dev_subset").items if "text" in item]
            everything = self.out / "engine" / "whole"
            count = new_tokens_of(everything, self.original.served.task, written)
            self._stopwatch = Stopwatch(everything, texts, count)
        return self._stopwatch.milliseconds(folders, None if self.whole is None else self.whole.ms)

    def _judged(self, build: Build, split: str) -> tuple[Fidelity, Score | None]:
        """Of the answers in the engine to the inputs "dev" or "test"."""
        inputs = self.original.inputs

        def judge() -> dict[str, Any]:
            self.progress.tell("engine", f"comparing in {self.engine.name}")
            expected, served = self.original.expected(split), opened(build.folder)
            found = answers(served, getattr(inputs, split), like=expected)
            score = None
            if (labels := inputs.labels) is not None:
                score = score_of(labels, getattr(labels, split), (self.original.served, expected), (served, found))
            return {"fidelity": asdict(compare_answers(expected, found)), "score": score and asdict(score)}

        found = self.phases.once(f"{split}-{build.folder.name}", judge)
        return Fidelity(**found["fidelity"]), Score(**found["score"]) if found["score"] else None
