"""What the exports to ONNX do to graphs of `onnx_ir`: compute their constants, put in nodes, replace values."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy as np

SMALL = 1024  # bytes; smaller tensors stay in the graph
_ANY_SIZE = 1 << 40
_NEW = "stored."  # begins the names of nodes that are put in; a number follows


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the output of the exporters; failures still raise exceptions."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def folded(model: Any) -> Any:
    """A copy of the graph in which all that depends on no input is an initializer."""
    from onnxscript import optimizer

    copy = model.clone()
    with quiet():
        optimizer.optimize(copy, input_size_limit=_ANY_SIZE, output_size_limit=_ANY_SIZE)
    return copy


def computed(graph: Any, next_node: Any, kind: str, *inputs: Any, domain: str = "", **attributes: Any) -> Any:
    """The output of a new node before `next_node`. An input may be an array."""
    import onnx_ir

    numbers = [int(node.name.removeprefix(_NEW)) for node in graph if (node.name or "").startswith(_NEW)]
    number = max(numbers, default=-1) + 1
    values = []
    for position, value in enumerate(inputs):
        if isinstance(value, np.ndarray | np.generic):
            value = initializer(graph, f"{_NEW}{number}.{position}", np.asarray(value))
        values.append(value)
    node = onnx_ir.node(kind, values, attributes, domain=domain, name=f"{_NEW}{number}")
    node.outputs[0].name = f"{_NEW}{number}.result"
    graph.insert_before(next_node, node)
    return node.outputs[0]


def mask_with_finite_scores(model: Any) -> None:
    """Give masked scores of attention −1e30, in place of −∞ or the least number: the same shares of the others, and no NaN where
    all of a row are masked, as in padding before a text. The exporter looks for NaN in every share and replaces them, which
    takes a fifth of the time of a small decoder."""
    graph, masks = model.graph, {}
    for check in [node for node in graph if node.op_type == "IsNaN"]:
        scores = _maker(_maker(check, 0, "Softmax"), 0, "Add")
        mask, users = _maker(scores, 1, "Where"), [use.node for use in check.outputs[0].uses()]
        least = mask and mask.inputs[2].const_value
        if least is None or least.numpy().max() > -1e30 or [node.op_type for node in users] != ["Where"]:
            continue
        if mask not in masks:
            masks[mask] = computed(graph, mask, "Where", *mask.inputs[:2], np.float32(-1e30))
        scores.replace_input_with(1, masks[mask])
        users[0].outputs[0].replace_all_uses_with(check.inputs[0], replace_graph_outputs=True)
    without_unused(model)


def _maker(node: Any, position: int, kind: str) -> Any:
    """The node of this kind that makes an input of `node`; None if none does, or `node` is None."""
    value = None if node is None else node.inputs[position]
    maker = None if value is None else value.producer()
    return maker if maker is not None and maker.op_type == kind else None


def initializer(graph: Any, name: str, values: np.ndarray) -> Any:
    """A new initializer with these values."""
    import onnx_ir

    tensor: Any = onnx_ir.tensor(values, name=name)
    value = onnx_ir.Value(name=name, shape=tensor.shape, type=onnx_ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def replace(graph: Any, old: Any, result: Any) -> None:
    """Have all that reads an initializer read `result`."""
    del graph.initializers[old.name]
    old.name = None
    old.replace_all_uses_with(result, replace_graph_outputs=True)


def without_unused(model: Any) -> Any:
    """The graph, after the removal of nodes and initializers that nothing reads."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    RemoveUnusedNodesPass()(model)
    return model
