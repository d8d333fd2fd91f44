"""Watch the forwards of a model: how it calls its layers, what comes into and out of a linear, and how a layer ends."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_freeze.architectures.roles import EXPERT_OUTPUT, are_experts, expert_input
from hf_freeze.compat.transformers import apply_gate


class Reached(Exception):
    """Ends a forward whose rest is not needed."""


@dataclass
class Call:
    """How a model calls a layer: the arguments besides the states, which are the first positional one or have a name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: str | None

    def run(self, layer: Any, states: Tensor) -> Tensor:
        output = (
            layer(states, *self.args, **self.kwargs)
            if self.states is None
            else layer(*self.args, **self.kwargs, **{self.states: states})
        )
        return output if torch.is_tensor(output) else output[0]

    def on(self, device: torch.device) -> "Call":
        """The same call with its arguments on a device."""

        def moved(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(moved, value))
            return value.to(device) if torch.is_tensor(value) else value

        return Call(moved(self.args), {key: moved(value) for key, value in self.kwargs.items()}, self.states)

    def shares_all_with(self, first: "Call") -> bool:
        """Whether all that it carries, such as a mask, is the same object in the call `first`."""
        known = {id(value) for value in (*first.args, *first.kwargs.values())}
        return all(not _carries(value) or id(value) in known for value in (*self.args, *self.kwargs.values()))

    def with_arguments_of(self, first: "Call", new: "Call") -> "Call":
        """The same call, but what it shares with the call `first` of a first layer is as in the call `new` of one for another
        model or batch."""
        pairs = [*zip(first.args, new.args, strict=False), *((v, new.kwargs.get(k)) for k, v in first.kwargs.items())]
        other = {id(old): value for old, value in pairs if _carries(old)}
        args = tuple(other.get(id(value), value) for value in self.args)
        return Call(args, {key: other.get(id(value), value) for key, value in self.kwargs.items()}, self.states)


def _carries(value: Any) -> bool:
    """Whether an argument is more than a setting."""
    return not isinstance(value, bool | int | float | str | None)


