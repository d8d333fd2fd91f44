"""What is asked of a whole model on texts: what its linears, tables, experts and its output matrix see."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_freeze import surgery
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.roles import EXPERT_OUTPUT
from hf_freeze.model.running import RealTokens, on_device
from hf_freeze.model.sums import Sums, add_routed, selected
from hf_freeze.model.watching import Routed, ends_of, hooked, read_by, seen_both, seen_in
from hf_freeze.progress import track
from hf_freeze.solvers.moments import Moments

Batch = Mapping[str, Any]


class WholeModel:
    """The part of `Statistics` that looks at the whole model `old` on `batches`."""

    def __init__(self, old: Any, batches: Sequence[Batch]) -> None:
        self._old = old
        self._batches = [on_device(old, batch) for batch in batches]
        self._architecture = architecture_for(old)
        self._real = RealTokens(old)

    @property
    def batch_count(self) -> int:
        return len(self._batches)

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
