"""What modules return in a forward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def outputs_of(root: Any, names: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Name -> the tensor that the module `name` of `root` returns in the forward within, the first of several."""
    seen: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        return lambda module, args, result: seen.__setitem__(name, result[0] if isinstance(result, tuple) else result)

    handles = [root.get_submodule(name).register_forward_hook(note(name)) for name in dict.fromkeys(names)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
