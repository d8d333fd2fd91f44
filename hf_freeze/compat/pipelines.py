"""The `translation` and `text2text-generation` pipelines, which transformers 5 no longer has; speech recognition for variants.

Importing it, as transformers.pipelines does after `import hf_freeze`, makes these work for every encoder-decoder model:

    pipeline("translation", model=folder)("Merhaba")              # [{"translation_text": "Hello"}]
    pipeline("translation_tr_to_en", model=folder)(["a", "b"])    # one dict per text; any pair of languages
    pipeline("text2text-generation", model=folder)(generator)     # streams; one list of dicts per text

The pipeline for speech recognition is that of transformers, which also takes variants for the kind of model that they are.

Shapes: B texts, R sequences returned for each text, T tokens.
"""

import copy
import logging
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, ClassVar

import transformers.pipelines
from torch import Tensor, ones_like, tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoModelForSeq2SeqLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.automatic_speech_recognition import AutomaticSpeechRecognitionPipeline
from transformers.pipelines.base import Pipeline

logger = logging.getLogger(__name__)

_PAIR = re.compile(r"translation_(?P<source>.+?)_to_(?P<target>.+)")
_T5 = {"model": ("google-t5/t5-base", "a9723ea")}  # what transformers 4 took where no model was named
NEW_TOKENS = 256  # for models that set no length of their own: generate's default would stop after 20


