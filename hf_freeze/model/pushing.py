"""What `push_to_hub` of a variant calls. The room that writes cards builds on this one, so `hf_freeze` enters it here."""

from typing import Any, Protocol


class Push(Protocol):
    def __call__(self, model: Any, repo_id: str, **options: Any) -> Any:
        """Push the variant `model`, with a card, to the Hub repository `repo_id`. `options`: those of the native method."""


push: Push
