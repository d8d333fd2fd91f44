"""Graphs for ONNX that several tests share: tracing takes most of the time of a small export."""

from typing import Any

from hf_freeze.publish.export import onnx


def trace_once(graphs: dict[str, Any], monkeypatch: Any) -> None:
    """Have exports trace a part only if `graphs` lacks its name; they get a copy of what is there."""
    trace = onnx._traced

    def known(part: Any) -> Any:
        if part.name not in graphs:
            graphs[part.name] = trace(part)
        return graphs[part.name].clone()

    monkeypatch.setattr(onnx, "_traced", known)
