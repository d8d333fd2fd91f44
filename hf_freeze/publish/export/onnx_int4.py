"""Weights of four bits in graphs of ONNX, which ONNX Runtime reads as the file holds them.

`layers.grids` packs two numbers in a byte, with a step for each 64 inputs of an output, and the traced graph computes the dense
weight from these. Here its products become MatMulNBits and its look-ups GatherBlockQuantized (both of com.microsoft). They read
the same bytes, so a table that is the output matrix too is stored once: the first number of a byte in its lower bits, rows filled
up to whole groups.

In fp32, MatMulNBits multiplies the inputs as they are. In int8, it rounds them with a step for each 64 inputs of a token, where
the processor has a kernel for that, and adds the products of a group as integers. These are at most 15 · 127, and two of them fit
into 16 bits on every processor.

The graph computes a dense weight as before of steps for whole rows, of rows that whole groups lengthen by more than an eighth,
and where anything but products and look-ups reads it.

Shapes: O outputs or rows of a table, I inputs or columns, G groups, T tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_freeze.layers.grids import GROUP
from hf_freeze.publish.export.onnx_nodes import SMALL, computed, initializer, without_unused

_DOMAIN = "com.microsoft"
_LEVEL = "accuracy_level"  # 4: inputs are rounded to int8
_PADDING = 1 / 8  # of a row, at most
# How the graph computes numbers in fp32 from bytes.
_UNPACKING = {"Cast", "Less", "Equal", "Mod", "And", "Div", "Sub", "Unsqueeze", "Concat", "Reshape", "Slice"}


@dataclass
class _Reading:
    """How a packed weight is read: for `products` with `dense` (O, I), or to look up the rows `ids` (T, 1): `dense` (T, I)."""

    dense: Any
    steps: np.ndarray  # (O, G)
    ids: Any
    products: list[Any]


def keep_four_bits(model: Any) -> None:
    """Have products and look-ups read weights of four bits as they are stored."""
    import onnx_ir

    for packed in list(model.graph.initializers.values()):
        if packed.dtype == onnx_ir.DataType.UINT8 and len(packed.shape) == 2 and packed.const_value.nbytes >= SMALL:
            readings: list[Any] = [_reading(packed, use.node) for use in packed.uses()]
            if all(readings):  # else the file would hold the bytes in two orders
                model.opset_imports[_DOMAIN] = 1
                for reading in readings:
                    _read_as_stored(model.graph, packed, reading)
    without_unused(model)


def _reading(packed: Any, node: Any) -> _Reading | None:
    """What the numbers are for that `node` unpacks or looks up; None if they cannot be read as they are stored."""
    import onnx_ir

    ids = node.inputs[1] if node.op_type == "GatherND" else None
    numbers, pending = set(), [node]
    while pending:
        node = pending.pop()
        if node.op_type not in _UNPACKING | {"GatherND"}:
            return None
        if node.op_type == "Cast" and node.attributes["to"].as_int() == onnx_ir.DataType.FLOAT.value:
            numbers.add(node.outputs[0])
        else:
            pending += [use.node for use in node.outputs[0].uses()]
    multiplications = {use.node for number in numbers for use in number.uses()}
    if [node.op_type for node in multiplications] != ["Mul"]:
        return None
    (multiplication,) = multiplications
    (steps,), dense = set(multiplication.inputs) - numbers, multiplication.outputs[0]
    while steps.producer() is not None:
        steps = steps.producer().inputs[0]
    columns = dense.shape[-1]
    groups = -(-columns // GROUP)
    in_groups = steps.const_value is not None and steps.const_value.size == packed.shape[0] * groups
    if not in_groups or groups * GROUP > (1 + _PADDING) * columns:
        return None
    turned = [use.node for use in dense.uses()] if ids is None else []
    products = [use.node for node in turned for use in node.outputs[0].uses()]
    if any(node.op_type != "Transpose" for node in turned) or any(node.op_type != "MatMul" for node in products):
        return None
    return _Reading(dense, steps.const_value.numpy().reshape(-1, groups), ids, products)


def _read_as_stored(graph: Any, packed: Any, reading: _Reading) -> None:
    (rows, groups), columns = reading.steps.shape, reading.dense.shape[-1]
    shape = (rows, groups, GROUP // 2) if reading.ids is None else (rows, groups * GROUP // 2)
    name = f"{packed.name}.{len(shape)}d"
    if name not in graph.initializers:
        values = packed.const_value.numpy()
        values = np.pad(values << 4 | values >> 4, [(0, 0), (0, groups * GROUP // 2 - values.shape[1])])
        initializer(graph, name, values.reshape(shape))
        initializer(graph, f"{name}_scale", reading.steps)
    weight = [graph.initializers[name], graph.initializers[f"{name}_scale"]]
    settings: dict[str, Any] = {"domain": _DOMAIN, "bits": 4, "block_size": GROUP}
    for node in reading.products:
        _become(node, "MatMulNBits", node.inputs[0], *weight, **settings, K=columns, N=rows)
    if reading.ids is not None:
        node = reading.dense.producer()
        ids = computed(graph, node, "Squeeze", reading.ids, np.array([-1]))
        found = computed(
            graph, node, "GatherBlockQuantized", weight[0], ids, weight[1], **settings, gather_axis=0, quantize_axis=1
        )
        bounds = [initializer(graph, f"{name}.{number}", np.array([number])) for number in (0, columns, -1)]
        _become(node, "Slice", found, *bounds)


def _become(node: Any, kind: str, *inputs: Any, domain: str = "", **attributes: int) -> None:
    """Have a node compute something else, with the outputs that it has."""
    import onnx_ir

    node.op_type, node.domain = kind, domain
    node.resize_inputs(len(inputs))
    for position, value in enumerate(inputs):
        node.replace_input_with(position, value)
    node.attributes.clear()
    for name, value in attributes.items():
        node.attributes.add(onnx_ir.AttrInt64(name, value))


def round_inputs(graph: Any) -> None:
    """Have products with weights of four bits round their inputs to int8."""
    import onnx_ir

    for node in graph:
        if node.op_type == "MatMulNBits":
            node.attributes.add(onnx_ir.AttrInt64(_LEVEL, 4))


def multiply_in_fp32(graph: Any) -> None:
    """Replace products that round their inputs by those of the same numbers in fp32."""
    for node in [node for node in graph if _LEVEL in node.attributes]:
        x, blocks, steps = node.inputs
        packed, columns = blocks.const_value.numpy(), node.attributes["K"].as_int()
        numbers = np.stack([packed & 15, packed >> 4], -1).reshape(*steps.shape, GROUP).astype(np.float32) - 8
        weight = (numbers * steps.const_value.numpy()[..., None]).reshape(len(packed), -1)
        if padding := weight.shape[1] - columns:
            x = computed(graph, node, "Pad", x, np.array([0, padding]), None, np.array([-1]))
        shape = computed(graph, node, "Shape", x)
        x = computed(graph, node, "Reshape", x, np.array([-1, GROUP]))
        largest = computed(graph, node, "ReduceMax", computed(graph, node, "Abs", x), np.array([-1]))
        step = computed(graph, node, "Div", largest, np.array(127, np.float32))
        step = computed(graph, node, "Max", step, np.array(np.finfo(np.float32).tiny))
        x = computed(graph, node, "Mul", computed(graph, node, "Round", computed(graph, node, "Div", x, step)), step)
        x = computed(graph, node, "Reshape", x, shape)
        _become(node, "MatMul", x, initializer(graph, f"{node.name}.dense", np.ascontiguousarray(weight.T)))
