"""Recurrent units instead of decoder self-attention: SSRU (Kim et al., 2019, https://aclanthology.org/D19-5632), average
attention (Zhang et al., 2018, https://arxiv.org/abs/1805.00631) or an LSTM.
"""

from dataclasses import dataclass, replace
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention, Stack, check_layers_type, hidden_size, in_layers, read
from hf_freeze.architectures.kinds import types_of_layers
from hf_freeze.compat.transformers import mark_stateful, record_weights
from hf_freeze.layers.derived import features
from hf_freeze.layers.recurrent import KINDS, RecurrentAttention
from hf_freeze.methods._blocks import check_blocks
from hf_freeze.methods.base import Facts, Method, Model
from hf_freeze.methods.checks import check_any_selected, check_bool, check_fields, check_positive, one_of, wrong
from hf_freeze.methods.registry import register_method

_STACK, _WIDEST = "decoder", 16  # times the hidden size
# Described by hand, or derived and tested: others call their attention in other ways, or have other masks and caches.
_BY_HAND = ("marian", "gpt2", "llama")
_DERIVED = (
    "bart",
    "gemma",
    "granite",
    "mbart",
    "mistral",
    "olmo2",
    "opt",
    "pegasus",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)


@register_method(
    "recurrent_decoder",
    example={"kind": "ssru"},
    modes={"aan": {"kind": "aan", "ffn_width": 24}, "lstm": {"kind": "lstm"}},
    facts=Facts(
        needs={"heads"}, architectures={*_BY_HAND, *_DERIVED}, from_scratch={"blocks"}, shrinks=True, repeatable=False
    ),
)
@dataclass(frozen=True, kw_only=True)
class RecurrentDecoder(Method):
    """Replace the self-attention of the decoder, in `layers` (None: all), by a recurrent unit (`layers/recurrent.py`). The state
    of a unit has the same size after any number of tokens, and so has the cache; a step of generation takes the same time at
    every length. Cross-attentions, FFNs, norms and residual connections stay.

    `kind`: "ssru" has a forget gate and two matrices, "aan" averages all tokens so far, "lstm" is an LSTM layer of the hidden
    size. In training, "ssru" and "aan" compute all tokens at once, "lstm" one after the other. `ffn_width` is the number of
    neurons of an FFN after the average of "aan", as wide as the FFNs of the model in the paper; None: no FFN. `gate`: whether
    "aan" weighs the average and the token by a gate.

    The units train from scratch: the backbone is a config, or Theseus comes before, whose predecessors are the trained layers.
    There is no closed form for them, so that a calibration changes nothing. `merge()` raises an error, because no native model
    has such units. `generate` has all searches but those that take back tokens, such as assisted generation.

    Raises ValueError for an unknown kind, `ffn_width` or `gate=False` for another kind than "aan", an FFN wider than 16 times the
    hidden size, a layer that the decoder does not have, a language model with cross-attentions, a sliding window, and an
    attention that another method has changed.
    """

    kind: str = "ssru"
    ffn_width: int | None = None
    gate: bool = True
    layers: dict[str, list[int]] | None = None

    def __post_init__(self) -> None:
        check_layers_type(self.layers)
        check_fields(self, kind=one_of(KINDS), ffn_width=check_positive, gate=check_bool)
        if self.kind != "aan":
            for field, default in (("ffn_width", None), ("gate", True)):
                if getattr(self, field) != default:
                    raise wrong(self, f"only kind='aan' has {field}", "kind", field)

    @property
    def facts(self) -> Facts:
        shrinks = self.kind == "ssru" or (self.kind == "aan" and not self.gate and self.ffn_width is None)
        return replace(super().facts, shrinks=shrinks)

    @property
    def _linears(self) -> tuple[str, ...]:
        """The names of the linears of a unit."""
        if self.kind != "aan":
            return ("forget", "input") if self.kind == "ssru" else ("input", "recurrent")
        return (*(("fc1", "fc2") if self.ffn_width else ()), *(("gate",) if self.gate else ()))

    def _attentions(self, architecture: Architecture, config: Any) -> dict[str, Attention]:
        attentions = in_layers(architecture.attentions(config), self.layers)
        return {
            name: attention
            for name, attention in attentions.items()
            if name.startswith(f"{_STACK}.") and name.endswith(".self")
        }

    def check(self, architecture: Architecture, config: Any) -> None:
        check_blocks(architecture, config, "RecurrentDecoder")
        architecture.check_layers(self.layers, config)
        if others := sorted(set(self.layers or ()) - {_STACK}):
            raise wrong(
                self, f"the attentions of stack {others[0]!r} are not causal; choose layers of 'decoder'", "layers"
            )
        check_any_selected(self._attentions(architecture, config), self.layers, "RecurrentDecoder")
        if (self.ffn_width or 0) > _WIDEST * (hidden := hidden_size(config)):
            raise wrong(self, f"must be at most {_WIDEST} times the hidden size {hidden}", "ffn_width")
        types = set(types_of_layers(config, architecture.stacks[_STACK])) - {"full_attention"}
        if types or getattr(config, "sliding_window", None):
            raise ValueError(
                "RecurrentDecoder: the masks of a sliding window do not tell padding; set sliding_window=None"
            )

    def restructure(self, model: Model, architecture: Architecture) -> None:
        mark_stateful(model)
        settings = {"ffn_width": self.ffn_width, "gate": self.gate} if self.kind == "aan" else {}
        for attention in self._attentions(architecture, model.config).values():
            for name in attention.linears:
                surgery.dense_module(model, name, self.name, advice=f"put {self.name!r} first")
            hidden = features(model.base_model.get_submodule(attention.o))[1]
            unit = KINDS[self.kind](hidden, **settings, **surgery.device_and_dtype(model, attention.o))
            new = RecurrentAttention(model.base_model.get_submodule(attention.module), unit)
            record_weights(model, attention.module, new)
            surgery.replace(model, attention.module, new)

    def describe(self, architecture: Architecture, config: Any) -> Architecture:
        stack = architecture.stacks[_STACK]
        replaced = tuple(int(name.split(".")[1]) for name in self._attentions(architecture, config))
        return replace(architecture, stacks={**architecture.stacks, _STACK: self._described(stack, replaced, config)})

    def _described(self, stack: Stack, replaced: tuple[int, ...], config: Any) -> Stack:
        module = stack.attentions["self"].module
        linears = [f"{module}.unit.{name}" for name in self._linears]
        others = tuple(number for number in range(read(config, stack.depth)) if number not in replaced)
        absent = {**stack.absent, "self": tuple(sorted({*stack.absent.get("self", ()), *replaced}))}
        absent |= dict.fromkeys(linears, others) if others else {}
        return replace(stack, projections=(*stack.projections, *linears), absent=absent)

    def merge(self, model: Model, architecture: Architecture) -> None:
        raise ValueError(
            "recurrent_decoder: no native model has recurrent units beside its attentions; it cannot be merged"
        )