@dataclass
class Routed:
    """A call of a module of experts: T tokens, k experts for each."""

    experts: Any
    states: Tensor  # (T, H)
    index: Tensor  # (T, k) the experts of each token
    factors: Tensor  # (T, k) of their outputs

    def tokens(self, number: int, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of one expert: its tokens (N,), of `rows` (T,) alone if that is given, and its factors for them (N, 1)."""
        at = self.index == number
        tokens, places = (at if rows is None else at & rows[:, None]).nonzero(as_tuple=True)
        return tokens, self.factors[tokens, places][:, None]

    def neurons(self, number: int, tokens: Tensor) -> Tensor:
        """(N,) -> (N, W): the values of the neurons of one expert for these tokens."""
        values = functional.linear(self.states[tokens], self.experts.get_parameter(expert_input(self.experts))[number])
        has_gate = values.shape[-1] != self.experts.get_parameter(EXPERT_OUTPUT).shape[-1]
        return apply_gate(self.experts, values) if has_gate else self.experts.act_fn(values)

    def outputs(self, number: int, tokens: Tensor) -> Tensor:
        """(N,) -> (N, H): the outputs of one expert for these tokens, whether it gets them or not, before its factor."""
        return functional.linear(self.neurons(number, tokens), self.experts.get_parameter(EXPERT_OUTPUT)[number])


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]], *, before: bool = False) -> Iterator[None]:
    """Inside, each hook is called after its module, with (module, args, kwargs, output), or `before` it, without the output."""
    with ExitStack() as handles:
        for module, hook in hooks:
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            handles.callback(register(hook, with_kwargs=True).remove)
        yield


@contextmanager
def swapped(old: Any, new: Any, names: Iterable[str]) -> Iterator[None]:
    """Inside, the new model has modules of the old one."""
    own = {name: new.base_model.get_submodule(name) for name in names}
    for name in names:
        new.base_model.set_submodule(name, old.base_model.get_submodule(name))
    try:
        yield
    finally:
        for name, module in own.items():
            new.base_model.set_submodule(name, module)


def seen_in(
    modules: Mapping[str, nn.Module], outputs: bool, run: Callable[[], Any], *, again: bool = False
) -> dict[str, list[Any]]:
    """Name -> first inputs (of experts `Routed`), or outputs, of each of the modules in a run, in their order: of their first
    call, and the run ends with that of the last of them; or where they may run `again`, of all calls."""
    seen: dict[str, list[Any]] = {}

    def look(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        if again or name not in seen:
            seen.setdefault(name, []).append(output if outputs else read_by(module, (*args, *kwargs.values())))
        if len(seen) == len(modules) and not again:
            raise Reached

    hooks = [(module, functools.partial(look, name)) for name, module in modules.items()]
    with suppress(Reached), hooked(hooks, before=not outputs):
        run()
    return seen


def read_by(module: nn.Module, inputs: Sequence[Any]) -> Any:
    """The first input of a module; of experts `Routed`."""
    if not are_experts(module):
        return inputs[0]
    return Routed(module, *(value.reshape(-1, value.shape[-1]) for value in inputs[:3]))


def first_input(inputs: dict[str, Tensor], name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    inputs.setdefault(name, (*args, *kwargs.values())[0])


def norms_of(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the parts of a layer that have no parameters but vectors."""
    for name, part in layer.named_modules():
        if name and {parameter.dim() for parameter in part.parameters()} == {1}:
            yield name, part


@dataclass
class End:
    """How a layer ends: its `output` (B, T, H); if that is what a norm in it gives, the norm's name and what comes `before`."""

    output: Any = None
    norm: str | None = None
    before: Any = None


@contextmanager
def ends_of(layers: Sequence[nn.Module]) -> Iterator[list[End]]:
    """The ends of these layers, filled in by a forward inside."""
    ends = [End() for _ in layers]
    last: dict[int, tuple[str, Tensor, Any]] = {}

    def after_part(number: int, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if args and torch.is_tensor(args[0]):
            last[number] = (name, args[0], output)

    def after_layer(number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        ends[number].output = output if torch.is_tensor(output) else output[0]
        if number in last and last[number][2] is ends[number].output:
            ends[number].norm, ends[number].before, _ = last[number]

    hooks = []
    for number, layer in enumerate(layers):
        hooks += [(part, functools.partial(after_part, number, name)) for name, part in norms_of(layer)]
        hooks.append((layer, functools.partial(after_layer, number)))
    with hooked(hooks):
        yield ends


def seen_both(linear: nn.Module, run: Callable[[], Any]) -> tuple[Any, Tensor] | None:
    """(input, output) of the linear in a run, which goes on to its end; None if it does not run. Of experts, too (`Routed`)."""
    seen: list[Any] = []

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.append((read_by(module, (*args, *kwargs.values())), output))

    with hooked([(linear, look)]):
        run()
    return seen[0] if seen else None


def calls_of(
    model: Any, batch: Mapping[str, Any], layers: Sequence[nn.Module], *, to_end: bool = False
) -> list[list[tuple[Tensor, Call]]]:
    """For each of the layers, (states, call) of its calls in a forward of the model, until each has run, or `to_end`."""
    caught: list[list[tuple[Tensor, Call]]] = [[] for _ in layers]

    def catch(number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if args:
            caught[number].append((args[0], Call(args[1:], kwargs, None)))
        else:
            name = next((name for name in ("hidden_states", *kwargs) if torch.is_tensor(kwargs.get(name))), "")
            rest = {key: value for key, value in kwargs.items() if key != name}
            caught[number].append((kwargs.get(name, torch.empty(0)), Call((), rest, name)))
        if all(caught) and not to_end:
            raise Reached

    hooks = [(layer, functools.partial(catch, number)) for number, layer in enumerate(layers)]
    with suppress(Reached), hooked(hooks, before=True):
        model(**batch)
    return caught


@contextmanager
def remembering(layer: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[Callable[[Any], None]]:
    """Inside, gradients are only for these `parameters` of a layer, and what comes before them is computed once: `begin(key)`
    is called before each run, and in later runs with the same key, which have the same inputs, the parts of the layer that do not
    depend on `parameters` give what they gave then."""
    chosen = {id(parameter) for parameter in parameters}
    flags = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
    parts = [part for part in layer.children() if not {*map(id, part.parameters())} & chosen and [*part.parameters()]]
    own = [vars(part).get("forward") for part in parts]
    known: dict[Any, Any] = {}
    run: list[Any] = [None, 0]

    def remembered(forward: Any, *args: Any, **kwargs: Any) -> Any:
        run[1] += 1
        if any(torch.is_tensor(value) and value.requires_grad for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        if tuple(run) not in known:
            known[tuple(run)] = forward(*args, **kwargs)
        return known[tuple(run)]

    def begin(key: Any) -> None:
        run[:] = key, 0

    for parameter, _ in flags:
        parameter.requires_grad_(id(parameter) in chosen)
    for part in parts:
        part.forward = functools.partial(remembered, part.forward)
    try:
        yield begin
    finally:
        for part, forward in zip(parts, own, strict=True):
            del part.forward
            if forward is not None:
                part.forward = forward
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
