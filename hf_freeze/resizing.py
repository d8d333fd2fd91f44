"""`resize_token_embeddings` of variants."""

from typing import TYPE_CHECKING, Any

from torch import nn

from hf_freeze import surgery
from hf_freeze.layers.factorized_embedding import LowRankOutput
from hf_freeze.registry import architecture_of, method_to_dict
from hf_freeze.token_ids import resize_kept_tokens

if TYPE_CHECKING:  # what the mixin is always combined with
    from transformers import PreTrainedModel as _Model
else:
    _Model = object


class ResizingMixin(_Model):
    """A seeded table is regenerated, tables of other forms and trimmed ones grow as the native ones."""

    def _get_resized_lm_head(self, old_lm_head: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(old_lm_head, LowRankOutput):
            return super()._get_resized_lm_head(old_lm_head, *args, **kwargs)
        resized: Any = super()._get_resized_lm_head(old_lm_head.table(), *args, **kwargs)
        old_lm_head.set_table(resized.weight)
        return old_lm_head

    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As the native one; a seeded table is regenerated, its earlier rows unchanged."""
        rows = vocabulary_size(self.config)
        self._check_resizable()
        self._demote_output_bias()
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        for method in self._methods:
            method.resized(self, self.architecture)
        self._promote_output_bias()
        self._follow_resize(vocabulary_size(self.config) - rows)
        held = [id(self.get_parameter(name)) for name in self.seeded_tensors]
        if len(set(held)) < len(held):
            raise ValueError("resizing tied two tables that were apart, and both are random; merge() first")
        before = self.seeded_tensors
        self._apply_freeze()
        for name, definition in self.seeded_tensors.items():
            if definition != before.get(name):
                self.config.digests.pop(definition.name, None)
        self._regenerate()
        return embeddings

    def _check_resizable(self: Any) -> None:
        trimming = [method for method in self._methods if method.kept_tokens is not None]
        modules = surgery.vocabulary_modules(self, self.architecture).items()
        tables = [f"{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)]
        if trimming and len({self.all_tied_weights_keys.get(name, name) for name in tables}) > 1:
            raise ValueError(
                f"method {trimming[0].name!r} keeps the same tokens in {tables}, and only one would be resized; merge() first"
            )

    def _follow_resize(self: Any, added: int) -> None:
        """The config as if the backbone had had as many more rows, and methods had kept them: so it loads again."""
        fields = self.config.original_fields
        resized = [field for field in self.architecture.token_tables.values() if field in fields]
        if not resized or not added:
            return
        self._methods, vocabulary = resize_kept_tokens(self._methods, fields[resized[0]], added)
        self.config.methods = [method_to_dict(method) for method in self._methods]
        fields |= dict.fromkeys(resized, vocabulary)


def vocabulary_size(config: Any) -> int:
    return getattr(config, next(iter(architecture_of(config.model_type).token_tables.values())))
