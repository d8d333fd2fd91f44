"""Shapes made and measured: cut with calibration, healed, exported, timed, and compared with the original."""

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_freeze.analysis.answers import compare_answers
from hf_freeze.compression.blocks import Block
from hf_freeze.compression.engine import Engine, Stopwatch, new_tokens_of, serve
from hf_freeze.compression.inputs import Inputs, batches_of
from hf_freeze.compression.labels import Score, score_of
from hf_freeze.compression.losses import Losses
from hf_freeze.compression.original import Original, with_written
from hf_freeze.compression.phases import Phases
from hf_freeze.compression.progress import Progress
from hf_freeze.compression.results import Made, Measured, points_lost
from hf_freeze.compression.settings import Settings
from hf_freeze.compression.shape import Shape, few_bits, in_words, methods_of, whole
from hf_freeze.io import bytes_of
from hf_freeze.model.fidelity import Fidelity
from hf_freeze.model.make import make_variant
from hf_freeze.publish.export.served import answers, opened
from hf_freeze.training.healing import DEFAULT, Healed, HealLimit, heal, parse_limit

_POOLING = {"cls": "cls", "lasttoken": "last"}  # of sentence-transformers -> of `heal`
_BEAMS = 5  # of a translator that writes what a student learns
_TAUGHT = 8192  # texts that it writes others for when healing is short: writing one takes longer than learning it


