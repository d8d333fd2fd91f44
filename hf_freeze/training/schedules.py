"""Schedules for training: gradual unfreezing, and learning rates by component."""

import math
from collections.abc import Mapping
from typing import Any

from hf_freeze.architectures.base import TRAINED, base_name, canonical_parameters, is_of_predecessor
from hf_freeze.architectures.registry import architecture_for, architecture_of
from hf_freeze.methods import Freeze

# Beside the components: the layers that replace others (Theseus), and what decides what is kept (HeadMask, LayerDrop).
SUCCESSOR, GATES = "successor", "gates"
RATED = (*TRAINED, SUCCESSOR, GATES)


def gradual_unfreezing(backbone: Any, *, until: float = 0.5) -> list[Freeze]:
    """Methods that unfreeze a model layer by layer, from the last layer down (Howard & Ruder, 2018,
    https://arxiv.org/abs/1801.06146, section 3.3).

    `backbone` is a model or a config. The last layer is trained from the start. The others follow at equal intervals, and the
    embeddings last, at the share `until` of training (if it is 1, they are never trained). In an encoder-decoder, the decoder is
    unfrozen before the encoder. The task head, and norms outside the layers, are trained from the start.

        methods = gradual_unfreezing(BertConfig(num_hidden_layers=4), until=0.4)
        [method.end for method in methods]  # layers 2, 1, 0 and the embeddings: [0.1, 0.2, 0.3, 0.4]
        model = make_variant("bert-base-uncased", methods, task="sequence-classification")
        Trainer(model=model, callbacks=[VariantCallback()], train_dataset=labelled).train()

    Raises ValueError for an unsupported backbone or an `until` outside 0 < until <= 1.
    """
    if isinstance(until, bool) or not isinstance(until, int | float) or not 0 < until <= 1:
        raise ValueError(f"until={until!r}: must be a share of training, 0 < until <= 1")
    config = _config(backbone)
    depths = architecture_of(config).depths(config)
    downwards = [(stack, layer) for stack, depth in depths.items() for layer in range(depth)][::-1]
    frozen = [
        Freeze(
            attention="frozen",
            ffn="frozen",
            norm="frozen",
            layers={stack: [layer]},
            end=round(until * k / len(downwards), 6),
        )
        for k, (stack, layer) in enumerate(downwards)
        if k > 0
    ]
    return [*frozen, Freeze(embeddings="frozen", end=until)]


def parameter_groups(
    model: Any, learning_rates: Mapping[str, float] | None = None, *, lr: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: `learning_rates` by component (`embeddings`, `attention`, `ffn`, `norm`, `head`), others
    with `lr`. A rate of `successor` is for all parameters of the layers that replace others (Theseus), whatever their component;
    one of `gates` for the gates of HeadMask and the scores of LayerDrop.

    They contain every parameter that is trained at some time, including those that a schedule currently freezes. Tied parameters
    appear once, in the group of their source. Norms and biases have no weight decay. A scheduler scales the rate of each group:

        groups = parameter_groups(model, {"embeddings": 1e-4}, lr=1e-3, weight_decay=0.01)
        Trainer(model=model, optimizers=(torch.optim.AdamW(groups), None), train_dataset=dataset)

    Raises ValueError for an unknown component, a rate or weight decay that is not a number of at least 0, a rate of a component
    without trainable parameters, and an unsupported model.
    """
    learning_rates = dict(learning_rates or {})
    for component in learning_rates:
        if component not in RATED:
            raise ValueError(f"learning_rates: unknown component {component!r}; choose from {list(RATED)}")
    named = {f"learning_rates[{component!r}]": rate for component, rate in learning_rates.items()}
    for name, value in (named | {"lr": lr, "weight_decay": weight_decay}).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r}: must be a number of at least 0")
    _config(model)
    architecture = architecture_for(model)
    thawing = set(model.frozen_for_a_while()) if getattr(model, "scheduled", False) else set()
    groups = {
        (component, decayed): {
            "params": [],
            "lr": learning_rates.get(component, lr),
            "weight_decay": weight_decay if decayed else 0.0,
            "component": component,
        }
        for component in RATED
        for decayed in (True, False)
    }
    names = [base_name(model, name) for name, _ in model.named_parameters()] if SUCCESSOR in learning_rates else []
    replacing = {architecture.layer_of(name) for name in names if is_of_predecessor(name)}
    for name, parameter in canonical_parameters(model):
        component = architecture.component(base_name(model, name))
        if component != "constant" and (parameter.requires_grad or name in thawing):
            # Parameters with one dimension are biases, or norms of task heads. Marian's output bias has two dimensions.
            decayed = component != "norm" and parameter.ndim > 1 and not name.endswith("bias")
            group = SUCCESSOR if replacing and architecture.layer_of(base_name(model, name)) in replacing else component
            if GATES in learning_rates and _is_gate(model, name):
                group = GATES
            groups[group, decayed]["params"].append(parameter)
    filled = [group for group in groups.values() if group["params"]]
    if empty := sorted(set(learning_rates) - {group["component"] for group in filled}):
        raise ValueError(f"learning_rates: {empty[0]!r} has nothing to train in this {type(model).__name__}")
    return filled


def _is_gate(model: Any, name: str) -> bool:
    """Whether the parameter is one that a method learns to decide what is kept."""
    owner, _, parameter = name.rpartition(".")
    return parameter in getattr(model.get_submodule(owner), "learnt_gates", ())


def _config(backbone: Any) -> Any:
    config = getattr(backbone, "config", backbone)
    if not hasattr(config, "model_type"):
        raise ValueError(f"{type(backbone).__name__} is neither a transformers model nor a config")
    return config
