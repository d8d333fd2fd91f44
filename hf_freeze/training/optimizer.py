"""Pruning during training: carries the optimizer state over to the remaining parameters."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hf_freeze.methods.base import Method
from hf_freeze.methods.registry import method_from_dict
from hf_freeze.model.make import make_variant


def carried_optimizer(optimizer: Any, old: Any, new: Any) -> torch.optim.Optimizer:
    """An optimizer for `new` that continues from the state of `optimizer`, which trains `old`.

    `new` is `make_variant(old, methods)` with methods that remove weights by index: HeadPruning(heads=), FFNPruning(keep=),
    LayerSelection, VocabularyTrimming. Each remaining value keeps its part of the state (in Adam: both moments and the step), its
    parameter group and the settings of the group. `optimizer` may be wrapped by the Trainer.

        pruned = make_variant(model, [analysis.select_heads(scores, fraction=0.3)])
        optimizer = carried_optimizer(optimizer, model, pruned)
        Trainer(model=pruned, optimizers=(optimizer, None), train_dataset=dataset)  # the learning rate schedule starts again

    Raises ValueError if `new` is not `old` with more methods, if a method is not one of these, if the optimizer has a parameter
    that is not in `old`, and if a state is neither a single number nor a tensor of its parameter's shape.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate's wrapper
    added = _added_methods(old, new)
    names = {parameter: name for name, parameter in old.named_parameters()}
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter not in names for parameter in optimized):
        raise ValueError("carried_optimizer: the optimizer has a parameter that is not in the old model")
    states = {names[parameter]: optimizer.state.get(parameter, {}) for parameter in optimized}
    group_index = {names[p]: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def carried(value_of: Callable[[str], torch.Tensor | float]) -> dict[str, torch.Tensor]:
        """`value_of(name)` of every old parameter, a tensor of its shape or a number, after the methods were applied to it."""
        carrier = copy.deepcopy(old).float()
        with torch.no_grad():
            for name, parameter in carrier.named_parameters():
                value = value_of(name)
                is_array = torch.is_tensor(value) and value.ndim
                parameter.copy_(value if is_array else torch.full_like(parameter, float(value)))
        return dict(make_variant(carrier, added).named_parameters())

    parameters = dict(new.named_parameters())
    # Methods only move values, so a parameter that was filled with one number still has that number in its first element.
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    has_state = carried(lambda name: bool(states.get(name)))
    for name, index in carried(lambda name: group_index.get(name, -1)).items():
        if (group := int(index.flatten()[0])) >= 0:
            groups[group]["params"].append(parameters[name])
    # `defaults` may contain settings that the constructor does not accept.
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    new_optimizer = type(optimizer)(groups, **defaults)
    for key in dict.fromkeys(key for state in states.values() for key in state):
        example = next(state[key] for state in states.values() if key in state)
        is_array = torch.is_tensor(example) and example.ndim > 0
        for name, state in states.items():
            if is_array and key in state and state[key].shape != old.get_parameter(name).shape:
                raise ValueError(
                    f"carried_optimizer: the state {key!r} of {name!r} has the shape {tuple(state[key].shape)}, not that of the "
                    f"parameter, {tuple(old.get_parameter(name).shape)}"
                )
        for name, value in carried(lambda name, key=key: states.get(name, {}).get(key, 0.0)).items():
            if not has_state[name].flatten()[0]:
                continue
            new_state = new_optimizer.state[parameters[name]]
            if is_array:
                new_state[key] = value.detach().to(example.dtype).clone()
            elif torch.is_tensor(example):
                new_state[key] = value.flatten()[0].detach().to(example).clone()
            else:
                new_state[key] = type(example)(value.flatten()[0])
    return new_optimizer


def _added_methods(old: Any, new: Any) -> list[Method]:
    """The methods that `new` has on top of those of `old`. Raises ValueError unless all of them remove weights by index."""
    before = getattr(old.config, "methods", [])
    if getattr(new.config, "methods", None) is None or new.config.methods[: len(before)] != before:
        raise ValueError(
            "carried_optimizer: the new model must be the old one with more methods: make_variant(old, methods)"
        )
    added = [method_from_dict(data) for data in new.config.methods[len(before) :]]
    for method in added:
        if not method.facts.selects:
            raise ValueError(
                f"carried_optimizer: {method!r} creates other weights, or selects them by value; only methods that remove "
                "weights by index can be carried over, such as HeadPruning(heads=...)"
            )
    return added
