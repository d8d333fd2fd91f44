"""The pass through a model, layer by layer, that tells a method what each linear sees while it converts the weights.

Two streams of states flow through the layers: that of the model before the method, and that of the new model as far as it has
been converted. Where a method asks for the moments of a linear, both have come up to its layer; so the error of earlier layers is
known to later ones, which can correct it. When all of a layer is converted, the weights of what was cut in it are fitted
together (`solvers/descent.py`), so that it gives what the old layer gave. In memory are the states of all batches before one
layer, and nothing of other layers.

The arguments of a layer (masks, positions, a bias that another layer has computed) are those that the model itself has given it,
caught by hooks. Where a stack does more between its layers than to pass states on, or the new model gives its layers other
arguments than the old one, which is looked at before each layer, the whole model runs up to the linear in question.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hf_freeze import surgery
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.roles import EXPERT_OUTPUT
from hf_freeze.compat.transformers import mask_of_frames
from hf_freeze.layers.derived import Derived, SelfInitialized, features
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import KeptTokens
from hf_freeze.model import paging
from hf_freeze.model.calibration import Calibration, Report, StoredMoments, calibrated_linears, warned_once
from hf_freeze.model.curvature import curvatures
from hf_freeze.model.fidelity import fidelity_on
from hf_freeze.model.fitting import coordinates_of
from hf_freeze.model.running import decoder_mask, in_eval_mode, on_device, without_cache
from hf_freeze.model.samples import Samples, samples_of
from hf_freeze.model.watching import (
    Call,
    Routed,
    calls_of,
    ends_of,
    first_input,
    norms_of,
    read_by,
    remembering,
    seen_both,
    seen_in,
    swapped,
)
from hf_freeze.model.weights import regenerate
from hf_freeze.progress import track
from hf_freeze.solvers.descent import descend
from hf_freeze.solvers.moments import Moments, working_dtype

_FEW = 8  # batches that compare many candidates
_SAME = 1e-3  # relative difference of states up to which a stream is what the model itself computes
_LEAST = 1e-12  # mean square of the states of a token that counts most

Batch = Mapping[str, Any]
Place = tuple[str, int]  # stack, layer


@dataclass
class _Sums:
    """Sums over tokens, of which `Moments` are the means."""

    count: int = 0
    total: float = 0  # of the weights of tokens
    gram: Any = 0
    mean: Any = 0
    cross: Any = 0
    outputs: Any = 0
    squares: Any = 0
    paired: bool = True

    def add(self, x: Tensor, y: Tensor | None, weights: Tensor | None = None) -> None:
        """x: (T, I) inputs; y: (T, O) outputs of the model before, if they are of the same tokens; weights: (T, 1) how much an
        error counts for each token."""
        x = x.to(working_dtype(x))
        weights = x.new_ones(len(x), 1) if weights is None else weights.to(x)
        weighted = weights * x
        self.count += len(x)
        self.total += float(weights.sum())
        self.gram = self.gram + x.T @ weighted
        self.mean = self.mean + weighted.sum(0)
        self.paired = self.paired and y is not None
        if y is not None and self.paired:
            y = y.to(x)
            self.cross = self.cross + y.T @ weighted
            self.outputs = self.outputs + (weights * y).sum(0)
            self.squares = self.squares + (weights * y.square()).sum(0)

    def moments(self, name: str) -> Moments | None:
        """Those of the linear `name`. Raises ValueError if they are not finite."""
        if not self.total:
            return None
        pairs = {"cross": self.cross, "output_mean": self.outputs, "output_square": self.squares} if self.paired else {}
        means = {name: value / self.total for name, value in pairs.items()}
        try:
            return Moments(self.gram / self.total, self.mean / self.total, self.count, **means)
        except ValueError as error:
            raise ValueError(f"calibration: the inputs or outputs of {name!r} cannot be used: {error}") from None


class CalibrationPass:
    """The statistics of one method's conversion of `old` to `new` on `batches` (`hf_freeze.methods.parts.Statistics`)."""

    def __init__(
        self, old: Any, new: Any, batches: Sequence[Batch], report: Report, make: Callable[[Any, Method], Any]
    ) -> None:
        self.report = report
        self._make = make
        self._old, self._new = old, new
        self._batches = [on_device(old, batch) for batch in batches]
        self._architecture = architecture_for(old)
        depths = self._architecture.depths(old.config)
        self._places = [(stack, layer) for stack, depth in depths.items() for layer in range(depth)]
        attentions = self._architecture.attentions(old.config)
        self._reads_encoder = {
            linear for name, one in attentions.items() if name.endswith(".cross") for linear in (one.k, one.v)
        }
        self._at: Place | None = None
        self._curvatures: dict[str, Tensor] = {}
        self._streams = False  # whether states are passed from layer to layer
        self._whole = False  # whether the whole old model is needed until the end
        self._caught: list[dict[Place, list[tuple[Tensor, Call]]]] = []  # of each batch
        self._calls: dict[
            str, list[list[Call]]
        ] = {}  # "old" and "new" -> of each batch, those of all layers of the stack
        self._states: dict[
            str, list[Tensor]
        ] = {}  # "old" and "new" -> of each batch, what comes into the present layer
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
        self._at, self._channels = None, channels
        # Not experts: some see too few tokens to fit all of their weights.
        alone = [
            name for name in names if fit and paging.active() is None and surgery.owner_of(self._old, name) == name
        ]
        self._fitted = [module for name in alone for module in (name, *before.get(name, ()))]
        known = set(names) <= self._curvatures.keys()
        if curvature and not known and paging.active() is None:  # which goes back through all layers
            self._curvatures = curvatures(self._old, self._batches, dict(surgery.modules(self._old, names)))
        self._whole = any(self._architecture.layer_of(f"{name}.") is None for name in names)
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
        sums = {name: _Sums() for name in names}
        owner, stream = surgery.owner_of(self._old, names[0]), None
        watched = [owner] if owner != names[0] else names
        alone = len(watched) == 1 and not of_norm and place is not None and self._streams
        if alone and place is not None:
            narrower = self._is_narrower(names[0]) and not self._ends_in_norm(place)
            stream = self._joins(place, owner) if narrower or self._is_as_wide(names[0], before) else None
        for number, batch in enumerate(self._batches):
            if stream is not None:
                self._add_joined(sums, place, number, owner, before, stream)
                continue
            outputs = self._watch("old", place, number, watched, (), outputs=owner == names[0])
            for name, calls in self._watch("new", place, number, watched, before, outputs=of_norm).items():
                for x, y in itertools.zip_longest(calls, outputs.get(name, ())[: len(calls)]):
                    if isinstance(x, Routed):
                        _add_routed(sums, x, y, self._rows(name, place, batch, x.states))
                        continue
                    rows = self._rows(name, place, batch, x)
                    routed = x.dim() == 2 and rows is None  # other tokens in both models
                    if y is not None and (routed or y.shape[:-1] != x.shape[:-1]):
                        y = None
                    elif y is not None and (of_norm or self._is_narrower(name)):
                        y = self._left(y)
                    sums[name].add(_selected(x, rows), None if y is None else _selected(y, rows))
        moments = {name: each.moments(name) for name, each in sums.items()}
        if owner != names[0]:
            moments = self.report.enough(owner, moments)
        for name, each in moments.items():
            if each is not None:
                self.report.check_tokens(name, each.count, 1 if of_norm else len(each.mean), self._widest)
        return {
            name: replace(each, curvature=self._curvatures.get(name)) if each is not None else None
            for name, each in moments.items()
        }

    def _add_joined(
        self, sums: Mapping[str, _Sums], place: Any, number: int, owner: str, before: Sequence[str], stream: str
    ) -> None:
        """Add to the sums of a linear, or of those of experts, what it sees where its outputs are added to the states."""
        own = self._joined("old", place, number, owner, stream)
        without_values = () if self._channels else dict.fromkeys((*before, owner))
        with swapped(self._old, self._new, without_values):
            new = self._joined("new", place, number, owner, stream)
        if own is None or new is None or (states := self._left(own[2])).shape != new[2].shape:
            return
        (x, output, joined), wanted = new, states.reshape(new[1].shape)
        lacking = wanted - joined.reshape(output.shape)
        rows = self._rows(owner, place, self._batches[number], x.states if isinstance(x, Routed) else x)
        if isinstance(x, Routed):
            _add_routed(sums, x, x, rows, (lacking, wanted))
        else:
            sums[owner].add(_selected(x, rows), _selected(lacking + output, rows), _weights(_selected(wanted, rows)))

    def lookups(self, tables: Sequence[str]) -> Tensor:
        modules = {self._old.get_submodule(name) for name in tables}
        counts = torch.zeros(max(module.num_embeddings for module in modules), dtype=torch.int64)
        batch: Batch = {}

        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            ids = (*args, *kwargs.values())[0]
            if (mask := self._mask_of(batch, ids)) is not None:
                ids = ids[mask]
            counts.add_(torch.bincount(ids.flatten(), minlength=len(counts)).cpu())

        with ExitStack() as handles:
            for module in modules:
                handles.callback(module.register_forward_pre_hook(count, with_kwargs=True).remove)
            for batch in self._batches:
                self._old(**batch)
        return counts

    def routed(self, modules: Sequence[str]) -> dict[str, Tensor]:
        matrices = {name: self._old.base_model.get_submodule(name).get_parameter(EXPERT_OUTPUT) for name in modules}
        found = {name: torch.zeros(len(each), dtype=torch.float64) for name, each in matrices.items()}
        batch: Batch = {}

        def add(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            x = read_by(module, args, kwargs)
            rows = self._rows(name, self._architecture.layer_of(f"{name}."), batch, x.states)
            for number, total in enumerate(found[name]):
                tokens, factors = x.tokens(number, rows)
                total += (factors * x.outputs(number, tokens)).double().square().sum().cpu()

        with ExitStack() as handles:
            for name in modules:
                hook = functools.partial(add, name)
                module = self._old.base_model.get_submodule(name)
                handles.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for batch in track(self._batches, "Calibrating", len(self._batches)):
                self._old(**batch)
        return found

    def output_moments(self) -> Moments | None:
        output = self._old.get_output_embeddings()
        if output is None:
            return None
        sums = _Sums()
        for batch in self._batches:
            x = seen_in({"": output}, False, lambda batch=batch: self._old(**batch))[""][0]
            sums.add(_selected(x, self._rows("", None, batch, x)), None)
        return sums.moments("the output matrix")

    def across(self, linear: str, first: str, last: str) -> tuple[Moments, tuple[str, str] | None] | None:
        sums, norms = _Sums(), None
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
            rows = self._rows(linear, self._architecture.layer_of(f"{linear}."), batch, x)
            sums.add(_selected(x, rows), _selected(y + wanted - own, rows))
        moments = sums.moments(linear)
        return None if moments is None else (moments, norms)

    def fit(self, stack: str, spans: Sequence[tuple[int, int]], names: Sequence[str]) -> None:
        if paging.active() is not None or not names:
            return
        self._streams, self._fitted = self._start(stack), [*names]
        for number, (first, last) in enumerate(spans):
            self._at = (stack, first)
            self._check_streams(number)
            self._leave(number, last)
        self._at = None

    def distance(self, method: Method) -> float:
        return fidelity_on(self._old, self._make(self._old, method), self._batches[:_FEW]).distance

    def _joins(self, place: Place, name: str) -> str | None:
        """Where the outputs of a linear are added to the stream of states of its layer: the module that reads the sum, "" for the
        end of the layer; None if they are not just added. Found by adding noise to them."""
        plain, output = self._read_after(place, name, None)
        if output is None:
            return None
        waves = torch.sin(torch.arange(output.numel(), device=output.device, dtype=torch.float32)).view_as(output)
        noise = (waves * output.float().std()).to(output)
        noisy, _ = self._read_after(place, name, noise)
        for module, states in plain.items():
            if states.numel() == noise.numel() and _same((noisy[module] - states).reshape(noise.shape), noise):
                return module
        return None

    def _read_after(self, place: Place, name: str, noise: Tensor | None) -> tuple[dict[str, Tensor], Tensor | None]:
        """What the norms of a layer of the old model read after a linear has run, and the end of the layer as ""; and the output
        of the linear, to which `noise` is added; None if it does not run once."""
        layer, prefix = self._layer(self._old, *place), self._prefix(place)
        inputs: dict[str, Tensor] = {}
        outputs: list[Tensor] = []

        def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            inputs.clear()
            outputs.append(output)
            return output if noise is None else output + noise

        with ExitStack() as handles:
            for part_name, part in norms_of(layer):
                hook = functools.partial(first_input, inputs, part_name)
                handles.callback(part.register_forward_pre_hook(hook, with_kwargs=True).remove)
            linear = layer.get_submodule(name.removeprefix(prefix))
            handles.callback(linear.register_forward_hook(add).remove)
            end = self._calls["old"][0][place[1]].run(layer, self._states["old"][0])
        return {**inputs, "": end}, outputs[0] if len(outputs) == 1 else None

    def _is_as_wide(self, name: str, before: Sequence[str]) -> bool:
        """Whether the stream that a linear writes to has as many channels in both models."""
        if name in before or any(name.startswith(f"{module}.") for module in before):
            return True
        old, new = (surgery.linear_at(model, name) for model in (self._old, self._new))
        return features(old) == features(new)

    def _ends_in_norm(self, place: Place) -> bool:
        """Whether a layer gives what a norm gives. Where the norm is refitted, what its inputs lack counts for less: with joined
        fits MiniLM of 3/4 of the channels was no better."""
        layer = self._layer(self._old, *place)
        with ends_of([layer]) as ends:
            self._calls["old"][0][place[1]].run(layer, self._states["old"][0])
        return ends[0].norm is not None

    def _is_narrower(self, name: str) -> bool:
        """Whether a linear writes to a stream that has lost channels (it has its other weights already)."""
        if not self._channels:
            return False
        old, new = (features(surgery.linear_at(model, name))[1] for model in (self._old, self._new))
        return len(self._channels) == new < old

    def _left(self, states: Tensor) -> Tensor:
        """The channels of old states that the new model has."""
        return states[..., self._channels] if self._channels else states

    def _prefix(self, place: Place) -> str:
        return self._architecture.stacks[place[0]].layers.format(place[1]) + "."

    def _joined(self, stream: str, place: Any, number: int, name: str, at: str) -> tuple[Any, Tensor, Tensor] | None:
        """(input, output, sum) of a linear, or of experts, whose outputs are added to the states of the layer `at` a module."""
        model = self._old if stream == "old" else self._new
        layer, prefix = self._layer(model, *place), self._prefix(place)
        inputs: dict[str, Tensor] = {}
        handle = None
        if at:
            hook = functools.partial(first_input, inputs, at)
            handle = layer.get_submodule(at).register_forward_pre_hook(hook, with_kwargs=True)

        def run() -> None:
            inputs.setdefault("", self._calls[stream][number][place[1]].run(layer, self._states[stream][number]))

        try:
            seen = seen_both(layer.get_submodule(name.removeprefix(prefix)), run)
        finally:
            if handle is not None:
                handle.remove()
        return None if seen is None else (*seen, inputs[at])

    def record(self, name: str, plain: float, calibrated: float) -> None:
        self.report.errors[name] = (plain, calibrated)

    def note(self, text: str) -> None:
        self.report.note(text)

    def at_once(self, names: Sequence[str]) -> dict[str, Moments | None]:
        """The moments of linears of the old model as it is, in one forward of each batch, in the order in which they run. Those
        that read the same states share one object. A module of several layers has seen the inputs of all of them."""
        sums: dict[str, _Sums] = {}
        leaders: dict[str, str] = {}  # linear -> the first of those that read the same states
        latest: tuple[Any, str] = (None, "")
        batch: Batch = {}

        def look(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal latest
            x = read_by(module, args, kwargs)
            place = self._architecture.layer_of(f"{name}.")
            if isinstance(x, Routed):
                of_experts = {each: sums.setdefault(each, _Sums()) for each in owned[name]}
                leaders.update(zip(of_experts, of_experts, strict=True))
                _add_routed(of_experts, x, None, self._rows(name, place, batch, x.states))
                return
            leader = leaders.setdefault(name, latest[1] if x is latest[0] else name)
            latest = x, leader
            if leader == name:
                sums.setdefault(name, _Sums()).add(_selected(x, self._rows(name, place, batch, x)), None)

        owned: dict[str, list[str]] = {}  # the module that runs linears -> these
        for name in names:
            owned.setdefault(surgery.owner_of(self._old, name), []).append(name)
        hooks = [
            module.register_forward_pre_hook(functools.partial(look, name), with_kwargs=True)
            for name, module in surgery.modules(self._old, owned)
        ]
        try:
            for batch in track(self._batches, "Calibrating", len(self._batches)):
                self._old(**batch)
                latest = None, ""
        finally:
            for hook in hooks:
                hook.remove()
        moments = {name: each.moments(name) for name, each in sums.items()}
        return {name: moments[leader] for name, leader in leaders.items()}

    # -- the way through the layers ----------------------------------------------------------------------------------------

    def _layer(self, model: Any, stack: str, layer: int) -> Any:
        return model.base_model.get_submodule(self._architecture.stacks[stack].layers.format(layer))

    def _enter(self, stack: str, layer: int) -> None:
        """Bring both streams up to this layer."""
        if self._at is None or self._at[0] != stack:
            if self._fitted:
                self._leave()
            self._at, self._streams = (stack, 0), self._start(stack)
            self._check_streams()
            self._let_go()
        while (at := self._at[1]) < layer:
            self._leave()
            self._let_go()
            self._at = (stack, at + 1)
            self._check_streams()

    def _leave(self, number: int | None = None, last: int | None = None) -> None:
        """Bring both streams through the present layer of the old model, up to layer `last` of it, and through layer `number` of
        the new one, where what was converted is fitted before, all of it together, to what leaves the old one."""
        if self._at is None or not self._streams:
            return
        stack, at = self._at
        number, last = at if number is None else number, at if last is None else last
        for through in range(at, last + 1):
            layer = self._layer(self._old, stack, through)
            self._states["old"] = [
                calls[through].run(layer, states)
                for calls, states in zip(self._calls["old"], self._states["old"], strict=True)
            ]
        layer = self._layer(self._new, stack, number)

        def run(batch: int) -> Tensor:
            return self._calls["new"][batch][at].run(layer, self._states["new"][batch])

        if parameters := self._fitted_parameters(stack, number):
            self._fit(layer, parameters, run)
        self._states["new"] = [run(batch) for batch in range(len(self._batches))]

    def _fit(self, layer: nn.Module, parameters: list[nn.Parameter], run: Callable[[int], Tensor]) -> None:
        """Fit parameters of a layer so that `run` of each batch gives the states of the old stream, if these have as many values
        as there are parameters."""
        targets = self._states["old"]
        if run(0).shape != targets[0].shape:
            return
        weights = [_weights(target.float()) for target in targets]
        for number, (batch, target) in enumerate(zip(self._batches, targets, strict=True)):
            rows = self._rows("", self._at, batch, target)
            weights[number] = weights[number] if rows is None else weights[number] * rows[..., None]
        size = sum(float((w * t.square()).sum()) for w, t in zip(weights, targets, strict=True))
        values = sum(int(w.count_nonzero()) for w in weights) * targets[0].shape[-1]
        if values < sum(p.numel() for p in parameters):
            self.report.note("fewer values than weights in a layer: its weights were not fitted together")
            return

        def errors() -> Iterator[Tensor]:
            for number, (weight, target) in enumerate(zip(weights, targets, strict=True)):
                begin(number)
                yield (weight * (run(number) - target).square()).sum() / size

        def outputs() -> Iterator[Tensor]:
            for number, weight in enumerate(weights):
                begin(number)
                yield (weight / size).sqrt() * run(number)

        with remembering(layer, parameters) as begin:
            descend(parameters, errors, coordinates_of(layer, parameters, outputs))

    def _fitted_parameters(self, stack: str, number: int) -> list[nn.Parameter]:
        """Those of a layer of the new model that may be fitted: in fp32 or fp64, not seeded, of no other layer, and not of a
        layer that another method has made."""
        architecture = architecture_for(self._new)
        prefix = f"{architecture.stacks[stack].layers.format(number)}."
        depth = architecture.depths(self._new.config)[stack]
        uses = Counter(id(p) for at in range(depth) for p in {*self._layer(self._new, stack, at).parameters()})
        fixed = {id(p) for name, p in self._new.named_parameters() if name in getattr(self._new, "seeded_tensors", ())}
        names = tuple(name for name in self._fitted if name.startswith(prefix))
        before = dict(self._old.base_model.named_modules())
        found: dict[int, nn.Parameter] = {}
        for name, part in self._new.base_model.named_modules():
            ours = isinstance(part, SelfInitialized) and type(part) is type(before.get(name))
            if not ours and any(name == each or name.startswith(f"{each}.") for each in names):
                found |= {id(p): p for p in part.parameters(recurse=False) if p.dtype in (torch.float32, torch.float64)}
        return [p for key, p in found.items() if uses[key] == 1 and key not in fixed]

    def _let_go(self) -> None:
        """Free those tensors of the old model that no stream comes to any more."""
        if self._streams and not self._whole:
            surgery.let_go(self._old)

    def _catch(self) -> None:
        """Catch how the old model calls its layers, and what comes into each stack."""
        layers = [self._layer(self._old, *place) for place in self._places]
        for batch in self._batches:
            caught = dict(zip(self._places, calls_of(self._old, batch, layers, to_end=True), strict=True))
            self._caught.append(caught)
            if len(self._caught) > 1:  # of the other batches, no states but the first ones
                for (stack, layer), calls in caught.items():
                    caught[stack, layer] = [(torch.empty(0) if layer else states, call) for states, call in calls]

    def _start(self, stack: str) -> bool:
        """Begin both streams of a stack. Whether its layers are called one after another, each once."""
        if not self._caught:
            self._catch()
        places = [place for place in self._places if place[0] == stack]
        self._calls, self._states = {"old": [], "new": []}, {"old": [], "new": []}
        for batch, caught in zip(self._batches, self._caught, strict=True):
            first = calls_of(self._new, batch, [self._layer(self._new, stack, 0)])[0]
            if len(first) != 1 or any(len(caught[place]) != 1 for place in places):
                return False
            calls = [caught[place][0][1] for place in places]
            self._calls["old"].append(calls)
            self._states["old"].append(caught[places[0]][0][0])
            self._calls["new"].append([each.with_arguments_of(calls[0], first[0][1]) for each in calls])
            self._states["new"].append(first[0][0])
        return True

    def _check_streams(self, number: int | None = None) -> None:
        """Give the streams up, if for the first batch they are not what the models themselves give this layer, which is layer
        `number` of the new one."""
        if not self._streams or self._at is None:
            return
        stack, layer = self._at
        new_layer = self._layer(self._new, stack, layer if number is None else number)
        caught = calls_of(self._new, self._batches[0], [new_layer])[0]
        new = caught[0][0] if caught else None
        if not (_same(self._states["old"][0], self._caught[0][self._at][0][0]) and _same(self._states["new"][0], new)):
            self._streams, self._states, self._calls = False, {}, {}

    def _watch(
        self,
        stream: str,
        place: Place | None,
        number: int,
        names: Sequence[str],
        before: Sequence[str],
        *,
        outputs: bool,
    ) -> dict[str, list[Any]]:
        """Name -> inputs (of experts `Routed`), or outputs, of the linear in the model of a `stream`, for batch `number`, of each
        time that it runs; linears that do not run are missing. `before`: modules that are those of the old model."""
        model = self._old if stream == "old" else self._new
        with swapped(self._old, model, before):
            modules = {name: model.base_model.get_submodule(name) for name in names}
            if place is None or not self._streams:
                again = place is not None and any(len(caught[place]) > 1 for caught in self._caught)
                return seen_in(modules, outputs, lambda: model(**self._batches[number]), again=again)
            call, states = self._calls[stream][number][place[1]], self._states[stream][number]
            layer = self._layer(model, *place)
            return seen_in(modules, outputs, lambda: call.run(layer, states))

    def _mask_of(self, batch: Batch, ids: Tensor) -> Tensor | None:
        """bool, as `ids`: the real tokens; None where all are."""
        read = batch.get("input_ids")
        of_source = read is not None and read.shape == ids.shape and torch.equal(read, ids)
        mask = batch.get("attention_mask") if of_source else decoder_mask(batch)
        return mask.bool() if mask is not None and mask.shape == ids.shape else None

    def _rows(self, name: str, place: Place | None, batch: Batch, x: Tensor) -> Tensor | None:
        """bool, in the shape of `x` without its last axis: the real tokens; None where the rows are not those of the batch, or
        it has no mask."""
        masks = [batch.get("attention_mask")]
        if self._old.config.is_encoder_decoder:
            of_encoder = name in self._reads_encoder or (place is not None and place[0] != "decoder")
            masks.insert(int(of_encoder), decoder_mask(batch))
        shape = x.shape[:-1]
        for mask in masks:
            if mask is None or mask.dim() != 2:
                continue
            if len(shape) == 2 and mask.shape[0] == shape[0] and mask.shape[1] > shape[1] and place is not None:
                mask = mask_of_frames(self._old, mask, shape[1])
            if mask.shape == shape or shape == (mask.numel(),):
                return mask.bool().reshape(shape)
        first = next((value for value in batch.values() if torch.is_tensor(value) and value.dim() == 2), None)
        if first is not None and shape == (first.numel(),):  # all tokens, one after another
            return torch.ones(shape, dtype=torch.bool, device=x.device)
        return None


def _weights(joined: Tensor) -> Tensor:
    """(T, O) states that outputs are a part of -> (T, 1): how much an error in them counts: as for the norm that follows, by
    1 / their mean square. In some models a few tokens have states a thousand times those of others, and would be all that
    counts."""
    return 1 / joined.to(working_dtype(joined)).square().mean(-1, keepdim=True).clamp_min(_LEAST)


def _add_routed(
    sums: Mapping[str, _Sums],
    x: Routed,
    y: Routed | None,
    rows: Tensor | None,
    joined: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Add a call of experts to the sums of their linears. The last ones are to give what they give in the call `y` of the model
    before.

    joined: (T, H) twice, what lacks in the states that their outputs are added to, and these states. Then the experts of a token
    are to add that, in proportion to their factors: so the outputs of each change least. An error of an expert counts by the
    square of its factor.
    """
    y = y if y is not None and y.states.shape == x.states.shape else None
    for name, each in sums.items():
        _, parameter, last = name.rsplit(".", 2)
        number = int(last)
        tokens, factors = x.tokens(number, rows)
        weights = factors.square()
        if joined is not None:
            weights = weights * _weights(joined[1][tokens])
        if parameter != EXPERT_OUTPUT:
            each.add(x.states[tokens], None, weights)
            continue
        wanted = None if y is None else y.outputs(number, tokens)
        if wanted is not None and joined is not None:
            wanted = wanted + joined[0][tokens] * (factors / x.factors[tokens].square().sum(-1, keepdim=True))
        each.add(x.neurons(number, tokens), wanted, weights)


def _selected(x: Tensor, rows: Tensor | None) -> Tensor:
    """(T, F): the rows that count."""
    return x.reshape(-1, x.shape[-1]) if rows is None else x[rows]


def _same(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape:
        return False
    one, other = one.float(), other.float()
    return bool((one - other).norm() <= _SAME * other.norm())


def collect(model: Any, calibration: Any, tokenizer: Any = None) -> Calibration:
    """The moments of all linears of attention and FFN of `model` as it is, on all of `calibration` (`samples_of`, whose errors it
    raises)."""
    samples = samples_of(model, calibration, tokenizer).whole()
    with CalibrationPass(model, model, samples.batches, Report(), lambda *_: model).running() as statistics:
        moments = statistics.at_once(calibrated_linears(model))
    return Calibration.of(model, moments, samples.texts, samples.tokens)


class Calibrator:
    """Gives the methods of one `make_variant` their statistics, each of the model as it is by then, or those that were saved.

    `calibration`: what `samples_of` takes, or a `Calibration`. Raises the ValueError of `Calibration.check`.
    """

    def __init__(self, model: Any, calibration: Any, tokenizer: Any, make: Callable[[Any, Method], Any]) -> None:
        """`make(model, method)`: the variant without a calibration."""
        self._make = make
        self._stored: Mapping[str, Moments] | None = None
        self.samples: Samples | None = None
        if isinstance(calibration, Calibration):
            calibration.check(model)
            self._stored = calibration.moments
            self.report = Report(calibration.texts, calibration.tokens)
        else:
            self.samples = samples_of(model, calibration, tokenizer)
            self.report = Report(self.samples.texts, self.samples.tokens)

    @property
    def runs(self) -> bool:
        """Whether there are texts to run models on."""
        return self._stored is None

    @contextmanager
    def statistics(self, old: Any, new: Any) -> Iterator[CalibrationPass | StoredMoments]:
        with warned_once():
            if self.samples is None:
                with torch.no_grad(), surgery.holding(old):
                    yield StoredMoments(self._stored or {}, old, self.report)
                return
            with CalibrationPass(old, new, self.samples.batches, self.report, self._make).running() as statistics:
                yield statistics

    def convert(self, method: Method, old: Any, new: Any) -> None:
        """`method.convert` with statistics, if it uses them."""
        if method.facts.calibration is None:
            self.report.note(f"{method.name}: is the same with a calibration as without")
            method.convert(old, new)
            if method.facts.renumbers == "tokens" and self.samples is not None:
                tokens: Any = method.part(KeptTokens)
                self.samples = self.samples.renumbered(tokens.kept)
        else:
            regenerate(new)  # the new model runs, and what a seed draws has no values yet
            with self.statistics(old, new) as statistics:
                method.convert(old, new, statistics)
        if self._stored is not None and (method.facts.shares_layers or method.facts.renumbers == "layers"):
            self._stored = {}  # names are those of other layers from now on

    def compares(self, method: Method) -> bool:
        """Whether the method's plain form is made, too, to keep the better one: where there are texts for it, and memory."""
        has_both = method.facts.calibration == "used"
        return has_both and self.samples is not None and bool(self.samples.held_out) and paging.active() is None

    def better(self, method: Method, original: Any, calibrated: Any, plain: Any) -> Any:
        """That of two variants whose outputs are nearer those of the `original` on the texts that are held out."""
        held_out = self.samples.held_out if self.samples is not None else []
        distances = [fidelity_on(original, one, held_out).distance for one in (calibrated, plain)]
        if distances[0] <= distances[1]:
            return calibrated
        self.report.note(
            f"{method.name}: on texts held out, the form with calibration is further from the original ({distances[0]:.3g}) than "
            f"the one without ({distances[1]:.3g}), which was taken"
        )
        return plain
