"""Make a trained model small enough for a budget, from the model, some texts and a limit.

Importing it imports neither torch nor transformers: a budget is checked without them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_freeze.compression.budget import Budget as Budget

if TYPE_CHECKING:
    from hf_freeze.compression.labels import Labels as Labels
    from hf_freeze.compression.large import LargeCompressed as LargeCompressed
    from hf_freeze.compression.large import compress_large as compress_large
    from hf_freeze.compression.progress import Step as Step
    from hf_freeze.compression.progress import Stopped as Stopped
    from hf_freeze.compression.results import Compressed as Compressed
    from hf_freeze.compression.run import compress as compress
    from hf_freeze.compression.run import front as front

_MODULES = {
    "Labels": "labels",
    "Step": "progress",
    "Stopped": "progress",
    "Compressed": "results",
    "LargeCompressed": "large",
    "compress": "run",
    "compress_large": "large",
    "front": "run",
}  # public name -> the module that is imported when the name is first used


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
