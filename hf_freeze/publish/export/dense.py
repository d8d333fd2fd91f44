"""Exports the native model that `merge()` returns, for use with transformers without hf_freeze."""

from pathlib import Path

import torch

from hf_freeze.publish.export.folders import Export

PACKAGES: tuple[str, ...] = ()
QUANTIZATIONS = ("float16", "bfloat16", "float32")
SUPPORTED_TASKS = None  # those of every family
NEEDS_TOKENIZER = False
KEEPS_STRUCTURE = False


def write(export: Export, folder: Path) -> None:
    """Save the model to `folder`, in the dtype `export.quantization` if it is set."""
    model = export.model if export.quantization is None else export.model.to(getattr(torch, export.quantization))
    model.save_pretrained(folder)
