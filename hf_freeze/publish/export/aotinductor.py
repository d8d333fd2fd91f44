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
from typing import Any

import torch
from torch import Tensor

from hf_freeze.publish.export.folders import Export
from hf_freeze.publish.export.parts import parts_of
from hf_freeze.publish.export.torch_export import compare, names_in, traced

PACKAGES: tuple[str, ...] = ()
QUANTIZATIONS: tuple[str, ...] = ()
SUPPORTED_TASKS = None
NEEDS_TOKENIZER = False
KEEPS_STRUCTURE = True
_NAMES = ".names.json"  # suffix of the file beside each package: the names of its inputs, with their shapes, and of its outputs
_SETTINGS = {
    "aot_inductor.use_runtime_constant_folding": True
}  # weights computed from others are computed once, when opened


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError without a C++ compiler, and as for `torch_export.write`."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise ValueError("aotinductor needs a C++ compiler, g++ or clang++; install one, or choose --format torch")
    parts = parts_of(export.model.float(), export.task)
    for part in parts:
        export.say(f"tracing the {part.name}")
        program = traced(part)
        export.say(f"compiling the {part.name}, which takes about a minute")
        path = folder / f"{part.name}.pt2"
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=_SETTINGS)
        (folder / f"{part.name}{_NAMES}").write_text(names_in(part), encoding="utf-8")
    compare(export, parts, open_parts(folder, {}))


def open_parts(folder: Path, options: dict[str, Any]) -> dict[str, "PackageRunner"]:
    """part -> its package. Raises ValueError for options, a folder without parts, and a file that cannot be opened."""
    if options:
        raise ValueError(f"aotinductor has no engine settings, so {sorted(options)} cannot be set; set torch's own")
    files = sorted(folder.glob("*.pt2"))
    if not files:
        raise ValueError(f"{folder} has no file *.pt2; export it again")
    return {path.stem: PackageRunner(path) for path in files}


class PackageRunner:
    """Runs one file of an exported folder: tensors by name -> outputs by name.

    `shapes`: of each input, as numbers, and names where they vary.
    """

    def __init__(self, path: Path) -> None:
        try:
            names = json.loads(path.with_name(f"{path.stem}{_NAMES}").read_text(encoding="utf-8"))
            self._run: Any = torch._inductor.aoti_load_package(str(path))
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be opened ({type(error).__name__}); export it again") from error
        self.shapes, self.outputs = names["shapes"], names["outputs"]

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self._run(*(inputs[name].contiguous() for name in self.shapes))
        return dict(zip(self.outputs, found, strict=True))
