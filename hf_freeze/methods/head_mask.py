"""A gate on each attention head: to mask heads, or to learn which to keep (Michel et al., 2019,
https://arxiv.org/abs/1905.10650; Voita et al., 2019, https://arxiv.org/abs/1905.09418).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention, check_layers_type, full_name
from hf_freeze.layers.gated import Gated
from hf_freeze.methods._heads import check_attentions, check_head, check_heads_type, chosen_attentions
from hf_freeze.methods.base import Facts, Method, Model
from hf_freeze.methods.checks import check_any_selected, check_bool
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import SeededTensor


@register_method("head_mask", example={}, facts=Facts(needs={"heads"}, exact=True, by_layer=("heads",)))
@dataclass(frozen=True, kw_only=True)
class HeadMask(Method):
    """Multiply the context of each head by a gate, in `layers` (None: all). A gate starts at 0 for the heads that `heads` names,
    such as `{"encoder.0.self": [1, 3]}`, and at 1 for the others. The gates are trained with the model unless `trainable` is
    False; `analysis.select_heads` chooses heads from trained gates, `analysis.head_gates(model)`. A masked head is still
    computed; `HeadPruning` removes heads. `merge()` multiplies the gates into the output matrices.

    Raises ValueError for an unknown layer, attention or head, and for an attention that another method has changed.
    """

    heads: dict[str, list[int]] | None = None
    trainable: bool = True
    layers: dict[str, list[int]] | None = None

    def __post_init__(self) -> None:
        check_layers_type(self.layers)
        if self.heads is not None:
            check_heads_type(self.heads, "HeadMask")
        check_bool(self.trainable, "HeadMask", "trainable")

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        check_attentions(self.heads, "HeadMask", architecture, config)
        gated = self._attentions(architecture, config)
        check_any_selected(gated, self.layers, "HeadMask")
        for name in self.heads or ():
            if name not in gated:
                raise ValueError(f"HeadMask(layers={self.layers!r}): {name!r} lies in none of these layers")

    def _attentions(self, architecture: Architecture, config: Any) -> dict[str, Attention]:
        return chosen_attentions(None, self.layers, architecture, config)

    def _outputs(self, architecture: Architecture, config: Any) -> list[str]:
        """Names of the output projections that have gates."""
        return [attention.o for attention in self._attentions(architecture, config).values()]

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for name, attention in self._attentions(architecture, model.config).items():
            heads = surgery.count_heads(model, attention, self.name)
            masked = (self.heads or {}).get(name, [])
            check_head(max(masked, default=0), heads, name, "HeadMask")
            linear = surgery.dense_module(model, attention.o, self.name, advice="leave it out by layers=")
            surgery.replace(model, attention.o, Gated.from_linear(linear, heads, masked))

    def prepare(self, model: Model, architecture: Architecture) -> None:
        for _, gated in surgery.modules(model, self._outputs(architecture, model.config)):
            if isinstance(gated, Gated):  # a later method may have removed all heads
                gated.reset()

    def freeze(self, model: Model, architecture: Architecture) -> Iterable[tuple[str, SeededTensor | None]]:
        if not self.trainable:
            for name in self._outputs(architecture, model.config):
                yield full_name(model, f"{name}.gates"), None

    def merge(self, model: Model, architecture: Architecture) -> None:
        for name, gated in surgery.modules(model, self._outputs(architecture, model.config)):
            surgery.replace(model, name, surgery.dense_linear(gated))
