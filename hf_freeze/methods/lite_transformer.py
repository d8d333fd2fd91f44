"""Half of the channels attend, the other half is convolved (Wu et al., 2020, "Lite Transformer with Long-Short Range Attention",
https://arxiv.org/abs/2004.11886).
"""

from dataclasses import dataclass, field, replace
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention
from hf_freeze.compat.transformers import record_weights
from hf_freeze.layers.convolution import KINDS, KernelConvolution
from hf_freeze.layers.long_short import ConvolutionAlone, LongShortAttention
from hf_freeze.methods._blocks import check_blocks, with_blocks
from hf_freeze.methods.base import Facts, Method, Model
from hf_freeze.methods.checks import (
    check_bool,
    check_fields,
    check_positive,
    check_positive_list,
    check_share_below_one,
    one_of,
)
from hf_freeze.methods.linear import set_field
from hf_freeze.methods.registry import register_method

_WIDEST = 1 << 10


@register_method(
    "lite_transformer",
    example={"kernels": [3, 5], "heads": 2, "conv_heads": 2},
    facts=Facts(needs={"blocks"}, architectures={"marian", "gpt2"}, from_scratch={"blocks"}, shrinks=True),
)
@dataclass(frozen=True, kw_only=True)
class LiteTransformer(Method):
    """Replace every self-attention by two branches whose outputs are concatenated (`layers/long_short.py`). The first half of the
    H channels attends, with `heads` heads. The second half is convolved over time: layer l has `kernels[l]` taps and
    `conv_heads` kernels for all its channels, centred on the token in an encoder and ending at it in a decoder
    (`layers/convolution.py`). The FFN, which mixes the branches, gets H neurons; cross-attentions stay unchanged.

    `conv`: "dynamic" computes the kernels from the token, as the paper does for WMT; "lightweight" learns them as parameters, and
    has no gate. Without `attention`, the convolution has all H channels, and no self-attention is left: the flat convolutional
    model; `heads` is ignored. `conv_dropout` drops taps in training (DropConnect). Surplus `kernels` are ignored. The published
    translation models have six layers in each stack, ReLU and a cosine schedule.

    The blocks train from scratch: the backbone is a config, or Theseus comes before, whose predecessors are the trained blocks.
    `merge()` raises an error, because no native model has such blocks.

    Raises ValueError for an even kernel size, fewer kernels than layers, heads that do not divide half of the hidden size, an odd
    hidden size, and an attention or FFN that another method has changed.
    """

    kernels: list[int] = field(default_factory=lambda: [3, 7, 15, 31, 31, 31])
    conv: str = "dynamic"
    attention: bool = True
    heads: int = 4
    conv_heads: int = 4
    conv_dropout: float = 0.0

    def __post_init__(self) -> None:
        set_field(self, "kernels", check_positive_list(self.kernels, "LiteTransformer", "kernels"))
        for taps in self.kernels:
            if taps % 2 == 0 or taps > _WIDEST:
                raise ValueError(f"LiteTransformer(kernels={self.kernels!r}): {taps} must be odd and below {_WIDEST}")
        kinds = {"conv": one_of(KINDS), "attention": check_bool, "conv_dropout": check_share_below_one}
        check_fields(self, **kinds, heads=check_positive, conv_heads=check_positive)

    def check(self, architecture: Architecture, config: Any) -> None:
        check_blocks(architecture, config, "LiteTransformer")
        for stack, depth in architecture.depths(config).items():
            if len(self.kernels) < depth:
                raise ValueError(
                    f"LiteTransformer(kernels={self.kernels!r}): {len(self.kernels)} kernels for the {depth} layers of stack "
                    f"{stack!r}; give one for each"
                )
        hidden = config.hidden_size
        for name in ("heads", "conv_heads") if self.attention else ("conv_heads",):
            # Half of the channels in both cases: without attention, a cache stores one half as keys and the other as values.
            if hidden % (2 * getattr(self, name)):
                raise ValueError(
                    f"LiteTransformer({name}={getattr(self, name)}): must divide half of the hidden size {hidden}"
                )

    def _head_size(self, config: Any) -> int:
        return config.hidden_size // 2 // self.heads

    def restructure(self, model: Model, architecture: Architecture) -> None:
        half, size = model.config.hidden_size // 2, self._head_size(model.config)
        for name, attention in architecture.attentions(model.config).items():
            if name.endswith(".self"):
                if self.attention:
                    surgery.resize_attention(model, attention, self.heads, size, self.name, inputs=half, outputs=half)
                conv = KernelConvolution(
                    half if self.attention else model.config.hidden_size,
                    self.conv_heads,
                    self.kernels[int(name.split(".")[1])],
                    kind=self.conv,
                    causal=not attention.bidirectional,
                    dropout=self.conv_dropout,
                    **surgery.device_and_dtype(model, attention.o),
                )
                old = model.base_model.get_submodule(attention.module)
                new = LongShortAttention(old, conv, size) if self.attention else ConvolutionAlone(old, conv)
                if not self.attention:
                    record_weights(model, attention.module, new)
                surgery.replace(model, attention.module, new)
        surgery.resize_ffns(model, architecture, model.config.hidden_size, self.name)

    def describe(self, architecture: Architecture, config: Any) -> Architecture:
        if not self.attention:
            stacks = {
                name: replace(
                    stack,
                    attentions={kind: block for kind, block in stack.attentions.items() if kind != "self"},
                    mixers=(f"{stack.attentions['self'].module}.conv.*",),
                )
                for name, stack in architecture.stacks.items()
            }
            return replace(architecture, stacks=stacks)

        def describe_attention(kind: str, attention: Attention) -> Attention:
            if kind != "self":
                return attention
            sizes: dict[str, Any] = {"heads": self.heads, "size": self._head_size(config)}
            return attention.inside("attention", others=(f"{attention.module}.conv.*",), **sizes)

        return with_blocks(architecture, describe_attention)

    def merge(self, model: Model, architecture: Architecture) -> None:
        raise ValueError(
            "lite_transformer: no native model has convolutions beside its attentions; it cannot be merged"
        )