class Maker:
    """Makes shapes of `original` in the folder `out`, each once; `close` it. `times`: whether they are timed. `blocks`, `losses`:
    what was found out about the model; to be set before a shape is cut."""

    def __init__(
        self,
        original: Original,
        engine: Engine,
        settings: Settings,
        out: Path,
        phases: Phases,
        progress: Progress,
        *,
        times: bool,
    ) -> None:
        self.original, self.engine, self.settings, self.out = original, engine, settings, out
        self.phases, self.progress, self._times = phases, progress, times
        self.heal = settings.heal if parse_limit(settings.heal) != (0.0, None) else None
        self.blocks: dict[str, Block] = {}
        self.losses: Losses
        self.whole: Measured | None = None  # the model as it is, in the engine
        self._stopwatch: Stopwatch | None = None
        self._nearest: tuple[str, float, Any] = ("", math.inf, None)  # of the compared ones: digest, loss, variant

    def close(self) -> None:
        if self._stopwatch is not None:
            self._stopwatch.close()

    def words(self, shape: Shape) -> str:
        return in_words(shape, self.blocks, self.original.depths, self.original.tokens)

    def everything(self) -> Made:
        """The whole model in the engine, measured."""
        shape = whole(self.original.depths, {}, self.engine.bits[0])
        made = self._exported(shape, "whole", self.original.folder)
        self.whole = self.measured(made)
        return made

    def built(self, shape: Shape, heals: bool = True) -> Made:
        """A shape, cut, healed (if `heals`) and exported."""
        limit = self.heal if heals else None
        name = f"{shape.digest}-unhealed" if limit != self.heal else shape.digest
        folder, healed = self._cut(shape, self.out / f"model-{name}", limit)
        made = replace(self._exported(shape, f"served-{name}", folder), model=folder, healed=healed)
        if limit is not None:  # what it was before is of no more use
            for before in (f"model-{name}-unhealed", f"engine/served-{name}-unhealed"):
                shutil.rmtree(self.out / before, ignore_errors=True)
        return made

    def distance(self, shape: Shape) -> float:
        """Of a shape from the original, cut with calibration and not healed; that of its tokens included."""
        self.progress.step(self.words(shape))
        subject = self.original.subject(shape.tokens)
        variant = subject.cut(methods_of(shape, self.blocks, self.original.depths))
        loss = subject.distance(variant) + (0.0 if shape.tokens is None else self.losses.of_tokens(shape.tokens))
        self._nearest = min(self._nearest, (shape.digest, loss, variant), key=lambda one: one[1])
        return loss

    def forget_nearest(self) -> None:
        """Before others are compared."""
        self._nearest = "", math.inf, None

    def milliseconds_of(self, shapes: Mapping[str, Shape]) -> dict[str, float]:
        """Of shapes by their names in words, cut without calibration."""
        folders = {}
        for name, shape in shapes.items():
            self.progress.tell("engine", f"exporting {name}, to learn what it costs in {self.engine.name}")
            model = make_variant(self.original.model, methods_of(shape, self.blocks, self.original.depths))
            with tempfile.TemporaryDirectory(dir=self.out) as temporary:
                saved = self.original.save(model, self.original.served.tokenizer, Path(temporary) / "model")
                folders[name] = self._served(f"probe-{shape.digest}", saved)
        return self._milliseconds(folders)

    def points_lost(self, made: Made) -> float:
        """In points, on the inputs that shapes are chosen by."""
        return points_lost(*self._judged(made, "dev"))

    def measured(self, made: Made) -> Measured:
        """Compared on the inputs that nothing was chosen by."""
        fidelity, score = self._judged(made, "test")
        return Measured(folder=made.folder, bytes=made.bytes, ms=made.ms, fidelity=fidelity, score=score)

    def _cut(self, shape: Shape, folder: Path, limit: HealLimit | None) -> tuple[Path, Healed | None]:
        """The saved variant of a shape, healed; and what came of the healing. `limit`: None for none."""

        def make() -> dict[str, Any] | None:
            subject, healed = self.original.subject(shape.tokens), None
            everything = methods_of(shape, self.blocks, self.original.depths)
            bits = [] if limit is None else few_bits(shape, self.blocks)  # those come after the healing
            if self._nearest[0] == shape.digest and not bits:
                variant = self._nearest[2]
            else:
                self.progress.tell("cut", "cutting the model")
                variant = subject.cut(everything[: len(everything) - len(bits)])
            if limit is not None:
                variant = variant if variant is not subject.model else make_variant(subject.model, [])
                self.progress.tell("heal", "healing")
                samples = replace(batches_of(subject.served, self._lessons(limit)), held_out=subject.held_out)
                teacher = self.original.teacher(subject, self.losses.tokens.get(shape.tokens or 0, 0.0))
                pooling = _POOLING.get(subject.served.sentence.get("mode", "mean"), "mean")
                options: Any = {"limit": limit, "pooling": pooling, "seed": self.settings.seed}
                healed = heal(variant, teacher, samples, self.out, callback=self.progress.heard, **options)
            if bits:
                variant = make_variant(variant, bits, calibration=subject.samples)
            self.original.save(variant.merge() if self.settings.native else variant, subject.tokenizer, folder)
            return asdict(healed) if healed else None

        found = self.phases.once(folder.name, make)
        return folder, Healed(**found) if found else None

    def _lessons(self, limit: HealLimit) -> Sequence[Any]:
        """The inputs to heal by; of a translator, with what the original writes: in its engine that is fast enough for beams, of
        which a student learns more (Kim and Rush, 2016, https://arxiv.org/abs/1606.07947)."""
        learnt, served = self.original.inputs.learnt, self.original.served
        if served.task != "seq2seq-lm":
            return learnt
        learnt = learnt[: _TAUGHT if limit == DEFAULT else None]
        if self.engine.name != "ctranslate2":
            return with_written(learnt, served)
        assert self.whole is not None
        return with_written(learnt, opened(self.whole.folder), _BEAMS)

    def _served(self, name: str, source: Path) -> Path:
        return serve(source, self.engine.format, self.engine.quantization, self.out / "engine" / name)

    def _exported(self, shape: Shape, name: str, source: Path) -> Made:
        """The saved model in `source` in the engine, with what it costs."""

        def measure() -> dict[str, Any]:
            self.progress.tell("engine", f"measuring in {self.engine.name}")
            folder = self._served(name, source)
            return {"bytes": bytes_of(folder), "ms": self._milliseconds({name: folder})[name] if self._times else None}

        return Made(shape=shape, folder=self.out / "engine" / name, **self.phases.once(f"made-{name}", measure))

    def _milliseconds(self, folders: Mapping[str, Path]) -> dict[str, float]:
        inputs = self.original.inputs
        texts = [item if isinstance(item, str) else " ".join(Inputs.words(item)) for item in inputs.compared]
        if not any(texts):
            raise ValueError("max_ms: times are measured of models that read texts; give max_bytes")
        if self._stopwatch is None:
            written = [item["text"] for item in self.original.expected("compared").items if "text" in item]
            everything = self.out / "engine" / "whole"
            count = new_tokens_of(everything, self.original.served.task, written)
            self._stopwatch = Stopwatch(everything, texts, count)
        return self._stopwatch.milliseconds(folders, None if self.whole is None else self.whole.ms)

    def _judged(self, made: Made, part: str) -> tuple[Fidelity, Score | None]:
        """Of the answers in the engine to the inputs "dev" or "test"."""
        inputs = self.original.inputs

        def judge() -> dict[str, Any]:
            self.progress.tell("engine", f"comparing in {self.engine.name}")
            expected, served = self.original.expected(part), opened(made.folder)
            found = answers(served, getattr(inputs, part), like=expected)
            score = None
            if (labels := inputs.labels) is not None:
                score = score_of(labels, getattr(labels, part), (self.original.served, expected), (served, found))
            return {"fidelity": asdict(compare_answers(expected, found)), "score": score and asdict(score)}

        found = self.phases.once(f"{part}-{made.folder.name}", judge)
        return Fidelity(**found["fidelity"]), Score(**found["score"]) if found["score"] else None
