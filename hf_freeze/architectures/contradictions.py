"""Config fields that contradict each other, found before a model is built of them."""

from collections.abc import Iterator
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from hf_freeze.architectures.describe import first_line
from hf_freeze.architectures.shrink import head_fields


def check_contradictions(config: Any) -> None:
    """Raise ValueError, in one line, if fields of `config` or of a config inside it contradict each other.

    transformers runs its own checks when a native config is made, but not when a field is assigned later, and not for the config
    of a variant.
    """
    for part in _parts(config):
        model_type = part.model_type.removeprefix("hf_freeze_")
        try:
            getattr(part, "validate", lambda: None)()
        except StrictDataclassError as error:
            raise ValueError(f"{model_type} config: {first_line(error)}: it was changed by hand") from None
        heads, groups = head_fields(part)
        if heads and groups and (count := getattr(part, heads)) % (shared := getattr(part, groups)):
            raise ValueError(
                f"{model_type} config: {heads}={count} is no multiple of {groups}={shared}: each key and value head serves "
                "the same number of query heads"
            )


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", ()):
        if hasattr(part := getattr(config, name, None), "model_type"):
            yield from _parts(part)
