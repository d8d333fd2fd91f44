"""How much worse a trained model becomes with fewer layers, heads, neurons or ranks, measured before any training."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_freeze import methods, surgery
from hf_freeze.analysis._probe import check_model, loss_of
from hf_freeze.analysis.head_importance import count_labels, head_importance, select_heads
from hf_freeze.analysis.neurons import ffn_importance, select_neurons
from hf_freeze.architectures.base import LINEAR_COMPONENTS, Architecture, hidden_size
from hf_freeze.architectures.tasks import tasks_of
from hf_freeze.layers.derived import features
from hf_freeze.methods.base import Method
from hf_freeze.model.make import make_variant
from hf_freeze.model.running import in_eval_mode, on_device, without_cache
from hf_freeze.progress import track

SHARES = (0.75, 0.5, 0.375, 0.25, 0.125)  # of the neurons, heads or ranks of a stack
BY_SHARE = ("neurons", "heads", "ffn_ranks", "attention_ranks")  # kinds of parts of which a stack keeps a share
_PART = 4  # of every so many batches, one decides which layer goes next, where there are twice as many
_GREEDY = 8  # layers of a stack up to which all that remain are tried again after each removal
_WIDE = 64  # neurons or ranks from which FFNs keep multiples of 8, which vector instructions compute without a rest
_WORTH = 0.9  # share of a weight's numbers that its factors may have: above it, files of ONNX hold the weight itself


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Losses in nats, summed over the labels of the same batches.

    `loss`: of the whole model. `removal`: stack -> its layers in the order of removal, the least missed first. `layers`: stack ->
    number of layers kept -> loss. `neurons`, `heads`, `ffn_ranks`, `attention_ranks` (of linears): stack -> share kept ->
    loss. `ranks`: rank of the token tables -> loss. `neuron_scores` and `head_scores` say which ones go first
    (`ffn_importance`, `head_importance`). `linears`: as from `plain_linears`. Only parts that can
    be removed have entries.
    """

    labels: int
    loss: float
    removal: dict[str, list[int]]
    layers: dict[str, dict[int, float]]
    neurons: dict[str, dict[float, float]] = field(default_factory=dict)
    heads: dict[str, dict[float, float]] = field(default_factory=dict)
    ffn_ranks: dict[str, dict[float, float]] = field(default_factory=dict)
    attention_ranks: dict[str, dict[float, float]] = field(default_factory=dict)
    ranks: dict[int, float] = field(default_factory=dict)
    linears: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    neuron_scores: dict[str, list[float]] = field(default_factory=dict)
    head_scores: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Sensitivity":
        """From what `json` reads of `dataclasses.asdict`: keys that were numbers are text there."""
        numbers: dict[str, Any] = {"ranks": {int(rank): loss for rank, loss in values["ranks"].items()}}
        for kind in ("layers", *BY_SHARE):
            number = int if kind == "layers" else float
            numbers[kind] = {  # older files have no ranks of linears
                stack: {number(kept): loss for kept, loss in losses.items()}
                for stack, losses in values.get(kind, {}).items()
            }
        return cls(**values | numbers)


def total_loss(model: Any, batches: Iterable[Mapping[str, Any]]) -> tuple[float, int]:
    """The loss of `model` in nats, summed over the labels of all batches, and the number of labels. In eval mode.

    Raises ValueError for batches without labels.
    """
    total, labels = 0.0, 0
    with in_eval_mode(model), without_cache(model), torch.no_grad():
        for batch in batches:
            batch = on_device(model, batch)
            count = count_labels(model, batch)
            total, labels = total + float(loss_of(model, batch, "total_loss")) * count, labels + count
    return total, labels


