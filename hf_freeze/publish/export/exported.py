"""Exported folders as models of transformers: `pipeline(task, model=FOLDER)` and `AutoModel...from_pretrained(FOLDER)` open them.

The engine runs the forward. Search, sampling, streaming and stopping are those of `generate`. Importing this module registers
the classes; after `import hf_freeze`, AutoConfig does so for such a folder. The models run on the CPU and cannot be trained.

Shapes: B rows, T new tokens, S source tokens or states of sound.
"""

import functools
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.generic import ModelOutput

from hf_freeze.architectures.tasks import AUTO_CLASSES, native_class
from hf_freeze.publish.export.caches import PAST, cache_of, past_of, start_of, tensors_of
from hf_freeze.publish.export.engine_parts import WITH_ENCODER
from hf_freeze.publish.export.folders import read_mark
from hf_freeze.publish.export.runners import open_parts
from hf_freeze.runtime.shortlists import DECODER

MODEL_TYPE = "exported_by_hf_freeze"
_GENERATION = GenerationConfig().to_dict().keys() - {"use_cache"}
_DOWNLOAD = ("revision", "token", "cache_dir", "local_files_only", "force_download")


class ExportedConfig(PreTrainedConfig):
    """The config of an exported folder: `exported` is that of the model that was exported, whose attributes this one has too."""

    model_type = MODEL_TYPE
    exported: dict[str, Any] | None = None

    @classmethod
    def of(cls, config: Any) -> "ExportedConfig":
        """For a model with this config."""
        shared = {
            name: getattr(config, name) for name in ("is_encoder_decoder", "id2label", "label2id", "problem_type")
        }
        return cls(exported={**config.to_dict(), "model_type": config.model_type}, **shared)

    @property
    def native(self) -> Any:
        """The config of the model that was exported."""
        if "_native" not in self.__dict__:
            fields = dict(self.exported or {})
            if "model_type" not in fields:
                raise ValueError(f"this {MODEL_TYPE} config names no model that was exported; export it again")
            self.__dict__["_native"] = CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)
        return self.__dict__["_native"]

    def __getattr__(self, name: str) -> Any:
        # Settings of generation are in generation_config.json, and nowhere else.
        if name.startswith("__") or name in _GENERATION or not self.__dict__.get("exported"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.native, name)

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        return self.native.get_text_config(*args, **kwargs) if self.exported else self

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        fields.pop("_native", None)
        return fields


