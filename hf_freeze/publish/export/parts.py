"""What an engine runs: the forward of a model in one or two parts, with tensors alone as inputs and outputs.

    model     any model that does not generate: its inputs -> its outputs, such as logits
    model     a language model that generates: input_ids, attention_mask, position_ids, and the keys and values of previous tokens
              -> logits, and keys and values including the new tokens
    encoder   of an encoder-decoder: input_ids, attention_mask -> last_hidden_state, and the keys and values of cross-attention
    decoder   input_ids, attention_mask of the source, keys and values of previous tokens and of the source
              -> logits, and keys and values including the new tokens

Keys and values are named `past_key_values.LAYER.SIDE.PART` as inputs and `present.LAYER.SIDE.PART` as outputs, where SIDE is
"decoder", or "encoder" for cross-attention, and PART is "key" or "value". The encoder computes those of cross-attention once for
each text, so that one decoder serves every step.

Shapes: B rows, T new tokens, P previous tokens, S source tokens, N heads, D head size, V vocabulary. input_ids (B, T);
attention_mask (B, P + T); keys and values (B, N, P, D), of cross-attention (B, N, S, D); logits (B, T, V).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from hf_freeze.compat.pipelines import max_positions

GENERATING = ("causal-lm", "seq2seq-lm")
_TEXT = ("input_ids", "attention_mask", "token_type_ids")
_SIDES = ("decoder", "encoder")
_LONG = 40  # tokens: more than a tile of any layer


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


def parts_of(model: Any, task: str) -> list[Part]:
    """The parts of a model in eval mode. Raises ValueError for a model whose inputs or whose cache no part has."""
    with torch.no_grad():
        if task == "seq2seq-lm":
            return _translator(model)
        return [_generator(model) if task == "causal-lm" else _single(model, task)]


Runner = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]  # inputs by name -> outputs by name


@torch.no_grad()
def largest_difference(parts: list[Part], runners: Mapping[str, Runner]) -> float:
    """The largest difference of what an engine computes for each part from what PyTorch does, for several numbers of rows and
    lengths: absolute for values below 1, relative above. Raises ValueError for other shapes."""
    differences = [0.0]
    for part in parts:
        for rows, size in ((1, 1), (4, 5), (2, _long(part))):
            inputs = _resized(part, rows, size)
            found = runners[part.name](inputs)
            for name, expected in zip(part.outputs, part.module(*inputs.values()), strict=True):
                if found[name].shape != expected.shape:
                    raise ValueError(
                        f"the engine does not compute the same as PyTorch for the {part.name}: its {name} has the shape "
                        f"{tuple(found[name].shape)} instead of {tuple(expected.shape)}"
                    )
                if expected.numel():
                    differences.append(float(((found[name] - expected).abs() / expected.abs().clamp(min=1)).max()))
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _long(part: Part) -> int:
    """A length above that of the example. The model must have positions for twice as many tokens, and for a few special ones."""
    return max(1, min([_LONG, *(limit // 2 - 2 for limit in positions(part.module.model.config))]))  # type: ignore[union-attr]


def positions(config: Any) -> list[int]:
    """How many tokens the encoder and the decoder have positions for, where they are limited."""
    limits = [max_positions(each, side) for each in (config, config.get_text_config()) for side in _SIDES]
    return [limit for limit in limits if limit]


def _resized(part: Part, rows: int, size: int) -> dict[str, Tensor]:
    """Inputs of a part with so many rows, where every length that varies is `size`, and those of both old and new tokens are
    their sum. With several rows, half of the last row of a source is padding."""
    lengths = {"batch": rows, "length": size, "source_length": size, "new_length": size, "past_length": size - 1}
    if "new_length" in {name for axes in part.axes.values() for name in axes.values()}:
        lengths["length"] = lengths["new_length"] + lengths["past_length"]
    generator = torch.Generator().manual_seed(size)
    inputs = {}
    for name, tensor in part.inputs.items():
        shape = [
            lengths[part.axes[name][axis]] if axis in part.axes[name] else n for axis, n in enumerate(tensor.shape)
        ]
        if tensor.is_floating_point():
            inputs[name] = torch.randn(shape, generator=generator)
        elif name.endswith("mask"):
            inputs[name] = torch.ones(shape, dtype=torch.long)
            if rows > 1 and "past_key_values.0.decoder.key" in part.inputs and name == "attention_mask":
                inputs[name][-1, :1] = 0  # a language model is padded on the left
            elif rows > 1:
                inputs[name][-1, (shape[1] + 1) // 2 :] = 0
        elif name == "position_ids":
            inputs[name] = torch.arange(lengths["past_length"], lengths["past_length"] + shape[1]).expand(shape)
        else:
            inputs[name] = torch.randint(int(tensor.max()) + 1, shape, generator=generator)
    return inputs


def example(names: Iterable[str], model: Any, rows: int, length: int) -> dict[str, Tensor]:
    """Random tokens (rows, length), or an image. With several rows of text, half of the last row is padding."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, length, dtype=torch.long)
    if rows > 1:
        mask[-1, (length + 1) // 2 :] = 0
    tensors = {}
    for name in names:
        if name == "input_ids":
            vocabulary = model.get_input_embeddings().num_embeddings
            tensors[name] = torch.randint(vocabulary, (rows, length), generator=generator)
        elif name == "pixel_values":
            tensors[name] = torch.randn(rows, *_image_shape(model.config), generator=generator)
        else:
            tensors[name] = mask if name == "attention_mask" else torch.zeros_like(mask)
    return tensors


def _image_shape(config: Any) -> tuple[int, int, int]:
    size = config.image_size
    return (config.num_channels, *(size if isinstance(size, list | tuple) else (size, size)))


# -- one forward -------------------------------------------------------------------------------------------------------------


class _Single(nn.Module):
    def __init__(self, model: Any, names: list[str], outputs: list[str]) -> None:
        super().__init__()
        self.model, self.names, self.outputs = model, names, outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**dict(zip(self.names, inputs, strict=True)), **_without_cache(self.model))
        return tuple(found[name] for name in self.outputs)