def sensitivity(
    model: Any,
    batches: Sequence[Mapping[str, Any]],
    *,
    heads: bool = True,
    ranks: bool = True,
    watch: Callable[[str], Any] = lambda text: None,
) -> Sensitivity:
    """Measure what each kind of part is worth to a trained model.

    Layers go one by one, each time the one that is missed least (in stacks of more than 8 layers by one measurement of each). A
    quarter of 8 batches or more decides which one that is, and all of them give the loss;
    heads and neurons by their first-order importance for the loss, each stack by itself; the linears of its FFNs, or of its
    attentions, become the nearest ones of lower rank (`methods.LowRank`). `heads`, `ranks`: whether to measure fewer heads, and
    lower ranks of linears and token tables. `watch` is told of each measurement, in words.

    `batches`: held-out data with labels, as dicts of tensors for the forward; they are gone through about once for each result.
    The model does not change.

    Raises ValueError for an unknown architecture, a model on meta, and batches without labels.
    """
    architecture = check_model(model)
    loss, labels = total_loss(model, batches)
    encoded = _encoded(model, batches)

    def loss_with(method: Method, stack: str = "", *, part: bool = False) -> float | None:
        """None where the model cannot take the method, which changes no other stack than `stack`, if that is given. `part`: of
        some of the batches, to compare."""
        try:
            small = make_variant(model, [method])
        except ValueError:
            return None
        used = encoded if stack == "decoder" else batches
        watch(f"{method.name.replace('_', ' ')} of the {stack or 'tables'}")
        return total_loss(small, used[::_PART] if part else used)[0]

    ranked_on_part = len(batches) >= 2 * _PART
    removal, layers = {}, {}
    for stack, depth in architecture.depths(model.config).items():
        removal[stack], layers[stack] = _remove_layers(stack, depth, loss, loss_with, ranked_on_part)
    result = Sensitivity(labels=labels, loss=loss, removal=removal, layers=layers)
    if architecture.ffns(model.config):
        scores = ffn_importance(model, batches, score="taylor")
        result.neuron_scores.update({block: values.tolist() for block, values in scores.items()})
    if heads and architecture.attentions(model.config):
        scores = head_importance(model, batches, normalize="none")
        result.head_scores.update({name: values.tolist() for name, values in scores.items()})
    if ranks:
        result.linears.update(plain_linears(model, architecture))
    units_of: tuple[Mapping[str, Any], ...] = (result.neuron_scores, result.head_scores, result.linears, result.linears)
    for kind, units in zip(BY_SHARE, units_of, strict=True):
        losses = getattr(result, kind)
        for stack in track(removal, f"Measuring fewer {kind.replace('_', ' ')}", len(removal)):
            if not any(name.startswith(f"{stack}.") for name in units):
                continue
            losses[stack] = {}
            for share in SHARES:
                method = _with_fewer(kind, result, stack, share, architecture, model.config)
                if method is not None and (found := loss_with(method, stack)) is not None:
                    losses[stack][share] = found
    if ranks:
        hidden = hidden_size(model.config)
        for rank in sorted(
            {round(hidden * share / 8) * 8 or 1 for share in SHARES if hidden * share >= 2}, reverse=True
        ):
            if (found := loss_with(methods.FactorizedEmbedding(rank=rank))) is not None:
                result.ranks[rank] = found
    return result


