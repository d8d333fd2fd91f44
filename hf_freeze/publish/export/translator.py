"""The base class of the translators: text to ids, generation settings, ids to text."""

import copy
import logging
import reprlib
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoTokenizer, GenerationConfig

from hf_freeze.compat.pipelines import NEW_TOKENS
from hf_freeze.publish.export.folders import read_mark

logger = logging.getLogger(__name__)

# Generation settings that do not change the output tokens, or that every translator follows.
_NEUTRAL = {"transformers_version", "use_cache", "return_dict_in_generate", "renormalize_logits", "early_stopping"}
_NEUTRAL |= {f"output_{name}" for name in ("attentions", "hidden_states", "scores", "logits")}
_NEUTRAL |= {"temperature", "top_k", "top_p"}  # have an effect only with do_sample
_NEUTRAL |= {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"}


class Translator:
    """An exported translation model with the interface of `pipeline("translation")`: for one text it returns a list of dicts, one
    for each returned sequence; for a list of texts, one dict for each text (a list of dicts if `num_return_sequences` > 1).

    Keyword arguments named in `settings` override the settings saved with the model. `batch_size`: texts per batch.
    `truncation=True` cuts texts that are longer than the model's positions.

    Raises ValueError for an unknown setting, an input that is not text, and a text that is too long without `truncation`.
    """

    format: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]

    def __init__(self, folder: str | Path) -> None:
        mark = read_mark(Path(folder), self.format, "seq2seq-lm")
        self._source_limit, self._target_limit = (mark["max_positions"][side] for side in ("encoder", "decoder"))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.generation_config: Any = GenerationConfig.from_pretrained(folder)
        # None, 0, 1 and [] turn a setting off; True is a switch that is on.
        values = self.generation_config.to_diff_dict().items()
        changed = {name for name, value in values if value is True or value not in (None, 0, 1, [])}
        if ignored := sorted(name for name in changed - _NEUTRAL - {*self.settings} if not name.startswith("_")):
            logger.warning("%s does not follow these generation settings of %s: %s", self.format, folder, ignored)

    def __call__(
        self, inputs: str | list[str], *, batch_size: int = 32, truncation: bool = False, **settings: Any
    ) -> list[Any]:
        for name in settings:
            if name not in self.settings:
                raise ValueError(f"{self.format} has no setting {name!r}; choose from {list(self.settings)}")
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        encoded = [self._encode(text, truncation) for text in texts]
        config = copy.deepcopy(self.generation_config)
        if "max_length" in settings and "max_new_tokens" not in settings:
            config.max_new_tokens = None  # it would take precedence
        config.update(**settings)
        results = [
            [{"translation_text": self.tokenizer.decode(ids, skip_special_tokens=True)} for ids in returned]
            for returned in (self.translate_ids(encoded, config, batch_size) if encoded else [])
        ]
        if isinstance(inputs, str):
            return results[0]
        return [result[0] for result in results] if all(len(result) == 1 for result in results) else results

    def translate_ids(self, encoded: list[list[int]], config: Any, batch_size: int) -> list[list[list[int]]]:
        """ids of each text -> ids of each sequence that is returned for it. Raises ValueError for settings that it lacks."""
        raise NotImplementedError

    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """Of the tokens of each target."""
        raise NotImplementedError

    def _encode(self, text: Any, truncation: bool) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"a translator needs text (str), not {type(text).__name__}: {reprlib.repr(text)}")
        limit = self._source_limit
        options = {"truncation": True, "max_length": limit} if truncation and limit is not None else {}
        ids = self.tokenizer(text, **options).input_ids or [self.generation_config.eos_token_id]
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"a text of {len(ids)} tokens is longer than the {limit} positions of the model; pass truncation=True to cut it "
                f"({reprlib.repr(text)})"
            )
        return ids

    def _new_tokens(self, config: Any) -> int:
        """The largest number of new tokens, without the end token that `generate` forces at the last position."""
        count, limit = config.max_new_tokens, self._target_limit
        if count is None and config.max_length is not None:
            count = config.max_length - 1  # `max_length` includes the start token of the decoder
        if count is None:  # the default of the pipeline
            count = limit - 1 if limit is not None and limit <= NEW_TOKENS else NEW_TOKENS
        if limit is not None:  # the model has no position for further tokens
            count = min(count, limit)
        return max(count - (config.forced_eos_token_id is not None), 1)


def set_or(value: Any, default: Any) -> Any:
    """`value`, or `default` if it is None: a generation config holds None for unset fields."""
    return default if value is None else value


def token_ids(value: Any) -> list[int]:
    """The ids of a setting that holds one id or several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]
