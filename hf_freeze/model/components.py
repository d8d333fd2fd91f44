"""Components of other checkpoints, such as pretrained embeddings, in a model that is otherwise new."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_freeze.architectures.base import TRAINED, Architecture, base_name, canonical_parameters
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.model.loading import load_model


@torch.no_grad()
def take_components(model: Any, sources: Mapping[str, Any]) -> None:
    """Overwrite components of `model` with the weights of others. `sources`: component -> a model, a Hub id or a directory.

    Raises ValueError for an unknown component, and if its tensors have other names or shapes in the other model,
    FileNotFoundError for a missing directory.
    """
    architecture = architecture_for(model)
    for component, source in sources.items():
        if component not in TRAINED:
            raise ValueError(f"no component {component!r}; choose from {list(TRAINED)}")
        if not isinstance(source, PreTrainedModel | str | os.PathLike):
            raise ValueError(
                f"components={{{component!r}: ...}} must be a model or a name, not {type(source).__name__}"
            )
        other = source if isinstance(source, PreTrainedModel) else load_model(source)
        own, theirs = (_of_component(one, architecture, component) for one in (model, other))
        where = f"{component} of {type(other).__name__ if other is source else source}"
        if other_names := sorted(own.keys() ^ theirs.keys()):
            raise ValueError(
                f"{where}: {other_names[0]!r} and {len(other_names) - 1} more are in one of the two models only; both must have "
                "the same architecture and depth there (merge() a variant with other modules first)"
            )
        for name, parameter in own.items():
            if theirs[name].shape != parameter.shape:
                raise ValueError(
                    f"{where}: {name!r} has the shape {tuple(theirs[name].shape)}, and {tuple(parameter.shape)} in the new model"
                )
            if not parameter.is_meta:
                parameter.copy_(theirs[name])


def _of_component(model: Any, architecture: Architecture, component: str) -> dict[str, torch.Tensor]:
    """The parameters of a component, by their names below the base model."""
    names = ((base_name(model, name), parameter) for name, parameter in canonical_parameters(model))
    return {name: parameter for name, parameter in names if architecture.component(name) == component}
