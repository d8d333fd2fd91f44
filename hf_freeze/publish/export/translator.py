"""What translators of every engine share: text to ids, generation settings, ids to text."""

import copy
import logging
import reprlib
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoTokenizer, GenerationConfig

from hf_freeze.compat.pipelines import NEW_TOKENS
from hf_freeze.publish.export.folders import read_mark

logger = logging.getLogger(__name__)

# Of a generation config, what does not change which tokens are found, or is followed without being asked for.
_NEUTRAL = {"transformers_version", "use_cache", "return_dict_in_generate", "renormalize_logits", "early_stopping"}
_NEUTRAL |= {f"output_{name}" for name in ("attentions", "hidden_states", "scores", "logits")}
_NEUTRAL |= {"temperature", "top_k", "top_p"}  # which do_sample alone reads
_NEUTRAL |= {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"}


class Translator:
    """An exported translation model, called as `pipeline("translation")` is: one text gives a list of dicts, one for each
    returned sequence; a list of texts one dict for each text (a list of dicts with `num_return_sequences` above 1).

    Arguments of a call that are in `settings` stand above those that the model was saved with. `batch_size`: texts at a time.
    `truncation=True` cuts a text that is longer than the model has positions for, otherwise a ValueError, as an input that is no
    text and an unknown setting are.
    """

    format: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]

    def __init__(self, folder: str | Path) -> None:
        mark = read_mark(Path(folder), self.format, "seq2seq-lm")
        self._source_limit, self._target_limit = (mark["max_positions"][side] for side in ("encoder", "decoder"))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.generation_config: Any = GenerationConfig.from_pretrained(folder)
        # Nothing, 0 and 1 switch a setting off, but for those that are switches.
        values = self.generation_config.to_diff_dict().items()
        changed = {name for name, value in values if value is True or value not in (None, 0, 1, [])}
        if ignored := sorted(name for name in changed - _NEUTRAL - {*self.settings} if not name.startswith("_")):
            logger.warning("%s does not follow these generation settings of %s: %s", self.format, folder, ignored)

    def __call__(
        self, inputs: str | list[str], *, batch_size: int = 32, truncation: bool = False, **settings: Any
    ) -> list[Any]:
        for name in settings:
            if name not in self.settings:
                raise ValueError(f"{self.format} knows no {name!r}; choose from {list(self.settings)}")
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        encoded = [self._encode(text, truncation) for text in texts]
        config = copy.deepcopy(self.generation_config)
        if "max_length" in settings and "max_new_tokens" not in settings:
            config.max_new_tokens = None  # which would win
        config.update(**settings)
        results = [
            [{"translation_text": self.tokenizer.decode(ids, skip_special_tokens=True)} for ids in returned]
            for returned in (self._translate(encoded, config, batch_size) if encoded else [])
        ]
        if isinstance(inputs, str):
            return results[0]
        return [result[0] for result in results] if all(len(result) == 1 for result in results) else results

    def _translate(self, encoded: list[list[int]], config: Any, batch_size: int) -> list[list[list[int]]]:
        """ids of each text -> ids of each sequence returned for it."""
        raise NotImplementedError

    def _encode(self, text: Any, truncation: bool) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"a translator takes text (str), not {type(text).__name__}: {reprlib.repr(text)}")
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
        """How many tokens may be found, without the end that `generate` forces upon the last place."""
        found, limit = config.max_new_tokens, self._target_limit
        if found is None and config.max_length is not None:
            found = config.max_length - 1  # which counts the token that the decoder starts with
        if found is None:  # as the pipeline
            found = limit - 1 if limit is not None and limit <= NEW_TOKENS else NEW_TOKENS
        if limit is not None:  # there is no position for another token
            found = min(found, limit)
        return max(found - (config.forced_eos_token_id is not None), 1)


def set_or(value: Any, default: Any) -> Any:
    """A generation config holds None for what nobody has set."""
    return default if value is None else value


def token_ids(value: Any) -> list[int]:
    """Of a setting that may be one id or several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]
