"""The pass through a model, layer by layer, that tells a method what each linear sees while it converts the weights.

Two streams of states flow through the layers (`streams.py`): that of the model before the method, and that of the new model as
far as it has been converted. Where a method asks for the moments of a linear, both have come up to its layer; so the error of
earlier layers is known to later ones, which can correct it. When all of a layer is converted, the weights of what was cut in it
are fitted together (`solvers/descent.py`), so that it gives what the old layer gave. In memory are the states of all batches
before one layer, and nothing of other layers.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hf_freeze import surgery
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.roles import EXPERT_OUTPUT
from hf_freeze.layers.derived import Derived, SelfInitialized, features
from hf_freeze.methods.base import Method
from hf_freeze.model.calibration import Calibration, Report, calibrated_linears
from hf_freeze.model.curvature import curvatures
from hf_freeze.model.fidelity import fidelity_on
from hf_freeze.model.fitting import fit_together
from hf_freeze.model.running import RealTokens, in_eval_mode, on_device, without_cache
from hf_freeze.model.samples import samples_of
from hf_freeze.model.streams import Place, Streams
from hf_freeze.model.sums import Sums, add_routed, error_weights, selected
from hf_freeze.model.watching import Routed, ends_of, hooked, read_by, seen_both, seen_in, swapped
from hf_freeze.progress import track
from hf_freeze.solvers.moments import Moments

_FEW = 8  # batches that compare many candidates

Batch = Mapping[str, Any]


class CalibrationPass:
    """The statistics of one method's conversion of `old` to `new` on `batches` (`hf_freeze.methods.parts.Statistics`).

    `make(model, method)`: the variant without a calibration. `one_by_one`: only a layer or two fit into memory, so nothing goes
    back through all of them.
    """

    def __init__(
        self,
        old: Any,
        new: Any,
        batches: Sequence[Batch],
        report: Report,
        make: Callable[[Any, Method], Any],
        one_by_one: bool = False,
    ) -> None:
        self.report, self._make, self._one_by_one = report, make, one_by_one
        self._old, self._new = old, new
        self._batches = [on_device(old, batch) for batch in batches]
        self._architecture = architecture_for(old)
        self._real = RealTokens(old)
        self.streams = Streams(old, new, self._batches)
        self._curvatures: dict[str, Tensor] = {}
        self._keeps_old = False  # whether the whole old model is needed until the end
        self._widest = 0  # inputs of the linears that are looked at
        self._fitted: list[str] = []  # modules that are fitted together, layer by layer
        self._channels: Sequence[int] = ()  # of the old states, those that the new model has; all if none are given

    @contextmanager
    def running(self) -> Iterator["CalibrationPass"]:
        """Inside, both models are in eval mode, and the old one keeps its tensors until its layer is done."""
        with ExitStack() as contexts:
            for context in (
                *(change(model) for model in (self._old, self._new) for change in (in_eval_mode, without_cache)),
                torch.no_grad(),
                surgery.holding(self._old),
            ):
                contexts.enter_context(context)
            yield self

    def walk(
        self,
        names: Sequence[str],
        before: Mapping[str, Sequence[str]] = MappingProxyType({}),
        *,
        curvature: bool = False,
        fit: bool = False,
        norms: Sequence[str] = (),
        channels: Sequence[int] = (),
    ) -> Iterator[dict[str, Moments | None]]:
        self.streams.at, self._channels = None, channels
        # Not experts: some see too few tokens to fit all of their weights.
        alone = [name for name in names if fit and not self._one_by_one and surgery.owner_of(self._old, name) == name]
        self._fitted = [module for name in alone for module in (name, *before.get(name, ()))]
        known = set(names) <= self._curvatures.keys()
        if curvature and not known and not self._one_by_one:
            self._curvatures = curvatures(self._old, self._batches, dict(surgery.modules(self._old, names)))
        self._keeps_old = any(self._architecture.layer_of(f"{name}.") is None for name in names)
        self._widest = max((features(linear)[0] for _, linear in surgery.modules(self._old, names)), default=0)
        groups = self._in_order(names, norms)
        for group in track(groups, "Calibrating", len(groups)):
            yield self._moments(group, [module for name in group for module in before.get(name, ())], group[0] in norms)
            # Linears of a group run to reach the next one, and may have kept a weight from before they had values.
            for name in group:
                for part in () if surgery.is_removed(self._new, name) else surgery.linear_at(self._new, name).modules():
                    if isinstance(part, Derived):
                        part.forget()
        if self._fitted:
            self._leave()
        self.report.warn_of_experts()

    def _in_order(self, linears: Sequence[str], norms: Sequence[str]) -> list[list[str]]:
        """Linears and norms in the order in which the old model runs them; linears that read the same states, or of one module of
        experts, are together."""
        names = [*linears, *norms]
        owners = {name: surgery.owner_of(self._old, name) for name in names}
        modules = {owner: self._old.base_model.get_submodule(owner) for owner in owners.values()}
        reads = seen_in(modules, False, lambda: self._old(**self._batches[0]))
        places = {name: self._architecture.layer_of(f"{name}.") for name in names}
        order = {name: number for number, name in enumerate(reads)}
        # Some may not have run.
        last = {places[name]: order[owners[name]] + 0.5 for name in names if owners[name] in order}
        ranked = sorted(names, key=lambda name: order.get(owners[name], last.get(places[name], len(order))))

        def group(name: str) -> Any:
            return places[name], id(reads[name][0]) if name in reads and name not in norms else owners[name]

        return [list(together) for _, together in itertools.groupby(ranked, group)]

    def _moments(self, names: Sequence[str], before: Sequence[str], of_norm: bool) -> dict[str, Moments | None]:
        place = self._architecture.layer_of(f"{names[0]}.")
        if place is not None:
            self._enter(*place)
        sums = {name: Sums() for name in names}
        owner, stream = surgery.owner_of(self._old, names[0]), None
        watched = [owner] if owner != names[0] else names
        if len(watched) == 1 and not of_norm and place is not None and self.streams.flow:
            # Where the norm at the end of a layer is refitted, what its inputs lack counts for less: with joined fits MiniLM of
            # 3/4 of the channels was no better.
            narrower = self._is_narrower(names[0]) and not self.streams.ends_in_norm()
            stream = self.streams.joins(owner) if narrower or self._is_as_wide(names[0], before) else None
        for number, batch in enumerate(self._batches):
            if stream is not None:
                self._add_joined(sums, place, number, owner, before, stream)
                continue
            outputs = self.streams.watch("old", place, number, watched, outputs=owner == names[0])
            inputs = self.streams.watch("new", place, number, watched, before, outputs=of_norm)
            for name, calls in inputs.items():
                for x, y in itertools.zip_longest(calls, outputs.get(name, ())[: len(calls)]):
                    if isinstance(x, Routed):
                        add_routed(sums, x, y, self._real.rows(name, place, batch, x.states))
                        continue
                    rows = self._real.rows(name, place, batch, x)
                    routed = x.dim() == 2 and rows is None  # other tokens in both models
                    if y is not None and (routed or y.shape[:-1] != x.shape[:-1]):
                        y = None
                    elif y is not None and (of_norm or self._is_narrower(name)):
                        y = self._left(y)
                    sums[name].add(selected(x, rows), None if y is None else selected(y, rows))
        moments = {name: of_name.moments(name) for name, of_name in sums.items()}
        if owner != names[0]:
            moments = self.report.enough(owner, moments)
        for name, seen in moments.items():
            if seen is not None:
                self.report.check_tokens(name, seen.count, 1 if of_norm else len(seen.mean), self._widest)
                moments[name] = replace(seen, curvature=self._curvatures.get(name))
        return moments

    def _add_joined(
        self, sums: Mapping[str, Sums], place: Place | None, number: int, owner: str, before: Sequence[str], at: str
    ) -> None:
        """Add to the sums of a linear, or of those of experts, what it sees where its outputs are added to the states."""
        old = self.streams.joined("old", number, owner, at)
        without_values = () if self._channels else dict.fromkeys((*before, owner))
        with swapped(self._old, self._new, without_values):
            new = self.streams.joined("new", number, owner, at)
        if old is None or new is None or (states := self._left(old[2])).shape != new[2].shape:
            return
        (x, output, joined), wanted = new, states.reshape(new[1].shape)
        lacking = wanted - joined.reshape(output.shape)
        rows = self._real.rows(owner, place, self._batches[number], x.states if isinstance(x, Routed) else x)
        if isinstance(x, Routed):
            add_routed(sums, x, x, rows, (lacking, wanted))
        else:
            weights = error_weights(selected(wanted, rows))
            sums[owner].add(selected(x, rows), selected(lacking + output, rows), weights)

    def _run_old(
        self, modules: Mapping[str, nn.Module], see: Callable[[Batch, str, nn.Module, tuple[Any, ...]], None]
    ) -> None:
        """Run the old model as it is, and have `see` called before each of the modules, with its inputs."""

        def hook(batch: Batch, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            see(batch, name, module, (*args, *kwargs.values()))

        for batch in track(self._batches, "Calibrating", len(self._batches)):
            hooks = [(module, functools.partial(hook, batch, name)) for name, module in modules.items()]
            with hooked(hooks, before=True):
                self._old(**batch)

    def lookups(self, tables: Sequence[str]) -> Tensor:
        modules = {self._old.get_submodule(name): name for name in tables}
        counts = torch.zeros(max(module.num_embeddings for module in modules), dtype=torch.int64)

        def count(batch: Batch, name: str, module: nn.Module, inputs: Sequence[Any]) -> None:
            ids = self._real.of_ids(inputs[0], batch)
            counts.add_(torch.bincount(ids.flatten(), minlength=len(counts)).cpu())

        self._run_old({name: module for module, name in modules.items()}, count)
        return counts

    def routed(self, modules: Sequence[str]) -> dict[str, Tensor]:
        experts = {name: self._old.base_model.get_submodule(name) for name in modules}
        found = {
            name: torch.zeros(len(module.get_parameter(EXPERT_OUTPUT)), dtype=torch.float64)
            for name, module in experts.items()
        }

        def add(batch: Batch, name: str, module: nn.Module, inputs: Sequence[Any]) -> None:
            x = read_by(module, inputs)
            rows = self._real.rows(name, self._architecture.layer_of(f"{name}."), batch, x.states)
            for number, total in enumerate(found[name]):
                tokens, factors = x.tokens(number, rows)
                total += (factors * x.outputs(number, tokens)).double().square().sum().cpu()

        self._run_old(experts, add)
        return found

    def output_moments(self) -> Moments | None:
        output = self._old.get_output_embeddings()
        if output is None:
            return None
        sums = Sums()
        for batch in self._batches:
            x = seen_in({"": output}, False, lambda batch=batch: self._old(**batch))[""][0]
            sums.add(selected(x, self._real.rows("", None, batch, x)), None)
        return sums.moments("the output matrix")

    def across(self, linear: str, first: str, last: str) -> tuple[Moments, tuple[str, str] | None] | None:
        sums, norms = Sums(), None
        layers = [self._old.base_model.get_submodule(name) for name in (first, last)]
        for batch in self._batches:
            with ends_of(layers) as ends:
                seen = seen_both(self._old.base_model.get_submodule(linear), lambda: self._old(**batch))  # noqa: B023
            if seen is None:
                continue
            x, y = seen
            both = all(end.norm is not None for end in ends)
            if both:
                norms = (f"{first}.{ends[0].norm}", f"{last}.{ends[1].norm}")
            (own, wanted) = (end.before if both else end.output for end in ends)
            rows = self._real.rows(linear, self._architecture.layer_of(f"{linear}."), batch, x)
            sums.add(selected(x, rows), selected(y + wanted - own, rows))
        moments = sums.moments(linear)
        return None if moments is None else (moments, norms)

    def fit(self, stack: str, spans: Sequence[tuple[int, int]], names: Sequence[str]) -> None:
        if self._one_by_one or not names:
            return
        streams, self._fitted = self.streams, [*names]
        streams.flow = streams.start(stack)
        for number, (first, last) in enumerate(spans):
            streams.at = (stack, first)
            streams.check(number)
            self._leave(number, last)
        streams.at = None

    def distance(self, method: Method) -> float:
        return fidelity_on(self._old, self._make(self._old, method), self._batches[:_FEW]).distance

    def _is_as_wide(self, name: str, before: Sequence[str]) -> bool:
        """Whether the stream that a linear writes to has as many channels in both models."""
        if name in before or any(name.startswith(f"{module}.") for module in before):
            return True
        old, new = (surgery.linear_at(model, name) for model in (self._old, self._new))
        return features(old) == features(new)

    def _is_narrower(self, name: str) -> bool:
        """Whether a linear writes to a stream that has lost channels (it has its other weights already)."""
        if not self._channels:
            return False
        old, new = (features(surgery.linear_at(model, name))[1] for model in (self._old, self._new))
        return len(self._channels) == new < old

    def _left(self, states: Tensor) -> Tensor:
        """The channels of old states that the new model has."""
        return states[..., self._channels] if self._channels else states

    def record(self, name: str, plain: float, calibrated: float) -> None:
        self.report.errors[name] = (plain, calibrated)

    def note(self, text: str) -> None:
        self.report.note(text)

    def at_once(self, names: Sequence[str]) -> dict[str, Moments | None]:
        """The moments of linears of the old model as it is, in one forward of each batch, in the order in which they run. Those
        that read the same states share one object. A module of several layers has seen the inputs of all of them."""
        sums: dict[str, Sums] = {}
        leaders: dict[str, str] = {}  # linear -> the first of those that read the same states
        latest: tuple[Any, str] = (None, "")
        owned: dict[str, list[str]] = {}  # the module that runs linears -> these
        for name in names:
            owned.setdefault(surgery.owner_of(self._old, name), []).append(name)

        def look(batch: Batch, name: str, module: nn.Module, inputs: Sequence[Any]) -> None:
            nonlocal latest
            x = read_by(module, inputs)
            place = self._architecture.layer_of(f"{name}.")
            if isinstance(x, Routed):
                of_experts = {linear: sums.setdefault(linear, Sums()) for linear in owned[name]}
                leaders.update(zip(of_experts, of_experts, strict=True))
                add_routed(of_experts, x, None, self._real.rows(name, place, batch, x.states))
                return
            leader = leaders.setdefault(name, latest[1] if x is latest[0] else name)
            latest = x, leader
            if leader == name:
                sums.setdefault(name, Sums()).add(selected(x, self._real.rows(name, place, batch, x)), None)

        self._run_old(dict(surgery.modules(self._old, owned)), look)
        moments = {name: of_name.moments(name) for name, of_name in sums.items()}
        return {name: moments[leader] for name, leader in leaders.items()}

    # -- the way through the layers ----------------------------------------------------------------------------------------

    def _enter(self, stack: str, layer: int) -> None:
        """Bring both streams up to this layer."""
        streams = self.streams
        if streams.at is None or streams.at[0] != stack:
            if self._fitted:
                self._leave()
            streams.at, streams.flow = (stack, 0), streams.start(stack)
            streams.check()
            self._let_go()
        while streams.at[1] < layer:
            self._leave()
            self._let_go()
            streams.at = (stack, streams.at[1] + 1)
            streams.check()

    def _leave(self, number: int | None = None, last: int | None = None) -> None:
        """Bring both streams through the present layer, as `Streams.leave` does; what was converted in it is fitted before, all
        of it together, to what leaves the old one."""
        if self.streams.at is None or not self.streams.flow:
            return
        stack, at = self.streams.at
        parameters = self._fitted_parameters(stack, at if number is None else number)
        self.streams.leave(functools.partial(self._fit, parameters), number, last)

    def _let_go(self) -> None:
        """Free those tensors of the old model that no stream comes to any more."""
        if self.streams.flow and not self._keeps_old:
            surgery.let_go(self._old)

    def _fit(self, parameters: list[nn.Parameter], layer: nn.Module, run: Callable[[int], Tensor]) -> None:
        """Fit parameters of a layer so that `run` of each batch gives the states of the old stream, if these have as many values
        as there are parameters."""
        targets = self.streams.states["old"]
        if not parameters or run(0).shape != targets[0].shape:
            return
        weights = [error_weights(target.float()) for target in targets]
        for number, (batch, target) in enumerate(zip(self._batches, targets, strict=True)):
            rows = self._real.rows("", self.streams.at, batch, target)
            weights[number] = weights[number] if rows is None else weights[number] * rows[..., None]
        if not fit_together(layer, parameters, run, targets, weights):
            self.report.note("fewer values than weights in a layer: its weights were not fitted together")

    def _fitted_parameters(self, stack: str, number: int) -> list[nn.Parameter]:
        """Those of a layer of the new model that may be fitted: in fp32 or fp64, not seeded, of no other layer, and not of a
        layer that another method has made."""
        architecture = architecture_for(self._new)
        prefix = f"{architecture.stacks[stack].layers.format(number)}."
        depth = architecture.depths(self._new.config)[stack]
        uses = Counter(id(p) for at in range(depth) for p in {*self.streams.layer("new", (stack, at)).parameters()})
        fixed = {id(p) for name, p in self._new.named_parameters() if name in getattr(self._new, "seeded_tensors", ())}
        names = tuple(name for name in self._fitted if name.startswith(prefix))
        before = dict(self._old.base_model.named_modules())
        found: dict[int, nn.Parameter] = {}
        for name, part in self._new.base_model.named_modules():
            ours = isinstance(part, SelfInitialized) and type(part) is type(before.get(name))
            if not ours and any(name == each or name.startswith(f"{each}.") for each in names):
                found |= {id(p): p for p in part.parameters(recurse=False) if p.dtype in (torch.float32, torch.float64)}
        return [p for key, p in found.items() if uses[key] == 1 and key not in fixed]


def collect(model: Any, calibration: Any, tokenizer: Any = None) -> Calibration:
    """The moments of all linears of attention and FFN of `model` as it is, on all of `calibration` (`samples_of`, whose errors it
    raises)."""
    samples = samples_of(model, calibration, tokenizer).undivided()
    with CalibrationPass(model, model, samples.batches, Report(), lambda *_: model).running() as statistics:
        moments = statistics.at_once(calibrated_linears(model))
    return Calibration.of(model, moments, samples.texts, samples.tokens)
