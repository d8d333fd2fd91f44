"""`resize_token_embeddings` of variants."""

from dataclasses import replace
from typing import Any

from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import base_name, read
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.compat.transformers import MixedModel
from hf_freeze.layers.adaptive_embedding import AdaptiveInputEmbedding, BandedOutput
from hf_freeze.layers.factorized_embedding import LowRankOutput
from hf_freeze.layers.quantized import Quantized
from hf_freeze.methods.parts import KeptTokens, ResizedTables, parts_of
from hf_freeze.model.token_ids import resize_kept_tokens
from hf_freeze.model.weights import demote_output_bias, promote_output_bias, regenerate


class ResizingMixin(MixedModel):
    """The part of a variant that resizes vocabularies: seeded tables are regenerated, factorised and trimmed ones can grow."""

    def resized_embeddings(
        self,
        native: Any,
        old_embeddings: Any,
        new_num_tokens: Any = None,
        multiple: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The table with so many rows; `native` resizes a plain one."""
        if not isinstance(old_embeddings, AdaptiveInputEmbedding):
            return native(old_embeddings, new_num_tokens, multiple, *args, **kwargs)
        last = old_embeddings.last_band_rows(new_num_tokens)
        native(old_embeddings.tails[-1], last, None, *args, **kwargs)
        old_embeddings.num_embeddings = new_num_tokens
        return old_embeddings

    def resized_output(
        self, native: Any, old_lm_head: Any, new_num_tokens: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The output matrix with so many rows; `native` resizes a plain one."""
        if not isinstance(old_lm_head, LowRankOutput):
            return native(old_lm_head, new_num_tokens, *args, **kwargs)
        banded = isinstance(old_lm_head, BandedOutput)
        part: Any = old_lm_head.tails[-1] if banded else old_lm_head
        rows = old_lm_head.last_band_rows(new_num_tokens) if banded else new_num_tokens
        resized: Any = native(part.table(), rows, *args, **kwargs)
        part.set_table(resized)
        if banded:
            old_lm_head.resize_bias()
        return old_lm_head

    def resize_output_bias(self, native: Any, output_embeddings: Any, input_embeddings: Any) -> None:
        """Give the bias on the logits as many values as the table has rows."""
        if isinstance(output_embeddings, BandedOutput):  # its `weight` is not all of its rows
            output_embeddings.resize_bias()
        else:
            native(output_embeddings, input_embeddings)

    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As the native method. A seeded table is regenerated; its earlier rows do not change. Raises ValueError if a method
        cannot follow."""
        rows = vocabulary_size(self.config)
        self._check_resizable()
        table = self.get_input_embeddings()
        if isinstance(table, AdaptiveInputEmbedding):
            if new_num_tokens is None and pad_to_multiple_of is None:
                return table
            new_num_tokens = table.num_embeddings if new_num_tokens is None else new_num_tokens
            if pad_to_multiple_of is not None:  # here, because the native method reads the number of rows from `weight`
                new_num_tokens = -(-new_num_tokens // pad_to_multiple_of) * pad_to_multiple_of
                pad_to_multiple_of = None
            table.last_band_rows(new_num_tokens)  # before anything has changed
        demote_output_bias(self)
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for _, tables in parts_of(self.methods, ResizedTables):
            tables.follow_resize(self, self.architecture)
        promote_output_bias(self)
        self._follow_resize(vocabulary_size(self.config) - rows)
        tables = [id(self.get_parameter(name)) for name in self.seeded_tensors]
        if len(set(tables)) < len(tables):
            raise ValueError("resizing tied two separate tables, and both are random; merge() first")
        before = self.seeded_tensors
        self.apply_freeze()
        for name, definition in self.seeded_tensors.items():
            if definition != before.get(name):
                self.config.digests.pop(base_name(self, name), None)
        regenerate(self)
        return embeddings

    def resize_decoder_token_embeddings(self: Any, new_num_tokens: int) -> nn.Embedding:
        """As the native method. Raises ValueError if a method made one table of source and target or trimmed the vocabulary,
        and AttributeError if the backbone has no such method."""
        if not hasattr(self.native_class, "resize_decoder_token_embeddings"):
            raise AttributeError(
                f"{type(self).__name__} has one table: resize_token_embeddings({new_num_tokens}) is for it"
            )
        self._check_resizable()
        apart = {f"{name}.weight" for name in surgery.token_tables(self, self.architecture)}
        joined = {target for target, source in self._own_ties.items() if {target, source} <= apart}
        # `resize_token_embeddings` calls this for the second of two tied tables.
        if joined and new_num_tokens != self.get_input_embeddings().num_embeddings:
            raise ValueError(
                f"a method made {min(joined)!r} one with the table of the source: resize_token_embeddings({new_num_tokens}) is "
                "for both"
            )
        return super().resize_decoder_token_embeddings(new_num_tokens)  # type: ignore[misc]

    def _check_resizable(self: Any) -> None:
        for name, module in surgery.vocabulary_modules(self, self.architecture).items():
            if isinstance(module, Quantized):
                raise ValueError(
                    f"{name!r} is quantised and cannot be resized: resize before Quantize, or merge() first"
                )
        trimming = [method for method, _ in parts_of(self.methods, KeptTokens)]
        modules = surgery.vocabulary_modules(self, self.architecture).items()
        tables = [f"{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)]
        if trimming and len({self.all_tied_weights_keys.get(name, name) for name in tables}) > 1:
            raise ValueError(
                f"method {trimming[0].name!r} keeps the same tokens in {tables}, and only one would be resized; merge() first"
            )
        units = [module for _, module in modules if isinstance(module, nn.Embedding)]
        joins = getattr(self.config, "share_encoder_decoder_embeddings", False) and not self.config.tie_word_embeddings
        if joins and len(units) > 1 and type(units[0]) is not nn.Embedding:
            raise ValueError(
                f"natively, resizing makes one of the tables {tables}, which tie_word_embeddings=False keeps apart and methods "
                "have replaced; merge() first"
            )

    def _follow_resize(self: Any, added: int) -> None:
        """Change the config as if the backbone had had these rows and methods had kept them, so that it loads again."""
        fields = self.config.original_fields
        resized = [field for field in self.architecture.token_tables.values() if field in fields]
        if not resized or not added:
            return
        methods, vocabulary = resize_kept_tokens(self.methods, fields[resized[0]], added)
        self._set_methods(methods)
        fields |= dict.fromkeys(resized, vocabulary)
        for number, method in enumerate(self.methods):
            if (tokens := method.part(KeptTokens)) is not None:
                self._origins[number] = {
                    name: replace(origin, index=tuple(tokens.kept), size=vocabulary)
                    for name, origin in self._origins[number].items()
                }
                vocabulary = len(tokens.kept)


def vocabulary_size(config: Any) -> int:
    """The number of tokens; 0 for a model without a table of tokens."""
    fields = architecture_of(config).token_tables.values()
    return read(config, next(iter(fields))) if fields else 0
