"""Where the values of seeded tensors are while a model runs: in memory, or nowhere, made by tiles where they are used."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from hf_freeze.compat.transformers import MixedModel
from hf_freeze.layers.fused_weight import why_not
from hf_freeze.layers.seeded_weight import Engine, SeededWeight
from hf_freeze.model.weights import ENGINES, regenerate
from hf_freeze.seeded import SeededTensor
from hf_freeze.seeded.tiles import whole_only

_NAMED = 3  # tensors that a warning names


class ExecutionMixin(MixedModel):
    """The part of a variant that decides how seeded tensors are executed. It is a setting of the model in memory, never of a
    checkpoint."""

    seeded_tensors: dict[str, SeededTensor]
    _seeded_execution: str = "resident"

    @property
    def seeded_execution(self) -> str:
        """The mode that `set_seeded_execution` or `from_pretrained` has set."""
        return self._seeded_execution

    @torch.no_grad()
    def set_seeded_execution(self, mode: str) -> None:
        """Choose how seeded matrices and tables are executed:

        - `"resident"` (default): they are in memory, like all other weights;
        - `"streamed"`: tiles of them are generated into one small buffer (at most 4 MB, shared by all layers), multiplied and
          forgotten, in the forward and for the gradient to the input. A table generates the rows that are looked up;
        - `"fused"`: as `"streamed"`, by code that generates and multiplies at once. Where it cannot be had, it warns once and
          streams.

        The values of the weights are the same bits in all modes. Vectors stay in memory. So does what can only be generated as a
        whole (orthogonal matrices, experts), with a warning that names it. Training goes on: seeded tensors are frozen. A cast or
        move of a streamed weight starts from its definition.

        Raises ValueError for an unknown mode, and for a seeded tensor that is trainable or was changed.
        """
        check_mode(mode)
        if mode != "resident":
            for name, definition in self.seeded_tensors.items():
                self._check_unchanged(name, definition)
        self._set_execution(mode)
        regenerate(self)
        self._warn_of_fallback()

    def _warn_of_fallback(self) -> None:
        if self._seeded_execution == "fused" and (reason := why_not(self.device.type)) is not None:
            warnings.warn(f"seeded_execution='fused': {reason}; seeded tensors are streamed instead", stacklevel=3)

    def _check_unchanged(self, name: str, definition: SeededTensor) -> None:
        parameter: Any = self.get_parameter(name)
        if parameter.is_meta or isinstance(parameter, SeededWeight) or whole_only(definition) is not None:
            return
        if type(parameter.data).__name__ == "DTensor":
            raise ValueError(f"{name!r} is sharded, and must stay resident")
        engine = Engine()
        if parameter.requires_grad or not engine.same(
            SeededWeight(definition, parameter.dtype, parameter.device, engine), parameter
        ):
            reason = "is trainable" if parameter.requires_grad else "was changed"
            raise ValueError(f"{name!r} {reason}, so it is not what its seed regenerates and must stay resident")

    def _set_execution(self, mode: str) -> None:
        self._seeded_execution = mode
        if mode != "resident":
            whole = {name: whole_only(definition) for name, definition in self.seeded_tensors.items()}
            whole = {name: reason for name, reason in whole.items() if reason not in (None, "vectors")}
            if whole:
                some = ", ".join(f"{name} ({reason})" for name, reason in list(whole.items())[:_NAMED])
                more = f" and {len(whole) - _NAMED} more" if len(whole) > _NAMED else ""
                warnings.warn(
                    f"seeded_execution={mode!r}: what can only be generated as a whole stays resident: {some}{more}",
                    stacklevel=3,
                )

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Inside, seeded tensors are in memory."""
        before = self._seeded_execution
        if before == "resident":
            yield
            return
        self.set_seeded_execution("resident")
        try:
            yield
        finally:
            self._seeded_execution = before
            regenerate(self)


def check_mode(mode: Any) -> None:
    """Raise ValueError for a mode that `set_seeded_execution` does not have."""
    if not isinstance(mode, str) or mode not in ENGINES:
        raise ValueError(f"seeded_execution={mode!r}: must be one of {', '.join(map(repr, ENGINES))}")
