"""Captures the outputs of modules in a forward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured_outputs(root: Any, names: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Inside this context, a forward fills the yielded dict: name -> output of the submodule `name` of `root`.

    Of a tuple of outputs, the first is captured.
    """
    outputs: dict[str, torch.Tensor] = {}

    def capture(name: str) -> Any:
        return lambda module, args, result: outputs.__setitem__(
            name, result[0] if isinstance(result, tuple) else result
        )

    handles = [root.get_submodule(name).register_forward_hook(capture(name)) for name in dict.fromkeys(names)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
