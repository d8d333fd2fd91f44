"""Weights in 8 or 4 bits, frozen (Dettmers et al., 2022, "LLM.int8()", https://arxiv.org/abs/2208.07339; 2023, "QLoRA",
https://arxiv.org/abs/2305.14314), by bitsandbytes."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import LINEAR_COMPONENTS, Architecture, full_name
from hf_freeze.layers.quantized import SCHEMES, STORED, QuantizedEmbedding, QuantizedLinear, check_installed
from hf_freeze.methods._linear import LinearMethod
from hf_freeze.methods.base import Model
from hf_freeze.methods.registry import register_method


@register_method("quantize", example={"scheme": "nf4", "components": ["ffn", "embeddings"]}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class Quantize(LinearMethod):
    """Hold the weights of `components` in `scheme`: `"int8"` takes 1 byte a weight and 4 a row of the matrix; `"nf4"` and `"fp4"`
    take half a byte a weight and 4 for 64. It freezes them: nothing trains weights of so few bits. Biases, and what else is
    there, train on unless Freeze names them. `hf_freeze.layers.quantized` says how it is computed.

    `components`: the linears of `"attention"` and `"ffn"`, in `layers`, and `"embeddings"`: the tables of tokens and the output
    matrix, tied or not. Tables of positions, norms and the heads of other tasks stay as they are. Needs bitsandbytes, the extra
    `quantize`. Fresh weights of a config are drawn as ever before they are quantised.

    What is drawn from a seed is refused: it takes no byte, and would take some. Factors, and other layers that a method has made,
    are refused too. `merge()` gives the dense weights that it computes with.

    Raises ValueError for an unknown scheme, component or layer, what is drawn from a seed, what another method has changed,
    weights that are not finite, and where bitsandbytes is missing.
    """

    converts_fresh: ClassVar[bool] = True
    choices: ClassVar[tuple[str, ...]] = (*LINEAR_COMPONENTS, "embeddings")

    scheme: str
    components: list[str] = field(default_factory=lambda: ["ffn", "attention"])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheme not in SCHEMES:
            raise ValueError(f"Quantize(scheme={self.scheme!r}): choose from {list(SCHEMES)}")

    @property
    def _linears(self) -> list[str]:
        return [component for component in self.components if component != "embeddings"]

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        if self._linears:
            super().check(architecture, config)
        elif self.layers is not None:
            raise ValueError(f"Quantize(layers={self.layers!r}): embeddings lie in no layer; leave it out")

    def linear_names(self, architecture: Architecture, config: Any) -> list[str]:
        return surgery.linear_names(architecture, config, self._linears, self.layers)

    def make(self, linear: Any, name: str, model: Any) -> nn.Module:
        return QuantizedLinear(linear, self.scheme)

    def _tables(self, model: Model, architecture: Architecture) -> dict[str, Any]:
        """Full name -> module, of all that has a row for each token."""
        return surgery.vocabulary_modules(model, architecture) if "embeddings" in self.components else {}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        check_installed()
        self._check_stored(model, architecture)
        super().restructure(model, architecture)
        for name, module in self._tables(model, architecture).items():
            table = isinstance(module, nn.Embedding)
            found: Any = surgery.native_module(model, name, nn.Embedding if table else nn.Linear, self.name)
            made = QuantizedEmbedding(found, self.scheme) if table else QuantizedLinear(found, self.scheme)
            surgery.replace_by_full_name(model, name, made)

    def _check_stored(self, model: Model, architecture: Architecture) -> None:
        named = [full_name(model, name) for name in self.linear_names(architecture, model.config)]
        named += self._tables(model, architecture)
        for method in model.methods:
            for name, definition in method.freeze(model, architecture):
                if definition is not None and name.removesuffix(".weight") in named:
                    raise ValueError(
                        f"method {self.name!r}: {name!r} is drawn from a seed by {method.name!r}, which stores nothing of it; "
                        "leave it out by components= or layers="
                    )

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        """The tables that the backbone ties."""
        sources = {
            name: model.all_tied_weights_keys.get(f"{name}.weight") for name in self._tables(model, architecture)
        }
        return {
            f"{name}.{each}": f"{source.removesuffix('.weight')}.{each}"
            for name, source in sources.items()
            if source is not None
            for each in STORED
        }

    @torch.no_grad()
    def convert(self, old: Any, new: Model) -> None:
        architecture = new.architecture
        for name, module in self.modules(new, architecture):
            module.fill(surgery.effective_weight(old.base_model.get_submodule(name)))
        for name, module in self._tables(new, architecture).items():
            if f"{name}.packed" not in new.all_tied_weights_keys:
                module.fill(old.get_submodule(name).weight)

    def merge(self, model: Model, architecture: Architecture) -> None:
        super().merge(model, architecture)
        for name, module in self._tables(model, architecture).items():
            table = isinstance(module, nn.Embedding)
            dense = surgery.dense_table(module) if table else surgery.dense_linear(module)
            surgery.replace_by_full_name(model, name, dense)
