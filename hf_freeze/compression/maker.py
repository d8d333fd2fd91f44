"""Shapes made of a model: cut with calibration, healed and exported."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_freeze.compression.bench import Bench
from hf_freeze.compression.distances import Distances
from hf_freeze.compression.inputs import batches_of
from hf_freeze.compression.original import with_written
from hf_freeze.compression.results import Build
from hf_freeze.compression.settings import Settings
from hf_freeze.compression.shape import Shape, few_bits
from hf_freeze.model.make import make_variant
from hf_freeze.publish.export.served import opened
from hf_freeze.training.healing import DEFAULT, Healed, HealLimit, heal, parse_limit

_POOLING = {"cls": "cls", "lasttoken": "last"}  # of sentence-transformers -> of `heal`
_BEAMS = 5  # of a translator that writes what a student learns
_TAUGHT = 8192  # texts that it writes others for when healing is short: writing one takes longer than learning it


class Maker:
    """Makes shapes of the original of `bench`, each once. `distances`: of smaller parts, by which tokens that are gone count."""

    def __init__(self, bench: Bench, distances: Distances, settings: Settings) -> None:
        self.bench, self.distances, self.settings = bench, distances, settings
        self.original, self.out = bench.original, bench.out
        self.phases, self.progress = bench.phases, bench.progress
        self._heal = limit_of(settings)
        self._nearest: tuple[str, float, Any] = ("", math.inf, None)  # of the compared ones: digest, distance, variant

    def build(self, shape: Shape, heals: bool = True) -> Build:
        """A shape, cut, healed (if `heals`) and exported."""
        limit = self._heal if heals else None
        name = f"{shape.digest}-unhealed" if limit != self._heal else shape.digest
        folder, healed = self._cut(shape, self.out / f"model-{name}", limit)
        build = replace(self.bench.export(shape, f"served-{name}", folder), model=folder, healed=healed)
        if limit is not None:  # what it was before is of no more use
            for before in (f"model-{name}-unhealed", f"engine/served-{name}-unhealed"):
                shutil.rmtree(self.out / before, ignore_errors=True)
        return build

    def distance(self, shape: Shape) -> float:
        """Of a shape from the original, cut with calibration and not healed; that of its tokens included."""
        self.progress.step(self.original.words(shape))
        subject = self.original.subject(shape.tokens)
        variant = subject.cut(self.original.methods_of(shape))
        of_tokens = 0.0 if shape.tokens is None else self.distances.of_tokens(shape.tokens)
        distance = subject.distance(variant) + of_tokens
        self._nearest = min(self._nearest, (shape.digest, distance, variant), key=lambda one: one[1])
        return distance

    def forget_nearest(self) -> None:
        """Before others are compared."""
        self._nearest = "", math.inf, None

    def _cut(self, shape: Shape, folder: Path, limit: HealLimit | None) -> tuple[Path, Healed | None]:
        """The saved variant of a shape, healed; and what came of the healing. `limit`: None for none."""

        def make() -> dict[str, Any] | None:
            subject, healed = self.original.subject(shape.tokens), None
            everything = self.original.methods_of(shape)
            bits = [] if limit is None else few_bits(shape, self.original.blocks)  # those come after the healing
            if self._nearest[0] == shape.digest and not bits:
                variant = self._nearest[2]
            else:
                self.progress.tell("cut", "cutting the model")
                variant = subject.cut(everything[: len(everything) - len(bits)])
            if limit is not None:
                variant = variant if variant is not subject.model else make_variant(subject.model, [])
                self.progress.tell("heal", "healing")
                samples = replace(batches_of(subject.served, self._lessons(limit)), held_out=subject.held_out)
                teacher = self.original.teacher(subject, self.distances.tokens.get(shape.tokens or 0, 0.0))
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
        if self.bench.engine.name != "ctranslate2":
            return with_written(learnt, served)
        assert self.bench.whole is not None
        return with_written(learnt, opened(self.bench.whole.folder), _BEAMS)


def limit_of(settings: Settings) -> HealLimit | None:
    """Of the healing; None where there is none."""
    return settings.heal if parse_limit(settings.heal) != (0.0, None) else None
