"""Saving, loading and pushing a variant: what a seed regenerates is not stored, and a checkpoint is whole or refused."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_freeze._version import __version__
from hf_freeze.architectures.base import base_name
from hf_freeze.compat.transformers import saves_adapters_alone
from hf_freeze.seeded import SeededTensor, digest

if TYPE_CHECKING:  # what the mixin is always combined with
    from transformers import PreTrainedModel as _Model
else:
    _Model = object


class SizeMismatchError(ValueError, RuntimeError):
    """A RuntimeError too, which is what transformers raises here."""


class SavingMixin(_Model):
    """Of a variant: everything that reads or writes its folder."""

    config: Any
    seeded_tensors: dict[str, SeededTensor]
    _declared_digests: frozenset[str]
    _gone_ties: set[str]

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """As the native one, without the seeded tensors; weights that the folder holds are removed first, so that one whose
        writing was stopped holds the old model, the new one, or none. Raises ValueError where a seeded tensor was changed."""
        for name, definition in self.seeded_tensors.items():
            held = self.get_parameter(name) if state_dict is None else state_dict.get(name)
            if held is None or held.is_meta or type(held).__name__ == "DTensor":
                continue
            if held.dtype == torch.float32 and digest(held) == self.config.digests.get(base_name(self, name)):
                continue
            value = definition.generate(held.device)
            self.config.digests[base_name(self, name)] = digest(value)
            if not torch.equal(value.to(held.dtype), held):
                raise ValueError(
                    f"{name!r} is frozen at random values that are not stored, but it was changed, or cast to a lower "
                    "precision and back; merge() stores it, or load the model in the precision that you save in"
                )
        # PEFT, merging, takes tables whose weight is computed for untied, and says so in the config.
        if self._gone_ties:
            self.config.tie_word_embeddings = True
        self.config.hf_freeze_version = __version__
        adapter_alone = saves_adapters_alone(self)
        if is_main_process and kwargs.get("variant") is None and not adapter_alone:
            for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
                Path(save_directory, name).unlink(missing_ok=True)
        super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the native one. A damaged file, a tensor that is missing, too much or of another size, or a seeded one that has no
        digest and is not in the `state_dict` given, or is another there, is a ValueError."""
        with_info = kwargs.pop("output_loading_info", False)
        resizes = kwargs.pop("ignore_mismatched_sizes", False)
        given = dict(kwargs.get("state_dict") or {})
        if given:  # a copy: the model keeps these tensors, and the seeded ones are written anew
            kwargs["state_dict"] = {name: value.clone() for name, value in given.items()}
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
            model, info = loaded
        except SafetensorError as error:
            raise ValueError(
                f"the weights of {pretrained_model_name_or_path} are truncated or damaged: {error}"
            ) from error
        where = f"the checkpoint {pretrained_model_name_or_path}"
        if info["mismatched_keys"] and not resizes:
            name, found, wanted = sorted(info["mismatched_keys"])[0]
            raise SizeMismatchError(
                f"size mismatch: {where} holds {name!r} of {list(found)}, the model has {list(wanted)}"
            )
        if model.config.architectures == [cls.__name__]:  # another class has other heads
            if info["missing_keys"]:
                raise ValueError(f"{where} lacks trained tensors: {sorted(info['missing_keys'])[:5]}")
            if info["unexpected_keys"]:
                raise ValueError(
                    f"{where} holds tensors that its config knows nothing of: {sorted(info['unexpected_keys'])[:5]}"
                )
        model._check_seeded(given, pretrained_model_name_or_path)
        return (model, info) if with_info else model

    def _check_seeded(self, given: dict[str, torch.Tensor], path: Any) -> None:
        """Compare the seeded tensors just regenerated with those of the state dict `given`; any other needs a digest."""
        values = {base_name(self, name): value for name, value in given.items()}
        for name in self.seeded_tensors:
            regenerated, value = self.get_parameter(name), values.get(base_name(self, name))
            if value is not None and not torch.equal(value.to(regenerated), regenerated):
                raise ValueError(
                    f"{name!r} of the state dict is not what its seed regenerates: it was changed; merge() stores it"
                )
            if value is None and base_name(self, name) not in self._declared_digests:
                raise ValueError(
                    f"the config of {path} has no digest of {base_name(self, name)!r}, which is not stored"
                )

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """As the native method, with a card of the methods and sizes if the repository has none."""
        # By name and late: publish/ builds on this room, and only a push needs it.
        return importlib.import_module("hf_freeze.publish.hub").push_model(self, repo_id, **kwargs)
