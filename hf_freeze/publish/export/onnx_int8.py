"""Graphs of ONNX in int8, with the same result on every CPU.

ONNX Runtime multiplies unsigned bytes (inputs) by signed ones (weights) fastest. On x86 without VNNI (Intel before 2019, AMD
before 2022) it adds two such products in 16 bits. 2 · 255 · 64 fits, 2 · 255 · 127 does not: so weights have seven bits, -64 to
64, and one scale for each output channel. Integers that training has fixed keep eight bits: they are multiplied as unsigned
bytes, which ONNX Runtime adds in 32 bits everywhere.

Shapes: V rows of a table, K inputs, N outputs of a product.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hf_freeze.publish.export.onnx_int4 import multiply_in_fp32, round_inputs
from hf_freeze.publish.export.onnx_nodes import SMALL, computed, folded, initializer, quiet, replace, without_unused

LEVELS = 64  # the largest weight of a product with unsigned bytes
_SOURCE = ".source"  # ends the names of what an int8 weight is computed from


def integer_product(self: Any, mat2: Any) -> Any:
    """The operations of ONNX for torch's product of integers, for which the exporter has none. The names are torch's. Inputs,
    which have just been rounded, get 128 added, as their zero point."""
    from onnxscript import ir, opset18

    opset: Any = opset18
    rounded = self.producer().inputs[0]  # before its cast to int8
    shifted = opset.Cast(opset.Add(rounded, 128.0), to=ir.DataType.UINT8)
    zero = opset.Constant(value=ir.tensor(np.array(128, np.uint8)))
    return opset.MatMulInteger(shifted, mat2, zero)


def keep_large_integers(model: Any) -> None:
    """Have weights of integer products be unsigned where they exceed `LEVELS`. The file holds them as before."""
    import onnx_ir

    products = [node for node in model.graph if node.op_type == "MatMulInteger"]
    if not products:
        return
    weights = {node.outputs[0].name: node.inputs[1] for node in folded(model).graph if node.op_type == "MatMulInteger"}
    for node in products:
        numbers = weights[node.outputs[0].name].const_value.numpy()
        if numbers.size and np.abs(numbers.astype(np.int16)).max() > LEVELS:
            result = computed(model.graph, node, "Cast", node.inputs[1], to=onnx_ir.DataType.INT32.value)
            result = computed(model.graph, node, "Add", result, np.array(128, np.int32))
            result = computed(model.graph, node, "Cast", result, to=onnx_ir.DataType.UINT8.value)
            node.replace_input_with(1, result)
            node.resize_inputs(4)
            node.replace_input_with(3, node.inputs[2])  # the zero point of the inputs is 128 too


def exact(model: Any) -> Any:
    """A copy that multiplies the same integers in fp32, where no sum overflows."""
    import onnx_ir

    copy = model.clone()
    products = [node for node in copy.graph if node.op_type == "MatMulInteger"]
    for node in products:
        factors, zeros = node.inputs[:2], (*node.inputs[2:], None, None)
        centred = []
        for factor, zero in zip(factors, zeros, strict=False):
            value = computed(copy.graph, node, "Cast", factor, to=onnx_ir.DataType.FLOAT.value)
            if zero is not None:
                zero = computed(copy.graph, node, "Cast", zero, to=onnx_ir.DataType.FLOAT.value)
                value = computed(copy.graph, node, "Sub", value, zero)
            centred.append(value)
        node.outputs[0].replace_all_uses_with(computed(copy.graph, node, "MatMul", *centred))
    multiply_in_fp32(copy.graph)
    return without_unused(copy)


def quantized(model: Any, recorded: list[dict[str, Tensor]] | None) -> Any:
    """A copy with the weights of matrix products in seven bits and tables in int8, with one scale for each output channel or row.
    Activations are int8 with one scale, from `recorded` inputs of the part, or else from each input. Where the graph computes a
    weight from fewer numbers, the file holds these, in int8 with a scale for each row."""
    import onnx_ir
    from onnxruntime import quantization

    class Recorded(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = iter(recorded or [])

        def get_next(self) -> Any:
            inputs = next(self.rest, None)
            return None if inputs is None else {name: value.contiguous().numpy() for name, value in inputs.items()}

    options: dict[str, Any] = {"weight_type": quantization.QuantType.QInt8, "per_channel": True, "reduce_range": True}
    with tempfile.TemporaryDirectory() as temporary, quiet():
        fp32, int8 = Path(temporary) / "fp32.onnx", Path(temporary) / "int8.onnx"
        onnx_ir.save(folded(model), fp32, external_data="fp32.data")
        _forget_shapes_of_weights(fp32)
        if recorded is None:
            quantization.quantize_dynamic(fp32, int8, op_types_to_quantize=["MatMul"], **options)
        else:
            kinds = ["MatMul", "Gemm"]
            quantization.quantize_static(
                fp32,
                int8,
                Recorded(),
                op_types_to_quantize=kinds,
                activation_type=quantization.QuantType.QUInt8,
                # Results go on in fp32: a range would cut off those, such as logits, that the texts do not reach.
                extra_options={"OpTypesToExcludeOutputQuantization": kinds},
                **options,
            )
        result: Any = onnx_ir.load(int8)
        onnx_ir.external_data.load_to_model(result)
    round_inputs(result.graph)
    _quantize_tables(result.graph)
    _compute_again(model.graph, result.graph)
    without_unused(result)
    first = next(iter(result.graph))
    for value in list(result.graph.initializers.values()):
        if value.const_value.nbytes >= SMALL and value.dtype == onnx_ir.DataType.FLOAT and _is_weight(value):
            _store_in_int8(result.graph, first, value)
    return result


def _forget_shapes_of_weights(path: Path) -> None:
    """Where ONNX Runtime 1.23, the last for Python 3.10, transposes a weight, it compares the new shape with that of the file."""
    import onnx

    proto = onnx.load(path, load_external_data=False)
    weights = {tensor.name for tensor in proto.graph.initializer}
    kept = [value for value in proto.graph.value_info if value.name not in weights]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(kept)
    onnx.save(proto, path)


def _quantize_tables(graph: Any) -> None:
    """Have each look-up read int8 (V, N) and scales (V,). A table that is the output matrix too has the same numbers there, as
    columns, so the file holds them once."""
    import onnx_ir

    for node in [node for node in graph if node.op_type == "Gather"]:
        table, ids = node.inputs
        stored = table.const_value if table.producer() is None else None
        if stored is None or stored.nbytes < SMALL or table.dtype != onnx_ir.DataType.FLOAT or len(table.shape) != 2:
            continue
        names = f"{table.name}_quantized", f"{table.name}_scale"
        if names[0] not in graph.initializers:
            numbers, scales = _rounded_rows(stored.numpy(), LEVELS)
            initializer(graph, names[0], numbers)
            initializer(graph, names[1], scales)
        numbers, scales = (computed(graph, node, "Gather", graph.initializers[name], ids, axis=0) for name in names)
        rows = computed(graph, node, "Cast", numbers, to=onnx_ir.DataType.FLOAT.value)
        scales = computed(graph, node, "Unsqueeze", scales, np.array([-1]))
        result = computed(graph, node, "Mul", rows, scales)
        node.outputs[0].replace_all_uses_with(result)


def _rounded_rows(values: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """(V, N) -> int8 (V, N), and the scales (V,), of which that of zeros is 1 as in ONNX Runtime."""
    scales = np.abs(values).max(1) / np.float32(levels)
    scales[scales < np.finfo(np.float32).tiny] = 1
    return np.rint(values / scales[:, None]).astype(np.int8), scales


def _compute_again(graph: Any, quantized: Any) -> None:
    """Replace the int8 weights of `quantized` that `graph` computes from less, such as factors or the entries of a sparse matrix:
    the file holds these, and the engine computes the weight and rounds it once, when it opens the file."""
    import onnx_ir

    results = {value.name: value for node in graph for value in node.outputs}
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
        if name == value.name or name not in results:
            continue
        sources = _sources(results[name])
        if sources is None or sum(_int8_bytes(each) for each in sources.values()) > 0.9 * value.const_value.nbytes:
            continue
        scales = quantized.initializers[f"{name}_scale"]
        if any(_has_scales_of_rows(use.node) for use in value.uses()):
            scales = computed(quantized, first, "Unsqueeze", scales, np.array([-1]))
        result = computed(quantized, first, "Div", copied(results[name]), scales)
        result = computed(quantized, first, "Round", result)
        result = computed(quantized, first, "Clip", result, np.float32(-LEVELS), np.float32(LEVELS))
        result = computed(quantized, first, "Cast", result, to=onnx_ir.DataType.INT8.value)
        replace(quantized, value, result)


def _has_scales_of_rows(node: Any) -> bool:
    """Whether a node reads a weight with scales for its first dimension, not for its last one."""
    axis = node.attributes.get("axis")
    return node.op_type == "Gather" or (node.op_type == "DequantizeLinear" and axis is not None and axis.as_int() == 0)


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
    return tensor.nbytes // 4 if tensor.dtype.name == "FLOAT" and tensor.nbytes >= SMALL else tensor.nbytes


def _is_weight(value: Any) -> bool:
    """Whether an initializer is a matrix, or what one is computed from; a bias, a step, or the scale of a norm, is neither."""
    kinds = {use.node.op_type for use in value.uses()}
    if value.name.removesuffix(_SOURCE).endswith(("_scale", ".scales")):
        return False
    return len(value.shape) > 1 or value.name.endswith(_SOURCE) or bool(kinds & {"Gather", "ScatterElements"})


def _store_in_int8(graph: Any, first: Any, value: Any) -> None:
    """Replace an fp32 initializer by int8 numbers and a scale for each entry of its first dimension."""
    import onnx_ir

    values = value.const_value.numpy()
    numbers, scales = _rounded_rows(values.reshape(len(values) if values.ndim > 1 else 1, -1), 127)
    result = computed(graph, first, "Cast", numbers.reshape(values.shape), to=onnx_ir.DataType.FLOAT.value)
    result = computed(graph, first, "Mul", result, scales.reshape(-1, *[1] * (values.ndim - 1)))
    replace(graph, value, result)
