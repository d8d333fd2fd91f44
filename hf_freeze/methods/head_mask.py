"""A gate on each attention head: to mask heads, or to learn which to keep (Michel et al., 2019,
https://arxiv.org/abs/1905.10650; Voita et al., 2019, https://arxiv.org/abs/1905.09418).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention, check_layers_type, full_name
from hf_freeze.layers.gated import Gated
from hf_freeze.methods._heads import check_attentions, check_heads_type, check_number, chosen_attentions
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import SeededTensor


@register_method("head_mask", example={}, exact=True)
@dataclass(frozen=True, kw_only=True)
class HeadMask(Method):
    """Multiply the context of each head by a gate, in `layers` (None: all): 0 for those that `heads` names, such as
    `{"encoder.0.self": [1, 3]}`, else 1. The gates are trained with the rest unless `trainable` is False; what they have learnt
    goes, as `analysis.head_gates(model)`, to `analysis.select_heads`. A masked head is computed all the same; `HeadPruning`
    removes it. `merge()` multiplies the gates into the output matrices.

    Raises ValueError for an unknown layer, attention or head, and for an attention that another method has changed.
    """

    freezes: ClassVar[bool] = True
    heads: dict[str, list[int]] | None = None
    trainable: bool = True
    layers: dict[str, list[int]] | None = None

    def __post_init__(self) -> None:
        check_layers_type(self.layers)
        if self.heads is not None:
            check_heads_type(self.heads, "HeadMask")
        if not isinstance(self.trainable, bool):
            raise ValueError(f"HeadMask(trainable={self.trainable!r}): must be True or False")

    @property
    def refers_to(self) -> frozenset[str]:
        return super().refers_to if self.heads is None else frozenset({"layers"})

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        check_attentions(self.heads, "HeadMask", architecture, config)
        gated = self._attentions(architecture, config)
        if not gated:
            raise ValueError(f"HeadMask(layers={self.layers!r}) names no layer: leave it out for all")
        for name in self.heads or ():
            if name not in gated:
                raise ValueError(f"HeadMask(layers={self.layers!r}): {name!r} lies in none of these layers")

    def _attentions(self, architecture: Architecture, config: Any) -> dict[str, Attention]:
        return chosen_attentions(None, self.layers, architecture, config)

    def _gates(self, model: Any, architecture: Architecture) -> dict[str, Any]:
        """Attention -> the module with its gates."""
        found = self._attentions(architecture, model.config)
        return {name: model.base_model.get_submodule(attention.o) for name, attention in found.items()}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for name, attention in self._attentions(architecture, model.config).items():
            heads = surgery.count_heads(model, attention, self.name)
            check_number(name, max((self.heads or {}).get(name, [0])), heads, "HeadMask")
            linear = model.base_model.get_submodule(attention.o)
            surgery.replace(model, attention.o, Gated.from_linear(linear, heads))

    @torch.no_grad()
    def prepare(self, model: Model, architecture: Architecture) -> None:
        for name, module in self._gates(model, architecture).items():
            module.gates.fill_(1)
            module.gates[(self.heads or {}).get(name, [])] = 0

    def freeze(self, model: Model, architecture: Architecture) -> Iterable[tuple[str, SeededTensor | None]]:
        if not self.trainable:
            for attention in self._attentions(architecture, model.config).values():
                yield full_name(model, f"{attention.o}.gates"), None

    def merge(self, model: Model, architecture: Architecture) -> None:
        for attention in self._attentions(architecture, model.config).values():
            gated = model.base_model.get_submodule(attention.o)
            surgery.replace(model, attention.o, surgery.dense_linear(gated))
