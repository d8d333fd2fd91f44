"""Pruning in the middle of training: what the optimizer knows of the parameters that are left."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hf_freeze.methods.registry import method_from_dict
from hf_freeze.model.make import make_variant


def carried_optimizer(optimizer: Any, old: Any, new: Any) -> torch.optim.Optimizer:
    """An optimizer of `new` that goes on where `optimizer`, of `old`, has stopped.

    `new` is what `make_variant(old, ...)` made of it by methods that leave weights out by name: HeadPruning(heads=),
    FFNPruning(keep=), LayerSelection, VocabularyTrimming. What is left keeps its part of the state (of Adam: both moments and the
    step), its group and the settings of that; what the Trainer has wrapped may be given as it is.

    >>> pruned = make_variant(model, [analysis.select_heads(scores, fraction=0.3)])
    >>> optimizer = carried_optimizer(trainer.optimizer, model, pruned)
    >>> Trainer(model=pruned, optimizers=(optimizer, None), ...)  # the schedule of the rate starts anew

    Raises ValueError where `new` is not `old` with more methods, a method is not of these, or a parameter of the optimizer is not
    of `old`; and for a state that is neither of the shape of its parameter nor one number.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's
    before = getattr(old.config, "methods", [])
    if getattr(new.config, "methods", None) is None or new.config.methods[: len(before)] != before:
        raise ValueError(
            "carried_optimizer: the new model must be the old one with more methods: make_variant(old, methods)"
        )
    added = [method_from_dict(data) for data in new.config.methods[len(before) :]]
    for method in added:
        if not method.selects:
            raise ValueError(
                f"carried_optimizer: {method!r} makes other weights, or chooses by their values; only such methods can be "
                "carried over as leave weights out by name, such as HeadPruning(heads=...)"
            )
    names = {parameter: name for name, parameter in old.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter not in names for parameter in held):
        raise ValueError("carried_optimizer: the optimizer holds a parameter that is not of the old model")
    state = {names[parameter]: optimizer.state.get(parameter, {}) for parameter in held}
    number = {names[p]: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def carried(value: Callable[[str, torch.Tensor], torch.Tensor | float]) -> dict[str, torch.Tensor]:
        """`value(name, parameter)` of the old parameters, which must have their shapes, as the methods leave it in the new."""
        bearer = copy.deepcopy(old).float()
        with torch.no_grad():
            for name, parameter in bearer.named_parameters():
                found = value(name, parameter)
                parameter.copy_(
                    found if torch.is_tensor(found) and found.ndim else torch.full_like(parameter, float(found))
                )
        return dict(make_variant(bearer, added).named_parameters())

    parameters = dict(new.named_parameters())
    # Methods only move values: what each element says of where it comes from, all of its parameter say.
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    stepped = carried(lambda name, _: bool(state.get(name)))
    for name, index in carried(lambda name, _: number.get(name, -1)).items():
        if (group := int(index.flatten()[0])) >= 0:
            groups[group]["params"].append(parameters[name])
    takes = inspect.signature(type(optimizer).__init__).parameters  # its defaults may hold what it sets itself
    made = type(optimizer)(groups, **{key: value for key, value in optimizer.defaults.items() if key in takes})
    for key in dict.fromkeys(key for each in state.values() for key in each):
        first = next(each[key] for each in state.values() if key in each)
        whole = torch.is_tensor(first) and first.ndim > 0
        for name, each in state.items():
            if whole and key in each and each[key].shape != old.get_parameter(name).shape:
                raise ValueError(
                    f"carried_optimizer: the state {key!r} of {name!r} has the shape {tuple(each[key].shape)}, not that of the "
                    f"parameter, {tuple(old.get_parameter(name).shape)}"
                )
        for name, value in carried(lambda name, _, key=key: state.get(name, {}).get(key, 0.0)).items():
            if not stepped[name].flatten()[0]:
                continue
            if whole:
                made.state[parameters[name]][key] = value.detach().to(first.dtype).clone()
            elif torch.is_tensor(first):
                made.state[parameters[name]][key] = value.flatten()[0].detach().to(first).clone()
            else:
                made.state[parameters[name]][key] = type(first)(value.flatten()[0])
    return made
