"""What runs the files of an exported folder, in the formats that keep the structure: tensors by name -> outputs by name.

Each runner has `shapes`: those of each input, as numbers, and names where they vary; and `outputs`, their names.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.const_fold import split_const_subgraphs

from hf_freeze.publish.export.folders import require

NAMES = "names.json"  # within a file of torch.export, and as a suffix beside one of AOTInductor: {"shapes": ..., "outputs": ...}


def open_parts(folder: Path, format: str, options: dict[str, Any]) -> dict[str, Any]:
    """part -> its runner. `options`: settings of the engine. Raises ValueError for a folder without parts, a file that cannot be
    opened, and an unknown setting."""
    suffix, runner = RUNNERS[format]
    files = sorted(folder.glob(f"*{suffix}"))
    if not files:
        raise ValueError(f"{folder} has no file *{suffix}; export it again")
    return {path.stem: runner(path, **options) for path in files}


class OnnxRunner:
    """Runs a file of ONNX Runtime, on the CPU. `options` are fields of `onnxruntime.SessionOptions`, such as
    `intra_op_num_threads`."""

    def __init__(self, path: Path, **options: Any) -> None:
        onnxruntime = require("onnxruntime", "onnx")
        settings = onnxruntime.SessionOptions()
        for name, value in options.items():
            if not hasattr(settings, name):
                choices = ", ".join(option for option in dir(settings) if not option.startswith("_"))
                raise ValueError(f"onnxruntime has no setting {name!r}; choose from {choices}")
            setattr(settings, name, value)
        try:
            self._session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own classes are not public
            reason = str(error).splitlines()[0][:200]
            raise ValueError(f"{path} cannot be opened ({reason}); export it again, or update onnxruntime") from error
        self.shapes = {value.name: value.shape for value in self._session.get_inputs()}
        self.outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        feed = {name: inputs[name].contiguous().numpy() for name in self.shapes}
        return dict(zip(self.outputs, map(torch.from_numpy, self._session.run(None, feed)), strict=True))


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
    """Runs a file of ExecuTorch."""

    def __init__(self, path: Path, **options: Any) -> None:
        _check_no(options)
        require("executorch", "executorch")
        from executorch.runtime import Runtime

        try:
            names = json.loads(path.with_name(f"{path.stem}.{NAMES}").read_text(encoding="utf-8"))
            self._run: Any = Runtime.get().load_program(path).load_method("forward")
            described = self._run.metadata
            self._limits = {name: described.input_tensor_meta(i).sizes() for i, name in enumerate(names["shapes"])}
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be opened ({type(error).__name__}); export it again") from error
        self.shapes, self.outputs, self._path = names["shapes"], names["outputs"], path

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, limit in self._limits.items():
            if any(size > most for size, most in zip(inputs[name].shape, limit, strict=True)):
                raise ValueError(
                    f"{self._path} takes {name} of at most {tuple(limit)}, not {tuple(inputs[name].shape)}; give it fewer or "
                    "shorter texts"
                )
        found = self._run.execute([inputs[name].contiguous() for name in self.shapes])
        return dict(zip(self.outputs, found, strict=True))


def _check_no(options: dict[str, Any]) -> None:
    if options:
        raise ValueError(
            f"files of PyTorch have no engine settings, so {sorted(options)} cannot be set; set torch's own"
        )


RUNNERS: dict[str, tuple[str, Any]] = {
    "onnx": (".onnx", OnnxRunner),
    "torch": (".pt2", ProgramRunner),
    "aotinductor": (".pt2", PackageRunner),
    "executorch": (".pte", LoweredRunner),
}
