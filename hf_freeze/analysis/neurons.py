"""Which neurons of the FFNs matter, and which to keep.

Shapes: B batch, T tokens, F neurons of an FFN. A neuron is a column of the input of the last linear of its FFN, after the
activation (and the gate, where there is one).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hf_freeze import methods, surgery
from hf_freeze.analysis._probe import (
    batches_on,
    check_model,
    in_eval_mode,
    inputs_and_gradients,
    inputs_seen,
    token_mask,
)
from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.derived import features

SCORES = ("magnitude", "activation", "taylor")
_SCOPES = ("layer", "global")


def ffn_importance(
    model: Any, dataloader: Iterable[Mapping[str, Any]] | None = None, *, score: str = "magnitude"
) -> dict[str, torch.Tensor]:
    """Score every neuron of every FFN, in eval mode: FFN, such as `"encoder.0.ffn"` -> fp32 on the CPU (F,), larger is better.

    - `"magnitude"`: product of the norms of its input weights and of its output weights, as `FFNPruning(width=...)` ranks
      them. Needs no data.
    - `"activation"`: mean of its absolute value over the tokens.
    - `"taylor"`: mean over batches of |Σ activation · gradient of the loss|, summed over the tokens of the batch: how much, to
      first order, the loss changes without it (Molchanov et al., 2017, https://arxiv.org/abs/1611.06440, who take the
      examples one by one: batches of one; and 2019, https://arxiv.org/abs/1906.10771, section 3.1). Needs labels.

    `dataloader`: batches, dicts of tensors for the forward. Padding does not count: `attention_mask`, and in the decoder of an
    encoder-decoder `decoder_attention_mask`, or labels of -100. The model, its modes and its gradients stay as they were.

    Raises ValueError for an unknown score or architecture, a model on meta, missing or empty data, batches without labels where
    they are needed, and a mask whose shape is not that of the tokens.
    """
    architecture = check_model(model)
    if score not in SCORES:
        raise ValueError(f"score={score!r}: choose from {list(SCORES)}")
    blocks = architecture.ffns(model.config)
    if score == "magnitude":
        return {block: surgery.neuron_magnitudes(model, linears).cpu() for block, linears in blocks.items()}
    if dataloader is None:
        raise ValueError(f"score={score!r} needs a dataloader")
    last = {block: model.base_model.get_submodule(linears[-1]) for block, linears in blocks.items()}
    collect = _activations if score == "activation" else _first_order
    with in_eval_mode(model):
        return collect(model, architecture, last, dataloader)


def _activations(model: Any, architecture: Architecture, last: Any, dataloader: Any) -> dict[str, torch.Tensor]:
    sums = {block: torch.zeros(features(linear)[0], dtype=torch.float64) for block, linear in last.items()}
    tokens = dict.fromkeys(last, 0)
    for batch in batches_on(model, dataloader, "Scoring neurons"):

        def note(block: str, x: torch.Tensor, batch: Any = batch) -> None:
            rows = x[token_mask(architecture, model, batch, block, x)]
            sums[block] += rows.double().abs().sum(0).cpu()
            tokens[block] += rows.shape[0]

        with inputs_seen(last, note), torch.no_grad():
            model(**batch)
    if empty := [block for block, count in tokens.items() if not count]:
        raise ValueError(f"the dataloader has no token that is not padding, at {empty[0]!r}")
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
    """Keep the neurons of the highest scores: FFN -> (F,), as `ffn_importance` gives them.

    `width` neurons, or this `fraction` of them, are kept in each FFN (`scope="layer"`) or on average (`"global"`, which compares
    the scores of different FFNs as they are: scale them if they should not be). Each FFN keeps the nearest multiple of
    `multiple_of`, at least one, or all neurons if it has not so many. An FFN that keeps all is not named.

    Raises ValueError for scores that are empty, not finite or not (F,), both or neither of width and fraction, a width below 1
    or above the neurons, a fraction outside (0, 1], an unknown scope, a multiple_of below 1, and where nothing is removed.
    """
    if not scores:
        raise ValueError("select_neurons: no scores")
    for block, values in scores.items():
        if not torch.is_tensor(values) or values.ndim != 1 or not values.numel() or not values.isfinite().all():
            raise ValueError(f"select_neurons: the scores of {block!r} must be finite numbers in a tensor (neurons,)")
    if (width is None) == (fraction is None):
        raise ValueError(f"select_neurons(width={width!r}, fraction={fraction!r}): give one of them")
    if scope not in _SCOPES:
        raise ValueError(f"select_neurons(scope={scope!r}): choose from {list(_SCOPES)}")
    if type(multiple_of) is not int or multiple_of < 1:
        raise ValueError(f"select_neurons(multiple_of={multiple_of!r}): must be an integer of at least 1")
    smallest = min(values.numel() for values in scores.values())
    if width is not None and (type(width) is not int or not 1 <= width <= smallest):
        raise ValueError(f"select_neurons(width={width!r}): must be in 1..{smallest}, the neurons of the smallest FFN")
    if fraction is not None and not (isinstance(fraction, int | float) and 0 < fraction <= 1):
        raise ValueError(f"select_neurons(fraction={fraction!r}): must be a share in (0, 1]")

    wanted = {b: float(width) if width is not None else float(fraction or 0) * v.numel() for b, v in scores.items()}
    if scope == "global":
        ranking = torch.cat([values.double().cpu() for values in scores.values()]).argsort(descending=True, stable=True)
        owners = torch.cat([torch.full((v.numel(),), i) for i, v in enumerate(scores.values())])
        best = owners[ranking[: round(sum(wanted.values()))]].bincount(minlength=len(scores))
        wanted = dict(zip(scores, best.tolist(), strict=True))
    keep = {}
    for block, values in scores.items():
        count = max(int(wanted[block] / multiple_of + 0.5), 1) * multiple_of
        if count < values.numel():
            keep[block] = values.argsort(descending=True, stable=True)[:count].sort().values.tolist()
    if not keep:
        raise ValueError("select_neurons: every FFN keeps all its neurons; lower width, fraction or multiple_of")
    return methods.FFNPruning(keep=keep)
