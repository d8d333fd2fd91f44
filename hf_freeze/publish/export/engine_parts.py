"""What an engine runs: the forward of a model in one or two parts, with tensors alone as inputs and outputs.

    model     any model that does not generate: its inputs -> its outputs, such as logits
    model     a language model that generates: input_ids, attention_mask, position_ids, and the past -> logits, and the past
              including the new tokens
    encoder   of an encoder-decoder: what it reads -> last_hidden_state, and the keys and values of cross-attention
    decoder   input_ids, attention_mask of the source, the past, and the keys and values of the source -> logits, and the past
              including the new tokens

`caches` names the tensors of the past. The encoder computes the keys and values of cross-attention once for each source, so that
one decoder serves every step.

Shapes: B rows, T new tokens, P previous tokens, S source tokens or samples of sound, V vocabulary. input_ids (B, T);
attention_mask (B, P + T); input_values (B, S); logits (B, T, V). input_features of Whisper (B, bins, frames) have one length.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_freeze.compat.pipelines import max_positions
from hf_freeze.publish.export.caches import PAST, PRESENT, cache_of, check_cache, empty_cache, tensors_of

GENERATING = ("causal-lm", "seq2seq-lm")  # of text
WITH_ENCODER = ("seq2seq-lm", "speech-seq2seq")
_TEXT = ("input_ids", "attention_mask", "token_type_ids")
_SIDES = ("decoder", "encoder")


@dataclass(frozen=True)
class Part:
    """A module whose forward takes the values of `inputs` in this order and returns the tensors named by `outputs`.

    `inputs`: an example. `axes`: for each input, the names of its dimensions that vary.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: list[str]
    axes: dict[str, dict[int, str]]

    def __post_init__(self) -> None:
        for name, value in self.inputs.items():
            self.inputs[name] = value.contiguous()  # a graph would keep the strides of a view


def engine_parts(model: Any, task: str) -> list[Part]:
    """The parts of a model in eval mode. Raises ValueError for a model whose inputs or whose cache no part has, and one that
    cannot run on them."""
    with torch.no_grad():
        try:
            if task in WITH_ENCODER:
                return _translator(model)
            return [_generator(model) if task == "causal-lm" else _single(model)]
        except Exception as error:  # of any kind: from the code of any family
            if isinstance(error, ValueError) and "\n" not in str(error):
                raise
            reason = (str(error).splitlines() or [""])[0][:200]
            raise ValueError(
                f"{type(model).__name__} cannot run as it would in an engine ({type(error).__name__}: {reason}); choose "
                "--format dense"
            ) from error


def positions(config: Any) -> list[int]:
    """How many tokens the encoder and the decoder have positions for, where they are limited."""
    limits = [max_positions(each, side) for each in (config, config.get_text_config()) for side in _SIDES]
    limits += [getattr(config, name, None) for name in ("max_target_positions", "max_seq_len")]  # Whisper, MPT
    return [limit for limit in limits if limit]


# -- inputs ------------------------------------------------------------------------------------------------------------------


def source_names(model: Any, reader: Any) -> list[str]:
    """The names of what `reader`, the model or its encoder, reads. Raises ValueError for anything but text, images or sound."""
    main, config = reader.main_input_name, model.config
    accepted = inspect.signature(reader.forward).parameters
    if main == "input_ids":
        return [name for name in _TEXT if name in accepted]
    if main == "pixel_values" and hasattr(config, "image_size"):
        return [main]
    # Features of sound that fill all positions of the encoder, as those of Whisper do.
    if main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return [main]
    if main == "input_values" and hasattr(config, "conv_kernel"):
        return [name for name in (main, "attention_mask") if name in accepted]
    raise ValueError(
        f"{type(model).__name__} reads {main} of a kind that an exported file has no place for: choose a model of text, images, "
        "or sound as Whisper or Wav2Vec2 read it, or --format dense"
    )


