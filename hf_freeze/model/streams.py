"""The states that go from layer to layer in two models: the one before a method, and the new one as far as it is converted.

The arguments of a layer (masks, positions, a bias that another layer has computed) are those that the model itself has given it,
caught by hooks. Where a stack does more between its layers than to pass states on, or the new model gives its layers other
arguments than the old one, which is looked at before each layer, the states do not flow, and whole models run.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hf_freeze.architectures.registry import architecture_for
from hf_freeze.model.paging import Paged
from hf_freeze.model.visiting import accelerator
from hf_freeze.model.watching import (
    Call,
    Reached,
    calls_of,
    ends_of,
    first_input,
    hooked,
    norms_of,
    seen_both,
    seen_in,
    swapped,
)

_SAME = 1e-3  # relative difference of states up to which a stream is what the model itself computes

Place = tuple[str, int]  # stack, layer


class Streams:
    """Both streams of states, before the layer `at` of the old model.

    `flow`: whether states are passed from layer to layer, so that a layer can run alone. Models and their streams are named
    "old" and "new". `paged`: where states lie, if only a layer or two of the models fit into memory.
    """

    def __init__(self, old: Any, new: Any, batches: Sequence[Mapping[str, Any]], paged: Paged | None = None) -> None:
        self.models = {"old": old, "new": new}
        self.architecture = architecture_for(old)
        self.at: Place | None = None
        self.flow = False
        self._batches, self._paged = batches, paged
        self.device = None if paged is None else accelerator()  # of the present layer in both models
        self._joins: dict[tuple[str, str], str | None] = {}
        self._recorded: list[dict[str, Tensor]] = []  # of each batch, as `record` says
        depths = self.architecture.depths(old.config)
        self._places = [(stack, layer) for stack, depth in depths.items() for layer in range(depth)]
        self._caught: list[dict[Place, list[tuple[Tensor, Call]]]] = []  # of each batch
        self._calls: dict[str, list[list[Call]]] = {}  # model -> of each batch, those of all layers of the stack
        self.states: dict[str, list[Tensor]] = {}  # model -> of each batch, what comes into the present layer

    def layer(self, model: str, place: Place) -> Any:
        """A layer of one of the models."""
        stack, number = place
        return self.models[model].base_model.get_submodule(self.architecture.stacks[stack].layers.format(number))

    def start(self, stack: str) -> bool:
        """Begin both streams of a stack. Whether its layers are called one after another, each once."""
        if not self._caught:
            self._catch()
        places = [place for place in self._places if place[0] == stack]
        self._calls, self.states = {"old": [], "new": []}, {"old": [], "new": []}
        for batch, caught in zip(self._batches, self._caught, strict=True):
            first = calls_of(self.models["new"], batch, [self.layer("new", (stack, 0))])[0]
            if len(first) != 1 or any(len(caught[place]) != 1 for place in places):
                return False
            calls = [caught[place][0][1] for place in places]
            self._calls["old"].append(calls)
            self.states["old"].append(caught[places[0]][0][0])
            self._calls["new"].append([call.with_arguments_of(calls[0], first[0][1]) for call in calls])
            self.states["new"].append(first[0][0])
        return True

    def _catch(self) -> None:
        """Catch how the old model calls its layers, and what comes into each stack. Where all that the calls of a stack carry is
        in its first one, other batches than the first only run up to there."""
        firsts = {place: (place[0], 0) for place in self._places}
        stacks = list(dict.fromkeys(firsts.values()))
        for batch in self._batches:
            follow = bool(self._caught) and all(
                len(calls) == 1 and calls[0][1].shares_all_with(self._caught[0][firsts[place]][0][1])
                for place, calls in self._caught[0].items()
            )
            places = stacks if follow else self._places
            layers = [self.layer("old", place) for place in places]
            caught = dict(zip(places, calls_of(self.models["old"], batch, layers, to_end=not follow), strict=True))
            for place, first in firsts.items() if follow else ():
                if place != first:
                    calls = [one[first][0][1] for one in (self._caught[0], caught)]
                    call = self._caught[0][place][0][1].with_arguments_of(*calls)
                    caught[place] = [(torch.empty(0), call)]
            for place, calls in caught.items():  # to compare with, the states of one batch
                needed = not self._caught or place in stacks
                caught[place] = [(self._kept(states if needed else torch.empty(0)), call) for states, call in calls]
            self._caught.append(caught)

    def _kept(self, states: Tensor) -> Tensor:
        return states if self._paged is None or not states.numel() else self._paged.copied(states)

    def check(self, number: int | None = None) -> None:
        """Give the streams up, if for the first batch they are not what the models themselves give this layer, which is layer
        `number` of the new one."""
        if not self.flow or self.at is None:
            return
        stack, layer = self.at
        flow = _same(self.states["old"][0], self._caught[0][self.at][0][0])
        # Of a model that is larger than the memory, all layers before this one are read for that.
        if flow and (self._paged is None or not layer & (layer - 1)):
            new_layer = self.layer("new", (stack, layer if number is None else number))
            caught = calls_of(self.models["new"], self._batches[0], [new_layer])[0]
            flow = _same(self.states["new"][0], caught[0][0] if caught else None)
        if not flow:
            self.flow, self.states, self._calls = False, {}, {}

    def run(self, model: str, batch: int, layer: nn.Module | None = None) -> Tensor:
        """What the present layer of a model, or `layer` instead, gives for the batch of this number."""
        stack, number = self._present()
        call, states = self._calls[model][batch][number], self.states[model][batch]
        if self.device is not None:
            call, states = call.on(self.device), states.to(self.device)
        return call.run(self.layer(model, (stack, number)) if layer is None else layer, states)

    def record(self, linears: Sequence[str], readers: Sequence[str] = ()) -> None:
        """Run the present layer of the old model once, and keep of each batch the outputs of these linears, what `readers` and
        norms read, and as "" what leaves the layer; where both models are one, also what the linears read."""
        layer, self._recorded = self.layer("old", self._present()), []
        for batch in range(len(self._batches)):
            seen: dict[str, Tensor] = {}
            copies: dict[int, tuple[Tensor, Tensor]] = {}  # several linears may read the same states
            look = functools.partial(self._look, seen, copies)
            read: dict[str, Tensor] = {}
            norms = [(part, functools.partial(first_input, read, name)) for name, part in norms_of(layer)]
            norms += [
                (layer.get_submodule(self._within(name)), functools.partial(first_input, read, f"{name} reads"))
                for name in readers
            ]
            outputs = [(layer.get_submodule(self._within(name)), functools.partial(look, name)) for name in linears]
            with hooked(norms, before=True), hooked(outputs):
                end = self.run("old", batch)
            self._recorded.append(seen | {name: self._kept(states) for name, states in (read | {"": end}).items()})

    def _look(
        self,
        seen: dict[str, Tensor],
        copies: dict[int, tuple[Tensor, Tensor]],
        name: str,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        output: Tensor,
    ) -> None:
        """Keep what a linear gives, and what it reads, the first time that it runs."""
        if name in seen:
            return
        seen[name] = self._kept(output)
        if self._is_one:
            states = (*args, *kwargs.values())[0]
            if id(states) not in copies:
                copies[id(states)] = states, self._kept(states)
            seen[f"{name} reads"] = copies[id(states)][1]

    @property
    def _is_one(self) -> bool:
        return self.models["old"] is self.models["new"]

    def _known(self, model: str, batch: int, names: Sequence[str], *, outputs: bool) -> list[Tensor] | None:
        """Inputs, or outputs, of linears that were recorded, if those of all of them were."""
        if not self._recorded or not (model == "old" or self._is_one):
            return None
        found = [self._recorded[batch].get(name if outputs else f"{name} reads") for name in names]
        return None if any(value is None for value in found) else found  # type: ignore[return-value]

    def changes(self, batch: int) -> tuple[Tensor, Tensor]:
        """What comes into the present layer of the old model, and what leaves it, as `record` has kept it."""
        return self.states["old"][batch], self._recorded[batch][""]

    def leave(
        self,
        fit: Callable[[nn.Module, Callable[[int], Tensor]], None],
        number: int | None = None,
        last: int | None = None,
        keep: Callable[[str, int, Tensor], Tensor] = lambda model, batch, states: states,
    ) -> None:
        """Bring both streams through the present layer of the old model, up to layer `last` of it, and through layer `number` of
        the new one, for which `fit(layer, run)` is called before; `run` gives its states for a batch. `keep(model, batch,
        states)`: the states as they are kept."""
        stack, at = self._present()
        number, last = at if number is None else number, at if last is None else last
        if self._recorded:
            self.states["old"], self._recorded = [keep("old", b, one[""]) for b, one in enumerate(self._recorded)], []
            at = last + 1
        for through in range(at, last + 1):
            old = self.layer("old", (stack, through))
            self.states["old"] = [
                calls[through].run(old, states)
                for calls, states in zip(self._calls["old"], self.states["old"], strict=True)
            ]
        layer = self.layer("new", (stack, number))
        run = functools.partial(self.run, "new", layer=layer)
        fit(layer, run)
        if self._is_one:
            self.states["new"] = self.states["old"]
            return
        self.states["new"] = [keep("new", batch, run(batch)) for batch in range(len(self._batches))]

    def watch(
        self,
        model: str,
        place: Place | None,
        batch: int,
        names: Sequence[str],
        before: Sequence[str] = (),
        *,
        outputs: bool,
    ) -> dict[str, list[Any]]:
        """Name -> inputs (of experts `Routed`), or outputs, of the linear in a model, for the batch of this number, of each time
        that it runs; linears that do not run are missing. `before`: modules that are those of the old model."""
        if (known := self._known(model, batch, names, outputs=outputs)) is not None:
            return {name: [value] for name, value in zip(names, known, strict=True)}
        own = self.models[model]
        with swapped(self.models["old"], own, before):
            modules = {name: own.base_model.get_submodule(name) for name in names}
            if place is None or not self.flow:
                again = place is not None and any(len(caught[place]) > 1 for caught in self._caught)
                return seen_in(modules, outputs, lambda: own(**self._batches[batch]), again=again)
            return seen_in(modules, outputs, lambda: self.run(model, batch))

    # -- where a linear joins the stream -----------------------------------------------------------------------------------

    def joins(self, name: str) -> str | None:
        """Where the outputs of a linear of the present layer are added to the stream: the module that reads the sum, "" for the
        end of the layer; None if they are not just added. Found by adding noise to them; in models larger than the memory once
        for all layers of a stack."""
        if self._paged is None:
            return self._found_join(name)
        key = (self._present()[0], self._within(name))
        if key not in self._joins:
            self._joins[key] = self._found_join(name)
        return self._joins[key]

    def _found_join(self, name: str) -> str | None:
        plain, output = self._read_after(name, None)
        if output is None:
            return None
        waves = torch.sin(torch.arange(output.numel(), device=output.device, dtype=torch.float32)).view_as(output)
        noise = (waves * output.float().std()).to(output)
        noisy, _ = self._read_after(name, noise)
        for module, states in plain.items():
            if states.numel() == noise.numel() and _same((noisy[module] - states).reshape(noise.shape), noise):
                return module
        return None

    def _read_after(self, name: str, noise: Tensor | None) -> tuple[dict[str, Tensor], Tensor | None]:
        """What the norms of a layer of the old model read after a linear has run, and the end of the layer as ""; and the output
        of the linear, to which `noise` is added; None if it does not run once."""
        layer = self.layer("old", self._present())
        inputs: dict[str, Tensor] = {}
        outputs: list[Tensor] = []

        def add(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            inputs.clear()
            outputs.append(output)
            return output if noise is None else output + noise

        norms = [(part, functools.partial(first_input, inputs, part_name)) for part_name, part in norms_of(layer)]
        with hooked(norms, before=True), hooked([(layer.get_submodule(self._within(name)), add)]):
            end = self.run("old", 0)
        return {**inputs, "": end}, outputs[0] if len(outputs) == 1 else None

    def joined(self, model: str, batch: int, name: str, at: str) -> tuple[Any, Tensor, Tensor] | None:
        """(input, output, sum) of a linear, or of experts, whose outputs are added to the states of the layer `at` a module."""
        both = [self._known(model, batch, [name], outputs=outputs) for outputs in (False, True)]
        if both[0] is not None and both[1] is not None and at in self._recorded[batch]:
            return both[0][0], both[1][0], self._recorded[batch][at]
        layer = self.layer(model, self._present())
        inputs: dict[str, Tensor] = {}
        linear = layer.get_submodule(self._within(name))

        ran: list[nn.Module] = []

        def read(module: nn.Module, args: Any, kwargs: Any) -> None:
            first_input(inputs, at, module, args, kwargs)
            if ran:
                raise Reached

        def run() -> None:
            with suppress(Reached):
                inputs.setdefault("", self.run(model, batch))

        with (
            hooked([(linear, lambda module, *_: ran.append(module))]),
            hooked([(layer.get_submodule(at), read)] if at else [], before=True),
        ):
            seen = seen_both(linear, run)
        return None if seen is None else (*seen, inputs[at])

    def wanted(self, batch: int, name: str, at: str) -> Tensor | None:
        """The sum that `joined` gives for the old model."""
        if self._recorded:
            return self._recorded[batch].get(at)
        found = self.joined("old", batch, name, at)
        return None if found is None else found[2]

    def ends_in_norm(self) -> bool:
        """Whether the present layer gives what a norm gives."""
        with ends_of([self.layer("old", self._present())]) as ends:
            self.run("old", 0)
        return ends[0].norm is not None

    def _present(self) -> Place:
        if self.at is None:
            raise RuntimeError("the streams are before no layer")
        return self.at

    def _within(self, name: str) -> str:
        """The name of a module of the present layer, below it."""
        stack, number = self._present()
        return name.removeprefix(f"{self.architecture.stacks[stack].layers.format(number)}.")


def _same(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape:
        return False
    one, other = one.float(), other.float()
    return bool((one - other).norm() <= _SAME * other.norm())
