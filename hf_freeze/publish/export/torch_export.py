"""Exports by `torch.export`, for programs that have PyTorch and nothing else: `torch.export.load("model.pt2").module()`.

`parts` says which files there are, and their inputs and outputs: model.pt2, or encoder.pt2 and decoder.pt2. Batch size and
lengths are dynamic. A file holds the parts of a variant as they are, like those for ONNX, but what a seed generates in fp32. What
encoder and decoder have in common, such as a token table, is in both files.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.const_fold import split_const_subgraphs

from hf_freeze.publish.export.folders import Export
from hf_freeze.publish.export.parts import Part, largest_difference, parts_of

PACKAGES: tuple[str, ...] = ()
QUANTIZATIONS: tuple[str, ...] = ()
SUPPORTED_TASKS = None  # all tasks of all families whose inputs and caches `parts` knows
NEEDS_TOKENIZER = False
KEEPS_STRUCTURE = True
NAMES = "names.json"  # within each file: the names of its inputs, with their shapes, and of its outputs
_TOLERANCE = 1e-4  # absolute and relative, of outputs


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if the forward cannot be traced, or if the files compute other outputs."""
    parts = parts_of(export.model.float(), export.task)
    for part in parts:
        export.say(f"tracing the {part.name}")
        program = traced(part)
        torch.export.save(program, folder / f"{part.name}.pt2", extra_files={NAMES: names_in(part)})
    compare(export, parts, open_parts(folder, {}))


def compare(export: Export, parts: list[Part], runners: Any) -> None:
    """Raises ValueError if `runners` compute other outputs than the model."""
    export.say("comparing with PyTorch")
    difference = largest_difference(parts, runners)
    if not difference <= _TOLERANCE:
        raise ValueError(
            f"the exported files do not compute the same as {type(export.model).__name__}: outputs differ by {difference:.3g}"
        )


@torch.no_grad()
def traced(part: Part) -> Any:
    """The program (torch.export.ExportedProgram) of a part, which holds only what it reads. Raises ValueError if `torch.export`
    fails."""
    try:
        program: Any = _exported(part.module.eval(), part).module(check_guards=False)
        program.graph.eliminate_dead_code()
        read = {node.target for node in program.graph.nodes if node.op == "get_attr"}
        for name in [name for name in program.state_dict() if name not in read]:
            module, _, own = name.rpartition(".")
            delattr(program.get_submodule(module), own)
        program.recompile()
        return _exported(program, part)
    except Exception as error:  # torch raises many kinds, with messages of pages
        raise ValueError(f"torch.export cannot trace the {part.name} of this model: {type(error).__name__}") from error


def _exported(module: nn.Module, part: Part) -> Any:
    shapes = tuple(dict.fromkeys(part.axes[name], torch.export.Dim.DYNAMIC) for name in part.inputs)
    # The forwards take *inputs, which is one argument.
    shapes = (shapes,) if not isinstance(module, torch.fx.GraphModule) else shapes
    return torch.export.export(module, tuple(part.inputs.values()), dynamic_shapes=shapes, strict=False)


def names_in(part: Part) -> str:
    """The names of a part, in JSON."""
    shapes = {
        name: [part.axes[name].get(axis, size) for axis, size in enumerate(value.shape)]
        for name, value in part.inputs.items()
    }
    return json.dumps({"shapes": shapes, "outputs": part.outputs})


def open_parts(folder: Path, options: dict[str, Any]) -> dict[str, "ProgramRunner"]:
    """part -> its program. Raises ValueError for options, a folder without parts, and a file that cannot be read."""
    if options:
        raise ValueError(f"torch has no engine settings, so {sorted(options)} cannot be set; set torch's own")
    files = sorted(folder.glob("*.pt2"))
    if not files:
        raise ValueError(f"{folder} has no file *.pt2; export it again")
    return {path.stem: ProgramRunner(path) for path in files}


class ProgramRunner:
    """Runs one file of an exported folder: tensors by name -> outputs by name.

    `shapes`: of each input, as numbers, and names where they vary. Weights that the program computes from others, such as those
    of sparse matrices, are computed once.
    """

    def __init__(self, path: Path) -> None:
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
