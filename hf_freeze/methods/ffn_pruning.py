"""Remove whole neurons of the FFNs: rows of the matrices before the activation, columns of the one after it (as filters in
Molchanov et al., 2017, https://arxiv.org/abs/1611.06440).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, check_layers_type, in_layers, set_fields
from hf_freeze.layers.derived import features
from hf_freeze.methods._checks import check_any_selected, check_numbers_by_name, check_one_given, check_positive
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.parts import Part, Selection
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin


@register_method("ffn_pruning", example={"width": 13}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class FFNPruning(Method):
    """Keep the `width` neurons of the largest magnitude in each FFN in `layers` (None: all). Or `keep`, such as
    `{"encoder.0.ffn": [0, 3, 4]}`: the neurons to keep in each FFN that it names (`analysis.select_neurons`).

    The magnitude of a neuron is the product of the norm of its input weights and the norm of its output weights. `merge()`
    gives a native model: of the smaller width if all layers have the same width, otherwise padded with zero neurons.

    After a Freeze that makes an FFN random, the config names the neurons that `width` keeps, and they keep their random values.
    Of fresh weights, `width` then keeps the first neurons.

    Raises ValueError for a width or neuron outside the FFN, an unknown layer or FFN, and an FFN that another method has changed.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"neurons"})
    width: int | None = None
    keep: dict[str, list[int]] | None = None
    layers: dict[str, list[int]] | None = None

    def __post_init__(self) -> None:
        check_layers_type(self.layers)
        check_one_given("FFNPruning", width=self.width, keep=self.keep)
        if self.width is not None:
            check_positive(self.width, "FFNPruning", "width")
            return
        if self.layers is not None:
            raise ValueError("FFNPruning(keep=..., layers=...): keep names the FFNs already; leave layers out")
        check_numbers_by_name(self.keep, "FFNPruning", "keep", items="neurons", example="{'encoder.0.ffn': [0, 3, 4]}")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Selection(self.origins, self.decided),)

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        blocks = architecture.ffns(config)
        for block in self.keep or ():
            if block not in blocks:
                raise ValueError(
                    f"FFNPruning: no FFN {block!r} in {architecture.model_type}; choose from {list(blocks)}"
                )
        check_any_selected(self._blocks(architecture, config), self.layers, "FFNPruning")

    @property
    def refers_to(self) -> frozenset[str]:
        return super().refers_to if self.keep is None else frozenset({"layers"})

    def _blocks(self, architecture: Architecture, config: Any) -> dict[str, list[str]]:
        """FFN -> its linears, for each FFN that the method changes."""
        blocks = architecture.ffns(config)
        if self.keep is not None:
            return {block: blocks[block] for block in self.keep}
        return in_layers(blocks, self.layers)

    def _select(self, model: Any, linears: list[str], source: Any, kept: list[int] | int) -> None:
        width = features(source.base_model.get_submodule(linears[-1]))[0]
        for name in linears:
            linear, outputs = source.base_model.get_submodule(name), name != linears[-1]
            neurons = range(kept) if isinstance(kept, int) else kept
            index = surgery.neuron_features(linear, neurons, width, outputs=outputs)
            shape_only = isinstance(kept, int)
            selected = surgery.select_features(linear, len(index) if shape_only else index, outputs=outputs)
            surgery.replace(model, name, selected)

    @property
    def selects(self) -> bool:
        return self.keep is not None

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for block, linears in self._blocks(architecture, model.config).items():
            modules = [surgery.dense_module(model, name, self.name) for name in linears]
            width, neurons = features(modules[-1])[0], (self.keep or {}).get(block, [])
            if self.width is not None and self.width > width:
                raise ValueError(f"FFNPruning(width={self.width}) of {block!r}: must be in 1..{width}")
            if neurons and neurons[-1] >= width:
                raise ValueError(f"FFNPruning: neuron {neurons[-1]} of {block!r}: must be in 0..{width - 1}")
            self._select(model, linears, model, self.width or len(neurons))

    def convert(self, old: Any, new: Model) -> None:
        for block, linears in self._blocks(new.architecture, new.config).items():
            kept = self._largest(old, linears) if self.keep is None else self.keep[block]
            self._select(new, linears, old, kept)

    def _largest(self, model: Any, linears: list[str]) -> list[int]:
        score = surgery.neuron_magnitudes(model, linears)
        return score.argsort(descending=True, stable=True)[: self.width].sort().values.tolist()

    def origins(self, model: Model, architecture: Architecture) -> dict[str, Origin]:
        origins: dict[str, Origin] = {}
        for block, linears in self._blocks(architecture, model.config).items():
            kept = range(self.width or 0) if self.keep is None else self.keep[block]
            width = features(surgery.dense_module(model, linears[-1], self.name))[0]
            for name in linears:
                linear, outputs = surgery.dense_module(model, name, self.name), name != linears[-1]
                index = surgery.neuron_features(linear, kept, width, outputs=outputs)
                origins |= surgery.feature_origins(name, linear, index, outputs=outputs)
        return origins

    def decided(self, old: Any, architecture: Architecture) -> "FFNPruning":
        if self.keep is not None:
            return self
        blocks = self._blocks(architecture, old.config)
        return FFNPruning(keep={block: self._largest(old, linears) for block, linears in blocks.items()})

    def merge(self, model: Model, architecture: Architecture) -> None:
        widths: dict[str, set[int]] = {}  # config field -> the widths of the FFNs whose size it holds
        for block, linears in architecture.ffns(model.config).items():
            if (field := architecture.stacks[block.split(".")[0]].width) is not None:
                widths.setdefault(field, set()).add(features(model.base_model.get_submodule(linears[-1]))[0])
        for block, linears in self._blocks(architecture, model.config).items():
            stack = architecture.stacks[block.split(".")[0]]
            if stack.width is None:
                self._pad(
                    model,
                    linears,
                    stack.native_width(linears[-1]),
                )
            elif len(widths[stack.width]) > 1:
                self._pad(model, linears, max(widths[stack.width]))
        set_fields(model.config, {field: max(sizes) for field, sizes in widths.items()})

    def _pad(self, model: Any, linears: list[str], width: int) -> None:
        """Add neurons with zero weights, up to `width`: they contribute nothing to the output."""
        narrow = features(model.base_model.get_submodule(linears[-1]))[0]
        for name in linears:
            linear, outputs = model.base_model.get_submodule(name), name != linears[-1]
            halves = features(linear)[1] // narrow if outputs else 1
            places = [half * width + neuron for half in range(halves) for neuron in range(narrow)]
            surgery.replace(model, name, surgery.spread_features(linear, places, halves * width, outputs=outputs))
