"""Exports to ONNX, for ONNX Runtime and other engines. Batch size and lengths are dynamic; what is smaller stays smaller.

`engine_parts` says which files there are, and their inputs and outputs: model.onnx, or encoder.onnx and decoder.onnx. Large
tensors of all files lie in weights.data, each of them once. With a lexical shortlist there is a second decoder, for
`hf_freeze.runtime` alone.

The graph has the parts of a variant as they are. Pruned heads, neurons and layers are gone. Factors stay factors where two
products are faster than one; where they are not, and for sparse and quantised weights, the file holds what the checkpoint holds
and the graph computes the weight from it, which ONNX Runtime does once, when it opens the file. What a seed generates is
stored: in 16 bits if that changes the outputs by at most `STORED`, or else in the 24 bits that it has.
"""

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_freeze.compat.transformers import product_of_experts
from hf_freeze.publish.export.comparison import Runner, largest_difference, tolerance
from hf_freeze.publish.export.engine_parts import Part, engine_parts
from hf_freeze.publish.export.folders import Export, Format, read_mark, require
from hf_freeze.publish.export.listed_decoder import listed_decoder
from hf_freeze.publish.export.onnx_int4 import keep_four_bits
from hf_freeze.publish.export.onnx_int8 import exact, integer_product, keep_large_integers, quantized
from hf_freeze.publish.export.onnx_nodes import SMALL, computed, mask_with_finite_scores, quiet
from hf_freeze.publish.export.recording import record_inputs
from hf_freeze.publish.export.runners import open_parts
from hf_freeze.publish.export.torch_export import exported
from hf_freeze.runtime.models import Parts
from hf_freeze.runtime.shortlists import FILE
from hf_freeze.runtime.writers import Translator

