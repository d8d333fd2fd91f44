"""The story of a compression: measure the model, find out what its parts are worth, choose what stays, cut with calibration,
heal, export, and measure again (`making.py`)."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compression.blocks import Block, blocks_of
from hf_freeze.compression.budget import TIME_RESERVE, Budget, in_bytes, in_bytes_up
from hf_freeze.compression.choose import Options, Program
from hf_freeze.compression.engine import engine_for
from hf_freeze.compression.inputs import Inputs, digest_of_items
from hf_freeze.compression.labels import Labels, check_labels
from hf_freeze.compression.losses import Losses, measured_losses, unmeasured_losses
from hf_freeze.compression.making import Maker
from hf_freeze.compression.original import Original
from hf_freeze.compression.phases import Phases
from hf_freeze.compression.prices import Prices, probe_shapes, sizes_of
from hf_freeze.compression.progress import Callback, Progress
from hf_freeze.compression.results import Compressed, Made, Measured, Tried
from hf_freeze.compression.settings import Settings
from hf_freeze.compression.shape import Shape, whole
from hf_freeze.publish.export.served import opened
from hf_freeze.seeded.tensor import fingerprint

_TIGHTER = 4  # times that a shape is chosen again because its folder is above the budget
_LARGEST, _SMALLEST = 0.9, 1.05  # of a front: times the whole model and the smallest shape
_HALVINGS = 5  # of the range of sizes, when bytes are to be fewest for a loss
_ROUNDED = 1.001  # times the bytes of the smallest, where they are named: its config may name a longer folder
_MARGIN = 0.002  # share of a limit of bytes that is left free, since sizes are estimates
_MUCH_WORSE = 3.0  # times the expected loss of the best, from which a candidate is not measured
_NATIVE_MULTIPLE = 64
_WAYS = ("", "layers", "heads", "bits")  # what a candidate does not touch, of each one


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
        served = opened(source)
        if labels is not None:
            check_labels(served, labels)
        kind = architecture_for(served.model).model_type
        self.engine = engine_for("torch" if settings.native else settings.engine, served.task, kind)
        identity = asdict(settings) | {
            "model": fingerprint(served.model),
            "budget": budget.to_dict(),
            "engine": self.engine.name,
            "inputs": [len(items), digest_of_items(list(items))],
            "labels": labels and digest_of_items([*asdict(labels).values()]),
            "heal": str(settings.heal),
        }
        del identity["min_fidelity"]  # it changes nothing that is made
        self.phases = Phases(out, identity)
        self.progress = Progress(self.say, callback, lambda: watch(self))
        self.original = Original(source, served, self.inputs, settings.samples, self.phases.once)
        self.depths = self.original.depths
        self.maker = Maker(
            self.original, self.engine, settings, out, self.phases, self.progress, times=budget.limits_time
        )
        uniform = settings.native or self.engine.uniform
        may_go = {"layers", "heads", "neurons", "tokens"}
        may_go -= {"tokens"} if settings.keep_vocabulary or not self.original.can_lose_tokens() else set()
        may_go -= {"heads"} if uniform else set()  # few native configs have a size of a head
        only_time = budget.limits_time and not budget.limits_bytes  # 4 bits save bytes, not time
        self.options = Options(
            bits=self.engine.bits[:1] if only_time else self.engine.bits,
            uniform=uniform,
            multiple=_NATIVE_MULTIPLE if settings.native else 8,
            may_go=frozenset(may_go),
        )
        self.tried: list[Tried] = []
        self.chosen: Shape | None = None
        self.results: list[Measured] = []  # of smaller models

    @property
    def blocks(self) -> dict[str, Block]:
        return self.maker.blocks

    @property
    def whole(self) -> Measured | None:
        """The model as it is, in the engine."""
        return self.maker.whole

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def run(self) -> Compressed:
        """Within the budget. Raises ValueError for one that is out of reach, and for less than `min_fidelity`."""
        with self._begun() as everything:
            self.say(f"the budget: {self.budget.words()}")
            loss, limited = self.budget.max_loss, self.budget.limits_bytes or self.budget.limits_time
            if loss is not None and not limited:
                made = self._of_fewest_bytes(everything, loss)
            elif not self.budget.excess(everything.bytes, everything.ms):
                self.say(f"met by {self.engine.name} alone, in {self.options.bits[0]} bits: nothing is cut")
                made = everything
            else:
                self._prepare(self._limits())
                made = self._within(self.budget)
            if loss is not None and (lost := self.maker.points_lost(made)) > loss:
                raise ValueError(
                    f"max_loss={loss:g}: the model in {made.folder} loses {lost:.2f} points on the inputs that shapes are "
                    "chosen by; give more bytes or time, or allow a larger loss"
                )
            return self._finished(made)

    def front(self, count: int) -> list[Compressed]:
        """The whole model in the engine, and `count` smaller ones down to the smallest, from one set of statistics."""
        with self._begun() as everything:
            self._prepare()
            least, found = self.prices.cost(self.program.smallest("bytes"))[0], [self._finished(everything)]
            for size in np.geomspace(_LARGEST * everything.bytes, _SMALLEST * least, count):
                with self._passing_over(size):  # the estimate of the smallest ones may be wrong
                    found.append(self._finished(self._within(Budget(max_bytes=int(size)))))
            return found

    def _of_fewest_bytes(self, best: Made, max_loss: float) -> Made:
        """The smallest folder that loses at most so many points, by halving the range of sizes. `best`: of the whole model."""
        if (lost := self.maker.points_lost(best)) > max_loss:
            raise ValueError(
                f"max_loss={max_loss:g}: the whole model in {self.engine.name} loses {lost:.2f} points already; allow more, or "
                "choose another engine"
            )
        self._prepare()
        least, most, budget = self.prices.cost(self.program.smallest("bytes"))[0], float(best.bytes), self.budget
        for _ in range(_HALVINGS):
            size, made = math.sqrt(least * most), None
            with self._passing_over(size):
                made = self._within(Budget(max_bytes=int(size)))
                self.say(f"{in_bytes(made.bytes)} lose {self.maker.points_lost(made):.2f} points")
            if made is not None and self.maker.points_lost(made) <= max_loss:
                best, most = made, float(made.bytes)
            else:
                least = size
        self.budget = budget
        return best

    @contextlib.contextmanager
    def _begun(self) -> Iterator[Made]:
        """With the whole model in the engine, measured."""
        try:
            everything = self.maker.everything()
            self.budget = self.budget.resolved(self.original.bytes, everything.ms)
            assert self.whole is not None
            self.say(f"the model: {in_bytes(self.original.bytes)}; in {self.engine.name}: {self.whole.words}")
            yield everything
        finally:
            self.maker.close()

    @contextlib.contextmanager
    def _passing_over(self, size: float) -> Iterator[None]:
        """One of several sizes: if it is out of reach, that is said, and does not end the others."""
        self.say(f"within {in_bytes(size)}:")
        try:
            yield
        except ValueError as error:
            self.say(str(error))

    def _prepare(self, limits: tuple[float, float | None] | None = None) -> None:
        """What parts are worth, and what they cost. `limits`: of bytes and milliseconds; where they are known, they are checked
        before minutes of measuring, and shapes that are of no use within them are not measured."""

        def find() -> dict[str, Any]:
            self.say("measuring what each head and neuron is worth")
            subject = self.original.subject()
            return {name: asdict(block) for name, block in blocks_of(subject.model, subject.samples).items()}

        found = self.phases.once("blocks", find)
        self.maker.blocks = {name: Block(**values) for name, values in found.items()}
        options = self.options
        full = replace(whole(self.depths, self.blocks, options.bits[0]), tokens=self.original.tokens)
        probes: list[tuple[Shape, float]] = []
        if self.budget.limits_time:
            shapes = probe_shapes(full, self.blocks, options.may_go)
            times = self.phases.once("probes", lambda: self.maker.milliseconds_of(shapes))
            probes = [(shape, times[name]) for name, shape in shapes.items()]
        assert self.whole is not None
        original, everything = self.original, self.whole
        folder, size = everything.folder, everything.bytes
        sizes = sizes_of(original.model, original.tokens, self.depths, folder, size, self.engine)
        self.prices = Prices(self.blocks, self.depths, sizes, probes)

        self.losses = unmeasured_losses(original, options.may_go)
        if limits is not None and _above(self.prices.cost(self._smallest(options.bits)), limits):
            self._smallest_within_reach()

        def worst(losses: Losses) -> float:
            with_all_layers = replace(options, may_go=options.may_go - {"layers"})
            best = limits and Program(self.blocks, losses, self.prices, with_all_layers).solve(*limits)
            return _MUCH_WORSE * best[1] if best else math.inf

        self.losses = measured_losses(
            self.original,
            self.blocks,
            options.may_go,
            options.bits,
            self.phases,
            self.progress,
            worst,
            heals=self.maker.heal is not None,
        )
        self.maker.losses = self.losses
        self.program = Program(self.blocks, self.losses, self.prices, options)

    def _within(self, budget: Budget) -> Made:
        """The best shape that was found, cut, healed and exported. If none is within the budget as it is estimated or as it was
        made, the smallest shape. Raises ValueError with what that takes if it is above, too."""
        self.budget = budget
        wanted = self._limits()
        least = self.prices.cost(self._smallest(self.options.bits))
        limits = max(wanted[0] * (1 - _MARGIN), least[0]), wanted[1]
        ways: Sequence[str] = _WAYS
        for _ in range(0 if _above(least, wanted) else _TIGHTER):
            if (found := self._chosen(limits, ways)) is None:
                break
            shape, way = found
            ways = [way]  # what was compared is not compared again for a few bytes less
            made = self.maker.built(shape, heals=False)  # healing changes neither bytes nor time
            if not budget.excess(made.bytes, made.ms):
                made = self.maker.built(shape)
            if not (excess := budget.excess(made.bytes, made.ms)):
                return made
            self.say(f"above the budget: {', '.join(excess)}; choosing again, for less")
            size, ms = self.prices.cost(shape)
            lower = (wanted[0] - max(made.bytes - size, 0.0)) * (1 - _MARGIN), wanted[1]
            if made.ms is not None and wanted[1] is not None and limits[1] is not None:
                lower = lower[0], min(limits[1] * (1 - TIME_RESERVE), wanted[1] * min(ms / made.ms, 1.0))
            limits = min(limits[0], lower[0]), lower[1]
        made = self.maker.built(self._smallest_within_reach())
        if excess := budget.excess(made.bytes, made.ms):  # a second measurement of its time may be longer
            raise ValueError(f"the budget of {budget.words()} was missed by the smallest shape: {', '.join(excess)}")
        return made

    def _smallest(self, bits: tuple[int, ...]) -> Shape:
        """The smallest shape by its estimate, with weights in these bits."""
        program = Program(self.blocks, self.losses, self.prices, replace(self.options, bits=bits))
        return program.smallest("bytes", self._limits()[1]) if self.budget.limits_bytes else program.smallest("ms")

    def _smallest_within_reach(self) -> Shape:
        """The smallest shape, made without healing, which changes neither bytes nor time: estimates are too rough to refuse a
        budget by. Raises ValueError with what it takes if that is above."""
        found: list[tuple[bool, float, Shape]] = []
        for bits in dict.fromkeys([self.options.bits, self.options.bits[:1]]):  # 4 bits fill up narrow rows
            shape = self._smallest(bits)
            made, limit = self.maker.built(shape, heals=False), self.budget.max_ms
            if not self.budget.excess(made.bytes, made.ms):
                return shape
            late = limit is not None and made.ms is not None and made.ms > limit
            found.append((late, made.ms if late and made.ms is not None else made.bytes, shape))
        late, least, shape = min(found, key=lambda one: one[:2])  # one within the time, if there is any
        shown = f"{math.ceil(1000 * least) / 1000:g} ms" if late else in_bytes_up(least * _ROUNDED)
        within = f" within {self.budget.limit('ms')}" if self.budget.limits_time and not late else ""
        raise ValueError(
            f"the budget of {self.budget.limit('ms' if late else 'bytes')} is out of reach: the smallest shape{within} "
            f"({self.maker.words(shape)}) needs about {shown}; give it at least that"
        )

    def _limits(self) -> tuple[float, float | None]:
        size = math.inf if self.budget.max_bytes is None else float(self.budget.max_bytes)
        return size, self.budget.max_ms and self.budget.max_ms * (1 - TIME_RESERVE)

    def _chosen(self, limits: tuple[float, float | None], ways: Sequence[str]) -> tuple[Shape, str] | None:
        """The best of the shapes of these ways, and its way; None if there is none. If they are several, each is cut with
        calibration and compared with the original."""
        candidates: dict[str, tuple[Shape, float, str]] = {}
        for way in ways:
            if candidates and way not in self._touched(next(iter(candidates.values()))[0]):
                continue
            bits = self.options.bits[:1] if way == "bits" else self.options.bits
            options = replace(self.options, may_go=self.options.may_go - {way}, bits=bits)
            found = Program(self.blocks, self.losses, self.prices, options).solve(*limits)
            if found is not None:
                candidates.setdefault(found[0].digest, (*found, way))
        if not candidates:
            return None
        best = min(expected for _, expected, _ in candidates.values())
        some = [one for one in candidates.values() if one[1] <= _MUCH_WORSE * best]
        self.maker.forget_nearest()
        if len(some) == 1:
            return some[0][0], some[0][2]
        self.progress.plan(sum(not self.phases.done(f"tried-{shape.digest}") for shape, *_ in some))
        results = []
        for shape, expected, _ in some:
            loss = self.phases.once(f"tried-{shape.digest}", lambda shape=shape: self.maker.distance(shape))
            (size, ms), words = self.prices.cost(shape), self.maker.words(shape)
            costs: Any = {"bytes": size, "ms": ms if self.prices.knows_time else None}
            tried = Tried(words=words, loss=loss, expected=expected, **costs)
            self.tried += [tried] if tried not in self.tried else []
            self.say(f"candidate: {words}: about {in_bytes(size)}; loss {loss:.2g} (expected {expected:.2g})")
            results.append(loss)
        shape, _, way = some[results.index(min(results))]
        return shape, way

    def _touched(self, shape: Shape) -> set[str]:
        """Of the ways, what a shape has less of."""
        kinds = {self.blocks[name].kind for name, units in shape.units.items() if units < self.blocks[name].units}
        kinds |= {"layers"} if any(len(shape.layers[stack]) < depth for stack, depth in self.depths.items()) else set()
        return kinds | ({"bits"} if any(bits < self.options.bits[0] for bits in shape.bits.values()) else set())

    def _finished(self, made: Made) -> Compressed:
        """Compared on the inputs that nothing was chosen by."""
        assert self.whole is not None
        after = self.whole if made.model is None else self.maker.measured(made)
        self.chosen, self.results = (None, []) if made.model is None else (made.shape, [*self.results, after])
        fidelity, least = after.fidelity.score, self.settings.min_fidelity
        if least is not None and fidelity is not None and fidelity < least:
            raise ValueError(
                f"min_fidelity={least:g}: the compressed model in {made.folder} has {fidelity:.4f} on held-out "
                "texts; give more bytes or time, more texts, or longer healing"
            )
        return Compressed(
            shape=made.shape,
            kept=self.maker.words(made.shape) if made.model is not None else "everything",
            model=made.model,
            original_bytes=self.original.bytes,
            whole=self.whole,
            after=after,
            healed=made.healed,
            seconds=self.phases.seconds,
        )


def _above(cost: tuple[float, float], limits: tuple[float, float | None]) -> bool:
    """Whether bytes or milliseconds are above their limits."""
    return cost[0] > limits[0] or (limits[1] is not None and cost[1] > limits[1])
