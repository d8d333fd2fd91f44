"""Saving, loading and pushing a variant. Seeded tensors are not stored; incomplete or damaged checkpoints are refused.

`AutoModel….from_pretrained` of a variant's folder:

1. `hf_freeze.__init__` has registered the variants' model types: the config is a variant's (`classes.py`, `config.py`).
2. The Auto class finds the variant's class, made for its native class (`classes.py`).
3. `SavingMixin.from_pretrained` takes the settings that are ours, and checks the folder.
4. `VariantMixin.__init__` (`build.py`) builds the backbone on `meta` and changes it as the methods say.
5. transformers reads the tensors that are stored, and draws none.
6. Seeded tensors are regenerated and compared with their digests (`weights.py`).
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import distributed

from hf_freeze._version import __version__
from hf_freeze.architectures.base import base_name
from hf_freeze.compat.transformers import MixedModel, do_not_save, keys_to_ignore, saves_adapters_alone
from hf_freeze.layers.seeded_weight import SeededWeight
from hf_freeze.model import pushing
from hf_freeze.model.atomic_save import finish_adapter, replacing_adapter, replacing_model, staged_subfolder
from hf_freeze.model.native_code import FILES, remote_code
from hf_freeze.model.remote_code import has_remote_code
from hf_freeze.model.weights import computed_constant, generated
from hf_freeze.seeded import SeededTensor, digest


class SizeMismatchError(ValueError, RuntimeError):
    """A RuntimeError too, which is what transformers raises here."""


class SavingMixin(MixedModel):
    """The part of a variant that reads and writes its folder."""

    config: Any
    seeded_tensors: dict[str, SeededTensor]
    _declared_digests: frozenset[str]
    _constants: set[str]
    _gone_ties: set[str]
    _own_ties: dict[str, str]

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Any = None,
        push_to_hub: bool = False,
        *,
        remote_code: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """As the native method, without the seeded tensors. A model in the folder is replaced in one step: a process that is
        killed at any moment leaves the old model or the new one. The disk must have room for both.

        `remote_code`: True also writes the code with which `trust_remote_code=True` loads the folder in a program that does not
        import hf_freeze, and enters it in config.json; False leaves it out; None does as the folder did that the model was
        loaded from.

        Raises ValueError if a seeded tensor was changed, or one of two that share their values, or if the folder also holds
        weights of another `variant=` that do not fit the new settings.
        """
        for name, definition in self.seeded_tensors.items():
            value = self.get_parameter(name) if state_dict is None else state_dict.get(name)
            if value is None or value.is_meta or type(value).__name__ == "DTensor":
                continue
            if isinstance(value, SeededWeight) and value.definition == definition:
                continue
            if value.dtype == torch.float32 and digest(value) == self.config.digests.get(base_name(self, name)):
                continue
            regenerated = definition.generate(value.device)
            self.config.digests[base_name(self, name)] = digest(regenerated)
            if not torch.equal(regenerated.to(value.dtype), value):
                raise ValueError(
                    f"{name!r} is frozen at random values that are not stored, but it was changed, or cast to a lower "
                    "precision and back; merge() stores it, or load the model in the precision that you save in"
                )
        if state_dict is None and not saves_adapters_alone(self):
            self._check_unstored_ties()
        # When PEFT merges, it takes tables with a computed weight for untied, and changes the config accordingly.
        if self._gone_ties:
            self.config.tie_word_embeddings = True
        self.config.hf_freeze_version = __version__
        with self._remote_code(has_remote_code(self.config) if remote_code is None else remote_code):
            self._save(save_directory, is_main_process, state_dict, push_to_hub, **kwargs)

    def _check_unstored_ties(self) -> None:
        """Raise ValueError if a tensor that is not stored, because it shares the values of another one, has other values."""
        for target, source in self.all_tied_weights_keys.items():
            if target in self._own_ties or source in self.seeded_tensors:
                value, shared = self.get_parameter_or_buffer(target), self.get_parameter_or_buffer(source)
                if value is not shared and not value.is_meta and not torch.equal(value, shared):
                    raise ValueError(
                        f"{target!r} shares the values of {source!r} in this variant, but was changed alone, as by "
                        "modules_to_save of PEFT: merge() stores both"
                    )

    @contextlib.contextmanager
    def _remote_code(self, wanted: bool) -> Iterator[None]:
        """Inside, the config writes the code that loads this model, or none."""
        vars(self.config).pop("auto_map", None)
        if wanted:
            self.config.auto_map, self.config.code_files = remote_code(self)
        try:
            yield
        finally:
            vars(self.config).pop("code_files", None)

    def _save(
        self, save_directory: Any, is_main_process: bool, state_dict: Any, push_to_hub: bool, **kwargs: Any
    ) -> None:
        do_not_save(self, (keys_to_ignore(self)[0] | self._constants) - self.trained_constants(state_dict))
        grouped = distributed.is_available() and distributed.is_initialized()
        writes = is_main_process and not (grouped and distributed.get_rank() > 0)
        if not writes or kwargs.get("distributed_checkpoint") or os.path.isfile(save_directory):
            super().save_pretrained(save_directory, writes, state_dict, push_to_hub, **kwargs)
        else:
            adapter_alone = saves_adapters_alone(self)
            replacing = replacing_adapter if adapter_alone else replacing_model
            with replacing(Path(save_directory)) as staged:
                state = None if state_dict is None else dict(state_dict)  # the native method empties it
                super().save_pretrained(staged, True, state, **kwargs)
                written = {path.name for path in staged.iterdir()}
            for name in set() if adapter_alone else set(FILES) - written:  # of the model that was there before
                Path(save_directory, name).unlink(missing_ok=True)
            if push_to_hub:  # from a folder of its own: other files in `save_directory` are not pushed
                options: dict[str, Any] = {"repo_id": Path(save_directory).name} | kwargs
                with tempfile.TemporaryDirectory() as folder:
                    super().save_pretrained(folder, True, state_dict, True, **options)
        if getattr(self.config, "distributed_config", None) is not None:
            self.barrier_after_gathered_checkpoint_save(self.config.distributed_config)

    @torch.no_grad()
    def trained_constants(self, state_dict: Any = None) -> set[str]:
        """Names of the constants, such as positions, that differ from what the native class computes. They are stored.

        `state_dict`: the values, if they are not those of the model. Constants without values, as on meta, count as computed.
        """
        trained, computed = set(), {}
        for name in self._constants:
            value = self.get_parameter(name) if state_dict is None else state_dict.get(name)
            if value is None or value.is_meta or type(value).__name__ == "DTensor":
                continue
            module = self.get_submodule(name.rpartition(".")[0])
            key = (type(module), value.shape, value.dtype)  # those of encoder and decoder are equal
            if key not in computed:
                computed[key] = computed_constant(self, name, torch.empty_like(value))
            if not torch.equal(value.cpu(), computed[key].cpu()):
                trained.add(name)
        return trained

    def load_adapter(self, peft_model_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the native method; an adapter whose saving was interrupted is completed first."""
        if peft_model_id is not None:
            finish_adapter(Path(peft_model_id))
        return super().load_adapter(peft_model_id, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the native method. `seeded_execution` (default "resident"): see `set_seeded_execution`.

        Raises ValueError for a damaged file, for a tensor that is missing, unexpected or of another size, for a seeded tensor
        that has no digest or differs in `state_dict`, and for an unknown `seeded_execution`."""
        with_info = kwargs.pop("output_loading_info", False)
        resizes = kwargs.pop("ignore_mismatched_sizes", False)
        in_memory = dict(kwargs.get("state_dict") or {})
        if in_memory:  # a copy: the model would keep these tensors, and regenerating would overwrite the caller's
            kwargs["state_dict"] = {name: value.clone() for name, value in in_memory.items()}
        if pretrained_model_name_or_path is not None:
            finish_adapter(Path(pretrained_model_name_or_path))
        try:
            loaded: Any = super().from_pretrained(  # which hands `seeded_execution` on to the class
                pretrained_model_name_or_path,
                *args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kwargs,
            )
            model, info = loaded
        except SafetensorError as error:
            raise ValueError(
                f"the weights of {pretrained_model_name_or_path} are truncated or damaged: {error}"
            ) from error
        if (staged := staged_subfolder(vars(model.config))) is not None:  # a save that was interrupted after its switch
            del model.config.transformers_weights
            if kwargs.get("generation_config") is None and model.can_generate():
                folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder", ""), staged)
                settings: Any = transformers.GenerationConfig
                model.generation_config = settings.from_pretrained(folder)
        where = f"the checkpoint {pretrained_model_name_or_path}"
        if info["mismatched_keys"] and not resizes:
            name, stored, expected = sorted(info["mismatched_keys"])[0]
            raise SizeMismatchError(
                f"size mismatch: {where} holds {name!r} of {list(stored)}, the model has {list(expected)}"
            )
        if model.config.architectures == [cls.__name__]:  # a class of another task has another head
            if info["missing_keys"]:
                raise ValueError(f"{where} lacks trained tensors: {sorted(info['missing_keys'])[:5]}")
            if info["unexpected_keys"]:
                raise ValueError(
                    f"{where} holds tensors that its config does not describe: {sorted(info['unexpected_keys'])[:5]}"
                )
        model._check_seeded(in_memory, pretrained_model_name_or_path)
        model._warn_of_fallback()
        return (model, info) if with_info else model

    def generate_for_disk(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of the seeded tensors and their tied ones among `names`, those that will be offloaded to the disk: they
        are in no file that accelerate could read them from."""
        tied = self.all_tied_weights_keys
        self.on_disk = {*self.seeded_tensors} & names - {source for name, source in tied.items() if name not in names}
        for name in sorted(names):
            if (source := tied.get(name, name)) in self.seeded_tensors:
                yield name, generated(self, source, "cpu").to(self.get_parameter(source).dtype)

    def _check_seeded(self, in_memory: dict[str, torch.Tensor], path: Any) -> None:
        """Compare the regenerated tensors with those of a state dict; every other seeded tensor needs a digest."""
        values = {base_name(self, name): value for name, value in in_memory.items()}
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
        return pushing.push(self, repo_id, **kwargs)
