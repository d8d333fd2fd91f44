"""Exports to AOTInductor (https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html): machine code for this kind of
processor, which Python and C++ programs load without tracing anything. A C++ compiler is needed to export, not to run.

The files are those of `torch_export`, compiled: model.pt2, or encoder.pt2 and decoder.pt2.
"""

import contextlib
import io
import json
import shutil
import warnings
from pathlib import Path

import torch

from hf_freeze.compat.transformers import count_all_experts
from hf_freeze.publish.export.folders import Export
from hf_freeze.publish.export.parts import parts_of
from hf_freeze.publish.export.runners import NAMES, open_parts
from hf_freeze.publish.export.torch_export import compare, names_of_part, traced

PACKAGES: tuple[str, ...] = ()
QUANTIZATIONS: tuple[str, ...] = ()
SUPPORTED_TASKS = None
NEEDS_TOKENIZER = False
KEEPS_STRUCTURE = True
_SETTINGS = {
    "aot_inductor.use_runtime_constant_folding": True
}  # weights computed from others are computed once, when opened


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError without a C++ compiler, and as for `torch_export.write`."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise ValueError("aotinductor needs a C++ compiler, g++ or clang++; install one, or choose --format torch")
    count_all_experts(export.model)
    parts = parts_of(export.model.float(), export.task)
    for part in parts:
        export.say(f"tracing the {part.name}")
        program = traced(part)
        export.say(f"compiling the {part.name}, which takes about a minute")
        path = folder / f"{part.name}.pt2"
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=_SETTINGS)
        (folder / f"{part.name}.{NAMES}").write_text(json.dumps(names_of_part(part)), encoding="utf-8")
    compare(export, parts, open_parts(folder, "aotinductor", {}))
