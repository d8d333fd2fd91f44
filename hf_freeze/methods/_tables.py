"""Shared by the methods that replace token tables and the output matrix."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture


def ties_beside_weights(
    model: Any, modules: Mapping[str, Any], parameters: Callable[[Any], Iterable[str]]
) -> dict[str, str]:
    """The ties of `parameters(module)`, for each module whose `weight` the backbone ties to that of another."""
    ties: dict[str, str] = {}
    for name, module in modules.items():
        if (source := model.all_tied_weights_keys.get(f"{name}.weight")) is not None:
            ties |= surgery.ties_to_module(name, source, parameters(module))
    return ties


def names_of_parameters(module: Any) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def embedding_factor(config: Any) -> float:
    """The factor by which the backbone multiplies its token embeddings."""
    return config.hidden_size**0.5 if getattr(config, "scale_embedding", False) else 1.0


def make_dense(model: Any, architecture: Architecture) -> None:
    """Put the native tables and output matrix back, with the values that the present ones stand for."""
    for name, table in surgery.token_tables(model, architecture).items():
        surgery.replace_by_full_name(model, name, surgery.dense_table(table))
    if (output := surgery.output_name(model, architecture)) is not None:
        surgery.replace_by_full_name(model, output, surgery.dense_linear(model.get_submodule(output)))
