"""Score attention heads by their importance, and choose the heads to remove (Michel et al., 2019,
https://arxiv.org/abs/1905.10650).

Shapes: B batch, T tokens, N heads. The context of a head is its part of the input of the output projection.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from hf_freeze import methods
from hf_freeze.analysis._probe import batches_on, check_model, check_scores, count_labels, inputs_and_gradients
from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.derived import features
from hf_freeze.layers.gated import Gated
from hf_freeze.layers.no_attention import NoHeads
from hf_freeze.methods.checks import check_choice, check_integer, check_one_given, check_positive_share
from hf_freeze.model.running import in_eval_mode, token_mask

REDUCTIONS = ("per_token", "per_example", "per_batch")
NORMALIZATIONS = ("layer", "none")


def head_importance(
    model: Any,
    dataloader: Iterable[Mapping[str, Any]],
    *,
    reduction: str = "per_token",
    normalize: str = "layer",
) -> dict[str, torch.Tensor]:
    """Score every head, in eval mode: attention, such as `"encoder.0.self"` -> fp32 on the CPU (N,). Larger is more important.
    Each batch takes one forward and one backward.

    Let g = ⟨context, ∂L/∂context⟩ of a head at a token, where L is the loss summed over the labels of a batch; Σ g is the
    derivative of L by a factor on the head. The score is the mean over tokens of |g| (`reduction="per_token"`), the mean over
    examples of |Σ g| (`"per_example"`; Michel et al., eq. 2) or the mean over batches of |Σ g| (`"per_batch"`, as in scripts
    that first sum the gradients of a batch). The first two do not depend on how examples are batched. `normalize="layer"`
    divides the scores of an attention by their L2 norm, as Michel et al. do; `"none"` does not.

    `dataloader`: batches with labels, as dicts of tensors for the forward. Padding does not count, as in `ffn_importance`. With
    torch.distributed, every process passes its own part of the data, and all get the scores of the whole data. The model, its
    modes and its gradients do not change. An attention without heads has no scores.

    Raises ValueError for an unknown reduction, normalisation or architecture, a model on meta, missing or empty data, batches
    without labels, and an attention that no batch has reached.
    """
    architecture = check_model(model)
    check_choice(reduction, REDUCTIONS, "head_importance", "reduction")
    check_choice(normalize, NORMALIZATIONS, "head_importance", "normalize")
    heads = heads_of(model, architecture)
    outputs = {name: one.output for name, one in heads.items()}
    sums = {name: torch.zeros(one.count, dtype=torch.float64, device=model.device) for name, one in heads.items()}
    counts = dict.fromkeys(heads, 0)
    with in_eval_mode(model):
        for batch in batches_on(model, dataloader, "Scoring heads"):
            labels = count_labels(model, batch)
            contexts = inputs_and_gradients(model, batch, outputs, "head_importance")
            for name, (context, gradient) in contexts.items():
                mask = token_mask(architecture, model, batch, name, context)
                product = (context.double() * gradient).unflatten(-1, (-1, heads[name].size)).sum(-1) * labels
                product = product * mask[..., None]  # (B, T, N)
                if reduction == "per_token":
                    score, count = product.abs().sum((0, 1)), int(mask.sum())
                elif reduction == "per_example":
                    score, count = product.sum(1).abs().sum(0), len(product)
                else:
                    score, count = product.sum((0, 1)).abs(), 1
                sums[name] += score
                counts[name] += count
    sums, counts = _sum_over_processes(sums), _sum_over_processes(counts)
    for name in heads:
        if not counts[name]:
            raise ValueError(f"no batch has reached {name!r}: it cannot be scored")
    scores = {name: sums[name] / counts[name] for name in heads}
    if normalize == "layer":
        scores = {name: score / score.norm().clamp(min=torch.finfo(score.dtype).tiny) for name, score in scores.items()}
    return {name: score.float().cpu() for name, score in scores.items()}


class Heads(NamedTuple):
    """The heads of an attention: the projection of their contexts, the size of one, and how many there are."""

    output: Any
    size: int
    count: int


def heads_of(model: Any, architecture: Architecture) -> dict[str, Heads]:
    """Attention -> its heads, for each attention that has some."""
    heads = {}
    for name, attention in architecture.attentions(model.config).items():
        output, size = model.base_model.get_submodule(attention.o), attention.head_size(model.config)
        if not isinstance(output, NoHeads):
            heads[name] = Heads(output, size, features(output)[0] // size)
    return heads


def _sum_over_processes(values: dict[str, Any]) -> dict[str, Any]:
    """Each value summed over all processes of torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, {n: v.cpu() if torch.is_tensor(v) else v for n, v in values.items()})
    return {name: sum(part[name] for part in parts) for name in values}


