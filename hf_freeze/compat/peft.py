"""What we use of PEFT beyond its public interface. PEFT is optional: nothing here imports it."""

import sys
from collections.abc import Iterator
from typing import Any


def mergeable_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, layer) of the layers that PEFT has put around modules of `model`, and that can merge their adapters."""
    for name, layer in model.named_modules():
        if layer is not model and hasattr(layer, "get_base_layer") and hasattr(layer, "merge"):
            yield name, layer


def trained_rows(layer: Any) -> Any:
    """The rows that a layer of trainable tokens trains, the same object for all tables that share them; None for other layers."""
    return getattr(layer, "trainable_tokens_delta", None)


def share_default_targets(model_type: str, *alike: str) -> None:
    """Let PEFT adapt models of `model_type` by default where it adapts those of the first known type in `alike`.

    Does nothing until PEFT is imported.
    """
    constants = sys.modules.get("peft.utils.constants")
    for mapping in list(vars(constants).values()) if constants else ():
        known = next((name for name in alike if name in mapping), None) if isinstance(mapping, dict) else None
        if known is not None:
            mapping.setdefault(model_type, mapping[known])