def _without_cache(model: Any) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def input_names(model: Any) -> list[str]:
    """The inputs of a model that does not generate. Raises ValueError if it reads anything but text or images."""
    accepted = inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values" and hasattr(model.config, "image_size"):
        return ["pixel_values"]
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name}"
            f"{' in an encoder and a decoder' * model.config.is_encoder_decoder}; choose a model that reads text or images, or "
            f"one of the tasks {', '.join(GENERATING)}"
        )
    return [name for name in _TEXT if name in accepted]


def _single(model: Any, task: str) -> Part:
    names = input_names(model)
    inputs = example(names, model, 3, 7)
    found = model(**inputs, **_without_cache(model))
    outputs = [name for name, value in found.items() if isinstance(value, Tensor)]
    rows = {0: "batch"}
    axes = {name: rows if name == "pixel_values" else rows | {1: "length"} for name in names}
    return Part("model", _Single(model, names, outputs), inputs, outputs, axes)


# -- caches ------------------------------------------------------------------------------------------------------------------


def cache_of(tensors: Iterable[Tensor]) -> DynamicCache:
    """The cache with these keys and values: key, value of the first layer, then of the second ..."""
    tensors = list(tensors)
    return DynamicCache(list(zip(tensors[::2], tensors[1::2], strict=True)))


def _tensors_of(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _check_cache(model: Any, cache: Any) -> None:
    """Raises ValueError unless every layer of the cache holds keys and values that grow by the new tokens."""
    layers = getattr(cache, "layers", None)
    if not layers or not all(isinstance(layer, DynamicLayer) and layer.keys is not None for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers or [cache]})
        raise ValueError(
            f"{type(model).__name__} keeps its past in {', '.join(kinds)}: an exported file holds keys and values that grow by a "
            "token at a time alone"
        )


def names_of(kind: str, side: str, layers: int) -> list[str]:
    """`kind`: "past_key_values" or "present"."""
    return [f"{kind}.{layer}.{side}.{part}" for layer in range(layers) for part in ("key", "value")]


def start_of(
    shapes: Mapping[str, list[Any]], encoded: Mapping[str, Tensor], mask: Tensor | None, rows: int | None = None
) -> dict[str, Tensor]:
    """The inputs of a decoder before the first token, except the tokens: no previous keys and values, and those of the source.

    `shapes`: of the decoder's inputs. `encoded`: the outputs of the encoder, for `mask` (B, S); without an encoder none, and
    `rows` gives B.
    """
    rows = len(mask) if mask is not None else rows or 1
    inputs = {} if mask is None else {"encoder_attention_mask": mask}
    for name, shape in shapes.items():
        if name.endswith((".decoder.key", ".decoder.value")):
            inputs[name] = torch.zeros(rows, shape[1], 0, shape[3])
        elif name.startswith("past_key_values."):
            inputs[name] = encoded[name.replace("past_key_values", "present")]
    return inputs