class Text2TextGenerationPipeline(Pipeline):
    """Text in, generated text out.

    Call it with one text, a list of texts, a dataset or any iterable; `truncation`, `clean_up_tokenization_spaces`,
    `return_tensors` and `stop_sequence` are its own arguments, all others go to `generate`.
    """

    return_name = "generated"
    model: Any
    tokenizer: Any
    generation_config: Any  # of older transformers only
    _registered_impl: ClassVar[dict[str, Any]]

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False
    _pipeline_calls_generate = True
    _default_generation_config = GenerationConfig(max_new_tokens=NEW_TOKENS)

    def __init__(self, model: Any, **kwargs: Any) -> None:
        task = kwargs.get("task", "")
        if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
            raise ValueError(
                f"{task!r} needs an encoder-decoder model with a language-model head, not {type(model).__name__}; "
                "a decoder alone runs in 'text-generation'"
            )
        specific = dict((getattr(model.config, "task_specific_params", None) or {}).get(task, {}))  # T5's, by task
        prefix = specific.pop("prefix", None)
        if "generation_config" in kwargs:
            specific = {}
        limit = max_positions(model.config, "decoder")
        length = model.generation_config.max_new_tokens  # older transformers put the default above it
        if length is None and limit is not None and limit <= NEW_TOKENS:
            length = limit - 1
        if length is not None:
            self._default_generation_config = GenerationConfig(max_new_tokens=length)
        super().__init__(model=model, **{**specific, **kwargs})
        self.prefix = prefix or self.prefix or ""
        if self.tokenizer is not None:
            self.tokenizer.padding_side = "right"  # an encoder counts positions from the left: padding there moves them

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """One text gives a list of dicts, one for each returned sequence; a list of texts gives one dict for each
        text (a list of dicts where `num_return_sequences` is above 1); anything that has no length, and every torch
        `Dataset`, is streamed: an iterator over one list of dicts for each text."""
        if isinstance(inputs, Dataset):
            return super().__call__(inputs, **kwargs)
        if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
            self._require_text(inputs)
            return super().__call__(inputs, **kwargs)
        if not isinstance(inputs, Sized):
            return super().__call__(_Stream(inputs), **kwargs)
        texts = []
        for index, text in enumerate(inputs):
            self._require_text(text, f" at index {index}")
            texts.append(text)
        results: list = super().__call__(texts, **kwargs) if texts else []  # type: ignore[assignment]
        return [result[0] for result in results] if all(len(result) == 1 for result in results) else results

    def _sanitize_parameters(
        self,
        return_tensors: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: bool | str | None = None,
        stop_sequence: str | list[str] | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict, dict, dict]:
        preprocess = {} if truncation is None else {"truncation": truncation}
        if stop_sequence is not None:
            generate_kwargs["stop_strings"] = [stop_sequence] if isinstance(stop_sequence, str) else stop_sequence
        postprocess = {"return_tensors": return_tensors, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        return preprocess, generate_kwargs, {name: value for name, value in postprocess.items() if value is not None}

    def preprocess(self, text: str, truncation: bool | str = False, **languages: str) -> dict[str, Any]:
        """One text -> input_ids (1, T), attention_mask (1, T) and what else the tokenizer gives to `generate`."""
        self._require_text(text)
        limit = max_positions(self.model.config, "encoder")
        options: dict[str, Any] = {"truncation": truncation, "return_tensors": "pt", "return_attention_mask": True}
        if truncation and limit is not None:
            options["max_length"] = min(limit, self.tokenizer.model_max_length)
        encoded = dict(self._encode(self.prefix + text, options, **languages))
        encoded.pop("token_type_ids", None)
        ids = encoded["input_ids"]
        if ids.shape[1] == 0:  # an empty text, and a tokenizer that adds no special tokens
            ends = [end for end in (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id) if end is not None]
            if not ends:
                raise ValueError("cannot encode an empty text: the tokenizer has no eos token and no pad token")
            encoded["input_ids"] = tensor([ends[:1]])
            encoded["attention_mask"] = ones_like(encoded["input_ids"])
        if limit is not None and ids.shape[1] > limit:
            logger.warning(
                "a text of %d tokens is longer than the %d positions of %s; pass truncation=True to cut it (%s)",
                *(ids.shape[1], limit, type(self.model).__name__, reprlib.repr(text)),
            )
        return encoded

    def _encode(self, text: str, options: dict[str, Any]) -> Mapping[str, Any]:
        return self.tokenizer(text, **options)

    def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, Tensor]:
        """input_ids (B, T) -> output_ids (B, R, T)"""
        forced = model_inputs.pop("forced_bos_token_id", None)  # the target language; the same for all texts of a call
        if forced is not None:
            generate_kwargs.setdefault("forced_bos_token_id", forced[0] if isinstance(forced, list) else forced)
        for name in ("assistant_model", "assistant_tokenizer"):
            if getattr(self, name) is not None:
                generate_kwargs.setdefault(name, getattr(self, name))
        generate_kwargs["tokenizer"] = self.tokenizer  # read for stop strings and by assistants
        output = self.model.generate(**model_inputs, **self._generate_arguments(generate_kwargs))
        ids = getattr(output, "sequences", output)
        return {"output_ids": ids.reshape(model_inputs["input_ids"].shape[0], -1, ids.shape[-1])}

    def _generate_arguments(self, generate_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments, above those given at construction, above the model's, above our default."""
        if hasattr(self, "_prepare_generate_kwargs"):
            return self._prepare_generate_kwargs(generate_kwargs)
        if "generation_config" in generate_kwargs:
            return generate_kwargs
        config = copy.deepcopy(self.generation_config)  # older transformers keep one config of all of these
        if "max_length" in generate_kwargs:
            config.max_new_tokens = None  # which would win
        return {**generate_kwargs, "generation_config": config}

    def postprocess(
        self,
        model_outputs: dict[str, Tensor],
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[dict[str, Any]]:
        """output_ids (1, R, T) -> R dicts. Token ids come without padding, so they are the same in a batch as alone."""
        rows = model_outputs["output_ids"][0]
        if return_tensors:
            return [{f"{self.return_name}_token_ids": self._strip_padding(row)} for row in rows]
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        return [{f"{self.return_name}_text": self.tokenizer.decode(row, **options)} for row in rows]

    def _strip_padding(self, ids: Tensor) -> Tensor:
        """(T,) -> (T without the padding at the end,)"""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        length = ids.shape[0]
        while length > 1 and ids[length - 1] == pad:
            length -= 1
        if pad == eos and length < ids.shape[0]:
            length += 1  # the first of them ended the text
        return ids[:length]

    def _require_text(self, value: Any, where: str = "") -> None:
        if not isinstance(value, str):
            hint = '; of a dataset, pass one column: dataset["text"]' if isinstance(value, Mapping) else ""
            kind = type(value).__name__
            raise ValueError(f"{self.task!r} takes text (str), not {kind}{where}: {reprlib.repr(value)}{hint}")


class TranslationPipeline(Text2TextGenerationPipeline):
    """Translation. `src_lang` and `tgt_lang`, or the names in a task such as `translation_tr_to_en`, choose the
    languages of a multilingual model; other models ignore them."""

    return_name = "translation"

    def _sanitize_parameters(self, src_lang: str | None = None, tgt_lang: str | None = None, **kwargs: Any) -> tuple:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        languages = {name: value for name, value in languages.items() if value is not None}
        if languages and not hasattr(self.tokenizer, "_build_translation_inputs") and not self._language_codes():
            logger.warning("%s knows no languages: %s ignored", type(self.tokenizer).__name__, languages)
        return {**preprocess, **languages}, forward, postprocess

    def _encode(
        self, text: str, options: dict[str, Any], src_lang: str | None = None, tgt_lang: str | None = None
    ) -> Mapping[str, Any]:
        if pair := _PAIR.fullmatch(self.task):
            src_lang, tgt_lang = src_lang or pair["source"], tgt_lang or pair["target"]
        if hasattr(self.tokenizer, "_build_translation_inputs"):  # mBART, NLLB, M2M100 ...
            self._require_languages(src_lang, tgt_lang)
            return self.tokenizer._build_translation_inputs(text, src_lang=src_lang, tgt_lang=tgt_lang, **options)
        code = f">>{tgt_lang}<<"  # Marian models with several target languages
        if code in self._language_codes() and not text.startswith(">>"):
            text = f"{code} {text}"
        return super()._encode(text, options)

    def _language_codes(self) -> list[str]:
        return getattr(self.tokenizer, "supported_language_codes", [])

    def _require_languages(self, *languages: str | None) -> None:
        if None in languages:
            raise ValueError(
                f"{type(self.tokenizer).__name__} needs src_lang= and tgt_lang=, or a task such as translation_en_to_de"
            )
        token = getattr(self.tokenizer, "get_lang_token", str)
        for language in languages:
            try:
                known = self.tokenizer.convert_tokens_to_ids(token(language)) != self.tokenizer.unk_token_id
            except KeyError:
                known = False
            if not known:
                codes = getattr(self.tokenizer, "lang_code_to_token", None) or self.tokenizer.all_special_tokens
                raise ValueError(f"unknown language {language!r}; choose from {sorted(codes)}")


class SpeechRecognitionPipeline(AutomaticSpeechRecognitionPipeline):
    """The native pipeline, which tells Whisper by its model type, and other models with a decoder by the names of their classes.
    Those of a variant are others, so that the pipeline would take it for an encoder with CTC."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        native_type = getattr(model, "native_class", type(model)).config_class.model_type
        self._variant_kind = None
        if hasattr(model, "native_class") and native_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
            self._variant_kind = "seq2seq_whisper" if native_type == "whisper" else "seq2seq"
        super().__init__(model, *args, **kwargs)

    @property
    def type(self) -> str:
        """Read throughout the native pipeline, also while it is made."""
        return self._variant_kind or self._kind

    @type.setter
    def type(self, kind: str) -> None:
        self._kind = kind


class _Stream(IterableDataset):
    """Any iterable, as the kind of input that a transformers pipeline reads lazily."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def max_positions(config: Any, side: str) -> int | None:
    """The longest sequence that the encoder or decoder has positions for; None where positions are relative."""
    for owner, name in (
        (config, f"max_{side}_position_embeddings"),
        (getattr(config, side, None), "max_position_embeddings"),
        (config, "max_position_embeddings"),
    ):
        if isinstance(limit := getattr(owner, name, None), int):
            return limit
    return None


def register_pipelines() -> None:
    """Let `transformers.pipeline` know the tasks of this module. A second call, or a task that someone else has
    registered, changes nothing."""
    pairs = {("en", target): _T5 for target in ("de", "fr", "ro")}
    for task, pipeline_class, default in (
        ("translation", TranslationPipeline, pairs),
        ("text2text-generation", Text2TextGenerationPipeline, _T5),
    ):
        # Looked at before the registry, where it exists; its "translation" stands for translation_xx_to_yy too.
        getattr(transformers.pipelines, "REMOVED_TASKS", {}).pop(task, None)
        if task not in PIPELINE_REGISTRY.supported_tasks:
            PIPELINE_REGISTRY.register_pipeline(task, pipeline_class, pt_model=AutoModelForSeq2SeqLM, type="text")
            PIPELINE_REGISTRY.supported_tasks[task]["default"] = default
            # With it, `pipe.save_pretrained` would mark the model as needing `trust_remote_code`.
            del pipeline_class._registered_impl
    speech, native = (
        PIPELINE_REGISTRY.supported_tasks["automatic-speech-recognition"],
        AutomaticSpeechRecognitionPipeline,
    )
    if speech["impl"] in (native, f"{native.__module__}.{native.__name__}"):  # newer transformers name the class
        speech["impl"] = SpeechRecognitionPipeline
    if not hasattr(PIPELINE_REGISTRY.check_task, "resolves_pairs"):
        PIPELINE_REGISTRY.check_task = _resolve_pairs(PIPELINE_REGISTRY.check_task)


def _resolve_pairs(check_task: Any) -> Any:
    """`PipelineRegistry.check_task` that also knows `translation_xx_to_yy`, for every xx and yy."""

    def check(task: str) -> tuple[str, dict, Any]:
        if not task.startswith("translation_") or task in PIPELINE_REGISTRY.supported_tasks:
            return check_task(task)
        pair = _PAIR.fullmatch(task)
        if pair is None:
            raise ValueError(f"unknown task {task!r}; name a pair of languages as in 'translation_tr_to_en'")
        return "translation_XX_to_YY", check_task("translation")[1], (pair["source"], pair["target"])

    check.resolves_pairs = True  # type: ignore[attr-defined]
    return check


register_pipelines()
