"""Saving, loading and pushing a variant: what a seed regenerates is not stored, and a checkpoint is whole or refused."""

import copy
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from torch import distributed

from hf_freeze._version import __version__
from hf_freeze.architectures.base import base_name
from hf_freeze.model.atomic_save import finish_adapter, replacing_adapter, replacing_model, staged_subfolder
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
    _constants: set[str]

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Any = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """As the native one, without the seeded tensors. A model that the folder holds is replaced in one step: whatever stops
        the process leaves the old model or the new one. The disk holds both for a moment.

        Raises ValueError where a seeded tensor was changed, or where the folder also holds weights of another `variant=` that
        the new settings do not fit.
        """
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
        self._keys_to_ignore_on_save = set(self._keys_to_ignore_on_save or ()) | self._constants
        self._keys_to_ignore_on_save -= self.trained_constants(state_dict)
        # PEFT, merging, takes tables whose weight is computed for untied, and says so in the config.
        if self._gone_ties:
            self.config.tie_word_embeddings = True
        self.config.hf_freeze_version = __version__
        grouped = distributed.is_available() and distributed.is_initialized()
        writes = is_main_process and not (grouped and distributed.get_rank() > 0)
        if not writes or kwargs.get("distributed_checkpoint") or os.path.isfile(save_directory):
            super().save_pretrained(save_directory, writes, state_dict, push_to_hub, **kwargs)
        else:
            adapter_alone = getattr(self, "_hf_peft_config_loaded", False)
            replacing = replacing_adapter if adapter_alone else replacing_model
            with replacing(Path(save_directory)) as staged:
                state = None if state_dict is None else dict(state_dict)  # it is emptied
                super().save_pretrained(staged, True, state, **kwargs)
            if push_to_hub:  # of its own files: what else the folder holds stays here
                options: dict[str, Any] = {"repo_id": Path(save_directory).name} | kwargs
                with tempfile.TemporaryDirectory() as folder:
                    super().save_pretrained(folder, True, state_dict, True, **options)
        if getattr(self.config, "distributed_config", None) is not None:
            self.barrier_after_gathered_checkpoint_save(self.config.distributed_config)

    @torch.no_grad()
    def trained_constants(self, state_dict: Any = None) -> set[str]:
        """Names of the constants, such as positions, that are not what the native class computes. They are stored.

        `state_dict`: the values, where they are not those of the model. Constants without values, as on meta, count as computed.
        """
        found, computed = set(), {}
        for name in self._constants:
            held = self.get_parameter(name) if state_dict is None else state_dict.get(name)
            if held is None or held.is_meta or type(held).__name__ == "DTensor":
                continue
            owner, _, attribute = name.rpartition(".")
            module = self.get_submodule(owner)
            key = (type(module), held.shape, held.dtype)  # encoder and decoder have equal ones
            if key not in computed:
                fresh = copy.deepcopy(module).to(held.dtype)
                self._init_weights(fresh)
                computed[key] = fresh.get_parameter(attribute)
            if not torch.equal(held.cpu(), computed[key].cpu()):
                found.add(name)
        return found

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the native one. A damaged file, a tensor that is missing, too much or of another size, or a seeded one that has no
        digest and is not in the `state_dict` given, or is another there, is a ValueError."""
        with_info = kwargs.pop("output_loading_info", False)
        resizes = kwargs.pop("ignore_mismatched_sizes", False)
        given = dict(kwargs.get("state_dict") or {})
        if pretrained_model_name_or_path is not None:
            finish_adapter(Path(pretrained_model_name_or_path))
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
            model, info = loaded
        except SafetensorError as error:
            raise ValueError(
                f"the weights of {pretrained_model_name_or_path} are truncated or damaged: {error}"
            ) from error
        if (staged := staged_subfolder(vars(model.config))) is not None:  # whoever saved it did not come to the end
            del model.config.transformers_weights
            if kwargs.get("generation_config") is None and model.can_generate():
                folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder", ""), staged)
                settings: Any = transformers.GenerationConfig
                model.generation_config = settings.from_pretrained(folder)
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
        """As the native one, with a card of the methods and sizes where the repository has none."""
        from hf_freeze.publish.hub import push_model  # here: it imports this file

        return push_model(self, repo_id, **kwargs)
