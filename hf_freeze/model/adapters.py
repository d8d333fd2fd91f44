"""What a variant does with adapters of PEFT: where one cannot be merged, to try it is an error."""

import functools
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers.derived import Computed, Derived
from hf_freeze.layers.gated import Gated
from hf_freeze.model.atomic_save import finish_adapter

if TYPE_CHECKING:  # what the mixin is always combined with
    from transformers import PreTrainedModel as _Model
else:
    _Model = object


class AdaptingMixin(_Model):
    """Of a variant: sees to what PEFT puts in."""

    def load_adapter(self, peft_model_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the native one; an adapter whose saving was interrupted is completed first."""
        if peft_model_id is not None:
            finish_adapter(Path(peft_model_id))
        return super().load_adapter(peft_model_id, *args, **kwargs)

    @property
    def peft_config(self) -> Any:
        """PEFT sets it once its layers are in the model, and deletes it when they are gone."""
        if "_peft_config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'peft_config'")
        return self.__dict__["_peft_config"]

    @peft_config.setter
    def peft_config(self, value: Any) -> None:
        self.__dict__["_peft_config"] = value
        held = Counter(id(weight) for module in self.modules() if (weight := _held_weight(module)) is not None)
        for name, layer in self.named_modules():
            if layer is not self and hasattr(layer, "get_base_layer") and hasattr(layer, "merge"):
                reason = _why_not(layer.get_base_layer(), held)  # type: ignore[operator]
                if reason is not None:
                    vars(layer)["merge"] = functools.partial(_refuse, name, reason)

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["_peft_config"]


def _held_weight(module: nn.Module) -> Any:
    """The tensor that may be one with that of another module."""
    return module._parameters.get("weight", module._buffers.get("packed"))


def _why_not(base: Any, held: Counter[int]) -> str | None:
    """Why an adapter cannot be merged into `base`; None where it can."""
    if isinstance(base, Computed) and type(base).take_weight is Computed.take_weight:
        return f"{type(base).__name__} computes its weight from other parameters"
    if isinstance(base, Derived | Gated) and not isinstance(base, Computed):
        return f"what {type(base).__name__} leaves out of its own weight, it would leave out of the adapter's"
    if isinstance(base, nn.Linear | Conv1D) and held[id(_held_weight(base))] > 1:
        return "its weight is also that of others, which have adapters of their own or none"
    return None


def _refuse(name: str, reason: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"cannot merge the adapter of {name!r}: {reason}; merge() the variant without it, load it on what that gives, and merge "
        "there"
    )
