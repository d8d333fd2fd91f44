"""What a layer is worth to a trained model: by the loss without it, or by how much it changes its input."""

import functools
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import functional

from hf_freeze import surgery
from hf_freeze.analysis._probe import batches_on, check_model, layer_places, loss_rises
from hf_freeze.architectures.base import Architecture
from hf_freeze.methods import LayerDrop, LayerSelection
from hf_freeze.methods.checks import check_choice
from hf_freeze.model.running import in_eval_mode, token_mask
from hf_freeze.surgery.sublayers import ATTENTION, FFN, check_sublayers, last_linears

MEASURES = ("removal", "similarity")
UNITS = ("layers", "sublayers")


def layer_importance(
    model: Any, data: Iterable[Mapping[str, Any]], *, measure: str = "removal", unit: str = "layers"
) -> dict[str, torch.Tensor]:
    """What each layer is worth: stack -> fp32 on the CPU (layers,). Larger values are more important.

    `measure`: `"removal"` is the rise of the loss, in nats as a mean over all labels, when a layer is left out and the hidden
    states pass it by; negative if the model is better without it. `"similarity"` is the Block Influence of Men et al. (2024,
    https://arxiv.org/abs/2403.03853, equation 1), 1 - cos(x, y) as a mean over the tokens that are not padding, with x the
    hidden states before the layer and y those after it, in 0..2. It needs no labels, and one forward in place of one for each
    layer.

    `unit`: with `"sublayers"`, "stack.kind", such as "encoder.self" and "encoder.ffn", -> the same for each sublayer, which then
    adds nothing to the hidden states; NaN for a layer without such a sublayer. By removal only.

    `data`: batches for the forward, as dicts of tensors. The model does not change. `select_layers` turns the result into the
    layers to keep.

    Raises ValueError for an unknown architecture, measure or unit, similarity of sublayers, sublayers that are not understood, a
    model on meta, batches without labels for `"removal"`, and no batches at all.
    """
    architecture = check_model(model)
    check_choice(measure, MEASURES, "layer_importance", "measure")
    check_choice(unit, UNITS, "layer_importance", "unit")
    if unit == "sublayers" and measure != "removal":
        raise ValueError(
            f"layer_importance(measure={measure!r}, unit='sublayers'): sublayers are measured by 'removal' only"
        )
    depths = architecture.depths(model.config)
    with in_eval_mode(model), torch.no_grad():
        if measure == "similarity":
            return _block_influence(model, architecture, data, depths)
        changes = _without_layers(model, architecture) if unit == "layers" else _without_sublayers(model, architecture)
        rises = loss_rises(model, data, changes, "layer_importance", "Leaving out layers")
    scores = {name: torch.full((depths[name.split(".")[0]],), torch.nan) for name, _ in changes}
    for (name, number), rise in rises.items():
        scores[name][number] = rise
    return scores


def keep_rates(model: Any) -> dict[str, torch.Tensor]:
    """What `LayerDrop(learned=True)` has learnt, as scores for `select_layers`: stack -> fp32 on the CPU (layers,), the share of
    training steps in which each layer runs.

        learnt = make_variant(model, [methods.LayerDrop(p=0.2, learned=True)])  # then train it
        learnt.finalize()
        shallow = make_variant(learnt, [analysis.select_layers(analysis.keep_rates(learnt), {"encoder": 2})])

    Raises ValueError for an unknown architecture, a model on meta, and a model without learnt rates.
    """
    architecture = check_model(model)
    for method in getattr(model, "methods_now", ()):
        if isinstance(method, LayerDrop) and (method.learned or method.rates is not None):
            rates = method.learnt_rates(model, architecture)
            return {stack: 1 - torch.tensor(of, dtype=torch.float32) for stack, of in rates.items()}
    raise ValueError(f"this {type(model).__name__} has no learnt rates: train it with LayerDrop(learned=True)")


