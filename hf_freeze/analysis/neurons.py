"""Score the neurons of FFNs by their importance, and choose the neurons to keep.

Shapes: B batch, T tokens, F neurons of an FFN. A neuron is a column of the input of the last linear of its FFN, after the
activation (and the gate, where there is one).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hf_freeze import methods, surgery
from hf_freeze.analysis._probe import batches_on, check_model, check_scores, input_hooks, inputs_and_gradients
from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.derived import features
from hf_freeze.methods.checks import check_choice, check_one_given, check_positive, check_positive_share
from hf_freeze.model.running import in_eval_mode, token_mask

SCORES = ("magnitude", "activation", "taylor")
_SCOPES = ("layer", "global")


def ffn_importance(
    model: Any, dataloader: Iterable[Mapping[str, Any]] | None = None, *, score: str = "magnitude"
) -> dict[str, torch.Tensor]:
    """Score every neuron of every FFN, in eval mode: FFN, such as `"encoder.0.ffn"` -> fp32 on the CPU (F,). Larger is more
    important.

    - `"magnitude"`: the product of the norm of a neuron's input weights and the norm of its output weights, as
      `FFNPruning(width=...)` ranks neurons. Needs no data.
    - `"activation"`: the mean over tokens of the neuron's absolute value.
    - `"taylor"`: the mean over batches of |Σ activation · gradient of the loss|, summed over the tokens of the batch. It
      estimates, to first order, how much the loss changes without the neuron (Molchanov et al., 2017,
      https://arxiv.org/abs/1611.06440, with batches of one example; and 2019, https://arxiv.org/abs/1906.10771, section 3.1).
      Needs labels.

    `dataloader`: batches, as dicts of tensors for the forward. Padding does not count: zeros in `attention_mask`; in the decoder
    of an encoder-decoder, zeros in `decoder_attention_mask`, or labels of -100. The model, its modes and its gradients do not
    change.

    Raises ValueError for an unknown score or architecture, a model on meta, missing or empty data, batches without the labels
    that "taylor" needs, and a mask whose shape is not that of the tokens.
    """
    architecture = check_model(model)
    check_choice(score, SCORES, "ffn_importance", "score")
    blocks = architecture.ffns(model.config)
    if score == "magnitude":
        return {block: surgery.neuron_magnitudes(model, linears).cpu() for block, linears in blocks.items()}
    if dataloader is None:
        raise ValueError(f"ffn_importance(score={score!r}) needs a dataloader")
    last = {block: model.base_model.get_submodule(linears[-1]) for block, linears in blocks.items()}
    collect = _activations if score == "activation" else _first_order
    with in_eval_mode(model):
        return collect(model, architecture, last, dataloader)


def _activations(model: Any, architecture: Architecture, last: Any, dataloader: Any) -> dict[str, torch.Tensor]:
    sums = {block: torch.zeros(features(linear)[0], dtype=torch.float64) for block, linear in last.items()}
    tokens = dict.fromkeys(last, 0)
    for batch in batches_on(model, dataloader, "Scoring neurons"):

        def add(block: str, x: torch.Tensor, batch: Any = batch) -> None:
            rows = x[token_mask(architecture, model, batch, block, x)]
            sums[block] += rows.double().abs().sum(0).cpu()
            tokens[block] += rows.shape[0]

        with input_hooks(last, add), torch.no_grad():
            model(**batch)
    if empty := [block for block, count in tokens.items() if not count]:
        raise ValueError(f"the dataloader has only padding for {empty[0]!r}")
    return {block: (total / tokens[block]).float() for block, total in sums.items()}


def _first_order(model: Any, architecture: Architecture, last: Any, dataloader: Any) -> dict[str, torch.Tensor]:
    sums = {block: torch.zeros(features(linear)[0], dtype=torch.float64) for block, linear in last.items()}
    count = 0
    for count, batch in enumerate(batches_on(model, dataloader, "Scoring neurons"), 1):  # noqa: B007 (used after the loop)
        for block, (x, gradient) in inputs_and_gradients(model, batch, last, "score='taylor'").items():
            products = (x.double() * gradient)[token_mask(architecture, model, batch, block, x)]
            sums[block] += products.sum(0).abs().cpu()
    return {block: (total / count).float() for block, total in sums.items()}


def select_neurons(
    scores: Mapping[str, torch.Tensor],
    *,
    width: int | None = None,
    fraction: float | None = None,
    scope: str = "layer",
    multiple_of: int = 1,
) -> methods.FFNPruning:
    """Keep the neurons with the highest scores. `scores`: FFN -> (F,), as from `ffn_importance`.

    `width` neurons, or this `fraction` of them, are kept in each FFN (`scope="layer"`) or on average (`"global"`). The global
    scope compares the unscaled scores of different FFNs; scale them first if they are not comparable. Each FFN keeps the nearest
    multiple of `multiple_of`, at least one multiple, or all its neurons if it has fewer. The result leaves out FFNs that keep all
    neurons.

    Raises ValueError for scores that are empty, not finite or not (F,), both or neither of width and fraction, a width below 1
    or above the neurons, a fraction outside (0, 1], an unknown scope, a multiple_of below 1, and where nothing is removed.
    """
    check_scores(scores, "select_neurons", "neurons")
    check_one_given("select_neurons", width=width, fraction=fraction)
    check_choice(scope, _SCOPES, "select_neurons", "scope")
    check_positive(multiple_of, "select_neurons", "multiple_of")
    smallest = min(values.numel() for values in scores.values())
    if width is not None and (type(width) is not int or not 1 <= width <= smallest):
        raise ValueError(f"select_neurons(width={width!r}): must be in 1..{smallest}, the neurons of the smallest FFN")
    if fraction is not None:
        check_positive_share(fraction, "select_neurons", "fraction")

    counts = {b: float(width) if width is not None else float(fraction or 0) * v.numel() for b, v in scores.items()}
    if scope == "global":
        ranking = torch.cat([values.double().cpu() for values in scores.values()]).argsort(descending=True, stable=True)
        owners = torch.cat([torch.full((v.numel(),), i) for i, v in enumerate(scores.values())])
        best = owners[ranking[: round(sum(counts.values()))]].bincount(minlength=len(scores))
        counts = dict(zip(scores, best.tolist(), strict=True))
    keep = {}
    for block, values in scores.items():
        count = max(int(counts[block] / multiple_of + 0.5), 1) * multiple_of
        if count < values.numel():
            keep[block] = values.argsort(descending=True, stable=True)[:count].sort().values.tolist()
    if not keep:
        raise ValueError("select_neurons: every FFN keeps all its neurons; lower width, fraction or multiple_of")
    return methods.FFNPruning(keep=keep)