def head_gates(model: Any) -> dict[str, torch.Tensor]:
    """The gates of `HeadMask` as scores for `select_heads`: attention -> their absolute values, fp32 on the CPU (N,).

    Raises ValueError for an unknown architecture, a model on meta, and a model without gates.
    """
    architecture = check_model(model)
    modules = dict(model.base_model.named_modules())
    outputs = {name: modules[attention.o] for name, attention in architecture.attentions(model.config).items()}
    gates = {name: output.gates for name, output in outputs.items() if isinstance(output, Gated)}
    if not gates:
        raise ValueError(f"this {type(model).__name__} has no gates: apply HeadMask first")
    return {name: values.detach().abs().float().cpu() for name, values in gates.items()}


def select_heads(
    scores: Mapping[str, torch.Tensor],
    *,
    fraction: float | None = None,
    count: int | None = None,
    min_heads: int = 0,
    group_size: int = 1,
) -> methods.HeadPruning:
    """Remove the heads with the lowest scores over all attentions. `scores`: attention -> (N,), as from `head_importance`.

    `count` heads, or this `fraction` of all heads, are removed; each attention keeps at least `min_heads`. `group_size`: the
    number of heads that share keys and values; they are removed together, by the sum of their scores. Where all heads of an
    attention share them, as in Falcon, leave it at 1: any heads can go.

    Raises ValueError for scores that are empty, not finite or not (N,), both or neither of fraction and count, and numbers of
    heads that cannot be removed.
    """
    check_scores(scores, "select_heads", "heads")
    for name, values in scores.items():
        if type(group_size) is not int or group_size < 1 or values.numel() % group_size:
            raise ValueError(
                f"select_heads(group_size={group_size!r}): must divide the {values.numel()} heads of {name!r}"
            )
    check_one_given("select_heads", fraction=fraction, count=count)
    if fraction is not None:
        check_positive_share(fraction, "select_heads", "fraction")
    check_integer(min_heads, 0, "select_heads", "min_heads")
    groups = {name: values.double().cpu().view(-1, group_size).sum(1) for name, values in scores.items()}
    least = -(-min_heads // group_size)
    most = sum(max(len(values) - least, 0) for values in groups.values())
    total = sum(map(len, groups.values()))
    # Numbers of groups from here on.
    to_remove = round(fraction * total) if fraction is not None else round(count / group_size)  # type: ignore[operator]
    if not 1 <= to_remove <= most:
        setting = f"fraction={fraction!r}" if fraction is not None else f"count={count!r}"
        raise ValueError(
            f"select_heads({setting}, min_heads={min_heads}): that is {to_remove * group_size} heads; must be in "
            f"{group_size}..{most * group_size}"
        )
    ranking = sorted(
        (float(value), name, number) for name, values in groups.items() for number, value in enumerate(values)
    )
    removed: dict[str, list[int]] = {}
    for _, name, number in ranking:
        if to_remove and len(removed.get(name, ())) < len(groups[name]) - least:
            removed.setdefault(name, []).append(number)
            to_remove -= 1
    heads = {
        name: [number * group_size + head for number in sorted(removed[name]) for head in range(group_size)]
        for name in scores
        if name in removed
    }
    return methods.HeadPruning(heads=heads)