def past_of(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The keys and values that a decoder has given, as inputs of its next step."""
    return {
        name.replace("present", "past_key_values"): value
        for name, value in found.items()
        if name.startswith("present.")
    }


# -- language models ---------------------------------------------------------------------------------------------------------


class _Generator(nn.Module):
    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        count = len(self.names)
        named = dict(zip(self.names, inputs[:count], strict=True))
        found = self.model(**named, past_key_values=cache_of(inputs[count:]), use_cache=True)
        return found.logits, *_tensors_of(found.past_key_values)


def _generator(model: Any) -> Part:
    tokens = example(["input_ids"], model, 3, 5)
    cache = model(**tokens, past_key_values=DynamicCache(), use_cache=True).past_key_values
    _check_cache(model, cache)
    past = _tensors_of(cache)
    names = ["input_ids", "attention_mask"]
    names += ["position_ids"] * ("position_ids" in inspect.signature(model.forward).parameters)
    new, all_tokens = {0: "batch", 1: "new_length"}, {0: "batch", 1: "length"}
    positions = torch.arange(5, 7).expand(3, 2)
    inputs = {"input_ids": tokens["input_ids"][:, :2], "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    inputs |= {"position_ids": positions} if "position_ids" in names else {}
    axes = {name: all_tokens if name == "attention_mask" else new for name in names}
    layers = len(past) // 2
    for name, tensor in zip(names_of("past_key_values", "decoder", layers), past, strict=True):
        inputs[name], axes[name] = tensor, {0: "batch", 2: "past_length"}
    return Part("model", _Generator(model, names), inputs, ["logits", *names_of("present", "decoder", layers)], axes)


# -- encoder-decoders --------------------------------------------------------------------------------------------------------


class _Encoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        ids, mask = inputs
        encoded = self.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        # A step of the decoder fills the cache of cross-attention; what else it computes is no output, and falls away.
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.model(
            encoder_outputs=(encoded,),
            attention_mask=mask,
            decoder_input_ids=ids[:, :1].clamp(max=0),
            past_key_values=cache,
            use_cache=True,
        )
        return encoded, *_tensors_of(cache.cross_attention_cache)


class _Decoder(nn.Module):
    def __init__(self, model: Any, layers: int, width: int) -> None:
        super().__init__()
        self.model, self.layers, self.width = model, layers, width

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        ids, mask, *cached = inputs
        past, cross = (cache_of(tensors) for tensors in (cached[: 2 * self.layers], cached[2 * self.layers :]))
        # The cache has the keys and values of the encoder's states already, so the states themselves are not read.
        states = mask.new_zeros(*mask.shape, self.width, dtype=cached[0].dtype)
        found = self.model(
            encoder_outputs=(states,),
            attention_mask=mask,
            decoder_input_ids=ids,
            past_key_values=EncoderDecoderCache(past, cross),
            use_cache=True,
        )
        return found.logits, *_tensors_of(found.past_key_values.self_attention_cache)


def _translator(model: Any) -> list[Part]:
    if model.main_input_name != "input_ids":
        raise ValueError(f"{type(model).__name__} reads {model.main_input_name}; choose a model that reads text")
    source = example(["input_ids", "attention_mask"], model, 3, 7)
    vocabulary = getattr(model.config, "decoder_vocab_size", None) or model.config.get_text_config().vocab_size
    target = torch.randint(vocabulary, (3, 4), generator=torch.Generator().manual_seed(1))
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    found = model(**source, decoder_input_ids=target, past_key_values=cache, use_cache=True)
    for half in (cache.self_attention_cache, cache.cross_attention_cache):
        _check_cache(model, half)
    past, cross = (_tensors_of(half) for half in (cache.self_attention_cache, cache.cross_attention_cache))
    layers, cross_layers = len(past) // 2, len(cross) // 2
    along = {0: "batch", 1: "source_length"}
    outputs = ["last_hidden_state", *names_of("present", "encoder", cross_layers)]
    encoder = Part("encoder", _Encoder(model), source, outputs, dict.fromkeys(source, along))
    inputs = {"input_ids": target[:, :2], "encoder_attention_mask": source["attention_mask"]}
    axes: dict[str, dict[int, str]] = {"input_ids": {0: "batch", 1: "new_length"}, "encoder_attention_mask": along}
    for side, tensors, length in (("decoder", past, "past_length"), ("encoder", cross, "source_length")):
        for name, tensor in zip(names_of("past_key_values", side, len(tensors) // 2), tensors, strict=True):
            inputs[name], axes[name] = tensor, {0: "batch", 2: length}
    decoder = _Decoder(model, layers, found.encoder_last_hidden_state.shape[-1])
    return [encoder, Part("decoder", decoder, inputs, ["logits", *names_of("present", "decoder", layers)], axes)]