def samples(config: Any, length: int) -> int:
    """Samples of sound that give more than `length` states: SEW cannot work on one."""
    least = 1
    for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride, strict=True))):
        least = (least - 1) * stride + kernel
    return least * (length + 1)


def _example(
    names: Iterable[str], model: Any, rows: int, length: int
) -> tuple[dict[str, Tensor], dict[str, dict[int, str]]]:
    """Random inputs, and their axes that vary: tokens (rows, length), sound of this length, or images. With several rows of text
    or sound, half of the last row is padding."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    axis = "samples" if "input_values" in names else "length"
    size = samples(config, length) if axis == "samples" else length
    mask = torch.ones(rows, size, dtype=torch.long)
    if rows > 1:
        mask[-1, (size + 1) // 2 :] = 0
    tensors, axes = {}, {}
    for name in names:
        axes[name] = {0: "batch", 1: axis}
        if name == "input_ids":
            tensors[name] = torch.randint(
                model.get_input_embeddings().num_embeddings, (rows, size), generator=generator
            )
        elif name == "input_values":
            tensors[name] = torch.randn(rows, size, generator=generator)
        elif name in ("pixel_values", "input_features"):
            shape = (
                (config.num_channels, *_pair(config.image_size))
                if name == "pixel_values"
                else (config.num_mel_bins, 2 * config.max_source_positions)
            )
            tensors[name], axes[name] = torch.randn(rows, *shape, generator=generator), {0: "batch"}
        else:
            tensors[name] = mask if name == "attention_mask" else torch.zeros_like(mask)
    return tensors, axes


def _pair(size: Any) -> tuple[int, int]:
    return tuple(size) if isinstance(size, list | tuple) else (size, size)


# -- one forward -------------------------------------------------------------------------------------------------------------


class _Forward(nn.Module):
    """`names`: those of the inputs."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def named(self, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(self.names, inputs, strict=True))


class _Single(_Forward):
    def __init__(self, model: Any, names: list[str], outputs: list[str]) -> None:
        super().__init__(model, names)
        self.outputs = outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**self.named(inputs), **_without_cache(self.model))
        return tuple(found[name] for name in self.outputs)


def _without_cache(model: Any) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _single(model: Any) -> Part:
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name} in an encoder and a decoder; choose a model with one of them, "
            f"or one of the tasks {', '.join(WITH_ENCODER)}"
        )
    names = source_names(model, model)
    inputs, axes = _example(names, model, 3, 7)
    found = model(**inputs, **_without_cache(model))
    outputs = [name for name, value in found.items() if isinstance(value, Tensor)]
    return Part("model", _Single(model, names, outputs), inputs, outputs, axes)


# -- language models ---------------------------------------------------------------------------------------------------------


class _Generator(_Forward):
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        named = self.named(inputs)
        past = {name: named.pop(name) for name in self.names if name.startswith(PAST)}
        found = self.model(**named, past_key_values=cache_of(past), use_cache=True)
        return found.logits, *tensors_of(found.past_key_values, PRESENT, "decoder").values()


