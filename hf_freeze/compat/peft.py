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


# Linears of `layers/recurrent.py`, which are there where a variant has none of the linears of attentions that PEFT adapts.
_OF_UNITS = ("unit.forget", "unit.input", "unit.gate")
_OF_ATTENTIONS = {"c_attn", "k_proj", "q_proj", "qkv_proj", "v_proj"}


def share_default_targets(model_type: str, *alike: str) -> None:
    """Let PEFT adapt models of `model_type` by default where it adapts those of the first known type in `alike`, and recurrent
    units where it adapts attentions.

    Does nothing until PEFT is imported.
    """
    constants = sys.modules.get("peft.utils.constants")
    for mapping in list(vars(constants).values()) if constants else ():
        known = next((name for name in alike if name in mapping), None) if isinstance(mapping, dict) else None
        if known is not None:
            targets = mapping[known]
            if isinstance(targets, list) and _OF_ATTENTIONS.intersection(targets):
                targets = [*targets, *_OF_UNITS]
            mapping.setdefault(model_type, targets)
