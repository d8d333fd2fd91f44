"""Weights in 8 or 4 bits, frozen (Dettmers et al., 2022, "LLM.int8()", https://arxiv.org/abs/2208.07339; 2023, "QLoRA",
https://arxiv.org/abs/2305.14314), by bitsandbytes."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import LINEAR_COMPONENTS, Architecture, full_name
from hf_freeze.layers.factorized_embedding import LowRankEmbedding, LowRankOutput
from hf_freeze.layers.low_rank import LowRankLinear
from hf_freeze.layers.quantized import SCHEMES, STORED, QuantizedEmbedding, QuantizedLinear, check_installed
from hf_freeze.layers.quantized_factors import (
    QuantizedLowRankEmbedding,
    QuantizedLowRankLinear,
    QuantizedLowRankOutput,
    equal_columns,
)
from hf_freeze.methods._checks import check_choice
from hf_freeze.methods._linear import LinearMethod
from hf_freeze.methods.base import Model
from hf_freeze.methods.registry import register_method


@register_method("quantize", example={"scheme": "nf4", "components": ["ffn", "embeddings"]}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class Quantize(LinearMethod):
    """Store the weights of `components` in `scheme`: `"int8"` takes 1 byte per weight and 4 bytes per row of the matrix; `"nf4"`
    and `"fp4"` take half a byte per weight and 4 bytes per 64 weights. Quantised weights are frozen, because they have too few
    bits to train. Biases and all other parameters train unless Freeze names them. `hf_freeze.layers.quantized` explains the
    computation.

    `components`: the linears of `"attention"` and `"ffn"`, in `layers`, and `"embeddings"`: the token tables and the output
    matrix, tied or not. Position tables, norms and the heads of other tasks stay unchanged. Needs bitsandbytes, the extra
    `quantize`. Fresh weights of a config are drawn as usual and then quantised.

    Of LowRank, both factors are quantised; of FactorizedEmbedding, the table, while the projection is trained. Other layers that
    a method has put in are refused, and so are weights drawn from a seed: they take no storage, and quantised they would.
    `merge()` gives the dense weights that quantised layers compute with. Heads, neurons and tokens may still be removed: all of
    int8, and tokens of 4 bits if the rows of the table are whole blocks of 64 weights.

    Raises ValueError for an unknown scheme, component or layer, weights drawn from a seed, a module that another method has
    changed, weights that are not finite, and a missing bitsandbytes.
    """

    converts_fresh: ClassVar[bool] = True
    replaces: ClassVar[tuple[type[nn.Module], ...]] = (LowRankLinear,)
    choices: ClassVar[tuple[str, ...]] = (*LINEAR_COMPONENTS, "embeddings")

    scheme: str
    components: list[str] = field(default_factory=lambda: ["ffn", "attention"])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.scheme, SCHEMES, "Quantize", "scheme")

    @property
    def _linear_components(self) -> list[str]:
        return [component for component in self.components if component != "embeddings"]

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        if self._linear_components:
            super().check(architecture, config)
        elif self.layers is not None:
            raise ValueError(f"Quantize(layers={self.layers!r}): embeddings lie in no layer; leave layers out")

    def linear_names(self, architecture: Architecture, config: Any) -> list[str]:
        return surgery.linear_names(architecture, config, self._linear_components, self.layers)

    def make(self, linear: Any, name: str, model: Any) -> nn.Module:
        kind = QuantizedLowRankLinear if isinstance(linear, LowRankLinear) else QuantizedLinear
        return kind(linear, self.scheme)

    def _tables(self, model: Model, architecture: Architecture) -> dict[str, Any]:
        """Full name -> module, for each module with a row for each token."""
        return surgery.vocabulary_modules(model, architecture) if "embeddings" in self.components else {}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        check_installed()
        self._check_stored(model, architecture)
        super().restructure(model, architecture)
        tables = self._tables(model, architecture)
        self._check_sources(model, architecture, tables)
        for name, module in tables.items():
            surgery.replace_by_full_name(model, name, self._quantized_table(model, name, module))

    def _quantized_table(self, model: Model, name: str, module: Any) -> nn.Module:
        if type(module) is LowRankEmbedding:
            return QuantizedLowRankEmbedding(module, self.scheme)
        if type(module) is LowRankOutput:
            return QuantizedLowRankOutput(module, self.scheme)
        if isinstance(module, nn.Embedding):
            return QuantizedEmbedding(surgery.native_module(model, name, nn.Embedding, self.name), self.scheme)
        return QuantizedLinear(surgery.native_module(model, name, nn.Linear, self.name), self.scheme)

    def _check_stored(self, model: Model, architecture: Architecture) -> None:
        """Raise ValueError if an earlier method draws one of the weights from a seed."""
        names = [full_name(model, name) for name in self.linear_names(architecture, model.config)]
        names += self._tables(model, architecture)
        for method in model.methods_now:
            for name, definition in method.freeze(model, architecture):
                if definition is not None and name.removesuffix(".weight") in names:
                    raise ValueError(
                        f"method {self.name!r}: {method.name!r} draws {name!r} from a seed and stores nothing for it; leave it "
                        "out by components= or layers="
                    )

    def _check_sources(self, model: Model, architecture: Architecture, tables: Iterable[str]) -> None:
        """Raise ValueError if one of the tables is tied to a matrix that stays as it is, such as a table of unknown kind."""
        for name in tables:
            source = model.all_tied_weights_keys.get(f"{name}.weight")
            if source is not None and source.removesuffix(".weight") not in tables:
                raise ValueError(
                    f"method {self.name!r}: {name!r} is tied to {source!r}, which is no known table of tokens of "
                    f"{architecture.model_type}; leave 'embeddings' out of components"
                )

    def ties(self, model: Model, architecture: Architecture) -> dict[str, str]:
        """The buffers of the tables that the backbone ties."""
        ties: dict[str, str] = {}
        for name in self._tables(model, architecture):
            if (source := model.all_tied_weights_keys.get(f"{name}.weight")) is not None:
                ties |= surgery.ties_to_module(name, source, STORED)
        return ties

    @torch.no_grad()
    def convert(self, old: Any, new: Model) -> None:
        architecture = new.architecture
        for name, module in self.modules(new, architecture):
            linear = old.base_model.get_submodule(name)
            if isinstance(module, QuantizedLowRankLinear):
                module.fill(linear.down, linear.up)
            else:
                module.fill(surgery.effective_weight(linear))
            surgery.release(old, [name])
        for name, module in self._tables(new, architecture).items():
            weight = old.get_submodule(name).weight
            if isinstance(module, QuantizedLowRankEmbedding | QuantizedLowRankOutput):
                weight, ratios = equal_columns(weight)
                surgery.set_values(module.projection, old.get_submodule(name).projection * ratios[:, None])
            if f"{name}.packed" not in new.all_tied_weights_keys:
                module.fill(weight)

    def merge(self, model: Model, architecture: Architecture) -> None:
        super().merge(model, architecture)
        for name, module in self._tables(model, architecture).items():
            is_table = isinstance(module, nn.Embedding)
            dense = surgery.dense_table(module) if is_table else surgery.dense_linear(module)
            surgery.replace_by_full_name(model, name, dense)
