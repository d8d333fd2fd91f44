"""Exports to AOTInductor (https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html): machine code for this kind of
processor, which Python and C++ programs load without tracing anything. A C++ compiler is needed to export, not to run.

The files are those of `torch_export`, compiled: model.pt2, or encoder.pt2 and decoder.pt2.
"""

import contextlib
import io
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from hf_freeze.layers.grids import integers_are_exact
from hf_freeze.publish.export.engine_parts import Part
from hf_freeze.publish.export.folders import Export, Format
from hf_freeze.publish.export.runners import NAMES
from hf_freeze.publish.export.torch_export import PORTABLE, write_programs

# Weights computed from others are computed once, when the file is opened.
_SETTINGS = {"aot_inductor.use_runtime_constant_folding": True}


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError without a C++ compiler, and as for `torch_export.write`."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise ValueError("aotinductor needs a C++ compiler, g++ or clang++; install one, or choose --format torch")

    def save(part: Part, program: Any, names: str) -> None:
        export.say(f"compiling the {part.name}, which takes about a minute")
        path = folder / f"{part.name}.pt2"
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=_SETTINGS)
        (folder / f"{part.name}.{NAMES}").write_text(names, encoding="utf-8")

    write_programs(export, folder, "aotinductor", save, {} if integers_are_exact() else PORTABLE)


FORMAT = Format(write)
