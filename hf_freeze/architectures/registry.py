"""ARCHITECTURES, and which of them a model is of."""

from typing import Any

from hf_freeze.architectures.base import Architecture

ARCHITECTURES: dict[str, Architecture] = {}
VARIANT_PREFIX = "hf_freeze_"  # of the `model_type` of a variant


def register_architecture(architecture: Architecture) -> Architecture:
    """Enter an architecture under its native model type."""
    if architecture.model_type in ARCHITECTURES:
        raise ValueError(f"architecture {architecture.model_type!r} is registered already")
    ARCHITECTURES[architecture.model_type] = architecture
    return architecture


def architecture_of(model_type: str) -> Architecture:
    """The architecture of a native or variant `model_type`. Raises ValueError with the choices."""
    native = model_type.removeprefix(VARIANT_PREFIX)
    if native not in ARCHITECTURES:
        raise ValueError(f"no architecture {native!r}; choose from {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[native]


def architecture_for(model: Any) -> Architecture:
    """That of a native model, or of a variant, as its methods have left it. Raises ValueError with the choices."""
    return getattr(model, "architecture", None) or architecture_of(model.config.model_type)
