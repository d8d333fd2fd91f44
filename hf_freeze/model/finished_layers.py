"""What a pass through a model larger than the memory has finished, in files: after each layer, its weights in the new model and
the states of all batches before the next layer. A killed process resumes there."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_freeze.io import append_line, sync, whole_lines
from hf_freeze.model.paging import Paged, in_file, resident

_JOURNAL = "layers"

States = dict[str, list[Tensor]]  # model -> of each batch


class FinishedLayers:
    """Those of one step of a conversion, in the folder of `paged`. `total`: how many layers the pass has."""

    def __init__(self, paged: Paged, total: int) -> None:
        self.paged, self._total = paged, total
        self._path = paged.folder / _JOURNAL
        lines = [json.loads(line) for line in whole_lines(self._path)] if self._path.exists() else []
        self._lines = [line for line in lines if line["step"] == paged.step]
        self._resumed, self._start = len(self._lines), time.monotonic()

    @property
    def places(self) -> list[tuple[str, int]]:
        """(stack, layer) of each, in order"""
        return [(line["stack"], line["layer"]) for line in self._lines]

    @property
    def errors(self) -> dict[str, Sequence[float]]:
        """Those of all their linears."""
        return {name: errors for line in self._lines for name, errors in line["errors"].items()}

    def file(self, model: str, layer: int, batch: int, states: Tensor) -> Tensor:
        """A copy of the states before a layer, in a file that stays until those before the next but one are written."""
        copy = in_file(self._states(model, layer, batch), states.shape, states.dtype, new=True)
        return copy.copy_(states)

    def states(self) -> States:
        """Those after the last finished layer."""
        line = self._lines[-1]
        found: States = {}
        for model, shapes in line["states"].items():
            found[model] = [
                in_file(self._states(model, line["layer"] + 1, batch), shape, getattr(torch, dtype), new=False)
                for batch, (shape, dtype) in enumerate(shapes)
            ]
        return found

    def add(
        self, place: tuple[str, int], states: States, error: float | None, errors: Mapping[str, Sequence[float]]
    ) -> None:
        """Say that a layer is finished. `states`: before the next one, made by `file`; none after the last one. `error`: of what
        leaves the layer, `errors`: of its linears, as a report has them."""
        stack, layer = place
        for model, tensors in states.items():
            for batch in range(len(tensors)):
                sync(self._states(model, layer + 1, batch))
        line = {
            "step": self.paged.step,
            "stack": stack,
            "layer": layer,
            "errors": errors,
            "states": {
                model: [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
                for model, tensors in states.items()
            },
        }
        append_line(self._path, json.dumps(line))
        self._lines.append(line)
        self.paged.say(self._words(place, error))

    def _words(self, place: tuple[str, int], error: float | None) -> str:
        done, seconds = len(self._lines), time.monotonic() - self._start
        each = seconds / (done - self._resumed)
        parts = [] if error is None else [f"error {float(f'{100 * error:.2g}'):g} % of its outputs"]
        parts += [f"{each:.0f} s a layer", f"{resident() / 1e9:.2f} GB of memory"]
        if left := self._total - done:
            parts.append(f"{_in_words(left * each)} left")
        return f"{place[0]} layer {place[1]} ({done} of {self._total}): {', '.join(parts)}"

    def _states(self, model: str, layer: int, batch: int) -> Any:
        return self.paged.folder / f"{self.paged.step} {model} states {layer % 2} {batch}.tensor"


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
