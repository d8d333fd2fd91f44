"""A plain native model: what `merge()` gives, for whoever has transformers and no hf_freeze."""

from pathlib import Path

import torch

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.publish.export.folders import Export

PACKAGES: tuple[str, ...] = ()
QUANTIZATIONS = ("float16", "bfloat16", "float32")
SUPPORTED_TASKS = {name: architecture.tasks for name, architecture in ARCHITECTURES.items()}
NEEDS_TOKENIZER = False
HOLDS_VARIANTS: tuple[str, ...] = ()


def write(export: Export, folder: Path) -> None:
    model = export.model if export.quantization is None else export.model.to(getattr(torch, export.quantization))
    model.save_pretrained(folder)