def _encoded(model: Any, batches: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The batches with the outputs of the encoder instead of its inputs, for measuring decoders; the batches as they are for
    a model without both, or that computes another loss from them."""
    if "seq2seq-lm" not in tasks_of(model) or not all("input_ids" in batch for batch in batches):
        return batches
    encoded = []
    with in_eval_mode(model), torch.no_grad():
        for batch in batches:
            inputs = on_device(model, batch)
            outputs = model.get_encoder()(inputs.pop("input_ids"), attention_mask=inputs.get("attention_mask"))
            encoded.append(inputs | {"encoder_outputs": outputs})
    loss, other = (total_loss(model, some[:1])[0] for some in (batches, encoded))
    return encoded if math.isclose(loss, other, rel_tol=1e-4) else batches


def _remove_layers(
    stack: str, depth: int, loss: float, loss_with: Any, ranked_on_part: bool
) -> tuple[list[int], dict[int, float]]:
    """(layers in the order of removal, number of layers kept -> loss). At least one layer stays."""
    kept, order, losses = list(range(depth)), [], {depth: loss}

    def loss_without(layer: int, part: bool) -> float | None:
        """Loss if this layer goes too; None where it cannot go."""
        method = methods.LayerSelection(keep={stack: [number for number in kept if number != layer]})
        return loss_with(method, stack, part=part)

    ranking: list[int] = []  # of a deep stack: from one measurement of each layer
    for _ in track(range(depth - 1), f"Removing layers of the {stack}", depth - 1):
        found: dict[int, float] = {}
        if depth <= _GREEDY or not ranking:
            found = {layer: value for layer in kept if (value := loss_without(layer, ranked_on_part)) is not None}
            ranking = sorted(found, key=lambda layer: (found[layer], layer))
        if not ranking:
            break
        layer = ranking.pop(0)
        value = loss_without(layer, False) if ranked_on_part or layer not in found else found[layer]
        if value is None:
            break
        kept.remove(layer)
        order.append(layer)
        losses[len(kept)] = value
    return order, losses


def _with_fewer(
    kind: str, measured: Sensitivity, stack: str, share: float, architecture: Architecture, config: Any
) -> Method | None:
    """The method that keeps this share of a stack; None where that is all of it, or cannot be."""
    layers = list(range(architecture.depths(config)[stack]))
    try:
        if kind == "neurons":
            return fewer_neurons(measured, stack, share, layers, uniform=True)
        if kind == "heads":
            return fewer_heads(measured, stack, share, layers, architecture, config)
        component = kind.removesuffix("_ranks")
        return of_ranks(lower_ranks(measured, stack, component, share, layers, architecture, {}))
    except ValueError:
        return None


def fewer_neurons(
    measured: Sensitivity, stack: str, share: float, layers: Sequence[int], *, uniform: bool
) -> methods.FFNPruning:
    """Keep this share of the neurons of a stack, in its `layers`, which get the numbers 0, 1 … in this order. `uniform`: as many
    in each FFN, for engines with one width for all."""
    scores = {block: torch.tensor(s) for block, s in _of_layers(measured.neuron_scores, stack, layers).items()}
    multiple = 8 if min(map(len, scores.values())) >= _WIDE else 1
    return select_neurons(scores, fraction=share, scope="layer" if uniform else "global", multiple_of=multiple)


def fewer_heads(
    measured: Sensitivity, stack: str, share: float, layers: Sequence[int], architecture: Architecture, config: Any
) -> methods.HeadPruning:
    """Keep this share of the heads of a stack, in its `layers`, which get the numbers 0, 1 … in this order. Each attention keeps
    at least one, or the heads that share one key."""
    scores = {name: torch.tensor(s) for name, s in _of_layers(measured.head_scores, stack, layers).items()}
    attentions = architecture.attentions(config)
    group = max(one.removed_together(config) for name, one in attentions.items() if name.startswith(f"{stack}."))
    return select_heads(scores, fraction=1 - share, min_heads=1, group_size=group)


def lower_rank(side: int, other: int, share: float) -> int | None:
    """This share of the rank of a weight of these sides, or the nearest multiple of 8 for a wide one; None where its factors are
    hardly smaller than the weight."""
    full = min(side, other)
    multiple = 8 if full >= _WIDE else 1
    rank = max(int(full * share / multiple + 0.5), 1) * multiple
    return rank if rank * (side + other) <= _WORTH * side * other else None


def of_ranks(ranks: dict[str, int]) -> methods.LowRank:
    """Linear of any component -> its rank, as a method."""
    return methods.LowRank(rank=ranks, components=list(LINEAR_COMPONENTS))


def lower_ranks(
    measured: Sensitivity,
    stack: str,
    component: str,
    share: float,
    layers: Sequence[int],
    architecture: Architecture,
    neurons: Mapping[str, Sequence[int]],
) -> dict[str, int]:
    """Linear -> this share of its rank, for those linears of a `component`, "ffn" or "attention", that become smaller by it.

    `layers`: those that are left; they get the numbers 0, 1 … in this order. `neurons`: FFN by its new number -> neurons that are
    kept, if some go. Heads must all be kept.
    """
    ranks = {}
    for block, linears in _of_layers(measured.linears, stack, layers).items():
        _, layer, kind = block.split(".")
        if not kind.startswith(component):
            continue
        place = architecture.stacks[stack].layers.format(int(layer))
        width = linears[-1][1]  # of a gate and its values in one linear, the side of the neurons is twice that
        for name, side, other in linears:
            kept = side // width * len(neurons[block]) if block in neurons else side
            if (rank := lower_rank(kept, other, share)) is not None:
                ranks[f"{place}.{name}"] = rank
    return ranks


def plain_linears(model: Any, architecture: Architecture) -> dict[str, list[tuple[str, int, int]]]:
    """FFN, such as "encoder.0.ffn", or "encoder.0.attention" -> (name below its layer, one side, other side) of the weight of
    each of its linears, where no method has changed any of them. In FFNs, the side of the neurons is the first."""
    blocks = architecture.ffns(model.config)
    for stack, layer, name in architecture.linears(model.config, "attention"):
        blocks.setdefault(f"{stack}.{layer}.attention", []).append(name)
    found = {}
    for block, names in blocks.items():
        stack, layer, _ = block.split(".")
        place = architecture.stacks[stack].layers.format(int(layer))
        if any(surgery.is_removed(model, name) for name in names):
            continue
        linears = dict(surgery.modules(model, names))
        if not all(map(surgery.is_dense, linears.values())):
            continue
        found[block] = []
        for name, linear in linears.items():
            inputs, outputs = features(linear)
            sides = (inputs, outputs) if name == names[-1] else (outputs, inputs)  # the last linear reads the neurons
            found[block].append((name.removeprefix(f"{place}."), *sides))
    return found


def _of_layers(scores: Mapping[str, Any], stack: str, layers: Sequence[int]) -> dict[str, Any]:
    """Those of the named layers of a stack, under their new numbers."""
    numbers = {layer: number for number, layer in enumerate(layers)}
    renamed = {}
    for name, values in scores.items():
        owner, layer, block = name.split(".", 2)
        if owner == stack and int(layer) in numbers:
            renamed[f"{stack}.{numbers[int(layer)]}.{block}"] = values
    return renamed
