"""Exports to ExecuTorch (https://docs.pytorch.org/executorch): a program for phones and other devices, which needs neither Python
nor PyTorch. Linear layers run in XNNPACK.

model.pte holds the programs of `torch_export`, each as a method with the name of its part, "model" or "encoder" and "decoder";
model.names.json the names of their inputs and outputs. Weights that several layers or methods read are stored once, except a
token table that is the output layer too: XNNPACK has its own copy of it. ExecuTorch plans memory for the largest inputs, so these
have limits: `ROWS` texts or beams at a time, of `LENGTH` tokens.
"""

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

from hf_freeze.compat.transformers import count_all_experts
from hf_freeze.publish.export.engine_parts import engine_parts, positions, samples
from hf_freeze.publish.export.folders import Export, Format, require
from hf_freeze.publish.export.runners import NAMES, open_parts
from hf_freeze.publish.export.torch_export import compare, names_of_part, traced

ROWS, LENGTH = 4, 512


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if the programs cannot be lowered, and as for `torch_export.write`."""
    model = export.model.float()
    model.set_attn_implementation("eager")  # ExecuTorch cannot lower the strides of the other
    count_all_experts(model)
    parts = engine_parts(model, export.task)
    length = min([LENGTH, *positions(model.config)])
    limits = dict.fromkeys(("length", "source_length", "new_length", "past_length"), length) | {"batch": ROWS}
    if any("samples" in axes.values() for part in parts for axes in part.axes.values()):
        limits["samples"] = samples(model.config, length)
    programs = {}
    for part in parts:
        export.say(f"tracing the {part.name}")
        programs[part.name] = traced(part, limits)
    export.say("lowering, which takes about a minute")
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            (folder / "model.pte").write_bytes(_lowered(programs))
    except Exception as error:  # of many kinds, with messages of pages
        raise ValueError(f"ExecuTorch cannot lower this model: {type(error).__name__}") from error
    names = {part.name: names_of_part(part) for part in parts}
    (folder / f"model.{NAMES}").write_text(json.dumps(names), encoding="utf-8")
    compare(export, parts, open_parts(folder, "executorch", {}))


FORMAT = Format(write, packages=("executorch.runtime",))


def _lowered(programs: dict[str, Any]) -> bytes:
    exir = require("executorch.exir", "executorch")
    xnnpack = require("executorch.backends.xnnpack.partition.config", "executorch")
    partition = require("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch")
    # XNNPACK claims to unsqueeze any tensor, but lowering fails for one with two dynamic lengths.
    configs = [each for each in xnnpack.ALL_PARTITIONER_CONFIGS if each is not xnnpack.UnsqueezeCopyConfig]
    partitioner = partition.XnnpackPartitioner(configs)
    # The check runs the program, which fixes the number of rows.
    settings = exir.EdgeCompileConfig(_check_ir_validity=False)
    lowered = exir.to_edge_transform_and_lower(programs, partitioner=[partitioner], compile_config=settings)
    return lowered.to_executorch().buffer
