"""ARCHITECTURES, and how to find the architecture of a model."""

from typing import Any

from hf_freeze.architectures.base import Architecture

ARCHITECTURES: dict[str, Architecture] = {}
VARIANT_PREFIX = "hf_freeze_"  # a variant's `model_type` is this prefix and the native one


def register_architecture(architecture: Architecture) -> Architecture:
    """Register an architecture under its native model type."""
    if architecture.model_type in ARCHITECTURES:
        raise ValueError(f"architecture {architecture.model_type!r} is registered already")
    ARCHITECTURES[architecture.model_type] = architecture
    return architecture


def architecture_of(model_type: str) -> Architecture:
    """The architecture of a native or variant `model_type`. Raises ValueError for an unknown one."""
    native = model_type.removeprefix(VARIANT_PREFIX)
    if native not in ARCHITECTURES:
        raise ValueError(f"no architecture {native!r}; choose from {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[native]


def architecture_for(model: Any) -> Architecture:
    """The architecture of a model; for a variant, as its methods describe it. Raises ValueError for an unknown one."""
    return getattr(model, "architecture", None) or architecture_of(model.config.model_type)
