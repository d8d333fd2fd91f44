"""Runs a file of ONNX Runtime on the CPU: arrays by name -> arrays by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.install import how_to_install


class Session:
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
