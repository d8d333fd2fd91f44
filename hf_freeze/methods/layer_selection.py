"""Remove whole layers (Sajjad et al., 2020, https://arxiv.org/abs/2004.03844)."""

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, check_layers_type
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.methods._spacing import evenly_spaced
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.checks import check_one_given, check_share
from hf_freeze.methods.parts import KeptLayers, Part, Selection
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin
from hf_freeze.solvers.moments import best_dense


@register_method(
    "layer_selection",
    example={"share": 0.5},
    facts=Facts(needs={"layers"}, shrinks=True, calibration="used", selects=True, renumbers="layers"),
)
@dataclass(frozen=True, kw_only=True)
class LayerSelection(Method):
    """Keep only the layers that `keep` names, such as `{"encoder": [0, 2, 4]}`, in their order and with new numbers; stacks
    outside `keep` stay whole. Or keep `share` of the layers of every stack, at least one, evenly spaced as LayerDrop prunes
    (Fan et al., 2020, https://arxiv.org/abs/1909.11556, "every other"): 0.5 keeps the layers 0, 2 and 4 of six.

    Later methods use the new numbers. Earlier ones that name layers keep acting on those of them that stay. The config has the
    new depth, and `merge()` gives a native model of that depth. A deep encoder with a shallow decoder translates fast (Kasai et
    al., 2021, https://arxiv.org/abs/2006.10369).

    Raises ValueError for an unknown stack, an unknown or repeated layer, a stack without layers, a share outside 0..1, and after
    a method that needs the layers as they are: LayerSharing with groups, and one that names layers and waits for `finalize()`.
    """

    keep: dict[str, list[int]] | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        check_one_given("LayerSelection", keep=self.keep, share=self.share)
        if self.share is not None:
            check_share(self.share, "LayerSelection", "share")
            return
        if not isinstance(self.keep, dict) or not self.keep:
            raise ValueError(f"LayerSelection(keep={self.keep!r}): must be a dict such as {{'encoder': [0, 2, 4]}}")
        check_layers_type(self.keep)
        for stack, numbers in self.keep.items():
            if not numbers or numbers != sorted(set(numbers)):
                raise ValueError(
                    f"LayerSelection(keep={{{stack!r}: {numbers!r}}}): must be a list of different layers, at least one, in "
                    "ascending order"
                )

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Selection(self.origins, self.decided, by_statistics=True), KeptLayers(self.layers_kept))

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.keep, config)
        for stack, numbers in (self.keep or {}).items():
            if architecture.stacks[stack].keeps_first and numbers[0] != 0:
                raise ValueError(
                    f"LayerSelection(keep={{{stack!r}: {numbers!r}}}): layer 0 of this {architecture.model_type} has parameters "
                    "that the other layers need; keep it"
                )

    def layers_kept(self, architecture: Architecture, config: Any) -> dict[str, list[int]]:
        """Stack -> the numbers of the layers to keep, for the depths in `config`."""
        if self.keep is not None:
            return self.keep
        share: Any = self.share
        return {
            stack: evenly_spaced(depth, max(round(share * depth), 1))
            for stack, depth in architecture.depths(config).items()
        }

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for stack, numbers in self.layers_kept(architecture, model.config).items():
            if numbers[0] != 0:
                surgery.move_first(model, architecture.stacks[stack], numbers[0])
            surgery.take_layers(model, architecture.stacks[stack].layers, numbers)

    def origins(self, model: Model, architecture: Architecture) -> dict[str, Origin]:
        origins: dict[str, Origin] = {}
        for stack, numbers in self.layers_kept(architecture, model.config).items():
            description = architecture.stacks[stack]
            origins |= surgery.layer_origins(model, description.layers, numbers)
            moved = [f"{description.layers.format(0)}.{name}" for name in description.unread]
            origins |= {name: Origin(name) for name in moved}
        return origins

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        kept = self.layers_kept(new.architecture, old.config)
        for stack, numbers in kept.items():
            description = new.architecture.stacks[stack]
            first = old.base_model.get_submodule(description.layers.format(0)).state_dict()
            for number, old_number in enumerate(numbers):
                source = old.base_model.get_submodule(description.layers.format(old_number))
                moved = {name: first[name] for name in description.unread} if number == 0 else {}
                surgery.take_values(source, new.base_model.get_submodule(description.layers.format(number)), moved)
        if statistics is not None:
            for stack in filter(kept.__contains__, new.architecture.stacks):  # a decoder reads what the encoder gives
                self._bridge_gaps(old, new, stack, kept[stack], statistics)

    def _bridge_gaps(self, old: Any, new: Any, stack: str, numbers: list[int], statistics: Statistics) -> None:
        """Refit the last linear before each gap so that its layer ends where the last of the removed layers did (ReplaceMe,
        Shopkhoev et al., 2025, https://arxiv.org/abs/2505.02819). Then fit the FFNs from there on."""
        layers, ffns = new.architecture.stacks[stack].layers, architecture_for(old).ffns(old.config)
        depth = architecture_for(old).depths(old.config)[stack]
        for number, (first, following) in enumerate(zip(numbers, [*numbers[1:], depth], strict=True)):
            blocks = [linears for block, linears in ffns.items() if block.startswith(f"{stack}.{first}.")]
            if (
                following == first + 1
                or not blocks
                or not surgery.is_dense(old.base_model.get_submodule(blocks[-1][-1]))
            ):
                continue
            names = [layers.format(layer) for layer in (first, following - 1, number)]
            found = statistics.across(blocks[-1][-1], *names[:2])
            if found is None:
                continue
            moments, norms = found
            linear = new.base_model.get_submodule(blocks[-1][-1].replace(names[0], names[2], 1))
            weight, bias = surgery.effective_weight(linear), linear.bias
            fitted, fitted_bias = best_dense(weight, bias, moments)
            surgery.set_linear(linear, fitted, fitted_bias)
            if norms is not None:
                own = new.base_model.get_submodule(norms[0].replace(names[0], names[2], 1))
                last = old.base_model.get_submodule(norms[1]).state_dict()
                # In memory of its own: until the end, the new model shares that of the old one.
                own.load_state_dict({name: values.clone() for name, values in last.items()}, assign=True)
        # What leaves the layer before a gap is not quite what later ones have read: they are fitted, too.
        spans = [(first, following - 1) for first, following in itertools.pairwise([0, *numbers[1:], depth])]
        gap = next((number for number, (first, last) in enumerate(spans) if first != last), len(spans))
        later = tuple(f"{stack}.{number}." for number in range(gap, len(spans)))
        found = new.architecture.ffns(new.config)
        statistics.fit(
            stack, spans, [name for block, names in found.items() if block.startswith(later) for name in names]
        )

    def decided(self, old: Any, architecture: Architecture, statistics: Statistics | None) -> "LayerSelection":
        """With statistics, `share` removes the layer whose loss changes the predictions least, one after another."""
        if self.keep is not None or statistics is None:
            return self
        kept = {stack: list(range(depth)) for stack, depth in architecture.depths(old.config).items()}
        counts = {stack: len(numbers) for stack, numbers in self.layers_kept(architecture, old.config).items()}
        while shorter := [stack for stack, numbers in kept.items() if len(numbers) > counts[stack]]:
            found = {}
            for stack in shorter:
                for layer in kept[stack]:
                    fewer = kept | {stack: [other for other in kept[stack] if other != layer]}
                    with contextlib.suppress(ValueError):  # a layer that must stay
                        found[stack, layer] = statistics.distance(LayerSelection(keep=fewer))
            if not found:
                return self
            stack, layer = min(found, key=lambda place: found[place])
            kept[stack].remove(layer)
        return LayerSelection(keep=kept)
