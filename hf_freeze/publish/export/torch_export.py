"""Exports by `torch.export`, for programs that have PyTorch and nothing else: `torch.export.load("model.pt2").module()`.

`engine_parts` says which files there are, and their inputs and outputs: model.pt2, or encoder.pt2 and decoder.pt2. Batch size and
lengths are dynamic. A file holds the parts of a variant as they are, like those for ONNX, but what a seed generates in fp32. What
encoder and decoder have in common, such as a token table, is in both files.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from hf_freeze.compat.transformers import count_all_experts
from hf_freeze.layers.grids import blockwise_product
from hf_freeze.publish.export.comparison import largest_difference, tolerance
from hf_freeze.publish.export.engine_parts import Part, engine_parts
from hf_freeze.publish.export.folders import Export, Format
from hf_freeze.publish.export.runners import NAMES, open_parts

_NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
# Programs run on other processors than the one that wrote them, and on some torch adds products of integers in 16 bits.
PORTABLE = {torch.ops.aten._int_mm.default: lambda x, weight: blockwise_product(x, weight.T)}


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if the forward cannot be traced, or if the files compute other outputs."""

    def save(part: Part, program: Any, names: str) -> None:
        torch.export.save(program, folder / f"{part.name}.pt2", extra_files={NAMES: names})

    write_programs(export, folder, "torch", save)


FORMAT = Format(write)


def write_programs(
    export: Export, folder: Path, format: str, save: Callable[[Part, Any, str], None], decompositions: Any = PORTABLE
) -> None:
    """Trace each part, have `save` write its program with what `names_of_part` says, and compare."""
    count_all_experts(export.model)
    parts = engine_parts(export.model.float(), export.task)
    for part in parts:
        export.say(f"tracing the {part.name}")
        save(part, traced(part, decompositions=decompositions), json.dumps(names_of_part(part)))
    compare(export, parts, open_parts(folder, format, {}))


def compare(export: Export, parts: list[Part], runners: Any, least: float = 0.0) -> None:
    """Raises ValueError if `runners` compute other outputs than the model. `least`: a difference that is accepted anyway."""
    export.say("comparing with PyTorch")
    difference, limit = largest_difference(parts, runners), max(tolerance(export.model, parts), least)
    if not difference <= limit:
        raise ValueError(
            f"the exported files do not compute the same as {type(export.model).__name__}: outputs differ by {difference:.3g}, "
            f"and rounding explains {limit:.3g}; choose --format dense"
        )


@torch.no_grad()
def traced(part: Part, limits: Mapping[str, int] | None = None, decompositions: Any = PORTABLE) -> Any:
    """The program (torch.export.ExportedProgram) of a part, which holds only what it reads. `limits`: the largest value of each
    of its `axes`; None is any. `decompositions`: operation -> what takes its place. Raises ValueError if `torch.export` fails."""
    try:
        program: Any = exported(part.module.eval(), part, limits).run_decompositions(decompositions)
    except Exception as error:  # torch raises many kinds, with messages of pages
        raise ValueError(f"torch.export cannot trace the {part.name} of this model: {type(error).__name__}") from error
    # Without operations in place, all that no output depends on is dead, once nothing checks its dtype.
    _erase_checks(program.graph)
    program.graph.eliminate_dead_code()
    _erase_unread(program)
    program.graph_module.recompile()
    for node in program.graph.nodes:  # where in the model's code each operation is from: as large as many weights
        for note in _NOTES:
            node.meta.pop(note, None)
    return program


def _erase_unread(program: Any) -> None:
    """Drop the tensors that no operation reads, such as the second name of a tied one."""
    unread = {node.name: node for node in program.graph.find_nodes(op="placeholder") if not node.users}
    specs = program.graph_signature.input_specs
    for spec in [spec for spec in specs if spec.target is not None and spec.arg.name in unread]:
        specs.remove(spec)
        program.graph.erase_node(unread[spec.arg.name])
        for tensors in (program.state_dict, program.constants):
            tensors.pop(spec.target, None)


def _erase_checks(graph: torch.fx.Graph) -> None:
    """Drop the checks of dtypes, which hold on to dead code and run in every call: three for each weight in nf4."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def exported(module: nn.Module, part: Part, limits: Mapping[str, int] | None = None) -> Any:
    """The program of `module`, which computes what `part` does."""
    dynamic: Any = torch.export.Dim.DYNAMIC
    shapes = tuple(
        {axis: dynamic if limits is None else dynamic(max=limits[size]) for axis, size in part.axes[name].items()}
        for name in part.inputs
    )
    # The forwards take *inputs, which is one argument.
    program: Any = torch.export.export(module, tuple(part.inputs.values()), dynamic_shapes=(shapes,), strict=False)
    if Version(torch.__version__) < Version("2.10"):
        program._guards_code = []  # its checks name *inputs in a way that the program does not know
    return program


def names_of_part(part: Part) -> dict[str, Any]:
    """What a runner has to know of a part: shapes of inputs, with names where they vary, and names of outputs."""
    shapes = {
        name: [part.axes[name].get(axis, size) for axis, size in enumerate(value.shape)]
        for name, value in part.inputs.items()
    }
    return {"shapes": shapes, "outputs": part.outputs}
