"""Weights in 8 or 4 bits: frozen, by bitsandbytes (Dettmers et al., 2022, "LLM.int8()", https://arxiv.org/abs/2208.07339; 2023,
"QLoRA", https://arxiv.org/abs/2305.14314), or trained for integers (Jacob et al., 2018, https://arxiv.org/abs/1712.05877; Esser
et al., 2020, "Learned Step Size Quantization", https://arxiv.org/abs/1902.08153)."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization

from hf_freeze import surgery
from hf_freeze.architectures.base import LINEAR_COMPONENTS, Architecture, full_name, in_layers
from hf_freeze.layers import fake_quantized, integer_experts, quantized_factors
from hf_freeze.layers.factorized_embedding import LowRankEmbedding, LowRankOutput
from hf_freeze.layers.grids import ACTIVATION_RANGES, GRANULARITIES, WEIGHT_RANGES, WIDTHS, Grid
from hf_freeze.layers.low_rank import LowRankLinear
from hf_freeze.layers.quantized import STORED, QuantizedEmbedding, QuantizedLinear
from hf_freeze.layers.schemes import SCHEMES, Scheme, check_installed
from hf_freeze.layers.sparse import SparseLinear, Sparsifiable
from hf_freeze.layers.tensor_train import TensorTrainLinear
from hf_freeze.layers.tucker import TuckerLinear
from hf_freeze.methods._quantized_values import Values
from hf_freeze.methods.base import Facts, Model, Statistics
from hf_freeze.methods.checks import check_bool, check_choice, check_one_given, check_share
from hf_freeze.methods.linear import LINEARS, LinearMethod
from hf_freeze.methods.parts import Part, Schedule
from hf_freeze.methods.registry import register_method

_CHOICES: dict[str, Any] = {
    "weights": WIDTHS,
    "activations": [None, "int8"],
    "granularity": GRANULARITIES,
    "weight_ranges": WEIGHT_RANGES,
    "activation_ranges": ACTIVATION_RANGES,
}
_OF_SCHEMES = ("layers", "scheme", "components", "weights")  # settings beside a scheme; all others are of `weights`


@register_method(
    "quantize",
    example={"scheme": "nf4", "components": ["ffn", "embeddings"]},
    modes={
        "trained": {
            "train": True,
            "weights": "int8",
            "activations": "int8",
            "weight_ranges": "learnt",
            "components": ["ffn", "embeddings"],
        }
    },
    facts=replace(LINEARS, shrinks=True, calibration="used"),
)
@dataclass(frozen=True, kw_only=True)
class Quantize(LinearMethod):
    """Few bits for the weights of `components`, in one of two ways.

    `scheme`: frozen weights, by bitsandbytes (the extra `quantize`). `"int8"` takes 1 byte per weight and 4 bytes per row of the
    matrix; `"nf4"` and `"fp4"` take half a byte per weight and 4 bytes per 64 weights. `hf_freeze.layers.schemes` explains the
    computation.

    `weights`: integers on a symmetric grid, `"int8"` (1 byte per weight) or `"int4"` (half a byte), with a step of 4 bytes per
    output (`granularity="channel"`) or per 64 inputs of an output (`"group-64"`; the last group may be shorter).
    `activations="int8"` also rounds the inputs of linears, whose products are then products of integers. With `train=True`, both
    are rounded in the forward and trained straight through the rounding, from the share `begin` of training on (None: from the
    start); `finalize()` stores the integers. Without it, trained weights are rounded at once and frozen.
    `weight_ranges`: steps from the largest |w| (`"max"`), or learnt as in LSQ (`"learnt"`).
    `activation_ranges`: the largest |x| of each token, found when it computes (`"token"`); or one range for all tokens, which
    training tracks, as the largest ever (`"max"`) or a moving average (`"moving"`), or learns (`"learnt"`). Those need
    `VariantCallback` or `model.advance`, as `begin` does. Integer products need no more than either kind: a step of a token can
    be taken out of the sums of its row, while steps of inputs, or a zero point, could not.

    A calibration chooses the integers and steps of the linears of `weights` by GPTQ (Frantar et al., 2022,
    https://arxiv.org/abs/2210.17323), so that their outputs change least on what they see, and corrects their biases; `scheme`,
    tables and what is trained stay as without.

    `components`: the linears of `"attention"` and `"ffn"`, in `layers`; `"embeddings"`: the token tables and the output matrix,
    tied or not; and `"experts"`: the matrices of a mixture's experts that lie in one parameter, where each output of each expert
    has steps of its own (`weights` without `train` and `activations`). A calibration rounds them for the tokens that each expert
    gets; a saved one, only those after the activation. An expert with no or too few tokens is rounded as without. Position
    tables, norms, biases and the heads of other tasks stay unchanged. Fresh weights of a config are drawn as usual and then
    quantised. All other parameters train unless Freeze names them.

    Of LowRank, both factors are quantised; of TensorTrain and Tucker, the cores and factors (without `activations`, see
    `hf_freeze.layers.quantized_factors`); of FactorizedEmbedding, the table, while the projection is trained. Of a pruning that
    is finalized, the non-zero weights are (`weights` only). Other layers that a method has put in are refused. Weights drawn
    from a seed are refused, too: they take no storage, and quantised they would. `merge()` gives the dense weights that
    quantised layers compute with, unless inputs are rounded, which no native class does. Heads, neurons and tokens may still
    be removed: all where each output has one step, and tokens of 4 bits of bitsandbytes if the rows of the table are whole
    blocks of 64 weights.

    torchao (https://github.com/pytorch/ao) has the same grids for nn.Linear and nn.Embedding, as subclasses of tensors; it serves
    where a plain model shall run on its GPU kernels, after `merge()`. Here it does not: it knows neither Conv1D, factors nor
    pruned weights, its tensors are not saved by the names and sizes that the config promises, and its products on CPUs round in
    an order of their own.

    Raises ValueError for unknown settings, components or layers, `train` or a setting of `weights` beside `scheme`, weights drawn
    from a seed, a module that another method has changed, weights or inputs that are not finite, ranges that no training has
    seen, and a missing bitsandbytes.
    """

    replaces: ClassVar[tuple[type[nn.Module], ...]] = (LowRankLinear, SparseLinear, TensorTrainLinear, TuckerLinear)
    choices: ClassVar[tuple[str, ...]] = (*LINEAR_COMPONENTS, "embeddings", "experts")

    scheme: str | None = None
    components: list[str] = field(default_factory=lambda: ["ffn", "attention"])
    weights: str | None = None
    train: bool = False
    activations: str | None = None
    granularity: str = "channel"
    weight_ranges: str = "max"
    activation_ranges: str = "token"
    begin: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_given("Quantize", scheme=self.scheme, weights=self.weights)
        check_bool(self.train, "Quantize", "train")
        if "experts" in self.components and (self.weights is None or self.train or self.activations is not None):
            raise ValueError(
                "Quantize(components=['experts']): the matrices of experts are rounded to integers at once, and their inputs are "
                f"not rounded: give weights= one of {list(WIDTHS)} without train and activations"
            )
        if self.scheme is not None:
            check_choice(self.scheme, SCHEMES, "Quantize", "scheme")
            for setting in fields(self):
                if setting.name not in _OF_SCHEMES and getattr(self, setting.name) != setting.default:
                    raise ValueError(
                        f"Quantize(scheme={self.scheme!r}, {setting.name}={getattr(self, setting.name)!r}): bitsandbytes freezes "
                        f"its weights as they are; instead of scheme, give weights= one of {list(WIDTHS)}"
                    )
            return
        for setting, choices in _CHOICES.items():
            check_choice(getattr(self, setting), choices, "Quantize", setting)
        if self.begin is not None:
            if not self.train:
                raise ValueError(f"Quantize(begin={self.begin!r}): rounding begins in training; add train=True")
            check_share(self.begin, "Quantize", "begin")

    @property
    def grid(self) -> Any:
        """The Grid of `weights`, and of the inputs, or the Scheme."""
        if self.scheme is not None:
            return Scheme(self.scheme)
        return Grid(**{name: getattr(self, name) for name in _CHOICES})

    @property
    def facts(self) -> Facts:
        return replace(super().facts, finalizable=self.train, stores={*self.components})

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_Rounding(self),) if self.train and (self.begin is not None or self.grid.is_static) else ()

    @property
    def _linear_components(self) -> list[str]:
        return [component for component in self.components if component in LINEAR_COMPONENTS]

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        if "experts" in self.components and not self._experts(architecture, config):
            raise ValueError(
                f"Quantize(components={self.components!r}): {architecture.model_type} has no experts with matrices in one "
                "parameter, in these layers; leave 'experts' out"
            )
        if self._linear_components:
            super().check(architecture, config)
        elif self.layers is not None and "experts" not in self.components:
            raise ValueError(f"Quantize(layers={self.layers!r}): embeddings lie in no layer; leave layers out")

    def linear_names(self, architecture: Architecture, config: Any) -> list[str]:
        return surgery.linear_names(architecture, config, self._linear_components, self.layers)

    def make(self, linear: Any, name: str, model: Any) -> nn.Module:
        """The layer that takes the place of a linear or table."""
        frozen, training = _KINDS[type(linear) if type(linear) in _KINDS else _native_kind(linear)]
        layer = (training if self.train else frozen)(linear, self.grid)
        if self.train:
            for rounding in layer.roundings():
                rounding.active = not self.begin
        return layer

    def _experts(self, architecture: Architecture, config: Any) -> list[str]:
        """The modules, below the base model, of the experts that the method rounds."""
        return (
            list(in_layers(architecture.experts(config), self.layers).values()) if "experts" in self.components else []
        )

    def _tables(self, model: Model, architecture: Architecture) -> dict[str, Any]:
        """Full name -> module, for each module with a row for each token."""
        return surgery.vocabulary_modules(model, architecture) if "embeddings" in self.components else {}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        if self.scheme is not None:
            check_installed()
        for name, module in self.modules(model, architecture) if self.weights is not None else ():
            if isinstance(module, Sparsifiable):
                raise ValueError(
                    f"method {self.name!r}: {name!r} is a {type(module).__name__}, whose zeros are still being chosen; leave "
                    "it out by components= or layers=, or finalize() before"
                )
        self._check_stored(model, architecture)
        super().restructure(model, architecture)
        for name in self._experts(architecture, model.config):
            surgery.replace(
                model, name, integer_experts.with_integers(surgery.native_experts(model, name, self.name), self.grid)
            )
        tables = self._tables(model, architecture)
        self._check_sources(model, architecture, tables)
        for name, module in tables.items():
            if type(module) not in _KINDS:
                surgery.native_module(model, name, _native_kind(module), self.name)
            surgery.replace_by_full_name(model, name, self.make(module, name, model))

    def _layers(self, model: Model, architecture: Architecture) -> list[tuple[str, Any]]:
        """(full name, layer) of all that the method has put in."""
        linears = [(full_name(model, name), module) for name, module in self.modules(model, architecture)]
        return [*linears, *self._tables(model, architecture).items()]

    def _check_stored(self, model: Model, architecture: Architecture) -> None:
        """Raise ValueError if an earlier method draws one of the weights from a seed."""
        names = [full_name(model, name) for name in self.linear_names(architecture, model.config)]
        names += self._tables(model, architecture)
        for name in self._experts(architecture, model.config):
            experts = model.base_model.get_submodule(name)
            names += [f"{full_name(model, name)}.{matrices}" for matrices in experts._parameters]
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
        """What the tables hold that the backbone ties: buffers, or learnt steps."""
        held: Iterable[str] = STORED
        if self.train:
            held = ["rounding.log_steps"] if self.weight_ranges == "learnt" else []
        ties: dict[str, str] = {}
        for name in self._tables(model, architecture):
            if (source := model.all_tied_weights_keys.get(f"{name}.weight")) is not None:
                ties |= surgery.ties_to_module(name, source, held)
        return ties

    @torch.no_grad()
    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        architecture = new.architecture
        if statistics is not None and (self.train or self.scheme is not None):
            setting = "train=True" if self.train else f"scheme={self.scheme!r}"
            statistics.note(f"{self.name}: {setting} is the same with a calibration as without")
            statistics = None
        values = Values(self.name, self.grid, self.train, old, new, statistics)
        values.set_tables(self._tables(new, architecture))  # first: with statistics, the new model runs
        values.set_linears(dict(self.modules(new, architecture)), self._experts(architecture, new.config))

    def prepare(self, model: Model, architecture: Architecture) -> None:
        if not self.train and self.scheme is None and (self.grid.is_static or self.weight_ranges == "learnt"):
            setting = "weight_ranges" if self.weight_ranges == "learnt" else "activation_ranges"
            default = "max" if self.weight_ranges == "learnt" else "token"
            raise ValueError(
                f"Quantize({setting}={getattr(self, setting)!r}): only training finds these ranges, and only the checkpoint of "
                f"the finalized model has them; add train=True, give {setting}={default!r}, or load that checkpoint"
            )

    @torch.no_grad()
    def finalize(self, model: Model, architecture: Architecture) -> "Quantize":
        fixed = {}
        # Layers draw values when they are made, which are not needed here: the global random state stays.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), initialization.no_init_weights():
            for name, module in self._layers(model, architecture):
                try:
                    fixed[name] = module.fixed()
                except ValueError as error:
                    raise ValueError(f"method {self.name!r}, {name!r}: {error}") from None
        for name, layer in fixed.items():
            surgery.replace_by_full_name(model, name, layer)
        return replace(self, train=False, begin=None)

    def merge(self, model: Model, architecture: Architecture) -> None:
        if self.activations is not None:
            raise ValueError(
                f"method {self.name!r} cannot be merged: it rounds the inputs of linears to {self.activations}, which no native "
                "class does"
            )
        super().merge(model, architecture)
        for name in self._experts(architecture, model.config):
            surgery.replace(model, name, integer_experts.native_experts(model.base_model.get_submodule(name)))
        for name, module in self._tables(model, architecture).items():
            is_table = isinstance(module, nn.Embedding)
            dense = surgery.dense_table(module) if is_table else surgery.dense_linear(module)
            surgery.replace_by_full_name(model, name, dense)


def _native_kind(module: Any) -> type[nn.Module]:
    return nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear


# Class of what is replaced -> the layer that holds few bits, and the one that trains for them.
_KINDS: dict[type[nn.Module], tuple[Any, Any]] = {
    nn.Linear: (QuantizedLinear, fake_quantized.like),
    nn.Embedding: (QuantizedEmbedding, fake_quantized.FakeQuantizedEmbedding),
    LowRankLinear: (quantized_factors.QuantizedLowRankLinear, fake_quantized.FakeQuantizedLowRankLinear),
    TensorTrainLinear: (quantized_factors.QuantizedTensorTrainLinear, fake_quantized.FakeQuantizedTensorTrainLinear),
    TuckerLinear: (quantized_factors.QuantizedTuckerLinear, fake_quantized.FakeQuantizedTuckerLinear),
    SparseLinear: (quantized_factors.QuantizedSparseLinear, fake_quantized.FakeQuantizedSparseLinear),
    LowRankEmbedding: (quantized_factors.QuantizedLowRankEmbedding, fake_quantized.FakeQuantizedLowRankEmbedding),
    LowRankOutput: (quantized_factors.QuantizedLowRankOutput, fake_quantized.FakeQuantizedLowRankOutput),
}


class _Rounding(Schedule):
    """When rounding begins, and the ranges of inputs."""

    def __init__(self, method: Quantize) -> None:
        self.method = method

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        return {"rounded to few bits": float(step / total_steps >= (self.method.begin or 0))}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        (active,) = self.values(step, total_steps).values()
        for _, layer in self.method._layers(model, architecture):
            for rounding in layer.roundings():
                rounding.active = bool(active)
                rounding.track()

    def rewind(self, model: Model, architecture: Architecture) -> None:
        for _, layer in self.method._layers(model, architecture):
            for rounding in layer.roundings():
                rounding.active = not self.method.begin
