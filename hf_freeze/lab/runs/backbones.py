"""The model that a run starts from: its config, and whether it can have the run's methods."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_freeze.architectures.registry import VARIANT_PREFIX
from hf_freeze.lab.recipes.recipe import Origin, Run
from hf_freeze.lab.recipes.rows import method_of
from hf_freeze.lab.recipes.settings import Backbone
from hf_freeze.lab.tasks.base import Task
from hf_freeze.lab.tasks.registry import task_of
from hf_freeze.model.make import make_variant


@dataclass(frozen=True)
class Untrained:
    """Stands for a tokenizer before there is one."""

    size: int
    pad_token_id: int = 0
    eos_token_id: int = 1

    def __len__(self) -> int:
        return self.size


def backbone_config(settings: Backbone, tokenizer: Any, **fields: Any) -> transformers.PreTrainedConfig:
    """The config of a fresh backbone whose vocabulary and special tokens are the tokenizer's. `fields`: what else is known."""
    vocabulary, pad, eos = len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id
    ids = {"vocab_size": vocabulary, "pad_token_id": pad, "eos_token_id": eos}
    if settings.model_type == "marian":
        ids |= {"decoder_vocab_size": vocabulary, "decoder_start_token_id": pad, "forced_eos_token_id": eos}
    else:
        ids |= {"bos_token_id": eos}
    return transformers.AutoConfig.for_model(settings.model_type, **ids, **fields, **settings.config)


def check_methods(run: Run) -> None:
    """Raise ValueError where the methods of a run do not fit its model or each other, as far as the recipe and the config of a
    pretrained model tell it: the tokenizer is assumed to be as large as it may be. What a calibration decides is left out, and
    what starts from a run of another grid."""
    task, config = task_of(run.task), _config(run)
    starts: list[Origin] = []
    start = run.start
    while start is not None:
        starts.insert(0, start)
        start = start.start
    unknown = any(each.calibration for each in (*starts, run)) or any(each.grid for each in starts)
    if unknown or config is None or not isinstance(task, Task):
        return
    try:
        with torch.device("meta"):
            model = config
            for each in (*starts, run):
                model = make_variant(model, [method_of(method) for method in each.methods], task=task.head)
    except ValueError as error:
        raise ValueError(f"row {run.row!r}: {error}") from error


def _config(run: Run) -> Any:
    """None where the recipe and the files do not tell it."""
    if run.pretrained is not None:
        config = transformers.AutoConfig.from_pretrained(run.pretrained) if Path(run.pretrained).is_dir() else None
        return None if config is None or config.model_type.startswith(VARIANT_PREFIX) else config
    if run.backbone is None or run.tokenizer is None:
        return None
    return backbone_config(run.backbone, Untrained(run.tokenizer.vocab_size))
