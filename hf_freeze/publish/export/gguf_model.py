"""What a GGUF file says of a model besides its tokens: names and values of its tensors, and the sizes and settings that llama.cpp
reads (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Names come from the tables of the package `gguf`, sizes from our description of the family.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.base import Attention, base_name, canonical_parameters
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.roles import features, is_norm
from hf_freeze.publish.export.folders import require
from hf_freeze.surgery import group_size

_SILU, _GELU = ("silu", "swish"), ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_ENCODER_TASKS = ("feature-extraction", "sequence-classification")


@dataclass(frozen=True)
class Family:
    """A family of llama.cpp.

    `arch`: its name there; `uneven`: the one that takes layers of different sizes, with the same tensors. `activations`: the
    functions of FFNs that it computes. `heads`: whether an attention may have fewer heads than fill the hidden size; `uneven`
    can. `split`: fused projections are written one by one.
    """

    arch: str
    uneven: str | None = None
    activations: tuple[str, ...] = _SILU
    tasks: tuple[str, ...] = ("causal-lm",)
    heads: bool = True
    split: bool = False

    def arch_for(self, layers: "Layers", hidden: int) -> str:
        """Its own, or the one that takes layers of different sizes if these need it."""
        own = not layers.uneven and (self.heads or layers.heads[0] * layers.head == hidden)
        return self.arch if own or self.uneven is None else self.uneven


_LLAMA, _BERT = Family("llama", "deci"), Family("bert", activations=_GELU, tasks=_ENCODER_TASKS, heads=False)
_T5 = Family("t5", activations=("relu", "gelu_new"), tasks=("seq2seq-lm",), heads=False)
FAMILIES = {  # model type -> its family; each one is compared with llama.cpp by the tests
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "phi3": Family("llama", "deci", split=True),  # what it computes is a Llama
    "qwen2": Family("qwen2", "deci", heads=False),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", activations=_GELU),
    "gemma2": Family("gemma2", activations=_GELU),
    "gemma3_text": Family("gemma3", activations=_GELU),
    "arcee": Family("arcee", activations=("relu2",), heads=False),
    "ernie4_5": Family("ernie4_5", heads=False),
    "hunyuan_v1_dense": Family("hunyuan-dense", heads=False),
    "ministral": _LLAMA,
    "olmo2": Family("olmo2", heads=False),
    "seed_oss": Family("seed_oss", heads=False),
    "smollm3": Family("smollm3", heads=False),
    "starcoder2": Family("starcoder2", activations=_GELU, heads=False),
    "gpt2": Family("gpt2", activations=_GELU, heads=False),
    "bert": _BERT,
    "distilbert": Family("bert", activations=_GELU, tasks=("feature-extraction",), heads=False),
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "t5": _T5,
    "mt5": _T5,
}
_CLASSES = {  # the linears of a classifier of texts
    "pooler.dense": "cls",
    "classifier.dense": "cls",
    "classifier": "cls.output",
    "classifier.out_proj": "cls.output",
}
_FACTORS = (
    "llama",
    "arcee",
)  # they read a factor of each rotary frequency, as deci does, which takes the place of llama
_PAIRS = (
    "llama",
    "deci",
    "arcee",
    "smollm3",
)  # they rotate neighbouring values of a head, transformers those half a head apart


@dataclass(frozen=True)
class Layers:
    """Sizes of each layer of a model: heads, heads of keys and values, neurons; `head`: of a head."""

    heads: list[int]
    key_heads: list[int]
    neurons: list[int]
    head: int

    @classmethod
    def of(cls, model: Any) -> "Layers":
        architecture, config = architecture_of(model.config), model.config
        first = next(iter(architecture.stacks))  # of a T5 the encoder, whose layers are like those of the decoder
        attentions = [one for name, one in architecture.attentions(config).items() if name.startswith(f"{first}.")]
        heads = [_heads(model, attention) for attention in attentions]
        groups = [
            group_size(model.base_model, attention, config, count)
            for attention, count in zip(attentions, heads, strict=True)
        ]
        outputs = [linears[-1] for name, linears in architecture.ffns(config).items() if name.startswith(f"{first}.")]
        return cls(
            heads,
            [count // group for count, group in zip(heads, groups, strict=True)],
            [features(model.base_model.get_submodule(name))[0] for name in outputs],
            attentions[0].head_size(config),
        )

    @property
    def uneven(self) -> bool:
        return any(len(set(sizes)) > 1 for sizes in (self.heads, self.key_heads, self.neurons))


def _heads(model: Any, attention: Attention) -> int:
    return features(model.base_model.get_submodule(attention.o))[0] // attention.head_size(model.config)


def check(model: Any) -> Family:
    """The family of a model. Raises ValueError for one that llama.cpp computes otherwise."""
    config = model.config
    kind = architecture_of(config).model_type
    family = FAMILIES[kind]
    act = next(getattr(config, name) for name in _ACTIVATIONS if hasattr(config, name))
    wrong: dict[str, Any] = {}
    if act not in family.activations:
        wrong["the activation function"] = f"{act!r}; it computes {', '.join(family.activations)}"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one["rope_type"] for one in (rope.values() if "rope_type" not in rope and rope else [rope]) if one}
    known = ("default", "linear", *(("llama3",) if family.arch in _FACTORS else ()))
    if other := sorted(kinds - {*known}):
        wrong["rotary positions of the type"] = f"{other[0]!r}; it takes {', '.join(known)} here"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        wrong["a share of rotated values of"] = rope["partial_rotary_factor"]
    rotated = list(getattr(config, "no_rope_layers", None) or [])
    if rotated != [int((number + 1) % 4 != 0) for number in range(len(rotated))]:
        wrong["rotary positions in other layers than three of four:"] = rotated
    if family.arch == "t5" and config.num_decoder_layers > config.num_layers:
        wrong["more layers in the decoder than in the encoder:"] = f"{config.num_decoder_layers}, {config.num_layers}"
    for name, value in wrong.items():
        raise ValueError(f"llama.cpp has no {kind} with {name} {value}; choose --format onnx")
    return family


_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation", "dense_act_fn")


# -- tensors -------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def tensors(model: Any, family: Family, arch: str, layers: Layers) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, fp32 values) of each tensor. Raises ValueError for one that llama.cpp has no place for."""
    gguf = require("gguf", "gguf")
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    depth = max(architecture_of(model.config).depths(model.config).values())
    names = gguf.get_tensor_name_map(kind, depth)
    attentions = list(architecture_of(model.config).attentions(model.config).values())
    for name, parameter in canonical_parameters(model):
        if _is_unread(name, model):
            continue
        values = _as_computed(model, name, parameter.detach().float())
        for part, rows in _parts(model, name, values, attentions, family):
            rows = _turned(model, part, rows, attentions, arch)
            yield _name_of(part, model, names), rows
    if (factors := _rotary_factors(model)) is not None:
        yield "rope_freqs.weight", factors


