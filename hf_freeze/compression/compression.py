"""The story of a compression: measure the model, find out what its parts are worth, choose what stays, cut with calibration,
heal, export, and measure again (`search.py`)."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compression.bench import Bench
from hf_freeze.compression.blocks import Block
from hf_freeze.compression.budget import Budget, in_bytes
from hf_freeze.compression.choose import Options, Program
from hf_freeze.compression.distances import Distances, measured_distances, unmeasured_distances
from hf_freeze.compression.engine import engine_for
from hf_freeze.compression.inputs import Inputs, digest_of_items
from hf_freeze.compression.labels import Labels, check_labels
from hf_freeze.compression.maker import Maker, limit_of
from hf_freeze.compression.original import Original
from hf_freeze.compression.phases import Phases
from hf_freeze.compression.prices import Prices, probe_shapes, sizes_of
from hf_freeze.compression.progress import Callback, Progress
from hf_freeze.compression.results import Build, Compressed, Measured, Tried
from hf_freeze.compression.search import MUCH_WORSE, Search
from hf_freeze.compression.settings import Settings
from hf_freeze.compression.shape import Shape, full_shape
from hf_freeze.model.convert import header_of
from hf_freeze.model.paging import available
from hf_freeze.publish.export.served import opened
from hf_freeze.seeded.tensor import fingerprint

_LARGEST, _SMALLEST = 0.9, 1.05  # of a front: times the whole model and the smallest shape
_HALVINGS = 5  # of the range of sizes, when bytes are to be fewest for a loss
_NATIVE_MULTIPLE = 64


class Compression:
    """One compression in the folder `out`; called again with the same settings, it goes on where it was stopped.

    `items`: what the model reads: see `publish.export.served.answers`. Raises ValueError for a budget that cannot be met, too few
    items, labels of another task, and a folder that holds another compression; Stopped where the callback has stopped it.
    """

    def __init__(
        self,
        source: str,
        items: Sequence[Any],
        budget: Budget,
        out: Path,
        settings: Settings | None = None,
        *,
        labels: Labels | None = None,
        console: Console | None = None,
        command: str = "",
        callback: Callback | None = None,
        watch: Callable[["Compression"], Any] = lambda compression: None,
    ) -> None:
        settings = settings or Settings()
        self.source, self.budget, self.out, self.command, self.settings = source, budget, out, command, settings
        self.console = console or Console()
        self.inputs = Inputs.of(items, settings.seed, labels)
        _check_memory(source)
        served = opened(source)
        if labels is not None:
            check_labels(served, labels)
        kind = architecture_for(served.model).model_type
        self.engine = engine_for("torch" if settings.native else settings.engine, served.task, kind)
        identity = asdict(settings) | {
            "model": fingerprint(served.model),
            "times": budget.limits_time,  # all else that is found out serves every budget
            "engine": self.engine.name,
            "inputs": [len(items), digest_of_items(list(items))],
            "labels": labels and digest_of_items([*asdict(labels).values()]),
            "heal": str(settings.heal),
        }
        del identity["min_fidelity"]  # it changes nothing that is made
        self.phases = Phases(out, identity)
        if self.phases.begun:
            self.say(f"going on with what {out} has")
        self.progress = Progress(self.say, callback, lambda: watch(self))
        self.original = Original(source, served, self.inputs, settings.samples, self.phases.once)
        self.depths = self.original.depths
        self.bench = Bench(self.original, self.engine, out, self.phases, self.progress, times=budget.limits_time)
        uniform = settings.native or self.engine.uniform
        may_go = {"layers", "heads", "neurons", "tokens"}
        may_go -= {"tokens"} if settings.keep_vocabulary or not self.original.can_lose_tokens() else set()
        may_go -= {"heads"} if uniform else set()  # few native configs have a size of a head
        only_time = budget.limits_time and not budget.limits_bytes  # 4 bits save bytes, not time
        self.options = Options(
            bits=self.engine.bits[:1] if only_time else self.engine.bits,
            uniform=uniform,
            multiple=_NATIVE_MULTIPLE if settings.native else self.engine.multiple,
            may_go=frozenset(may_go),
        )
        self.search: Search | None = None  # once it is known what parts are worth
        self.chosen: Shape | None = None
        self.results: list[Measured] = []  # of smaller models

    @property
    def blocks(self) -> dict[str, Block]:
        return self.original.blocks

    @property
    def tried(self) -> list[Tried]:
        return [] if self.search is None else self.search.tried

    @property
    def whole(self) -> Measured | None:
        """The model as it is, in the engine."""
        return self.bench.whole

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def run(self) -> Compressed:
        """Within the budget. Raises ValueError for one that is out of reach, and for less than `min_fidelity`."""
        with self._begun() as everything:
            self.say(f"the budget: {self.budget.words()}")
            points, limited = self.budget.max_loss, self.budget.limits_bytes or self.budget.limits_time
            if points is not None and not limited:
                build = self._of_fewest_bytes(everything, points)
            elif not self.budget.excess(everything.bytes, everything.ms):
                self.say(f"met by {self.engine.name} alone, in {self.options.bits[0]} bits: nothing is cut")
                build = everything
            else:
                build = self._new_search(self.budget).within(self.budget)
            if points is not None and (lost := self.bench.points_lost(build)) > points:
                raise ValueError(
                    f"max_loss={points:g}: the model in {build.folder} loses {lost:.2f} points on the inputs that shapes are "
                    "chosen by; give more bytes or time, or allow a larger loss"
                )
            return self._finished(build)

    def front(self, count: int) -> list[Compressed]:
        """The whole model in the engine, and `count` smaller ones down to the smallest, from one set of statistics."""
        with self._begun() as everything:
            search, results = self._new_search(), [self._finished(everything)]
            for size in np.geomspace(_LARGEST * everything.bytes, _SMALLEST * search.least_bytes, count):
                with self._passing_over(size):  # the estimate of the smallest ones may be wrong
                    results.append(self._finished(self._within_bytes(search, size)))
            return results

    def _of_fewest_bytes(self, best: Build, max_points: float) -> Build:
        """The smallest folder that loses at most so many points, by halving the range of sizes. `best`: of the whole model."""
        if (lost := self.bench.points_lost(best)) > max_points:
            raise ValueError(
                f"max_loss={max_points:g}: the whole model in {self.engine.name} loses {lost:.2f} points already; allow more, or "
                "choose another engine"
            )
        search, budget = self._new_search(), self.budget
        least, most = search.least_bytes, float(best.bytes)
        for _ in range(_HALVINGS):
            size, build = math.sqrt(least * most), None
            with self._passing_over(size):
                build = self._within_bytes(search, size)
                self.say(f"{in_bytes(build.bytes)} lose {self.bench.points_lost(build):.2f} points")
            if build is not None and self.bench.points_lost(build) <= max_points:
                best, most = build, float(build.bytes)
            else:
                least = size
        self.budget = budget
        return best

    def _within_bytes(self, search: Search, size: float) -> Build:
        """One of several sizes, which the page tells meanwhile."""
        self.budget = Budget(max_bytes=int(size))
        return search.within(self.budget)

    @contextlib.contextmanager
    def _begun(self) -> Iterator[Build]:
        """With the whole model in the engine, measured."""
        more = ", or raise samples" * (self.settings.samples < len(self.inputs.learnt))
        with _few_tokens_said_once(lambda text: self.say(text + more)):
            try:
                everything = self.bench.everything()
                self.budget = self.budget.resolved(self.original.bytes, everything.ms)
                assert self.whole is not None
                self.say(f"the model: {in_bytes(self.original.bytes)}; in {self.engine.name}: {self.whole.words}")
                yield everything
            finally:
                self.bench.close()

    @contextlib.contextmanager
    def _passing_over(self, size: float) -> Iterator[None]:
        """One of several sizes: if it is out of reach, that is said, and does not end the others."""
        self.say(f"within {in_bytes(size)}:")
        try:
            yield
        except ValueError as error:
            self.say(str(error))

    def _new_search(self, budget: Budget | None = None) -> Search:
        """What parts are worth, and what they cost. `budget`: where it is known, it is checked before minutes of measuring, and
        shapes that are of no use within it are not measured."""
        if not self.phases.done("blocks"):
            self.say("measuring what each head and neuron is worth")
        blocks, options, prices = self.original.blocks, self.options, self._prices()

        def search_by(distances: Distances) -> Search:
            return Search(Maker(self.bench, distances, self.settings), prices, options, self.say)

        if budget is not None:
            search_by(unmeasured_distances(self.original, options.may_go)).check(budget)

        def worst(distances: Distances) -> float:
            with_all_layers = replace(options, may_go=options.may_go - {"layers"})
            best = budget and Program(blocks, distances, prices, with_all_layers).solve(*budget.for_estimates)
            return MUCH_WORSE * best[1] if best else math.inf

        heals = limit_of(self.settings) is not None
        distances = measured_distances(self.bench, options.may_go, options.bits, worst=worst, heals=heals)
        self.search = search_by(distances)
        return self.search

    def _prices(self) -> Prices:
        """Of bytes, and of time where it is limited."""
        original, everything, blocks = self.original, self.whole, self.original.blocks
        assert everything is not None
        probes: list[tuple[Shape, float]] = []
        if self.budget.limits_time:
            full = replace(full_shape(self.depths, blocks, self.options.bits[0]), tokens=original.tokens)
            shapes = probe_shapes(full, blocks, self.options.may_go)
            times = self.phases.once("probes", lambda: self.bench.milliseconds_of(shapes))
            probes = [(shape, times[name]) for name, shape in shapes.items()]
        folder, size = everything.folder, everything.bytes
        sizes = sizes_of(original.model, original.tokens, self.depths, folder, size, self.engine)
        return Prices(blocks, self.depths, sizes, probes)

    def _finished(self, build: Build) -> Compressed:
        """Compared on the inputs that nothing was chosen by."""
        assert self.whole is not None
        after = self.whole if build.model is None else self.bench.measured(build)
        self.chosen, self.results = (None, []) if build.model is None else (build.shape, [*self.results, after])
        fidelity, least = after.fidelity.score, self.settings.min_fidelity
        if least is not None and fidelity is not None and fidelity < least:
            raise ValueError(
                f"min_fidelity={least:g}: the compressed model in {build.folder} has {fidelity:.4f} on held-out "
                "texts; give more bytes or time, more texts, or longer healing"
            )
        return Compressed(
            shape=build.shape,
            kept=self.original.words(build.shape) if build.model is not None else "everything",
            model=build.model,
            original_bytes=self.original.bytes,
            whole=self.whole,
            after=after,
            healed=build.healed,
            seconds=self.phases.seconds,
        )


def _check_memory(source: str) -> None:
    """Raise ValueError for a folder whose model does not fit into memory in fp32."""
    files, free = list(Path(source).glob("*.safetensors")), available()
    if not files or free is None:
        return
    needed = sum(4 * math.prod(shape) for file in files for _, shape in header_of(file).values())
    if needed > free:
        raise ValueError(
            f"{source} takes {needed / 1e9:.1f} GB of memory in fp32, and {free / 1e9:.1f} GB are free: give --layer-by-layer "
            "(compress_large in Python), or use a machine with more memory"
        )


@contextlib.contextmanager
def _few_tokens_said_once(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, each shape is calibrated on the same texts: if they are few, that is said once."""
    with warnings.catch_warnings():
        show, said = warnings.showwarning, []

        def told(message: Any, *rest: Any, **options: Any) -> None:
            if not str(message).startswith("few tokens"):
                show(message, *rest, **options)
            elif not said:
                said.append(message)
                say(str(message))

        warnings.showwarning = told
        yield
