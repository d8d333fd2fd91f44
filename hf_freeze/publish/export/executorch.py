"""Exports to ExecuTorch (https://docs.pytorch.org/executorch): programs for phones and other devices, which need neither
Python nor PyTorch. Linear layers run in XNNPACK.

The files are those of `torch_export`, lowered: model.pte, or encoder.pte and decoder.pte. ExecuTorch plans memory for the largest
inputs, so these have limits: `ROWS` texts (beams count) of `LENGTH` tokens.
"""

from pathlib import Path
from typing import Any

from hf_freeze.publish.export.folders import Export
from hf_freeze.publish.export.parts import parts_of, positions
from hf_freeze.publish.export.runners import NAMES, open_parts
from hf_freeze.publish.export.torch_export import compare, names_in, traced

PACKAGES = ("executorch",)
QUANTIZATIONS: tuple[str, ...] = ()
SUPPORTED_TASKS = None
NEEDS_TOKENIZER = False
KEEPS_STRUCTURE = True
ROWS, LENGTH = 8, 256


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if the program cannot be lowered, and as for `torch_export.write`."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    model = export.model.float()
    model.set_attn_implementation("eager")  # ExecuTorch cannot lower the strides of the other
    parts = parts_of(model, export.task)
    for part in parts:
        export.say(f"tracing the {part.name}")
        program = traced(part, _limits(export.model.config))
        export.say(f"lowering the {part.name}, which takes about a minute")
        try:
            # The check runs the program, which fixes the number of rows.
            settings = EdgeCompileConfig(_check_ir_validity=False)
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=settings)
            (folder / f"{part.name}.pte").write_bytes(lowered.to_executorch().buffer)
        except Exception as error:  # of many kinds, with messages of pages
            raise ValueError(
                f"ExecuTorch cannot lower the {part.name} of this model: {type(error).__name__}"
            ) from error
        (folder / f"{part.name}.{NAMES}").write_text(names_in(part), encoding="utf-8")
    compare(export, parts, open_parts(folder, "executorch", {}))


def _limits(config: Any) -> dict[str, int]:
    length = min([LENGTH, *positions(config)])
    lengths = dict.fromkeys(("length", "source_length", "new_length", "past_length"), length)
    return lengths | {"batch": ROWS}
