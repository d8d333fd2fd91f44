"""The best shape within a budget: chosen by the integer program, cut, compared, and chosen again where it is above."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hf_freeze.compression.budget import TIME_RESERVE, Budget, in_bytes, in_bytes_up
from hf_freeze.compression.choose import Options, Program
from hf_freeze.compression.maker import Maker
from hf_freeze.compression.prices import Prices
from hf_freeze.compression.results import Build, Tried
from hf_freeze.compression.shape import Shape

MUCH_WORSE = 3.0  # times the expected distance of the best, from which a candidate is not measured
_TIGHTER = 4  # times that a shape is chosen again because its folder is above the budget
_ROUNDED = 1.001  # times the bytes of the smallest, where they are named: its config may name a longer folder
_MARGIN = 0.002  # share of a limit of bytes that is left free, since sizes are estimates
_WAYS = ("", "layers", "heads", "bits")  # what a candidate does not touch, of each one


class Search:
    """Among the shapes that `options` allow, of these prices; `maker` makes them and knows their distances."""

    def __init__(self, maker: Maker, prices: Prices, options: Options, say: Callable[[str], None]) -> None:
        self.prices, self.options, self.distances = prices, options, maker.distances
        self.tried: list[Tried] = []
        self._maker, self._original, self._say = maker, maker.original, say

    def check(self, budget: Budget) -> None:
        """Raises ValueError with what the smallest shape takes if that is above the budget."""
        if _above(self.prices.cost(self._smallest(budget, self.options.bits)), budget.for_estimates):
            self._smallest_within_reach(budget)

    @property
    def least_bytes(self) -> float:
        """Of the smallest shape, as estimated."""
        return self.prices.cost(self._program(self.options).smallest("bytes"))[0]

    def within(self, budget: Budget) -> Build:
        """The best shape that was found, cut, healed and exported. If none is within the budget as it is estimated or as it was
        made, the smallest shape. Raises ValueError with what that takes if it is above, too."""
        wanted = budget.for_estimates
        least = self.prices.cost(self._smallest(budget, self.options.bits))
        limits = max(wanted[0] * (1 - _MARGIN), least[0]), wanted[1]
        ways: Sequence[str] = _WAYS
        for _ in range(0 if _above(least, wanted) else _TIGHTER):
            if (found := self._chosen(limits, ways)) is None:
                break
            shape, way = found
            ways = [way]  # what was compared is not compared again for a few bytes less
            build = self._maker.build(shape, heals=False)  # healing changes neither bytes nor time
            if not budget.excess(build.bytes, build.ms):
                build = self._maker.build(shape)
            if not (excess := budget.excess(build.bytes, build.ms)):
                return build
            self._say(f"above the budget: {', '.join(excess)}; choosing again, for less")
            size, ms = self.prices.cost(shape)
            lower = (wanted[0] - max(build.bytes - size, 0.0)) * (1 - _MARGIN), wanted[1]
            if build.ms is not None and wanted[1] is not None and limits[1] is not None:
                lower = lower[0], min(limits[1] * (1 - TIME_RESERVE), wanted[1] * min(ms / build.ms, 1.0))
            limits = min(limits[0], lower[0]), lower[1]
        build = self._maker.build(self._smallest_within_reach(budget))
        if excess := budget.excess(build.bytes, build.ms):  # a second measurement of its time may be longer
            raise ValueError(f"the budget of {budget.words()} was missed by the smallest shape: {', '.join(excess)}")
        return build

    def _smallest(self, budget: Budget, bits: tuple[int, ...]) -> Shape:
        """The smallest shape by its estimate, of what the budget limits, with weights in these bits."""
        program = self._program(replace(self.options, bits=bits))
        return program.smallest("bytes", budget.for_estimates[1]) if budget.limits_bytes else program.smallest("ms")

    def _program(self, options: Options) -> Program:
        return Program(self._original.blocks, self.distances, self.prices, options)

    def _smallest_within_reach(self, budget: Budget) -> Shape:
        """The smallest shape, made without healing, which changes neither bytes nor time: estimates are too rough to refuse a
        budget by. Raises ValueError with what it takes if that is above."""
        found: list[tuple[bool, float, Shape]] = []
        for bits in dict.fromkeys([self.options.bits, self.options.bits[:1]]):  # 4 bits fill up narrow rows
            shape = self._smallest(budget, bits)
            build, limit = self._maker.build(shape, heals=False), budget.max_ms
            if not budget.excess(build.bytes, build.ms):
                return shape
            late = limit is not None and build.ms is not None and build.ms > limit
            found.append((late, build.ms if late and build.ms is not None else build.bytes, shape))
        late, least, shape = min(found, key=lambda one: one[:2])  # one within the time, if there is any
        shown = f"{math.ceil(1000 * least) / 1000:g} ms" if late else in_bytes_up(least * _ROUNDED)
        within = f" within {budget.limit('ms')}" if budget.limits_time and not late else ""
        raise ValueError(
            f"the budget of {budget.limit('ms' if late else 'bytes')} is out of reach: the smallest shape{within} "
            f"({self._original.words(shape)}) needs about {shown}; give it at least that, and more to keep what the model does"
        )

    def _chosen(self, limits: tuple[float, float | None], ways: Sequence[str]) -> tuple[Shape, str] | None:
        """The best of the shapes of these ways, and its way; None if there is none. If they are several, each is cut with
        calibration and compared with the original."""
        candidates: dict[str, tuple[Shape, float, str]] = {}
        for way in ways:
            if candidates and way not in self._touched(next(iter(candidates.values()))[0]):
                continue
            bits = self.options.bits[:1] if way == "bits" else self.options.bits
            options = replace(self.options, may_go=self.options.may_go - {way}, bits=bits)
            found = self._program(options).solve(*limits)
            if found is not None:
                candidates.setdefault(found[0].digest, (*found, way))
        if not candidates:
            return None
        best = min(expected for _, expected, _ in candidates.values())
        some = [one for one in candidates.values() if one[1] <= MUCH_WORSE * best]
        self._maker.forget_nearest()
        distances = [0.0] if len(some) == 1 else self._compared([(shape, expected) for shape, expected, _ in some])
        shape, _, way = some[distances.index(min(distances))]
        return shape, way

    def _compared(self, candidates: Sequence[tuple[Shape, float]]) -> list[float]:
        """How far each of these shapes is from the original. With each: what is expected."""
        phases, distances = self._maker.phases, []
        self._maker.progress.plan(sum(not phases.done(f"tried-{shape.digest}") for shape, _ in candidates))
        for shape, expected in candidates:
            distance = phases.once(f"tried-{shape.digest}", lambda shape=shape: self._maker.distance(shape))
            (size, ms), words = self.prices.cost(shape), self._original.words(shape)
            costs: Any = {"bytes": size, "ms": ms if self.prices.knows_time else None}
            tried = Tried(words=words, loss=distance, expected=expected, **costs)
            self.tried += [tried] if tried not in self.tried else []
            self._say(f"candidate: {words}: about {in_bytes(size)}; loss {distance:.2g} (expected {expected:.2g})")
            distances.append(distance)
        return distances

    def _touched(self, shape: Shape) -> set[str]:
        """Of the ways, what a shape has less of."""
        blocks, depths = self._original.blocks, self._original.depths
        kinds = {blocks[name].kind for name, units in shape.units.items() if units < blocks[name].units}
        kinds |= {"layers"} if any(len(shape.layers[stack]) < depth for stack, depth in depths.items()) else set()
        return kinds | ({"bits"} if any(bits < self.options.bits[0] for bits in shape.bits.values()) else set())


def _above(cost: tuple[float, float], limits: tuple[float, float | None]) -> bool:
    """Whether bytes or milliseconds are above their limits."""
    return cost[0] > limits[0] or (limits[1] is not None and cost[1] > limits[1])