def _is_unread(name: str, model: Any) -> bool:
    """Of an encoder, the layer after it that sentence vectors do not need."""
    return model.base_model is model and name.startswith("pooler.")


def _name_of(name: str, model: Any, names: Any) -> str:
    stem, _, kind = base_name(model, name).rpartition(".")
    if stem in _CLASSES:
        return f"{_CLASSES[stem]}.{kind}"
    for candidate in (name, base_name(model, name)):
        if found := names.get_name(candidate, try_suffixes=(".weight", ".bias")):
            return found
    raise ValueError(f"llama.cpp has no place for {name!r} of {type(model).__name__}; choose --format onnx")


def _as_computed(model: Any, name: str, values: Tensor) -> Tensor:
    """Weights as the forward uses them: (outputs, inputs), norms with what is added to them, factors multiplied in."""
    path, _, kind = name.rpartition(".")
    module, config = model.get_submodule(path), model.config
    if isinstance(module, Conv1D) and kind == "weight":
        values = values.T
    if is_norm(module) and kind == "weight" and not hasattr(module, "bias"):
        probed = module(torch.ones_like(module.weight)).float()
        if (probed - values).abs().sum() > (probed - values - 1).abs().sum():
            values = values + 1  # as in Gemma
    if name == "decoder.final_layer_norm.weight" and getattr(config, "scale_decoder_outputs", False):
        values = values * config.d_model**-0.5  # T5 scales what its tied output matrix reads
    if base_name(model, name) == "embeddings.position_embeddings.weight" and config.model_type.endswith("roberta"):
        values = values[config.pad_token_id + 1 :]  # where its positions start
    return values


def _parts(
    model: Any, name: str, values: Tensor, attentions: list[Attention], family: Family
) -> Iterator[tuple[str, Tensor]]:
    """(name as in a Llama, values) of each projection in a fused tensor, if the family writes them apart; else the tensor."""
    path, _, kind = base_name(model, name).rpartition(".")
    prefix = name.removesuffix(f"{path}.{kind}")
    for attention in attentions:
        if family.split and attention.linears.get(path, 0) > 1:
            heads = _heads(model, attention)
            group = group_size(model.base_model, attention, model.config, heads)
            for role in attention.roles(path):
                rows = attention.outputs_of(model.config, role, heads, group)
                yield f"{prefix}{attention.module}.{role}_proj.{kind}", values[rows]
            return
    if family.split and path.endswith("gate_up_proj"):
        for part, rows in zip(("gate_proj", "up_proj"), values.chunk(2), strict=True):
            yield f"{prefix}{path.removesuffix('gate_up_proj')}{part}.{kind}", rows
        return
    yield name, values


