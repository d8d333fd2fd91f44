"""Exports to OpenVINO (https://docs.openvino.ai), for Intel's CPUs and others.

Each part is the graph of `onnx.write` as OpenVINO reads it: PART.xml and PART.bin, with the structure of a variant and what it
stores. A tensor that the encoder and the decoder share is in both files. The 8-bit weights are those of NNCF
(https://github.com/openvinotoolkit/nncf): OpenVINO multiplies by the integers of our ONNX files several times more slowly.

    float16       weights in 16 bits
    int8          weights in 8 bits, one scale for each output channel
    int8-static   inputs of linears too, with the scales of texts
"""

import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_freeze.publish.export import onnx
from hf_freeze.publish.export.comparison import largest_difference
from hf_freeze.publish.export.engine_parts import engine_parts
from hf_freeze.publish.export.folders import Export, Format, require
from hf_freeze.publish.export.recording import record_inputs
from hf_freeze.publish.export.runners import NAMES, open_parts
from hf_freeze.publish.export.torch_export import compare, names_of_part


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if OpenVINO cannot read the graph, computes other outputs than PyTorch, or
    cannot open what is quantized; for "int8-static", if all texts to calibrate with are empty; and as for `onnx.write`."""
    openvino: Any = require("openvino", "openvino")
    core, parts = openvino.Core(), engine_parts(export.model.float(), export.task)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        source = Path(temporary)
        onnx.write(replace(export, quantization=None), source)
        for part in parts:
            export.say(f"converting the {part.name}")
            try:
                model = core.read_model(source / f"{part.name}.onnx")
                openvino.save_model(model, folder / f"{part.name}.xml", compress_to_fp16=False)
            except RuntimeError as error:  # with messages of pages
                raise ValueError(
                    f"openvino cannot hold this model: it cannot read the {part.name} of {type(export.model).__name__}; choose "
                    "--format onnx"
                ) from error
            del model  # which holds the file open
            # OpenVINO gives a tensor several names, in no order; what it keeps is the order of inputs and outputs.
            names = json.dumps(names_of_part(part))
            (folder / f"{part.name}.{NAMES}").write_text(names, encoding="utf-8")
    seeds = bool(getattr(export.model, "seeded_tensors", {}))  # stored in 16 bits, if that changes little
    compare(export, parts, open_parts(folder, "openvino", {}), least=onnx.STORED if seeds else 0.0)
    if export.quantization is not None:
        _quantize(export, folder, openvino)
        try:
            runners = open_parts(folder, "openvino", {})
        except ValueError as error:  # as of a translator in int8-static, with 2026.4
            raise ValueError(
                f"openvino cannot open {type(export.model).__name__} in {export.quantization}; choose int8 or float16"
            ) from error
        difference = largest_difference(parts, runners)
        export.say(f"in {export.quantization}, outputs for random tokens differ by at most {difference:.2g}")


FORMAT = Format(
    write,
    packages=("openvino", "onnx", "onnxscript", "onnxruntime"),
    quantizations=("float16", "int8", "int8-static"),
    calibrated=("int8-static",),
)


def _quantize(export: Export, folder: Path, openvino: Any) -> None:
    """Replace the files in `folder`."""
    nncf: Any = None if export.quantization == "float16" else require("nncf", "openvino")
    recorded: dict[str, Any] = {}
    if export.quantization == "int8-static":
        export.say("calibrating")
        recorded = record_inputs(export, open_parts(folder, "openvino", {}))
    export.say("quantizing")
    for path in sorted(folder.glob("*.xml")):
        model = openvino.Core().read_model(path)
        with _quiet():
            if export.quantization == "int8":
                model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
            elif export.quantization == "int8-static":
                inputs = [[value.numpy() for value in each.values()] for each in recorded[path.stem]]
                kind = nncf.ModelType.TRANSFORMER
                model = nncf.quantize(model, nncf.Dataset(inputs), model_type=kind, subset_size=len(inputs))
        written = path.with_name(f"new-{path.name}")
        openvino.save_model(model, written, compress_to_fp16=export.quantization == "float16")
        del model  # which holds the old file open
        for part in (written, written.with_suffix(".bin")):
            part.replace(folder / part.name.removeprefix("new-"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the tables and progress bars of NNCF."""
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
