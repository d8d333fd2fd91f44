"""The pass through a model, layer by layer, that tells a method what each linear sees while it converts the weights.

Two streams of states flow through the layers (`streams.py`): that of the model before the method, and that of the new model as
far as it has been converted. Where a method asks for the moments of a linear, both have come up to its layer; so the error of
earlier layers is known to later ones, which can correct it. When all of a layer is converted, the weights of what was cut in it
are fitted together (`solvers/descent.py`), so that it gives what the old layer gave. In memory are the states of all batches
before one layer, and nothing of other layers.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hf_freeze import surgery
from hf_freeze.layers.derived import Derived, features
from hf_freeze.methods.base import Method
from hf_freeze.model.calibration import Calibration, Report, calibrated_linears
from hf_freeze.model.curvature import curvatures
from hf_freeze.model.fidelity import fidelity_on
from hf_freeze.model.finished_layers import FinishedLayers, States
from hf_freeze.model.fitting import fit_together, may_be_fitted
from hf_freeze.model.paging import Paged
from hf_freeze.model.running import fast_linears, first_row, in_eval_mode, without_cache
from hf_freeze.model.samples import samples_of
from hf_freeze.model.streams import Place, Streams
from hf_freeze.model.sums import Sums, add_routed, error_weights, selected
from hf_freeze.model.visiting import Visit
from hf_freeze.model.watching import Routed, seen_in, swapped
from hf_freeze.model.whole_model import Batch, WholeModel
from hf_freeze.progress import track
from hf_freeze.solvers.moments import Moments, behind
from hf_freeze.surgery.replacing import DENSE

_FEW = 8  # batches that compare many candidates


class CalibrationPass(WholeModel):
    """The statistics of one method's conversion of `old` to `new` on `batches` (`hf_freeze.methods.parts.Statistics`).

    `make(model, method)`: the variant without a calibration. `paged`: given if only a layer or two fit into memory, so nothing
    goes back through all of them; states and finished layers lie there, and after a kill the pass resumes.
    """

    def __init__(
        self,
        old: Any,
        new: Any,
        batches: Sequence[Batch],
        report: Report,
        make: Callable[[Any, Method], Any],
        paged: Paged | None = None,
    ) -> None:
        super().__init__(old, batches)
        self.report, self._make, self._new, self._paged = report, make, new, paged
        self.streams = Streams(old, new, self._batches, paged)
        self._finished: FinishedLayers | None = None
        self._visit: Visit | None = None
        self._walks = 0
        self._groups: list[list[str]] = []  # of the present walk
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
                fast_linears(self._old.dtype),
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
        resumes: bool | None = None,
    ) -> Iterator[dict[str, Moments | None]]:
        self.streams.at, self._channels = None, channels
        # Not experts: some see too few tokens to fit all of their weights.
        alone = [name for name in names if fit and self._paged is None and surgery.owner_of(self._old, name) == name]
        self._fitted = [module for name in alone for module in (name, *before.get(name, ()))]
        known = set(names) <= self._curvatures.keys()
        if curvature and not known and self._paged is None:
            self._curvatures = curvatures(self._old, self._batches, dict(surgery.modules(self._old, names)))
        self._keeps_old = any(self._place(name) is None for name in names)
        self._widest = max((features(linear)[0] for _, linear in surgery.modules(self._old, names)), default=0)
        self._groups = groups = self._in_order(names, norms)
        if self._paged is not None and (self._old is not self._new if resumes is None else resumes):
            groups = self._resumed(self._paged)
        for group in track(groups, "Calibrating", len(groups)):
            yield self._moments(group, [module for name in group for module in before.get(name, ())], group[0] in norms)
            # Linears of a group run to reach the next one, and may have kept a weight from before they had values.
            for name in group:
                for part in () if surgery.is_removed(self._new, name) else surgery.linear_at(self._new, name).modules():
                    if isinstance(part, Derived):
                        part.forget()
        self._end_stack()
        self._finished = None
        self.report.warn_of_experts()

    def _in_order(self, linears: Sequence[str], norms: Sequence[str]) -> list[list[str]]:
        """Linears and norms in the order in which the old model runs them; linears that read the same states, or of one module of
        experts, are together."""
        names = [*linears, *norms]
        owners = {name: surgery.owner_of(self._old, name) for name in names}
        modules = {owner: self._old.base_model.get_submodule(owner) for owner in owners.values()}
        batch = self._batches[0] if self._paged is None else first_row(self._batches[0])
        reads = seen_in(modules, False, lambda: self._old(**batch))
        places = {name: self._place(name) for name in names}
        order = {name: number for number, name in enumerate(reads)}
        # Some may not have run.
        last = {places[name]: order[owners[name]] + 0.5 for name in names if owners[name] in order}
        ranked = sorted(names, key=lambda name: order.get(owners[name], last.get(places[name], len(order))))

        def group(name: str) -> Any:
            return places[name], id(reads[name][0]) if name in reads and name not in norms else owners[name]

        return [list(together) for _, together in itertools.groupby(ranked, group)]

    def _moments(self, names: Sequence[str], before: Sequence[str], of_norm: bool) -> dict[str, Moments | None]:
        place = self._place(names[0])
        if place is not None:
            self._enter(*place)
        sums = {name: Sums() for name in names}
        owner, stream = surgery.owner_of(self._old, names[0]), None
        watched = [owner] if owner != names[0] else names
        for name in watched[1:]:
            sums[name].reads_as = sums[watched[0]]
        if len(watched) == 1 and not of_norm and place is not None and self.streams.flow:
            # Where the norm at the end of a layer is refitted, what its inputs lack counts for less: with joined fits MiniLM of
            # 3/4 of the channels was no better.
            narrower = self._is_narrower(names[0]) and not self.streams.ends_in_norm()
            stream = self.streams.joins(owner) if narrower or self._is_as_wide(names[0], before) else None
        wide, read = stream is None and not of_norm and self._is_wide(names), Sums()
        watched = watched[:1] if wide else watched
        for number, batch in enumerate(self._batches):
            if stream is not None:
                self._add_joined(sums, place, number, owner, before, stream)
                continue
            given = owner == names[0] and not wide
            outputs = self.streams.watch("old", place, number, watched, outputs=given)
            # The others read the same states, so that they need not run.
            inputs = self.streams.watch("new", place, number, watched[:1], before, outputs=of_norm)
            inputs = {name: inputs.get(watched[0], []) for name in watched}
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
                    if wide and y is not None:
                        read.add(selected(y, rows), None)
        moments = {name: of_name.moments(name) for name, of_name in sums.items()}
        if wide:
            moments = self._behind(names, moments[names[0]], read)
        if owner != names[0]:
            moments = self.report.enough(owner, moments)
        for name, seen in moments.items():
            if seen is not None:
                self.report.check_tokens(name, seen.count, 1 if of_norm else len(seen.mean), self._widest)
                moments[name] = replace(seen, curvature=self._curvatures.get(name))
        return moments

    def _is_wide(self, names: Sequence[str]) -> bool:
        """Whether the outputs of linears that read the same states are more than twice as many as their inputs: then it is faster
        to compute their moments from those of the inputs."""
        if self._paged is None or self._old is self._new or not self.streams.flow or self._channels:
            return False
        linears = [linear for _, linear in surgery.modules(self._old, names)]
        sizes = [features(linear) for linear in linears if type(linear) in DENSE]
        return len(sizes) == len(names) and sum(outputs for _, outputs in sizes) > 2 * sizes[0][0]

    def _behind(self, names: Sequence[str], seen: Moments | None, read: Sums) -> dict[str, Moments | None]:
        """The moments of linears that are wide. `seen`: with the old inputs for outputs; `read`: of the old inputs."""
        if seen is None or seen.cross is None:
            return dict.fromkeys(names, seen)
        (gram, _), linears = read.of_inputs(), surgery.modules(self._old, names)
        return {name: behind(surgery.effective_weight(one), one.bias, seen, gram) for name, one in linears}

    def _add_joined(
        self, sums: Mapping[str, Sums], place: Place | None, number: int, owner: str, before: Sequence[str], at: str
    ) -> None:
        """Add to the sums of a linear, or of those of experts, what it sees where its outputs are added to the states."""
        old = self.streams.wanted(number, owner, at)
        without_values = () if self._channels else dict.fromkeys((*before, owner))
        with swapped(self._old, self._new, without_values):
            new = self.streams.joined("new", number, owner, at)
        if old is None or new is None or (states := self._left(old)).shape != new[2].shape:
            return
        (x, output, joined), wanted = new, states.to(new[1].device).reshape(new[1].shape)
        lacking = wanted - joined.reshape(output.shape)
        rows = self._real.rows(owner, place, self._batches[number], x.states if isinstance(x, Routed) else x)
        if isinstance(x, Routed):
            add_routed(sums, x, x, rows, (lacking, wanted))
        else:
            weights = error_weights(selected(wanted, rows))
            sums[owner].add(selected(x, rows), selected(lacking + output, rows), weights)

    def fit(self, stack: str, spans: Sequence[tuple[int, int]], names: Sequence[str]) -> None:
        if self._paged is not None or not names:
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

    # -- the way through the layers ----------------------------------------------------------------------------------------

    def _enter(self, stack: str, layer: int) -> None:
        """Bring both streams up to this layer."""
        streams = self.streams
        if streams.at is None or streams.at[0] != stack:
            self._end_stack()
            streams.at, streams.flow = (stack, 0), streams.start(stack)
            self._begin_layer()
        while streams.at[1] < layer:
            self._leave()
            streams.at = (stack, streams.at[1] + 1)
            self._begin_layer()

    def _begin_layer(self) -> None:
        """Before the first linear of the present layer is asked for."""
        self.streams.check()
        self._let_go()
        if self._paged is not None and self.streams.flow:
            self._begin_visit()
            inside = [group for group in self._groups if self._place(group[0]) == self.streams.at]
            wide = [group[0] for group in inside if self._is_wide(group)]
            others = [name for group in inside if group[0] not in wide for name in group]
            self.streams.record([name for name in others if surgery.owner_of(self._old, name) == name], wide)

    def _begin_visit(self) -> None:
        """Have the present layer of both models on the GPU, if there is one."""
        if (device := self.streams.device) is not None and self.streams.at is not None:
            self._visit = Visit(device)
            for model in ("old", "new") if self._old is not self._new else ("old",):
                self._visit.begin(self.streams.layer(model, self.streams.at))

    def _end_visit(self) -> None:
        if self._visit is not None and self.streams.at is not None:
            self._visit.end(*(self.streams.layer(model, self.streams.at) for model in ("old", "new")))
            self._visit = None

    def _end_stack(self) -> None:
        """After the last linear of the present stack: no states are needed behind it."""
        self._end_visit()
        if self._fitted:
            self._leave()
        elif self._finished is not None and self.streams.at is not None and self.streams.flow:
            self._keep_layer(*self.streams.at, self._finished, {}, None)

    def _resumed(self, paged: Paged) -> list[list[str]]:
        """Take over what a killed process has finished of this walk, and return the groups that are left."""
        if self._walks:
            paged.next_step()
        self._walks += 1
        places = {place for group in self._groups if (place := self._place(group[0])) is not None}
        last = {stack: max(layer for name, layer in places if name == stack) for stack, _ in places}
        self._finished = done = FinishedLayers(paged, sum(number + 1 for number in last.values()))
        for stack, layer in done.places:
            paged.restore_layer(*self._layer(stack, layer))
        for name, (plain, calibrated) in done.errors.items():
            self.record(name, plain, calibrated)
        if done.places and (place := done.places[-1])[1] < last[place[0]]:
            stack, layer = place
            self.streams.flow = self.streams.start(stack)
            states = done.states()
            self.streams.states = {"old": states["old"], "new": states.get("new", states["old"])}
            self.streams.at = stack, layer + 1
            self._begin_layer()
        return [group for group in self._groups if self._place(group[0]) not in done.places]

    def _layer(self, stack: str, layer: int) -> tuple[str, nn.Module]:
        """(name, module) of a layer of the new model."""
        return self._architecture.stacks[stack].layers.format(layer), self.streams.layer("new", (stack, layer))

    def _place(self, name: str) -> Place | None:
        return self._architecture.layer_of(f"{name}.")

    def _keep_layer(
        self, stack: str, layer: int, finished: FinishedLayers, states: States, error: float | None
    ) -> None:
        """Keep what is finished of a layer in files."""
        finished.paged.keep_layer(*self._layer(stack, layer))
        errors = {name: each for name, each in self.report.errors.items() if self._place(name) == (stack, layer)}
        finished.add((stack, layer), states, error, errors)

    def _leave(self, number: int | None = None, last: int | None = None) -> None:
        """Bring both streams through the present layer, as `Streams.leave` does; what was converted in it is fitted before, all
        of it together, to what leaves the old one."""
        if self.streams.at is None or not self.streams.flow:
            return
        stack, at = self.streams.at
        parameters = may_be_fitted(self._old, self._new, self._fitted, stack, at if number is None else number)
        fit = functools.partial(self._fit, parameters)
        if (finished := self._finished) is None:
            self.streams.leave(fit, number, last)
            self._end_visit()
            return

        def keep(model: str, batch: int, states: Tensor) -> Tensor:
            return finished.file(model, at + 1, batch, states)

        self.streams.leave(fit, keep=keep)
        self._end_visit()
        if self._old is self._new:
            self._keep_layer(stack, at, finished, {"old": self.streams.states["old"]}, None)
        else:
            self._keep_layer(stack, at, finished, self.streams.states, self._error())

    def _error(self) -> float | None:
        """Of what leaves a layer, relative to what leaves the old one."""
        error = size = 0.0
        for number, (old, new) in enumerate(zip(*self.streams.states.values(), strict=True)):
            if (wanted := self._left(old)).shape == new.shape:
                rows = self._real.rows("", self.streams.at, self._batches[number], old)
                one, other = selected(wanted, rows).float(), selected(new, rows).float()
                error, size = error + float((one - other).square().sum()), size + float(one.square().sum())
        return (error / size) ** 0.5 if size else None

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


def collect(model: Any, calibration: Any, tokenizer: Any = None) -> Calibration:
    """The moments of all linears of attention and FFN of `model` as it is, on all of `calibration` (`samples_of`, whose errors it
    raises)."""
    samples = samples_of(model, calibration, tokenizer).undivided()
    with CalibrationPass(model, model, samples.batches, Report(), lambda *_: model).running() as statistics:
        moments = statistics.at_once(calibrated_linears(model))
    return Calibration.of(model, moments, samples.texts, samples.tokens)
