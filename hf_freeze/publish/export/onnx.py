"""Exports to ONNX, for ONNX Runtime and other engines. Batch size and lengths are dynamic; what is smaller stays smaller.

`parts` says which files there are, and their inputs and outputs: model.onnx, or encoder.onnx and decoder.onnx. Large tensors of
all files lie in weights.data, each of them once.

The graph has the parts of a variant as they are. Pruned heads, neurons and layers are gone. Factors stay factors where two
products are faster than one; where they are not, and for sparse and quantised weights, the file holds what the checkpoint holds
and the graph computes the weight from it, which ONNX Runtime does once, when it opens the file. What a seed generates is
stored: in 16 bits if the outputs stay the same to `_STORED`, or else in the 24 bits that it has.
"""

import contextlib
import hashlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_freeze.compat.transformers import product_of_experts
from hf_freeze.publish.export.caches import past_of, start_of
from hf_freeze.publish.export.calibration import record_inputs
from hf_freeze.publish.export.comparison import largest_difference, tolerance
from hf_freeze.publish.export.folders import Export
from hf_freeze.publish.export.parts import Part, parts_of
from hf_freeze.publish.export.runners import OnnxRunner, open_parts
from hf_freeze.publish.export.torch_export import exported
from hf_freeze.publish.export.translator import Translator, set_or, token_ids

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
QUANTIZATIONS = ("int8", "int8-static")
CALIBRATED = ("int8-static",)  # quantizations that need texts
SUPPORTED_TASKS = None  # all tasks of all families whose inputs and caches `parts` knows
NEEDS_TOKENIZER = False
KEEPS_STRUCTURE = True
DATA = "weights.data"
_ALIGNMENT = 64  # bytes, of the tensors in DATA
_SMALL = 1024  # bytes; smaller tensors stay in the graph
_ANY_SIZE = 1 << 40
_SOURCE = ".source"  # ends the names of what an int8 weight is computed from
_STORED = 1e-4  # absolute and relative, of outputs
_FORMS = {"float16": 16, "uint24": 24}  # how numbers that a seed generates are stored -> bits of a number, fewest first


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if the forward cannot be traced, or if ONNX Runtime computes other outputs
    than PyTorch; for "int8-static", if all texts to calibrate with are empty."""
    model = export.model.float()
    parts = parts_of(model, export.task)
    graphs = {}
    for part in parts:
        export.say(f"tracing the {part.name}")
        try:
            graphs[part.name] = _traced(part)
        except Exception as error:  # of many kinds, with messages of pages
            raise ValueError(
                f"onnx cannot hold this model: torch.export cannot trace the {part.name} of {type(model).__name__}; choose "
                "--format dense"
            ) from error
    seeded = _seeded_tensors(model)
    limit = tolerance(model, parts)
    forms = list(_FORMS) if seeded and export.quantization is None else ["uint24"]
    for form in forms:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            exact = Path(temporary)
            _save({name: graph.clone() for name, graph in graphs.items()}, exact, seeded, form)
            export.say("comparing with PyTorch")
            difference = largest_difference(parts, open_parts(exact, "onnx", {}))
            if form != forms[-1] and not difference <= max(limit, _STORED):
                continue
            if form == forms[-1] and not difference <= limit:
                raise ValueError(
                    f"onnxruntime does not compute the same as {type(model).__name__}: outputs differ by {difference:.3g}, and "
                    f"rounding explains {limit:.3g}; choose --format torch or dense"
                )
            if export.quantization is not None:
                _write_quantized(export, graphs, parts, exact, folder)
                return
            for path in exact.iterdir():
                path.rename(folder / path.name)
        if seeded:
            export.say(
                f"what seeds generate is stored in {_FORMS[form]} bits a number; outputs differ by {difference:.1g}"
            )
        return


def _write_quantized(export: Export, graphs: dict[str, Any], parts: list[Part], exact: Path, folder: Path) -> None:
    """`exact`: the folder with the files before."""
    recorded = None
    if export.quantization == "int8-static":
        export.say("calibrating")
        recorded = record_inputs(export, open_parts(exact, "onnx", {}))
    export.say("quantizing")
    quantized = {
        name: _quantized(graph, None if recorded is None else recorded[name]) for name, graph in graphs.items()
    }
    _save(quantized, folder, {})
    difference = largest_difference(parts, open_parts(folder, "onnx", {}))
    export.say(f"in {export.quantization}, outputs for random tokens differ by at most {difference:.2g}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the output of the exporters; failures still raise exceptions."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# -- graphs ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _traced(part: Part) -> Any:
    """The graph (onnx_ir.Model) of a part, without the notes of the exporter, which are many times as long."""
    import onnx_ir
    from onnxscript import optimizer

    with _quiet():
        program: Any = torch.onnx.export(
            exported(part.module.eval(), part),
            input_names=list(part.inputs),
            output_names=part.outputs,
            dynamo=True,
            verbose=False,
            optimize=False,
            custom_translation_table={
                torch.ops.aten._int_mm.default: _integer_product,
                product_of_experts(): _products_of_groups,
            },
        )
        graph = program.model
        # The limits keep products of factors, and all that is computed from stored weights, as they are.
        optimizer.optimize(graph, input_size_limit=_SMALL // 4, output_size_limit=_SMALL // 4)
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


def _integer_product(self: Any, mat2: Any) -> Any:
    """The operations of ONNX for torch's product of integers, for which the exporter has none. The names are torch's.

    ONNX Runtime multiplies unsigned by signed bytes many times as fast as signed ones on x86: inputs, which have just been
    rounded, get 128 added, as their zero point. Without VNNI (Intel before 2019, AMD before 2022) it adds pairs of such products
    in 16 bits, which can overflow if both weights and inputs are almost as large as int8 allows; weights of 4 bits are safe.
    """
    from onnxscript import ir, opset18

    opset: Any = opset18
    rounded = self.producer().inputs[0]  # before its cast to int8
    shifted = opset.Cast(opset.Add(rounded, 128.0), to=ir.DataType.UINT8)
    zero = opset.Constant(value=ir.tensor(np.array(128, np.uint8)))
    return opset.MatMulInteger(shifted, mat2, zero)


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


def _quantized(graph: Any, recorded: list[dict[str, Tensor]] | None) -> Any:
    """Weights of matrix products and tables in int8, with one scale each. So are activations, whose scales come from `recorded`
    inputs of the part, or else from each input. Where the graph computes a weight from fewer numbers, the file holds these, in
    int8 with a scale for each row."""
    import onnx_ir
    from onnxruntime import quantization
    from onnxscript import optimizer

    class Recorded(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = iter(recorded or [])

        def get_next(self) -> Any:
            inputs = next(self.rest, None)
            return None if inputs is None else {name: value.contiguous().numpy() for name, value in inputs.items()}

    folded = graph.clone()
    with tempfile.TemporaryDirectory() as temporary, _quiet():
        optimizer.optimize(folded, input_size_limit=_ANY_SIZE, output_size_limit=_ANY_SIZE)
        exact, int8 = Path(temporary) / "exact.onnx", Path(temporary) / "int8.onnx"
        onnx_ir.save(folded, exact, external_data="exact.data")
        kind = quantization.QuantType.QInt8
        if recorded is None:
            quantization.quantize_dynamic(exact, int8, weight_type=kind)
        else:
            kinds = ["MatMul", "Gemm", "Gather"]
            quantization.quantize_static(
                exact,
                int8,
                Recorded(),
                op_types_to_quantize=kinds,
                weight_type=kind,
                activation_type=quantization.QuantType.QUInt8,
                # Results go on in fp32: a range would cut off those, such as logits, that the texts do not reach.
                extra_options={"OpTypesToExcludeOutputQuantization": kinds},
            )
        quantized: Any = onnx_ir.load(int8)
        onnx_ir.external_data.load_to_model(quantized)
    _compute_again(graph.graph, quantized.graph)
    first = next(iter(quantized.graph))
    for value in list(quantized.graph.initializers.values()):
        if value.const_value.nbytes >= _SMALL and value.dtype == onnx_ir.DataType.FLOAT and _is_weight(value):
            _store_in_int8(quantized.graph, first, value)
    return quantized


def _compute_again(graph: Any, quantized: Any) -> None:
    """Replace the int8 weights of `quantized` that `graph` computes from less, such as factors or the entries of a sparse matrix:
    the file holds these, and the engine computes the weight and rounds it once, when it opens the file."""
    import onnx_ir

    computed = {value.name: value for node in graph for value in node.outputs}
    first = next(iter(quantized))
    copies: dict[str, Any] = {}

    def copied(value: Any) -> Any:
        """The value of `graph` in `quantized`, with the nodes that compute it."""
        if value is None or value.name in copies:
            return value and copies[value.name]
        if value.name in graph.initializers:
            copy = onnx_ir.Value(
                name=f"{value.name}{_SOURCE}", shape=value.shape, type=value.type, const_value=value.const_value
            )
            quantized.register_initializer(copy)
        else:
            node = value.producer()
            inputs = [copied(each) for each in node.inputs]
            made = onnx_ir.Node(
                node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs)
            )
            copy = made.outputs[node.outputs.index(value)]
            copy.name = f"{value.name}.computed"
            quantized.insert_before(first, made)
        copies[value.name] = copy
        return copy

    for value in list(quantized.initializers.values()):
        name = value.name.removesuffix("_quantized")
        if name == value.name or name not in computed:
            continue
        node = computed[name].producer()
        if node.op_type == "Transpose" and f"{node.inputs[0].name}_quantized" in quantized.initializers:
            # A table of tokens that is the output matrix too: the same numbers, with the same scale.
            for part in ("scale", "zero_point"):
                old = quantized.initializers.pop(f"{name}_{part}")
                old.replace_all_uses_with(quantized.initializers[f"{node.inputs[0].name}_{part}"])
            table = quantized.initializers[f"{node.inputs[0].name}_quantized"]
            _replace(quantized, value, _computed(quantized, first, "Transpose", table, perm=[1, 0]))
            continue
        sources = _sources(computed[name])
        if sources is None or sum(_int8_bytes(each) for each in sources.values()) > 0.9 * value.const_value.nbytes:
            continue
        result = _computed(quantized, first, "Div", copied(computed[name]), quantized.initializers[f"{name}_scale"])
        result = _computed(quantized, first, "Round", result)
        result = _computed(quantized, first, "Clip", result, np.float32(-127), np.float32(127))
        result = _computed(quantized, first, "Cast", result, to=onnx_ir.DataType.INT8.value)
        _replace(quantized, value, result)


def _replace(graph: Any, initializer: Any, result: Any) -> None:
    """Have all that reads an initializer read `result`."""
    del graph.initializers[initializer.name]
    initializer.name = None
    initializer.replace_all_uses_with(result, replace_graph_outputs=True)


def _sources(value: Any) -> dict[str, Any] | None:
    """name -> the initializers that a value is computed from; None if it depends on an input of the graph."""
    if value.const_value is not None and value.producer() is None:
        return {value.name: value}
    if value.producer() is None:
        return None
    found: dict[str, Any] = {}
    for each in value.producer().inputs:
        if each is not None:
            if (sources := _sources(each)) is None:
                return None
            found |= sources
    return found


def _int8_bytes(value: Any) -> int:
    tensor = value.const_value
    return tensor.nbytes // 4 if tensor.dtype.name == "FLOAT" and tensor.nbytes >= _SMALL else tensor.nbytes


def _is_weight(value: Any) -> bool:
    """Whether an initializer is a matrix, or what one is computed from; a bias, or the scale of a norm, is neither."""
    kinds = {use.node.op_type for use in value.uses()}
    return len(value.shape) > 1 or value.name.endswith(_SOURCE) or bool(kinds & {"Gather", "ScatterElements"})


def _store_in_int8(graph: Any, first: Any, value: Any) -> None:
    """Replace an fp32 initializer by int8 numbers and a scale for each entry of its first dimension."""
    import onnx_ir

    values = value.const_value.numpy()
    rows = values.reshape(len(values), -1) if values.ndim > 1 else values.reshape(1, -1)
    scales = np.maximum(np.abs(rows).max(1, keepdims=True) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    numbers = np.rint(rows / scales).astype(np.int8).reshape(values.shape)
    result = _computed(graph, first, "Cast", numbers, to=onnx_ir.DataType.FLOAT.value)
    by_row = scales.reshape(-1, *[1] * (values.ndim - 1)) if values.ndim > 1 else scales.reshape(1)
    result = _computed(graph, first, "Mul", result, by_row)
    _replace(graph, value, result)


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
            if value.const_value.nbytes < _SMALL:
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
                result = _computed(graph, first, "Transpose", result, perm=[1, 0])
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
        onnx_ir.save(model, folder / f"{name}.onnx")


def _digest(values: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).digest()


def _computed(graph: Any, first: Any, kind: str, *inputs: Any, **attributes: Any) -> Any:
    """The output of a new node before the node `first`. An input may be an array."""
    import onnx_ir

    number = sum(1 for _ in graph)
    values = []
    for position, value in enumerate(inputs):
        if isinstance(value, np.ndarray | np.generic):
            tensor: Any = onnx_ir.tensor(np.asarray(value), name=f"stored.{number}.{position}")
            value = onnx_ir.Value(
                name=tensor.name, shape=tensor.shape, type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
            )
            graph.register_initializer(value)
        values.append(value)
    node = onnx_ir.node(kind, values, attributes, name=f"stored.{number}")
    node.outputs[0].name = f"stored.{number}.result"
    graph.insert_before(first, node)
    return node.outputs[0]


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

    result = _computed(graph, first, "Cast", packed, to=onnx_ir.DataType.FLOAT.value)
    if packed.dtype != onnx_ir.DataType.UINT8:
        return result
    result = _computed(graph, first, "Mul", result, np.array([1, 256, 65536], np.float32))
    result = _computed(graph, first, "ReduceSum", result, np.array([-1]), keepdims=0)
    result = _computed(graph, first, "Add", result, np.array(0.5 - 2**23, np.float32))
    return _computed(graph, first, "Mul", result, np.array(np.float32(bound) * np.float32(2.0**-23)))


# -- running -----------------------------------------------------------------------------------------------------------------


class _Search:
    """Runs encoder and decoder; holds the cache of a batch between two tokens."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._encoder, self._decoder = (
            OnnxRunner(folder / f"{part}.onnx", **options) for part in ("encoder", "decoder")
        )

    def start(self, ids: Tensor, mask: Tensor) -> None:
        """Encode a batch: ids, mask (B, T)."""
        encoded = self._encoder({"input_ids": ids, "attention_mask": mask})
        self._inputs = start_of(self._decoder.shapes, encoded, mask)

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens (B, 1) -> logits of the next token (B, V); appends the tokens to the cache."""
        found = self._decoder({**self._inputs, "input_ids": tokens})
        self._inputs |= past_of(found)
        return found["logits"][:, -1]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows of the batch except these."""
        self._inputs = {name: value[rows] for name, value in self._inputs.items()}