DATA = "weights.data"
_ALIGNMENT = 64  # bytes, of the tensors in DATA
STORED = 1e-4  # absolute and relative, of outputs
_FORMS = {"float16": 16, "uint24": 24}  # how numbers that a seed generates are stored -> bits of a number, fewest first


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if the forward cannot be traced, or if ONNX Runtime computes other outputs
    than PyTorch; for "int8-static", if all texts to calibrate with are empty."""
    parts = engine_parts(export.model.float(), export.task)
    if export.shortlist is not None:
        parts.append(listed_decoder(parts[-1], export.shortlist))
        export.shortlist.save(folder / FILE)
    write_parts(export, parts, traced_parts(export, parts), folder)


def traced_parts(export: Export, parts: list[Part]) -> dict[str, Any]:
    """part -> its graph (onnx_ir.Model). Raises ValueError if the forward cannot be traced."""
    graphs = {}
    for part in parts:
        export.say(f"tracing the {part.name}")
        try:
            graphs[part.name] = _traced(part)
        except Exception as error:  # of many kinds, with messages of pages
            raise ValueError(
                f"onnx cannot hold this model: torch.export cannot trace the {part.name} of {type(export.model).__name__}; "
                "choose --format dense"
            ) from error
    return graphs


def write_parts(export: Export, parts: list[Part], graphs: dict[str, Any], folder: Path) -> None:
    """Write the graphs of the parts to `folder`, and compare. Raises ValueError as `write` does."""
    model = export.model
    seeded = _seeded_tensors(model)
    limit = tolerance(model, parts)
    forms = list(_FORMS) if seeded and export.quantization is None else ["uint24"]
    for form in forms:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            fp32 = Path(temporary)
            _save({name: graph.clone() for name, graph in graphs.items()}, fp32, seeded, form)
            export.say("comparing with PyTorch")
            difference = largest_difference(parts, open_parts(fp32, "onnx", {}))
            if form != forms[-1] and not difference <= max(limit, STORED):
                continue
            if form == forms[-1] and not difference <= limit:
                raise ValueError(
                    f"onnxruntime does not compute the same as {type(model).__name__}: outputs differ by {difference:.3g}, and "
                    f"rounding explains {limit:.3g}; choose --format torch or dense"
                )
            if export.quantization is not None:
                _write_quantized(export, graphs, parts, fp32, folder, limit)
                return
            for path in fp32.iterdir():
                path.rename(folder / path.name)
        if seeded:
            export.say(
                f"what seeds generate is stored in {_FORMS[form]} bits a number; outputs differ by {difference:.1g}"
            )
        return


FORMAT = Format(
    write,
    packages=("onnx", "onnxscript", "onnxruntime"),
    quantizations=("int8", "int8-static"),
    calibrated=("int8-static",),
    takes_shortlist=True,
)


def _write_quantized(
    export: Export, graphs: dict[str, Any], parts: list[Part], fp32: Path, folder: Path, limit: float
) -> None:
    """`fp32`: the folder with the files before; `limit`: how far rounding in fp32 takes outputs.

    Raises ValueError if ONNX Runtime is further from exact products of the same integers than rounding to them costs twice. A
    difference in the last bit may become one of a step where inputs are rounded, and grow from layer to layer, but not beyond
    what other roundings of the same model differ by."""
    recorded = None
    if export.quantization == "int8-static":
        export.say("calibrating")
        recorded = record_inputs(export, open_parts(fp32, "onnx", {}))
    export.say("quantizing")
    int8 = {name: quantized(graph, None if recorded is None else recorded[name]) for name, graph in graphs.items()}
    export.say("comparing with exact products")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        _save({name: exact(graph) for name, graph in int8.items()}, Path(temporary), {})
        _save(int8, folder, {})
        levels = require("onnxruntime", "onnx").GraphOptimizationLevel
        unfused = {"graph_optimization_level": levels.ORT_DISABLE_ALL}
        products, found = open_parts(Path(temporary), "onnx", unfused), open_parts(folder, "onnx", {})
        cost = largest_difference(parts, products)
        error = largest_difference([replace(part, module=_Run(part, products)) for part in parts], found)
    if not error <= 2 * cost + limit:
        raise ValueError(
            f"onnxruntime multiplies integers wrongly on this CPU: outputs differ by {error:.2g} from exact products, which "
            f"differ by {cost:.2g} from {type(export.model).__name__}; export without quantization"
        )
    difference = largest_difference(parts, found)
    export.say(f"in {export.quantization}, outputs for random tokens differ by at most {difference:.2g}")


class _Run(nn.Module):
    """A part as runners compute it."""

    def __init__(self, part: Part, runners: Mapping[str, Runner]) -> None:
        super().__init__()
        self.model: Any = part.module.model
        self._part, self._runner = part, runners[part.name]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self._runner(dict(zip(self._part.inputs, inputs, strict=True)))
        return tuple(found[name] for name in self._part.outputs)


# -- graphs ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _traced(part: Part) -> Any:
    """The graph (onnx_ir.Model) of a part, without the notes of the exporter, which are many times as long."""
    import onnx_ir
    from onnxscript import optimizer

    with quiet():
        program: Any = torch.onnx.export(
            exported(part.module.eval(), part),
            input_names=list(part.inputs),
            output_names=part.outputs,
            dynamo=True,
            verbose=False,
            optimize=False,
            custom_translation_table={
                torch.ops.aten._int_mm.default: integer_product,
                product_of_experts(): _products_of_groups,
            },
        )
        graph = program.model
        # The limits keep products of factors, and all that is computed from stored weights, as they are.
        optimizer.optimize(graph, input_size_limit=SMALL // 4, output_size_limit=SMALL // 4)
    mask_with_finite_scores(graph)
    keep_large_integers(graph)
    keep_four_bits(graph)
    symbols = {str(v.shape[axis]): name for v in graph.graph.inputs for axis, name in part.axes[v.name].items()}
    values = [*graph.graph.inputs, *graph.graph.initializers.values()]
    for node in graph.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        values += node.outputs
    for value in values:
        value.metadata_props.clear()
        if value.shape is not None and not value.is_initializer():
            value.shape = onnx_ir.Shape([symbols.get(str(size), size) for size in value.shape])
    graph.metadata_props.clear()
    graph.graph.metadata_props.clear()
    return graph


def _products_of_groups(input: Any, weight: Any, offs: Any) -> Any:
    """The operations of ONNX for the experts of a mixture: of the rows of `input` (S, I), those up to each of `offs` (E,) times
    one of the matrices `weight` (E, I, O). The names are those of transformers."""
    from onnxscript import opset18

    opset: Any = opset18
    ends = opset.Cast(offs, to=7)  # int64
    bounds = opset.Concat(opset.Constant(value_ints=[0]), ends, axis=0)
    results = []
    for expert in range(weight.shape[0]):
        first, last = (opset.Gather(bounds, opset.Constant(value_ints=[number])) for number in (expert, expert + 1))
        rows = opset.Slice(input, first, last, opset.Constant(value_ints=[0]))
        results.append(opset.MatMul(rows, opset.Gather(weight, opset.Constant(value_int=expert))))
    return opset.Concat(*results, axis=0) if len(results) > 1 else results[0]


class _Weights:
    """The file of the tensors of several graphs, each tensor once.

    `seeded`: digest of a tensor that a seed generates -> its bound; they are stored in `form`, one of `_FORMS`.
    """

    def __init__(self, folder: Path, seeded: dict[bytes, float], form: str | None) -> None:
        self.folder, self.seeded, self.form = folder, seeded, form
        self.places: dict[bytes, tuple[int, int]] = {}  # digest of the content -> (offset, length)

    def move(self, graph: Any, data: Any) -> None:
        """Move the large initializers of `graph` into the open file `data`."""
        first = next(iter(graph))
        for value in list(graph.initializers.values()):
            if value.const_value.nbytes < SMALL:
                continue
            values = value.const_value.numpy()
            known = self.places.keys() | self.seeded.keys()
            turned = values.ndim == 2 and _digest(values) not in known and _digest(values.T) in known
            values = np.ascontiguousarray(values.T if turned else values)
            bound = self.seeded.get(_digest(values)) if self.form is not None else None
            packed = None if bound is None else _packed(values, bound, self.form)
            del graph.initializers[value.name]
            result = new = self._external(values if packed is None else packed, value.name, data)
            graph.register_initializer(new)
            if packed is not None and bound is not None:
                result = _unpacked(graph, first, new, values.shape, bound)
            if turned:
                result = computed(graph, first, "Transpose", result, perm=[1, 0])
            value.name = None
            value.replace_all_uses_with(result, replace_graph_outputs=True)

    def _external(self, values: np.ndarray, name: str, data: Any) -> Any:
        import onnx_ir

        digest = _digest(values)
        if digest not in self.places:
            data.write(bytes(-data.tell() % _ALIGNMENT))
            self.places[digest] = data.tell(), values.nbytes
            data.write(values.data if values.flags.c_contiguous else values.tobytes())
        dtype, shape = onnx_ir.DataType.from_numpy(values.dtype), onnx_ir.Shape(values.shape)
        place = self.places[digest]
        tensor: Any = onnx_ir.ExternalTensor(DATA, *place, dtype, shape=shape, name=name, base_dir=self.folder)
        return onnx_ir.Value(
            name=name, shape=onnx_ir.Shape(values.shape), type=onnx_ir.TensorType(dtype), const_value=tensor
        )


def _save(graphs: dict[str, Any], folder: Path, seeded: dict[bytes, float], form: str | None = None) -> None:
    """Write the graphs. What several tensors have in common, also as the transpose of each other, is stored once."""
    import onnx_ir

    weights = _Weights(folder, seeded, form)
    with open(folder / DATA, "wb") as data:
        for model in graphs.values():
            weights.move(model.graph, data)
    for name, model in graphs.items():
        _with_short_names(model.graph)
        onnx_ir.save(model, folder / f"{name}.onnx")


def _with_short_names(graph: Any) -> None:
    """Numbers for the names of nodes and of what they compute, and no shapes of that, which engines infer: half of what a graph
    takes without its weights."""
    for value in graph.initializers.values():
        value.shape = value.type = None
    for number, node in enumerate(graph.all_nodes()):
        node.name = str(number)
        for place, value in enumerate(node.outputs):
            if value.name and not value.is_graph_output():
                value.name, value.shape, value.type = f"{number}.{place}", None, None


def _digest(values: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).digest()


# -- numbers that a seed generates -------------------------------------------------------------------------------------------


def _seeded_tensors(model: Any) -> dict[bytes, float]:
    """digest of each tensor of `model` that a seed generates -> its bound"""
    definitions = getattr(model, "seeded_tensors", {})
    return {_digest(model.get_parameter(name).detach().numpy()): one.bound for name, one in definitions.items()}


def _packed(values: np.ndarray, bound: float, form: str | None) -> np.ndarray | None:
    """The values as int8 if they are small integers; in 16 bits; or exactly, in three bytes (..., 3), the lowest first. None if
    they are no uniform values with this bound."""
    if np.array_equal(values.astype(np.int8), values):
        return values.astype(np.int8)
    if form == "float16":
        return values.astype(np.float16)
    scale = np.float32(np.float32(bound) * np.float32(2.0**-23))
    words = np.rint(values.astype(np.float64) / scale - (0.5 - 2**23)).astype(np.int64)  # seeded.tensor
    again = (words.astype(np.float32) + np.float32(0.5 - 2**23)) * scale
    if not np.array_equal(again, values) or words.min() < 0 or words.max() >= 1 << 24:
        return None
    return np.stack([words >> shift & 255 for shift in (0, 8, 16)], axis=-1).astype(np.uint8)


def _unpacked(graph: Any, first: Any, packed: Any, shape: tuple[int, ...], bound: float) -> Any:
    """fp32 in `shape` of what `_packed` has made; every step but the last multiplication is exact."""
    import onnx_ir

    result = computed(graph, first, "Cast", packed, to=onnx_ir.DataType.FLOAT.value)
    if packed.dtype != onnx_ir.DataType.UINT8:
        return result
    result = computed(graph, first, "Mul", result, np.array([1, 256, 65536], np.float32))
    result = computed(graph, first, "ReduceSum", result, np.array([-1]), keepdims=0)
    result = computed(graph, first, "Add", result, np.array(0.5 - 2**23, np.float32))
    return computed(graph, first, "Mul", result, np.array(np.float32(bound) * np.float32(2.0**-23)))


# -- running -----------------------------------------------------------------------------------------------------------------


class OnnxTranslator:
    """Translates with a folder written by `hf-freeze export --format onnx`, without the Python of `generate`: a
    `hf_freeze.runtime.Translator` with the interface of `pipeline("translation")`. `options` are fields of
    `onnxruntime.SessionOptions`, such as `intra_op_num_threads`.

    Raises ValueError as `hf_freeze.runtime.open` does."""

    def __init__(self, folder: str | Path, **options: Any) -> None:
        mark = read_mark(Path(folder), "onnx", "seq2seq-lm")
        self._translate = Translator(Parts.open(Path(folder), mark, **options), mark["task"])

    def __call__(self, inputs: str | list[str], **settings: Any) -> list[Any]:
        """For one text a list of dicts, one for each returned sequence; for a list of texts a dict for each, or such a list.
        `settings`: those of `hf_freeze.runtime.Translator`."""
        found = self._translate(inputs, **settings)
        answers = [found] if isinstance(inputs, str) else found
        several = [each if isinstance(each, list) else [each] for each in answers]
        dicts = [[{"translation_text": text} for text in each] for each in several]
        if isinstance(inputs, str):
            return dicts[0]
        return [each[0] for each in dicts] if all(len(each) == 1 for each in dicts) else dicts
