"""Models that write: translators and language models.

Shapes: B texts, S source tokens, T prompt tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hf_freeze.runtime.decoding import Decoder
from hf_freeze.runtime.folders import read_json
from hf_freeze.runtime.models import BATCH, Model, Parts, batches, one_or_all
from hf_freeze.runtime.search import write
from hf_freeze.runtime.settings import Settings, changed, ids_of, settings_of
from hf_freeze.runtime.tokenizing import Encoded, padded


class Writer(Model):
    """A model that writes. `settings`: those of the folder's generation_config.json.

    Raises ValueError for a setting of the folder that it does not follow."""

    def __init__(self, parts: Parts, task: str) -> None:
        super().__init__(parts, task)
        path = parts.folder / "generation_config.json"
        config = read_json(path)
        self.settings: Settings = settings_of(config, path)
        self._start = self.settings.decoder_start_token_id
        self._start = config.get("bos_token_id") if self._start is None else self._start

    def ids(
        self, encoded: Sequence[Sequence[int]], *, batch_size: int = BATCH, **settings: Any
    ) -> list[list[list[int]]]:
        """ids of each text -> the new ids of each of its `num_return_sequences`, with the end token. Settings: see the call.

        Raises ValueError as the call does."""
        used = changed(self.settings, settings)
        written: dict[int, list[list[int]]] = {}
        for chosen in batches(encoded, len, batch_size):
            rows = [Encoded([*encoded[i]], [0] * len(encoded[i])) for i in chosen]
            written |= zip(chosen, self._batch(rows, used, chosen), strict=True)
        return [written[i] for i in range(len(encoded))]

    def _batch(self, rows: list[Encoded], settings: Settings, numbers: list[int]) -> list[list[list[int]]]:
        raise NotImplementedError

    def _written(self, texts: list[str], rows: list[Encoded], batch_size: int, settings: dict[str, Any]) -> list[Any]:
        """The texts of the sequences; of one for each text, without a list around it."""
        found = [
            [self._tokenizer.decode(ids) for ids in each]
            for each in self.ids([row.ids for row in rows], batch_size=batch_size, **settings)
        ]
        return [each[0] if len(each) == 1 else each for each in found]


class Translator(Writer):
    """Translates texts, or whatever an encoder-decoder was trained to write."""

    def __call__(
        self, texts: str | Sequence[str], *, truncation: bool = False, batch_size: int = BATCH, **settings: Any
    ) -> list[Any] | str:
        """A text -> its translation; a list of texts -> a list; with `num_return_sequences` above 1 a list for each text.

        `settings`: fields of `Settings`, which take the place of the folder's: num_beams, max_new_tokens, length_penalty,
        do_sample, temperature, top_k, top_p, seed, and others. `truncation` cuts texts that are longer than the
        model's positions.

        Raises ValueError for an unknown setting or value, an input that is not text, and one that is too long."""
        return one_or_all(
            texts, lambda given: self._written(given, self._rows(given, truncation), batch_size, settings)
        )

    def _batch(self, rows: list[Encoded], settings: Settings, numbers: list[int]) -> list[list[list[int]]]:
        start = settings.decoder_start_token_id
        start = self._start if start is None else start
        if start is None:
            raise ValueError(f"{self.folder} names no decoder_start_token_id; pass one")
        inputs = padded(rows, self._tokenizer.pad if settings.pad_token_id is None else settings.pad_token_id)
        encoder, decoder = (self.parts.sessions[name] for name in ("encoder", "decoder"))
        given = encoder(inputs) | {"encoder_attention_mask": inputs["attention_mask"]}
        given = {name: value for name, value in given.items() if name != "last_hidden_state"}
        limits = [settings.new_tokens(1, self.parts.positions["decoder"], False)] * len(rows)
        starts = np.full((len(rows), 1), start)
        listed = self._listed(inputs["input_ids"], settings)
        return write(Decoder(decoder, given, len(rows), *listed), starts, starts.tolist(), limits, settings, numbers)

    def _listed(self, ids: np.ndarray, settings: Settings) -> tuple[np.ndarray | None, int]:
        """(the tokens of the shortlist for these texts, the size of the vocabulary); None without a shortlist."""
        shortlist = self.parts.shortlist
        if shortlist is None:
            return None, 0
        forced = (settings.forced_bos_token_id, settings.forced_eos_token_id, settings.pad_token_id)
        tokens = shortlist.tokens(ids, [*settings.ends, *(token for value in forced for token in ids_of(value))])
        return tokens, max(len(shortlist.starts) - 1, int(tokens[-1]) + 1)


class Generator(Writer):
    """Continues texts."""

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        truncation: bool = False,
        batch_size: int = BATCH,
        return_full_text: bool = True,
        **settings: Any,
    ) -> list[Any] | str:
        """A text -> the text with its continuation, or without `return_full_text` the continuation alone; a list of texts -> a
        list; with `num_return_sequences` above 1 a list for each text. `settings`: see `Translator`. The search is greedy, unless
        the folder or the call says otherwise.

        Raises ValueError for an unknown setting or value, an input that is not text, and one that is too long."""

        def continued(given: list[str]) -> list[Any]:
            rows = self._rows(given, truncation)
            found = self.ids([row.ids for row in rows], batch_size=batch_size, **settings)
            answers = [[self._continued(row, text, ids, return_full_text) for ids in each]
                       for row, text, each in zip(rows, given, found, strict=True)]  # fmt: skip
            return [each[0] if len(each) == 1 else each for each in answers]

        return one_or_all(texts, continued)

    def _continued(self, row: Encoded, text: str, ids: list[int], whole: bool) -> str:
        # Together with the prompt: alone, many tokenizers drop the space before the first token.
        before = len(self._tokenizer.decode(row.ids))
        new = self._tokenizer.decode([*row.ids, *ids])[before:]
        return text + new if whole else new

    def _outputs(self, rows: Sequence[Encoded], batch_size: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """(number of the row, "logits" (T, V) after each of its tokens)"""
        for chosen in batches(rows, lambda row: len(row.ids), batch_size):
            decoder, ids = self._decoder([rows[i] for i in chosen], self.settings)
            for i, logits in zip(chosen, decoder.logits(ids), strict=True):
                yield i, {"logits": logits[-len(rows[i].ids) :]}

    def _decoder(self, rows: Sequence[Encoded], settings: Settings) -> tuple[Decoder, np.ndarray]:
        """One that has read nothing, and the ids (R, T) of the rows, padded on the left."""
        given = padded(rows, settings.pad_token_id, left=True)
        ids = given.pop("input_ids")
        given.pop("token_type_ids")
        return Decoder(self.parts.sessions["model"], given, len(rows)), ids

    def _batch(self, rows: list[Encoded], settings: Settings, numbers: list[int]) -> list[list[list[int]]]:
        decoder, ids = self._decoder(rows, settings)
        positions, prompts = self.parts.positions["decoder"], [row.ids for row in rows]
        limits = [settings.new_tokens(len(prompt), positions, True) for prompt in prompts]
        return write(decoder, ids, prompts, limits, settings, numbers)