class OnnxTranslator(Translator):
    """Translates by greedy search with a folder written by `hf-freeze export --format onnx`. For beam search, export to
    CTranslate2. `options` are fields of `onnxruntime.SessionOptions`, such as `intra_op_num_threads`."""

    format = "onnx"
    settings = ("max_new_tokens", "max_length", "bad_words_ids")

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder)
        self._search = _Search(Path(folder), **options)

    def _translate(self, encoded: list[list[int]], config: Any, batch_size: int) -> list[list[list[int]]]:
        banned = config.bad_words_ids or []
        if any(len(word) > 1 for word in banned):
            raise ValueError(f"bad_words_ids={banned}: this greedy search can ban single tokens only")
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))  # similar lengths need little padding
        translations: dict[int, list[int]] = {}
        for begin in range(0, len(order), batch_size):
            rows = order[begin : begin + batch_size]
            outputs = self._greedy([encoded[i] for i in rows], config, [word[0] for word in banned])
            translations |= zip(rows, outputs, strict=True)
        return [[translations[i]] for i in range(len(encoded))]

    def _greedy(self, encoded: list[list[int]], config: Any, banned: list[int]) -> list[list[int]]:
        length, ends = max(map(len, encoded)), torch.tensor(token_ids(config.eos_token_id))
        pad = set_or(config.pad_token_id, 0)
        mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in encoded])
        self._search.start(torch.tensor([ids + [pad] * (length - len(ids)) for ids in encoded]), mask)
        outputs: list[list[int]] = [[] for _ in encoded]
        running, tokens = torch.arange(len(encoded)), torch.full((len(encoded), 1), config.decoder_start_token_id)
        for _ in range(self._new_tokens(config)):
            logits = self._search.logits(tokens)
            logits[:, banned] = -torch.inf
            best = logits.argmax(-1)
            unfinished = ~torch.isin(best, ends)
            running, tokens = running[unfinished], best[unfinished, None]
            if not len(running):
                break
            if not unfinished.all():
                self._search.keep(unfinished)
            for row, token in zip(running.tolist(), tokens[:, 0].tolist(), strict=True):
                outputs[row].append(token)
        return outputs