def _generator(model: Any) -> Part:
    tokens = _example(["input_ids"], model, 3, 5)[0]["input_ids"]
    cache = model(input_ids=tokens, past_key_values=empty_cache(model.config), use_cache=True).past_key_values
    check_cache(model, cache)
    past = tensors_of(cache, PAST, "decoder")
    names = ["input_ids", "attention_mask"]
    names += ["position_ids"] * ("position_ids" in inspect.signature(model.forward).parameters)
    new, all_tokens = {0: "batch", 1: "new_length"}, {0: "batch", 1: "length"}
    inputs = {"input_ids": tokens[:, :2], "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    inputs |= {"position_ids": torch.arange(5, 7).expand(3, 2)} if "position_ids" in names else {}
    axes = {name: all_tokens if name == "attention_mask" else new for name in names} | _axes(past, "past_length")
    outputs = ["logits", *tensors_of(cache, PRESENT, "decoder")]
    return Part("model", _Generator(model, [*names, *past]), inputs | past, outputs, axes)


def _axes(cached: Iterable[str], length: str) -> dict[str, dict[int, str]]:
    """The axes that vary of the tensors of a cache."""
    return {name: {0: "batch"} | ({} if name.endswith((".conv", ".state")) else {2: length}) for name in cached}


# -- encoder-decoders --------------------------------------------------------------------------------------------------------


class _Encoder(_Forward):
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        named = self.named(inputs)
        encoded = self.model.get_encoder()(**named).last_hidden_state
        return encoded, *cross_attention(self.model, encoded, named.get("attention_mask")).values()


def cross_attention(model: Any, encoded: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """The keys and values of cross-attention for the encoder's states (B, S, H), by name. `mask`: (B, S)."""
    # A step of the decoder fills the cache of cross-attention; what else it computes is no output, and falls away.
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    model(
        encoder_outputs=BaseModelOutput(encoded),  # type: ignore[arg-type]
        attention_mask=mask,
        decoder_input_ids=torch.zeros_like(encoded[:, :1, 0], dtype=torch.long),
        past_key_values=cache,
        use_cache=True,
    )
    return tensors_of(cache.cross_attention_cache, PRESENT, "encoder")


class _Decoder(_Forward):
    """`width`: of the encoder's states."""

    def __init__(self, model: Any, names: list[str], width: int) -> None:
        super().__init__(model, names)
        self.width = width

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        named = self.named(inputs)
        past, cross = (cache_of({name: value for name, value in named.items() if f".{s}." in name}) for s in _SIDES)
        mask, keys = named.get("encoder_attention_mask"), inputs[-1]
        rows, length = (keys.shape[0], keys.shape[2]) if mask is None else mask.shape
        # The cache has the keys and values of the encoder's states already, so the states themselves are not read.
        found = self.model(
            encoder_outputs=BaseModelOutput(keys.new_zeros(rows, length, self.width)),
            attention_mask=mask,
            decoder_input_ids=named["input_ids"],
            past_key_values=EncoderDecoderCache(past, cross),
            use_cache=True,
        )
        return found.logits, *tensors_of(found.past_key_values.self_attention_cache, PRESENT, "decoder").values()


def _translator(model: Any) -> list[Part]:
    reader = model.get_encoder()
    names = [name for name in source_names(model, reader) if name != "token_type_ids"]
    source, axes = _example(names, model, 3, 7)
    config = model.config
    vocabulary = getattr(config, "decoder_vocab_size", None) or config.get_text_config(decoder=True).vocab_size
    target = torch.randint(vocabulary, (3, 4), generator=torch.Generator().manual_seed(1))
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    found = model(**source, decoder_input_ids=target, past_key_values=cache, use_cache=True)
    past, cross = cache.self_attention_cache, cache.cross_attention_cache
    for half in (past, cross):
        check_cache(model, half)
    outputs = ["last_hidden_state", *tensors_of(cross, PRESENT, "encoder")]
    encoder = Part("encoder", _Encoder(model, names), source, outputs, axes)
    inputs = {"input_ids": target[:, :2]} | tensors_of(past, PAST, "decoder") | tensors_of(cross, PAST, "encoder")
    along = {"input_ids": {0: "batch", 1: "new_length"}} | _axes(tensors_of(past, PAST, "decoder"), "past_length")
    if "attention_mask" in source:
        inputs = {"input_ids": inputs.pop("input_ids"), "encoder_attention_mask": source["attention_mask"]} | inputs
        along |= {"encoder_attention_mask": {0: "batch", 1: "source_length"}}
        along |= _axes(tensors_of(cross, PAST, "encoder"), "source_length")
    else:
        along |= {name: {0: "batch"} for name in tensors_of(cross, PAST, "encoder")}
    decoder = _Decoder(model, list(inputs), found.encoder_last_hidden_state.shape[-1])
    outputs = ["logits", *tensors_of(past, PRESENT, "decoder")]
    return [encoder, Part("decoder", decoder, inputs, outputs, along)]
