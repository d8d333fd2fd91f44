"""Settings of generation: those of the folder's `generation_config.json`, and those of a call.

Names, meanings and defaults are those of `generate` of transformers, save that up to 256 new tokens are written by default, as
the pipelines do.
"""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

NEW_TOKENS = 256
# Settings that change no output, or change it only together with one that is refused.
_NEUTRAL = {
    "transformers_version",
    "use_cache",
    "bos_token_id",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
}
_NEUTRAL |= {"output_attentions", "output_hidden_states", "cache_implementation", "cache_config", "compile_config"}
_NEUTRAL |= {
    "disable_compile",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
}
_NEUTRAL |= {
    "assistant_lookbehind",
    "target_lookbehind",
    "speculation_type",
    "prefill_chunk_size",
    "_from_model_config",
}
_OFF_AT_ONE = {"typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beam_groups"}
_TOKENS = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See `generate` of transformers. `seed`: of sampling; each text draws numbers of its own.

    Raises ValueError for a value out of its limits, and for settings that exclude each other."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int = 0
    num_beams: int = 1
    num_return_sequences: int = 1
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    renormalize_logits: bool = False
    bad_words_ids: Any = None
    suppress_tokens: Any = None
    begin_suppress_tokens: Any = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: Any = None
    eos_token_id: Any = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "max_new_tokens": 1,
            "max_length": 1,
            "min_new_tokens": 0,
            "min_length": 0,
            "num_beams": 1,
        }
        least |= {"num_return_sequences": 1, "top_k": 0, "no_repeat_ngram_size": 0, "seed": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, numbers.Integral) or value < limit):
                raise ValueError(f"{name}={value!r}: must be a whole number of at least {limit}")
        for name, most in (("temperature", None), ("top_p", 1.0), ("repetition_penalty", None)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= (most or float("inf")):
                raise ValueError(
                    f"{name}={value!r}: must be a number above 0" + (f" and at most {most:g}" if most else "")
                )
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping={self.early_stopping!r}: choose from True, False, 'never'")
        if self.do_sample and self.num_beams > 1:
            raise ValueError(f"do_sample=True with num_beams={self.num_beams}: choose one of them")
        if not self.do_sample and self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences}: must be at most num_beams={self.num_beams}, or sample with "
                "do_sample=True"
            )

    @property
    def ends(self) -> list[int]:
        """The ids that end a text."""
        return ids_of(self.eos_token_id)

    def new_tokens(self, prompt: int, positions: int | None, reads_prompt: bool) -> int:
        """The largest number of new tokens after `prompt` tokens. `positions`: those of the model; `reads_prompt`: whether the
        prompt takes some of them. Raises ValueError for a prompt that leaves none."""
        count = self.max_new_tokens
        if count is None and self.max_length is not None:
            count = self.max_length - prompt
        if count is None:
            count = NEW_TOKENS if reads_prompt or positions is None or positions > NEW_TOKENS else positions - 1
        if positions is not None:  # the model has no position for further tokens
            count = min(count, positions - prompt if reads_prompt else positions)
        if count < 1:
            raise ValueError(
                f"a prompt of {prompt} tokens leaves no new token: the model has positions for {positions}, max_length is "
                f"{self.max_length}; shorten it"
            )
        return count


_NAMES = [one.name for one in fields(Settings)]


def settings_of(config: Mapping[str, Any], place: Any) -> Settings:
    """Of a `generation_config.json`. Raises ValueError for one that changes what is written and is not one of `Settings`."""
    known = {name: value for name, value in config.items() if name in _NAMES and value is not None}
    for name, value in config.items():
        is_off = not value or (name in _OFF_AT_ONE and value == 1)
        if name not in _NAMES and name not in _NEUTRAL and not is_off:
            raise ValueError(
                f"{place} sets {name}={value!r}, which this runtime does not do: open the folder with transformers"
            )
    return Settings(**known)


def changed(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """With the options of a call, of which one for the length takes the place of the other. Raises ValueError for an unknown
    name, and for ids that are none."""
    for name, value in options.items():
        if name not in _NAMES:
            raise ValueError(f"unknown setting {name!r}; choose from {', '.join(_NAMES)}")
        if name in _TOKENS and value is not None and not isinstance(value, int | list | tuple):
            raise ValueError(f"{name}={value!r}: must be ids of tokens, such as [3]")
    lengths: dict[str, Any] = {}
    for one, other in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if one in options and other not in options:
            lengths[other] = None
    return replace(settings, **lengths, **options)


def ids_of(value: Any) -> list[int]:
    """The ids of a setting that holds none, one or several."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