class ExportedModel(PreTrainedModel):
    """A model whose forward an engine runs. `task`: the one that it was exported for. `main_input_name`: what it reads, such as
    "input_ids" or "input_features"."""

    config_class = ExportedConfig
    task: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ("model",)

    def __init__(self, config: ExportedConfig, runners: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.runners = dict(runners)
        self.main_input_name = next(iter(self.runners[self.parts[0]].shapes))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Open a folder or a Hub id. `engine`: settings of the engine, for ONNX Runtime fields of its `SessionOptions`, such as
        {"intra_op_num_threads": 4}. Arguments for weights, such as `dtype`, have no effect.

        Raises ValueError for a folder that was exported for another task, that is damaged, or whose engine is missing.
        """
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            options = {name: kwargs[name] for name in _DOWNLOAD if kwargs.get(name) is not None}
            folder = Path(snapshot_download(str(pretrained_model_name_or_path), **options))
        kind = read_mark(folder, None, cls.task)["format"]
        runners = open_parts(folder, kind, kwargs.get("engine") or {}, without=DECODER)
        if missing := [part for part in cls.parts if part not in runners]:
            raise ValueError(f"{folder} lacks the part {' and the part '.join(missing)}; export it again")
        config = config or ExportedConfig.from_pretrained(folder)
        model = _with_search_of_speech(cls, config)(config, runners)
        if model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return (model, {}) if kwargs.get("output_loading_info") else model

    def __getattr__(self, name: str) -> Any:
        # Pipelines tell models of speech by the native class. Whisper's `generate` asks its modules for their strides.
        if name == "native_class":
            self.__dict__[name] = _native_class(self.task, self.config)
        elif name == "model" and self.native_class.base_model_prefix == name:
            with torch.device("meta"):
                self.__dict__[name] = getattr(self.native_class(self.config.native), name)
        return self.__dict__[name] if name in self.__dict__ else super().__getattr__(name)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.float32

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Raises ValueError: an exported model has no weights of its own."""
        raise ValueError(
            "an exported model cannot be saved again: copy its folder, or save the model that was exported"
        )


def _native_class(task: str, config: Any) -> Any:
    """The class of the model that was exported, or of the native model that it is a variant of."""
    exported = native_class(task, type(config.native))
    return getattr(exported, "native_class", exported)


def _with_search_of_speech(cls: Any, config: ExportedConfig) -> Any:
    """For speech, the class with the `generate` of the native class, if that is one of its own, as Whisper's is."""
    if cls.task != "speech-seq2seq":
        return cls
    own = [
        b
        for b in _native_class(cls.task, config).__mro__
        if issubclass(b, GenerationMixin) and not issubclass(b, PreTrainedModel)
    ]
    return type(cls.__name__, (*(b for b in own if b is not GenerationMixin), cls), {"__module__": __name__})


class ExportedForward(ExportedModel):
    """A model that does not generate."""

    def forward(
        self, **inputs: Any
    ) -> Any:  # a ModelOutput; sentence-transformers 6.2 takes the annotation for its fields
        """The tensors that the model was exported with; a mask that is not given is all ones, token types are zeros."""
        (runner,) = self.runners.values()
        given = {name: _as_read(value) for name, value in inputs.items() if isinstance(value, Tensor)}
        filled = {"attention_mask": 1, "token_type_ids": 0}
        missing = [name for name in runner.shapes if name not in given and name not in filled]
        if missing:
            raise ValueError(f"{type(self).__name__} needs {', '.join(missing)}; it reads {list(runner.shapes)}")
        like = given[self.main_input_name]
        feed = {
            name: given[name] if name in given else torch.full_like(like, filled[name], dtype=torch.long)
            for name in runner.shapes
        }
        return _output(runner(feed))


def _as_read(tensor: Tensor) -> Tensor:
    """Engines read fp32 and int64 alone."""
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _output(values: Mapping[str, Tensor]) -> Any:
    """A ModelOutput with these values; dots in names become underscores."""
    named = {name.replace(".", "_"): value for name, value in values.items()}
    return _output_class(tuple(named))(**named)


@functools.cache
def _output_class(names: tuple[str, ...]) -> Any:
    return make_dataclass("ExportedOutput", [(name, Any, None) for name in names], bases=(ModelOutput,))


class ExportedGenerator(ExportedModel, GenerationMixin):
    """A language model."""

    _is_stateful = False

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,  # its name since transformers 5.24
        use_cache: bool | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids (B, T) -> logits (B, T, vocabulary), and, unless `use_cache` is False, a cache that holds these tokens too"""
        (runner,) = self.runners.values()
        feed, seen = _past(runner.shapes, past_key_values if cache is None else cache, len(input_ids))
        length = seen + input_ids.shape[1]
        mask = torch.ones(len(input_ids), length, dtype=torch.long) if attention_mask is None else attention_mask.long()
        if position_ids is None:
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        feed |= {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids}
        found = runner(feed)
        cache = None if use_cache is False else cache_of(past_of(found))
        return CausalLMOutputWithPast(logits=found["logits"], past_key_values=cache)


class _Encoder(nn.Module):
    """The encoder of an ExportedTranslator; its output has the keys and values of cross-attention beside the hidden states."""

    def __init__(self, runner: Any, main_input_name: str) -> None:
        super().__init__()
        self.runner, self.main_input_name = runner, main_input_name

    def forward(self, attention_mask: Tensor | None = None, **inputs: Any) -> ModelOutput:
        source = _as_read(inputs[self.main_input_name])
        mask = torch.ones_like(source, dtype=torch.long) if attention_mask is None else attention_mask.long()
        return _output(self.runner({self.main_input_name: source, "attention_mask": mask}))


class ExportedTranslator(ExportedModel, GenerationMixin):
    """An encoder-decoder of text, or of sound."""

    parts = ("encoder", "decoder")
    _is_stateful = False

    def __init__(self, config: ExportedConfig, runners: Mapping[str, Any]) -> None:
        super().__init__(config, runners)
        self.encoder = _Encoder(self.runners["encoder"], self.main_input_name)

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self.encoder

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        cache: Any = None,  # its name since transformers 5.24
        use_cache: bool | None = None,
        input_features: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> Seq2SeqLMOutput:
        """input_ids (B, S), or input_features (B, bins, frames), and decoder_input_ids (B, T) -> logits (B, T, vocabulary), and,
        unless `use_cache` is False, a cache that holds these tokens too.

        Raises ValueError for a mask that leaves out tokens of the decoder, and if attentions are asked for, as they are for the
        times of words."""
        if decoder_input_ids is None:
            raise ValueError(f"{type(self).__name__} needs decoder_input_ids; to translate, use generate()")
        if output_attentions or (decoder_attention_mask is not None and not decoder_attention_mask.all()):
            setting = "output_attentions" if output_attentions else "decoder_attention_mask"
            raise ValueError(
                f"an exported model has no {setting}: turn off the times of words and conditions on earlier text, or use the "
                "model that was exported"
            )
        source = {self.main_input_name: input_ids if input_features is None else input_features}
        encoded = self.encoder(attention_mask, **source) if encoder_outputs is None else encoder_outputs
        states = encoded["last_hidden_state"]
        cross = {name: encoded[name.replace(".", "_")] for name in self.runners["encoder"].outputs}
        mask = torch.ones(states.shape[:2], dtype=torch.long) if attention_mask is None else attention_mask.long()
        runner = self.runners["decoder"]
        cache = past_key_values if cache is None else cache
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else None
        past = _past(runner.shapes, own, len(states))[0]
        feed = start_of(runner.shapes, cross, mask) | past | {"input_ids": decoder_input_ids}
        found = runner(feed)
        # Cross-attention reads the encoder's output, which is the same for all beams of a text, so only this half is reordered.
        cache = None if use_cache is False else EncoderDecoderCache(cache_of(past_of(found)), DynamicCache())
        return Seq2SeqLMOutput(
            logits=found["logits"],
            past_key_values=cache,
            encoder_last_hidden_state=states,  # type: ignore[arg-type]
        )


def _past(shapes: Mapping[str, Any], cache: Any, rows: int) -> tuple[dict[str, Tensor], int]:
    """(previous keys and values as inputs of the engine, number of previous tokens)"""
    seen = 0 if cache is None else cache.get_seq_length()
    if not seen:
        own = {name: shape for name, shape in shapes.items() if ".decoder." in name}
        return start_of(own, {}, None, rows), 0
    return tensors_of(cache, PAST, "decoder"), seen


_BASES: dict[str, Any] = {"causal-lm": ExportedGenerator} | dict.fromkeys(WITH_ENCODER, ExportedTranslator)
CLASSES: dict[str, type[ExportedModel]] = {}  # task -> class

AutoConfig.register(MODEL_TYPE, ExportedConfig, exist_ok=True)
for _task, _auto in AUTO_CLASSES.items():
    _name = f"Exported{_auto.__name__.removeprefix('Auto')}"
    CLASSES[_task] = type(_name, (_BASES.get(_task, ExportedForward),), {"task": _task, "__module__": __name__})
    globals()[_name] = CLASSES[_task]
    _auto.register(ExportedConfig, CLASSES[_task], exist_ok=True)
