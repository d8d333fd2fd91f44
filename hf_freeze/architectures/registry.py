"""ARCHITECTURES, and how to find the architecture of a model."""

from typing import Any

from hf_freeze.architectures.base import Architecture
from hf_freeze.architectures.derive import derive
from hf_freeze.architectures.describe import NotDerived

ARCHITECTURES: dict[str, Architecture] = {}
LOOKUP = " (`hf-freeze describe TYPE` shows the parts found in a model type; docs/families.md lists all types)"
VARIANT_PREFIX = "hf_freeze_"  # a variant's `model_type` is this prefix and the native one


def register_architecture(architecture: Architecture) -> Architecture:
    """Register an architecture under its native model type."""
    if architecture.model_type in ARCHITECTURES:
        raise ValueError(f"architecture {architecture.model_type!r} is registered already")
    ARCHITECTURES[architecture.model_type] = architecture
    return architecture


def architecture_of(config: Any) -> Architecture:
    """The architecture of a native config, or of the backbone of a variant's: the one described by hand, or one derived.

    Raises ValueError if nothing can be derived.
    """
    if hasattr(config, "native_architecture"):  # a variant's
        return config.native_architecture
    if config.model_type in ARCHITECTURES:
        return ARCHITECTURES[config.model_type]
    try:
        return derive(config)
    except NotDerived as error:
        raise NotDerived(f"{error}{LOOKUP}") from None


def architecture_for(model: Any) -> Architecture:
    """The architecture of a model; for a variant, as its methods describe it. Raises ValueError for an unknown one."""
    return getattr(model, "architecture", None) or architecture_of(model.config)
