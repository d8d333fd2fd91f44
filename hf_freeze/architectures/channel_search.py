"""Finds the hidden channels of a small model.

Exchanging the channels of the residual stream, in everything that reads or writes it, leaves a model as it is. So what lies
before the layers gets another order of channels, the small model runs, and the first module whose tensors are neither as before
nor in the new order tells that something before it has to follow. This goes on until nothing is left, and needs no names.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.channels import MATRICES, ChannelMap, NotFound, pattern_of, reads, tensors_in
from hf_freeze.architectures.roles import is_norm

_SAME = 2e-4  # relative difference below which two tensors are alike
_LESS = 0.98  # a change is a step towards an order if it leaves at most this share of the difference
_NEAR = 24  # so many of the last dimensions are tried in twos, and their like after them
_MOST_RUNS = 1500

Places = tuple[tuple[str, int], ...]
"""(parameter or buffer, axis) of dimensions that go together, such as the rows of a linear and its bias."""


class _Wrong(Exception):
    """Ends a run at the first call with tensors in no order."""


class Finder:
    """Finds the channels of `model`, a small one full of noise, on `inputs`; `stacks`: the names of its lists of layers.

    The model has hooks until `close()`.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], stacks: Iterable[str]) -> None:
        self.model, self.inputs = model, inputs
        self.firsts = {f"{name}.0": name for name in stacks}
        self.tensors = {
            name: tensor
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if tensor.is_floating_point() and tensor.ndim
        }
        self.names = dict(model.named_modules())
        _vary_norms(model)
        self.whole = {name: value.detach().clone() for name, value in self.tensors.items()}
        self.expected: list[tuple[str, bool, list[torch.Tensor]]] = []  # (module, whether it gets them, tensors)
        # id of an expected tensor: `_orders`
        self.orders: dict[int, tuple[torch.Tensor, float, list[torch.Tensor]]] = {}
        self.started: dict[str, int] = {}  # module -> the number of its first call
        self.norms: dict[str, str] = {}
        self.runs = 0
        self.handles = list(self._hooks())
        self.hidden = self._record()
        self.order = torch.randperm(self.hidden, generator=torch.Generator().manual_seed(4))
        self.units = self._units()

    # -- runs ------------------------------------------------------------------------------------------------------------

    def _hooks(self) -> Iterator[Any]:
        """Have `see(module name, whether it gets them, tensors)` called before and after each module."""
        for name, module in self.names.items():
            if name:
                yield module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: self.see(name, True, list(tensors_in((args, kwargs)))),
                    with_kwargs=True,
                )
                yield module.register_forward_hook(
                    lambda *call, name=name: self.see(name, False, list(tensors_in(call[2])))
                )

    def close(self) -> None:
        """Leave the model without hooks. They stay from run to run, of which there are hundreds."""
        for handle in self.handles:
            handle.remove()

    def _forward(self, see: Callable[[str, bool, list[torch.Tensor]], None]) -> list[torch.Tensor]:
        self.see = see
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return list(tensors_in(self.model(**copy.deepcopy(self.inputs))))

    def _record(self) -> int:
        """Run the model as it is; returns the number of channels: that of the states which the first layers get."""
        sizes: list[int] = []
        last: list[Any] = []  # the norm that was called last, and its outputs

        def see(name: str, given: bool, tensors: list[torch.Tensor]) -> None:
            states = [t for t in tensors if t.is_floating_point() and t.ndim > 2]
            if given and name in self.firsts and name not in self.started and states:
                sizes.append(states[0].shape[-1])
            if given:
                self.started.setdefault(name, len(self.expected))
                if states and last and last[1].shape == states[0].shape and _parallel(last[1], states[0]):
                    self.norms.setdefault(name, last[0])
            elif states and is_norm(self.names[name]):
                last[:] = name, states[0].clone()
            self.expected.append((name, given, [t.detach().clone() for t in tensors]))

        outputs = self._forward(see)
        self.expected.append(("", False, [t.detach().clone() for t in outputs]))
        self.firsts = {name: stack for name, stack in self.firsts.items() if name in self.started}
        if len(set(sizes)) != 1:
            raise NotFound(
                f"its stacks have states of {sorted(set(sizes))} channels" if sizes else "it has no stack of layers"
            )
        return sizes[0]

    def first_wrong(self, flipped: frozenset[Places], *, strict: bool = False) -> tuple[int, float]:
        """(number of the first call with tensors in no order, how far they are from one) where the channels of `flipped` are in
        another order; the number of all calls and 0.0 if there is none. `strict`: the old order alone is one."""
        count, wrong = 0, (len(self.expected), 0.0)
        seen: dict[int, torch.Tensor] = {}  # modules hand tensors on
        self.runs += 1
        if self.runs > _MOST_RUNS:
            raise NotFound("what its hidden channels are was not found in time")

        def see(name: str, given: bool, tensors: list[torch.Tensor]) -> None:
            nonlocal count, wrong
            expected = self.expected[count]
            distance = (
                self._distance(tensors, expected[2], given, strict, seen)
                if expected[:2] == (name, given)
                else float("inf")
            )
            if distance:
                wrong = count, distance
                raise _Wrong
            count += 1

        with suppress(_Wrong), self.reordered(flipped):
            see("", False, self._forward(see))
        return wrong

    @contextmanager
    def reordered(self, flipped: Iterable[Places]) -> Iterator[None]:
        places = [place for unit in flipped for place in unit]
        try:
            for name, axis in places:
                self.tensors[name].data = self.tensors[name].data.index_select(axis, self.order)
            yield
        finally:
            for name, _ in places:
                self.tensors[name].data = self.whole[name].clone()

    def _distance(
        self, actual: list[torch.Tensor], expected: list[torch.Tensor], given: bool, strict: bool, seen: Any
    ) -> float:
        """How far tensors are from what they should be, relative to their size: 0.0 in the old or in the new order."""
        if len(actual) != len(expected):
            return float("inf")
        total = 0.0
        for x, y in zip(actual, expected, strict=True):
            if x.shape != y.shape:
                return float("inf")
            if id(x) in seen or torch.equal(x, y):
                continue
            seen[id(x)] = x
            has_channels = self.hidden in x.shape and not strict
            if not x.is_floating_point() or (given and not has_channels and not strict):
                continue  # some read a shape off a slice of the states
            x = _bounded(x)
            y, size, reordered = self._orders(y)
            distance = float((x - y).norm())
            if has_channels and distance >= _SAME * size:
                distance = min(float((x - other).norm()) for other in reordered)
            if distance > _SAME * size + 1e-7:
                total += distance / max(size, 1e-9)
        return total

    def _orders(self, expected: torch.Tensor) -> tuple[torch.Tensor, float, list[torch.Tensor]]:
        """(the tensor, its norm, and it in the new order along each axis that may be that of the channels); made once."""
        if id(expected) not in self.orders:
            y = _bounded(expected)
            axes = [axis for axis, size in enumerate(y.shape) if size == self.hidden]
            self.orders[id(expected)] = y, float(y.norm()), [y.index_select(axis, self.order) for axis in axes]
        return self.orders[id(expected)]

    # -- the search ------------------------------------------------------------------------------------------------------

    def _units(self) -> dict[Places, int]:
        """Dimensions that may be channels -> the number of the call at which they are first used."""
        owners: dict[int, list[str]] = {}
        for name, module in self.names.items():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                owners.setdefault(id(tensor), []).append(name)
        like: dict[Any, list[tuple[str, int]]] = {}
        for module_name, module in self.names.items():
            pattern = pattern_of(self.model, module_name)
            prefix = f"{module_name}." if module_name else ""
            sides: dict[Any, list[tuple[str, int]]] = {}
            for name in (*module._parameters, *module._buffers):
                tensor: Any = self.tensors.get(f"{prefix}{name}")
                for axis, size in enumerate(() if tensor is None else tensor.shape):
                    if size == self.hidden:
                        side: Any = (name, axis)
                        if isinstance(module, MATRICES) or tensor.ndim == 1:
                            side = tensor.ndim > 1 and axis == (0 if isinstance(module, Conv1D) else 1)
                        sides.setdefault(side, []).append((f"{prefix}{name}", axis))
            for side, places in sides.items():
                like.setdefault((pattern, side), []).extend(places)
        return {
            tuple(places): min(self._start(user) for name, _ in places for user in owners[id(self.tensors[name])])
            for places in like.values()
        }

    def _start(self, name: str) -> int:
        """The number of the first call of a module, or of the module that it lies in, if that takes its weights."""
        while name and name not in self.started:
            name = name.rpartition(".")[0]
        return self.started.get(name, 0)

    def find(self) -> frozenset[Places]:
        """The dimensions that are channels. Raises NotFound."""
        first = max(map(self.started.__getitem__, self.firsts))
        inside = tuple(f"{name}." for name in self.firsts.values())
        flipped = frozenset(
            unit for unit, start in self.units.items() if start < first and not unit[0][0].startswith(inside)
        )
        place, distance = self.first_wrong(flipped)
        while place < len(self.expected):
            step = self._step(flipped, place, distance, 2)
            if step is None:
                name, given, _ = self.expected[place]
                raise NotFound(f"{name or 'the model'!r} {'gets' if given else 'gives'} states in no order")
            flipped, place, distance = step
        if not flipped:
            raise NotFound("what follows another order of its hidden channels was not found")
        return flipped

    def _step(
        self, flipped: frozenset[Places], place: int, distance: float, depth: int
    ) -> tuple[frozenset[Places], int, float] | None:
        """More dimensions than `flipped` (or less), with which a run comes further than to the call `place`, or nearer to an
        order there; None if none are found. `depth`: so many more may have to follow one."""
        near = sorted(
            (u for u, start in self.units.items() if start <= place), key=self.units.__getitem__, reverse=True
        )
        best, worse = None, []
        for unit in near:
            other = flipped ^ {unit}
            number, left = self.first_wrong(other)
            if number > place:
                return other, number, left
            if number == place and left < (_LESS * distance if best is None else best[2]):
                best = other, number, left
            if number < place:
                worse.append((other, number, left))
        if best is not None or not depth:
            return best
        for state in worse[:_NEAR]:
            last = state[1]
            while state is not None and state[1] <= place:
                state = self._step(*state, depth - 1)
                if state is not None and state[1] < last:
                    state = None
            if state is not None:
                return state
        return None

    # -- the proof -------------------------------------------------------------------------------------------------------

    def idle(self, flipped: frozenset[Places]) -> list[Places]:
        """The dimensions that do not matter: in the order of the others, or out of it, they do not change the outputs, as those
        of modules which are not used."""
        found = []
        for unit in self.units:
            # What a head computes from the states may well be in another order.
            one = (
                self.first_wrong(flipped - {unit})
                if unit in flipped
                else self.first_wrong(frozenset({unit}), strict=True)
            )
            if one[0] == len(self.expected):
                found.append(unit)
        return found

    def channels(self, flipped: frozenset[Places]) -> ChannelMap:
        """What is found, for any model of this kind. Raises NotFound where layers of one list differ."""
        axes: dict[str, tuple[int, ...]] = {}
        read: set[tuple[str, int]] = set()
        found: dict[str, list[int]] = {}
        for name, axis in (place for unit in flipped for place in unit):
            found.setdefault(name, []).append(axis)
        same = {id(tensor): name for name, tensor in self.tensors.items()}
        for module_name, module in self.model.named_modules(remove_duplicate=False):
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                full = f"{module_name}.{name}" if module_name else name
                own = tuple(sorted(found.get(same.get(id(tensor), ""), ())))
                pattern = pattern_of(self.model, full)
                if axes.setdefault(pattern, own) != own:
                    raise NotFound(f"not all of its {pattern!r} are alike")
                read |= {(pattern, axis) for axis in own if reads(module, name, axis)}
        norms = {pattern_of(self.model, name): pattern_of(self.model, norm) for name, norm in self.norms.items()}
        return ChannelMap(axes, frozenset(read), norms)


@torch.no_grad()
def _vary_norms(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if is_norm(module) else ():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def _bounded(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0, 0, 0).clamp_(-1e6, 1e6)


def _parallel(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether one is the other times a positive number."""
    return float((x / x.norm() - y / y.norm()).norm()) < _SAME
