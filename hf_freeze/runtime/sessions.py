"""Runs a file of ONNX Runtime or OpenVINO on the CPU: arrays by name -> arrays by name."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.install import how_to_install

NAMES = "names.json"  # of another engine than ONNX Runtime: {"shapes": ..., "outputs": ...}, in or beside the file of the model


class OnnxSession:
    """`options` are fields of `onnxruntime.SessionOptions`, such as `intra_op_num_threads`. `shapes`: those of each input, as
    numbers, and names where they vary; `outputs`: their names.

    Raises ValueError if onnxruntime is missing, for an unknown setting, and for a file that cannot be opened.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ValueError(f"onnx needs onnxruntime, which is missing; {how_to_install('serve')}") from error
        settings: Any = onnxruntime.SessionOptions()
        if hasattr(os, "sched_getaffinity") and (allowed := len(os.sched_getaffinity(0))) < (os.cpu_count() or 1):
            # It would start a thread for each core of the machine; on fewer, as in some containers, they wait for each other,
            # which took two to four times as long.
            settings.intra_op_num_threads = allowed
        for name, value in options.items():
            if not hasattr(settings, name):
                choices = ", ".join(option for option in dir(settings) if not option.startswith("_"))
                raise ValueError(f"onnxruntime has no setting {name!r}; choose from {choices}")
            setattr(settings, name, value)
        try:
            self._session: Any = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own classes are not public
            reason = str(error).splitlines()[0][:200]
            raise ValueError(f"{path} cannot be opened ({reason}); export it again, or update onnxruntime") from error
        self.shapes: dict[str, list[Any]] = {value.name: value.shape for value in self._session.get_inputs()}
        self.outputs: list[str] = [value.name for value in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Inputs that the file does not have are left out."""
        return dict(
            zip(self.outputs, self._session.run(None, {name: inputs[name] for name in self.shapes}), strict=True)
        )


class OpenVINOSession:
    """`options` are properties of OpenVINO's CPU plugin, such as `INFERENCE_NUM_THREADS`; the rest is as in `OnnxSession`. It
    computes in fp32, unless they say otherwise: its own choice is bf16 where the CPU has it, and to round what it multiplies by
    stored integers."""

    def __init__(self, path: Path, **options: Any) -> None:
        try:
            import openvino
        except ImportError as error:
            raise ValueError(f"openvino needs openvino, which is missing; {how_to_install('openvino')}") from error
        exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        settings = exact | {"PERFORMANCE_HINT": "LATENCY"} | options
        core = openvino.Core()
        known = core.get_property("CPU", "SUPPORTED_PROPERTIES")
        if unknown := sorted(settings.keys() - known.keys()):
            raise ValueError(f"openvino has no setting {unknown[0]!r}; choose from {', '.join(sorted(known))}")
        try:
            names = json.loads(path.with_suffix(f".{NAMES}").read_text(encoding="utf-8"))
            self._run: Any = core.compile_model(core.read_model(path), "CPU", settings)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be opened ({type(error).__name__}); export it again") from error
        self.shapes: dict[str, list[Any]] = names["shapes"]
        self.outputs: list[str] = names["outputs"]

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = self._run([inputs[name] for name in self.shapes])
        return {name: found[place] for place, name in enumerate(self.outputs)}


Session = OnnxSession | OpenVINOSession
SESSIONS: dict[
    str, tuple[str, type[Session], str]
] = {  # format -> end of its files, class, and its setting for a number of threads
    "onnx": (".onnx", OnnxSession, "intra_op_num_threads"),
    "openvino": (".xml", OpenVINOSession, "INFERENCE_NUM_THREADS"),
}