def _turned(model: Any, name: str, values: Tensor, attentions: list[Attention], arch: str) -> Tensor:
    """Queries with the scale of their scores, and queries and keys with the values of a head in llama.cpp's order."""
    path = base_name(model, name).rpartition(".")[0]
    attention = next((one for one in attentions if path.startswith(f"{one.module}.")), None)
    if attention is None:
        return values
    role, size = path.rpartition(".")[2], attention.head_size(model.config)
    scale = getattr(model.base_model.get_submodule(attention.module), "scaling", None)
    if scale is not None and arch != "t5" and (ratio := scale * size**0.5) != 1:
        normed = any(
            part.endswith("q_norm") for part, _ in model.base_model.named_modules() if part.startswith(attention.module)
        )
        if role == "q_norm" or (role.startswith("q") and not normed):
            values = values * ratio
    if arch in _PAIRS and role in ("q_proj", "k_proj"):
        values = values.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)
    return values


def _rotary_factors(model: Any) -> Tensor | None:
    """By what llama3 divides the frequencies of rotary positions, (head size / 2,); None for another kind."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return None
    used = model.base_model.rotary_emb.inv_freq.float()
    plain = rope["rope_theta"] ** -(torch.arange(len(used)) / len(used))
    return plain / used


# -- sizes and settings --------------------------------------------------------------------------------------------------------


def add_settings(writer: Any, model: Any, task: str, layers: Layers, sentence: dict[str, Any]) -> None:
    """Tell the `writer` of a file the sizes and settings of a model. `sentence`: see `read_sentence_files`."""
    config = model.config
    writer.add_context_length(
        _first_of(config, "max_position_embeddings", "n_positions", default=512) - _skipped(config)
    )
    writer.add_embedding_length(_first_of(config, "hidden_size", "n_embd", "d_model", "dim"))
    writer.add_block_count(len(layers.heads))
    for add, sizes in (
        (writer.add_head_count, layers.heads),
        (writer.add_head_count_kv, layers.key_heads),
        (writer.add_feed_forward_length, layers.neurons),
    ):
        add(sizes if layers.uneven else sizes[0])
    writer.add_key_length(layers.head)
    writer.add_value_length(layers.head)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
        writer.add_layer_norm_eps(_first_of(config, *names, default=1e-12))
    _add_rotation(writer, config, layers)
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if getattr(config, name, None):
            add(getattr(config, name))
    if task in _ENCODER_TASKS:
        _add_pooling(writer, config, task, sentence)
    if task == "seq2seq-lm":
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
        writer.add_decoder_start_token_id(config.decoder_start_token_id)
        writer.add_decoder_block_count(config.num_decoder_layers)


def _has_windows(config: Any) -> bool:
    """Whether llama.cpp reads how far an attention looks back; `config` may be a variant's."""
    return architecture_of(config).model_type.startswith("gemma")


def ignored_window(config: Any) -> int | None:
    """The number of tokens that an attention looks back at, if it is below the positions and llama.cpp does not read it."""
    window = getattr(config, "sliding_window", None)
    is_read = _has_windows(config) or not window
    return None if is_read or window >= config.max_position_embeddings else window


def _first_of(config: Any, *names: str, default: Any = None) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _skipped(config: Any) -> int:
    return config.pad_token_id + 1 if config.model_type.endswith("roberta") else 0


def _add_rotation(writer: Any, config: Any, layers: Layers) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if not rope:
        return
    writer.add_rope_dimension_count(layers.head)
    if "full_attention" in rope:  # Gemma 3 has others where it looks back a little only
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(require("gguf", "gguf").RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if _has_windows(config) and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _add_pooling(writer: Any, config: Any, task: str, sentence: dict[str, Any]) -> None:
    gguf = require("gguf", "gguf")
    kinds = {"mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS, "lasttoken": gguf.PoolingType.LAST}
    mode = sentence.get("mode", "mean")
    if task == "feature-extraction" and (mode not in kinds or sentence.get("dense")):
        what = f"pooling {mode!r}" if mode not in kinds else "a linear after the pooling"
        raise ValueError(f"llama.cpp has no {what}; it takes {', '.join(kinds)} here; choose --format onnx")
    writer.add_causal_attention(False)
    writer.add_token_type_count(getattr(config, "type_vocab_size", 1))
    writer.add_pooling_type(gguf.PoolingType.RANK if task != "feature-extraction" else kinds[mode])
    if task == "sequence-classification":
        writer.add_classifier_output_labels([config.id2label[i] for i in range(config.num_labels)])