def select_layers(scores: Mapping[str, torch.Tensor], keep: Mapping[str, int]) -> LayerSelection:
    """The `LayerSelection` that keeps so many layers of each stack in `keep`, such as `{"encoder": 3}`, those of the highest
    `scores` (stack -> (layers,), as from `layer_importance`); of equal ones, the first. Other stacks stay whole.

        scores = analysis.layer_importance(model, batches, measure="similarity")
        shallow = make_variant(model, [analysis.select_layers(scores, {"encoder": 2})])

    Raises ValueError for a stack without scores, and a number outside 1..its layers.
    """
    kept = {}
    for stack, count in keep.items():
        if stack not in scores:
            raise ValueError(
                f"select_layers(keep={dict(keep)!r}): no scores of stack {stack!r}; choose from {sorted(scores)}"
            )
        depth = len(scores[stack])
        if type(count) is not int or not 1 <= count <= depth:
            raise ValueError(
                f"select_layers(keep={{{stack!r}: {count!r}}}): must be an integer in 1..{depth}, its layers"
            )
        order = torch.as_tensor(scores[stack]).argsort(descending=True, stable=True)
        kept[stack] = sorted(order[:count].tolist())
    return LayerSelection(keep=kept)


Changes = dict[tuple[str, int], Any]  # (stack, or stack and kind of sublayer; number of the layer) -> see `loss_rises`


def _without_layers(model: Any, architecture: Architecture) -> Changes:
    changes: Changes = {}
    for stack, number in layer_places(model, architecture):
        layer = surgery.layers_of(model, architecture, stack)[number]
        changes[stack, number] = layer, functools.partial(layer.register_forward_hook, _pass_by, with_kwargs=True)
    return changes


def _pass_by(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """The output of a layer that leaves the hidden states as they are. Later layers may need the rest of a tuple."""
    before = args[0] if args else kwargs["hidden_states"]
    return (before, *output[1:]) if isinstance(output, tuple | list) else before


def _without_sublayers(model: Any, architecture: Architecture) -> Changes:
    """The outputs of the linear that a sublayer ends with are zero."""
    for unit in (ATTENTION, FFN):
        check_sublayers(
            unit, architecture, model.config, list(architecture.stacks), "layer_importance(unit='sublayers')"
        )
    changes: Changes = {}
    for stack, number in layer_places(model, architecture):
        layer = surgery.layers_of(model, architecture, stack)[number]
        for kind, name in last_linears(architecture, model.config, stack, number).items():
            linear = layer.get_submodule(name)
            silence = functools.partial(linear.register_forward_hook, lambda _, __, output: torch.zeros_like(output))
            changes[f"{stack}.{kind}", number] = layer, silence
    return changes


def _block_influence(
    model: Any, architecture: Architecture, data: Any, depths: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    sums, tokens = (
        {stack: torch.zeros(depth, dtype=torch.float64) for stack, depth in depths.items()} for _ in range(2)
    )
    seen: list[tuple[str, int, torch.Tensor, torch.Tensor]] = []

    def observe(stack: str, number: int, _: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        seen.append((stack, number, before, output[0] if isinstance(output, tuple | list) else output))

    with ExitStack() as hooks:
        for stack, number in layer_places(model, architecture):
            layer = surgery.layers_of(model, architecture, stack)[number]
            hooks.enter_context(
                layer.register_forward_hook(functools.partial(observe, stack, number), with_kwargs=True)
            )
        for batch in batches_on(model, data, "Comparing layers"):
            seen.clear()
            model(**batch)
            for stack, number, before, after in seen:
                influence = 1 - functional.cosine_similarity(before.float(), after.float(), dim=-1)  # (B, T)
                mask = token_mask(architecture, model, batch, f"{stack}.", before)
                sums[stack][number] += float(influence[mask].double().sum())
                tokens[stack][number] += int(mask.sum())
    return {stack: (sums[stack] / tokens[stack]).float() for stack in depths}
