"""What runs the files of an exported folder, in the formats that keep the structure: tensors by name -> outputs by name.

Each runner has `shapes`: those of each input, as numbers, and names where they vary; and `outputs`, their names.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.const_fold import split_const_subgraphs

from hf_freeze.publish.export.folders import require
from hf_freeze.runtime.sessions import NAMES, SESSIONS, OnnxSession, OpenVINOSession


def open_parts(folder: Path, format: str, options: dict[str, Any], without: str = "") -> dict[str, Any]:
    """part -> its runner. `options`: settings of the engine; `without`: a file that stays closed, if it is there. Raises
    ValueError for a format of browsers, a folder without parts, a file that cannot be opened, and an unknown setting."""
    if format not in RUNNERS:
        raise ValueError(
            f"{folder} is for {format}, which opens in browsers alone; export to onnx, which has the same graphs"
        )
    suffix, opened = RUNNERS[format]
    files = sorted(path for path in folder.glob(f"*{suffix}") if path.stem != without)
    if not files:
        raise ValueError(f"{folder} has no file *{suffix}; export it again")
    return {part: runner for path in files for part, runner in opened(path, **options).items()}


def _alone(runner: Any) -> Any:
    """Opens files that hold one part each, whose name is that of the file."""
    return lambda path, **options: {path.stem: runner(path, **options)}


def thread_options(format: str | None, threads: int) -> dict[str, int]:
    """The setting of the engine for a number of threads; none where it follows torch."""
    return {SESSIONS[format][2]: threads} if format in SESSIONS else {}


class OnnxRunner(OnnxSession):
    """Runs a file of ONNX Runtime, on the CPU. `options` are fields of `onnxruntime.SessionOptions`, such as
    `intra_op_num_threads`."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        found = super().__call__({name: inputs[name].contiguous().numpy() for name in self.shapes})
        return {name: torch.from_numpy(value) for name, value in found.items()}


class OpenVINORunner(OpenVINOSession):
    """Runs a file of OpenVINO, on the CPU. `options` are its properties, such as `INFERENCE_NUM_THREADS`."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        found = super().__call__({name: inputs[name].contiguous().numpy() for name in self.shapes})
        return {name: torch.from_numpy(value) for name, value in found.items()}


class ProgramRunner:
    """Runs a file of `torch.export`. Weights that the program computes from others, such as those
    of sparse matrices, are computed once.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        _check_no(options)
        found = {NAMES: ""}
        try:
            program: Any = torch.export.load(path, extra_files=found)
            names = json.loads(found[NAMES])
        except Exception as error:  # a zip file, its JSON and its tensors can be damaged in many ways
            raise ValueError(f"{path} cannot be read ({type(error).__name__}); export it again") from error
        self.shapes, self.outputs = names["shapes"], names["outputs"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names of the model's modules that the program does not have
            # Guards say which sizes were seen in tracing; outputs are compared for others when the model is exported.
            folded: Any = split_const_subgraphs(program.module(check_guards=False))
        folded.run_folding()
        folded.const_subgraph_module = None
        self._run = folded

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.outputs, self._run(*(inputs[name] for name in self.shapes)), strict=True))


class PackageRunner:
    """Runs a file of AOTInductor."""

    def __init__(self, path: Path, **options: Any) -> None:
        _check_no(options)
        try:
            names = json.loads(path.with_name(f"{path.stem}.{NAMES}").read_text(encoding="utf-8"))
            self._run: Any = torch._inductor.aoti_load_package(str(path))
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be opened ({type(error).__name__}); export it again") from error
        self.shapes, self.outputs = names["shapes"], names["outputs"]

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self._run(*(inputs[name].contiguous() for name in self.shapes))
        return dict(zip(self.outputs, found, strict=True))


class LoweredRunner:
    """Runs a method of a program of ExecuTorch, for as many rows at a time as it has memory for. `names`: those of its inputs and
    outputs.

    Raises ValueError for inputs with more tokens than it has memory for.
    """

    def __init__(self, method: Any, names: dict[str, Any], path: Path) -> None:
        self.shapes, self.outputs, self._path, self._run = names["shapes"], names["outputs"], path, method
        described = method.metadata
        self._limits = {name: described.input_tensor_meta(i).sizes() for i, name in enumerate(self.shapes)}

    @classmethod
    def open(cls, path: Path, **options: Any) -> dict[str, "LoweredRunner"]:
        """part -> its runner, of a program with several methods"""
        _check_no(options)
        runtime = require("executorch.runtime", "executorch")
        try:
            names = json.loads(path.with_suffix(f".{NAMES}").read_text(encoding="utf-8"))
            program = runtime.Runtime.get().load_program(path)
            return {part: cls(program.load_method(part), names[part], path) for part in names}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be opened ({type(error).__name__}); export it again") from error

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        feed = [inputs[name] for name in self.shapes]
        for (name, limit), tensor in zip(self._limits.items(), feed, strict=True):
            if any(size > most for size, most in zip(tensor.shape[1:], limit[1:], strict=True)):
                raise ValueError(
                    f"{self._path} has memory for {name} of the shape {tuple(limit[1:])} a row, not {tuple(tensor.shape[1:])}; "
                    "give it shorter texts, or fewer new tokens"
                )
        rows = next(iter(self._limits.values()))[0]
        batches = zip(*(tensor.split(rows) for tensor in feed), strict=True)
        found = [self._run.execute([tensor.contiguous() for tensor in batch]) for batch in batches]
        return dict(zip(self.outputs, map(torch.cat, zip(*found, strict=True)), strict=True))


def _check_no(options: dict[str, Any]) -> None:
    if options:
        raise ValueError(
            f"files of PyTorch have no engine settings, so {sorted(options)} cannot be set; set torch's own"
        )


RUNNERS: dict[str, tuple[str, Any]] = {
    "onnx": (".onnx", _alone(OnnxRunner)),
    "openvino": (".xml", _alone(OpenVINORunner)),
    "torch": (".pt2", _alone(ProgramRunner)),
    "aotinductor": (".pt2", _alone(PackageRunner)),
    "executorch": (".pte", LoweredRunner.open),
}
