"""`alignment_heads` of Whisper's generation config, pairs (decoder layer, head): from the cross-attention of these heads come the
times of tokens. Methods that remove layers or heads give the others new numbers."""

from collections.abc import Iterable
from typing import Any

from hf_freeze.architectures.registry import architecture_for
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import Selection, layers_kept


def without_layers(settings: Any, method: Method, old: Any) -> None:
    """Renumber the pairs in `settings`, a generation config or None, in place, for the layers that `method` keeps of the model
    `old`. Pairs of other layers are left out; without any, the field is, and transformers says so when asked for times."""
    kept = layers_kept(method, architecture_for(old), old.config).get("decoder") if _pairs(settings) else None
    if kept is not None:
        _set(settings, ([kept.index(layer), head] for layer, head in _pairs(settings) if layer in kept))


def without_heads(settings: Any, method: Method, old: Any) -> None:
    """The same for the heads that `method` removes from the model `old`."""
    selection = method.part(Selection) if _pairs(settings) else None
    if selection is None or selection.decided is None:
        return
    gone = getattr(selection.decided(old, architecture_for(old), None), "heads", None) or {}
    removed = ((layer, head, gone.get(f"decoder.{layer}.cross", ())) for layer, head in _pairs(settings))
    _set(settings, ([layer, head - sum(g < head for g in out)] for layer, head, out in removed if head not in out))


def has_alignment(settings: Any) -> bool:
    """Whether removed heads must be known, to renumber pairs."""
    return bool(_pairs(settings))


def _pairs(settings: Any) -> list[Any]:
    return getattr(settings, "alignment_heads", None) or []


def _set(settings: Any, pairs: Iterable[list[int]]) -> None:
    settings.alignment_heads = list(pairs)
    if not settings.alignment_heads:
        del settings.alignment_heads
