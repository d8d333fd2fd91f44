"""The attentions and FFNs of a model, and what each loses with fewer heads or neurons, from one pass over the texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_freeze import methods, surgery
from hf_freeze.architectures.base import Attention
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.methods.head_pruning import eliminated_heads
from hf_freeze.model.calibrating import CalibrationPass
from hf_freeze.model.calibration import Report, warned_once
from hf_freeze.model.samples import Samples
from hf_freeze.solvers.columns import eliminate
from hf_freeze.surgery.neurons import LinearNeurons


@dataclass(frozen=True)
class Block:
    """An attention (`heads`: those of each unit that goes at once) or an FFN (`heads` empty, a unit is a neuron).

    `order`: in which units go; `losses`: by 0 removals and more, the distance of the model's outputs from the original's, as the
    quadratic approximation has it. `weights`: the numbers in its matrices, of which a unit has `per_unit`.
    """

    name: str
    weights: int
    per_unit: float
    order: Sequence[int]
    losses: Sequence[float]
    heads: Sequence[Sequence[int]] = ()

    @property
    def units(self) -> int:
        return len(self.order)

    @property
    def kind(self) -> str:
        return "heads" if self.heads else "neurons"

    @property
    def place(self) -> tuple[str, int]:
        """(stack, layer)"""
        stack, layer, _ = self.name.split(".", 2)
        return stack, int(layer)

    def kept(self, count: int) -> list[int]:
        """The numbers of the neurons or heads that stay if `count` units do."""
        units = sorted(self.order[len(self.order) - count :])
        return [head for unit in units for head in self.heads[unit]] if self.heads else units


def blocks_of(model: Any, samples: Samples) -> dict[str, Block]:
    """Those whose heads or neurons can go, by name, such as "encoder.0.self" or "decoder.1.ffn"."""
    found, sizes = blocks_in(model)
    blocks = {}
    running = CalibrationPass(model, model, samples.batches, Report(), lambda *_: model).running()
    with warned_once(), running as statistics:
        for moments in statistics.walk(list(found), curvature=True):
            for output, moment in moments.items():
                name, attention = found[output]
                if moment is None or name not in sizes:
                    continue
                heads: list[list[int]] = []
                if attention is not None:
                    heads, found_order = eliminated_heads(model, attention, moment)
                else:
                    linear = model.base_model.get_submodule(output)
                    found_order = eliminate(surgery.effective_weight(linear), linear.bias, moment)
                order, losses = found_order.order.tolist(), found_order.losses.tolist()
                blocks[name] = Block(name, sizes[name], sizes[name] / len(order), order, losses, heads)
    return {name: blocks[name] for name in sizes if name in blocks}


def blocks_in(model: Any) -> tuple[dict[str, tuple[str, Attention | None]], dict[str, int]]:
    """(the last linear of a block -> its name, and the attention that it is; block -> the numbers in its matrices)"""
    architecture = architecture_for(model)
    found: dict[str, tuple[str, Attention | None]] = {}
    for name, attention in architecture.attentions(model.config).items():
        if _can_lose(model, methods.HeadPruning(share=0.5, layers=_only(name))):
            found[attention.o] = name, attention
    for name, neurons in surgery.neurons_of(architecture, model.config).items():
        if isinstance(neurons, LinearNeurons):
            found[neurons.linears[-1]] = name, None
    return found, _weights(model)


def _only(name: str) -> dict[str, list[int]]:
    stack, layer, _ = name.split(".", 2)
    return {stack: [int(layer)]}


def _can_lose(model: Any, method: Any) -> bool:
    try:
        method.check(architecture_for(model), model.config)
    except ValueError:
        return False
    return True


def _weights(model: Any) -> dict[str, int]:
    """Attention or FFN -> the numbers in its matrices, in the order of the layers."""
    architecture = architecture_for(model)
    linears: dict[str, Sequence[str]] = {
        **{name: list(attention.linears) for name, attention in architecture.attentions(model.config).items()},
        **{name: list(names) for name, names in architecture.ffns(model.config).items()},
    }
    present = {name: [each for each in names if not surgery.is_removed(model, each)] for name, names in linears.items()}
    counts = {
        name: sum(surgery.effective_weight(linear).numel() for _, linear in surgery.modules(model, names))
        for name, names in present.items()
    }
    return {name: count for name, count in counts.items() if count}
