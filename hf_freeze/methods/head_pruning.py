"""Remove attention heads: rows of the matrices of queries, keys and values, columns of that of the output (Michel et al., 2019,
https://arxiv.org/abs/1905.10650).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention, check_layers_type
from hf_freeze.layers.derived import features
from hf_freeze.layers.hard_concrete import HardConcrete
from hf_freeze.layers.masked_heads import MaskedHeads
from hf_freeze.methods._budget import AUTO, Competing, size_of
from hf_freeze.methods._checks import (
    check_any_selected,
    check_choice,
    check_number,
    check_one_given,
    check_share,
    check_training_span,
)
from hf_freeze.methods._gradual_heads import HEAD_SCOPES, FewerHeads, OpenGates, kept_count, mask_least
from hf_freeze.methods._head_settings import check_attentions, check_head, check_heads_type, chosen_attentions
from hf_freeze.methods._ramps import RAMPS
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.parts import Part, Selection
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin
from hf_freeze.solvers.allocation import allocate
from hf_freeze.solvers.columns import Elimination, eliminate
from hf_freeze.solvers.moments import Moments

_MOST_PENALTY = 1e9


@register_method(
    "head_pruning",
    example={"share": 0.5},
    modes={
        "gradual": {"share": 0.5, "begin": 0.0, "end": 0.5, "scope": "global", "ramp": "linear"},
        "gates": {"penalty": 0.1},
    },
    facts=Facts(needs={"heads"}, shrinks=True, calibration="used", by_layer=("heads",)),
)
@dataclass(frozen=True, kw_only=True)
class HeadPruning(Method):
    """Remove the heads that `heads` names, such as `{"encoder.0.self": [1, 3]}` (`analysis.select_heads`), as Michel et al.
    (2019, https://arxiv.org/abs/1905.10650) do. Or keep `share` of the heads of each attention, at least one, in `layers` (None:
    all): the heads of the largest magnitude. The magnitude is the product of the norm of a head's value weights and the norm of
    its output weights.

    An attention may lose all its heads: then only the bias of its output remains, and nothing is computed. One that has more
    than its projections, such as norms, keeps one. Of heads that share keys and values, whole groups go, or the same number
    from every group that stays; `share` takes whole groups if there are several. Later methods use the new numbers. `merge()`
    gives a native model whose removed heads are zero.

    With a calibration, `share` keeps the heads that the outputs need most, and refits what stays; with `scope="global"`, it is
    the share of all heads, and each attention keeps at least one. "auto" is what `budget=` of `make_variant` leaves them.

    With `begin` or `end`, heads are removed while the model is trained: the share of heads falls from 1 to `share` between these
    shares of training (None: 0 and 1), as `ramp` says: "linear", "cosine" or "cubic" (fast at first, as for magnitude pruning).
    The heads of the lowest importance go first, by equation 2 of the paper, from the gradients of about the last hundred steps of
    the training itself; masked heads stay masked. `scope` compares heads in each attention ("attention"), or all heads together
    by their share of the L2 norm of their attention ("global", as in the paper), which leaves each attention one. This needs
    `VariantCallback` or `model.advance`. `finalize()` masks what is still to be masked, removes the masked heads, and names them
    in `heads`.

    Or `penalty`, the λ of Voita et al. (2019, https://arxiv.org/abs/1905.09418, equations 5 to 8): each head gets a hard
    concrete gate, drawn in each step of training, and λ times the expected number of open gates is added to the mean loss per
    label. A group of heads that share keys and values has one gate, unless there is only one group. In eval mode gates have
    no noise, and are 1 at the start. `finalize()` removes the heads whose gates are 0, and multiplies the other gates into
    the output matrices. Gates may need a higher learning rate than weights (`training.parameter_groups(model, {"gates":
    0.01}, lr=...)`). A custom loss must add `outputs["auxiliary_loss"]`.

    After a Freeze that makes an attention random, the config names the heads that `share` removes, and the others keep their
    random values. Of fresh weights, `share` then keeps the first heads.

    Raises ValueError for an unknown attention or head, a share outside 0..1, groups of heads that would be of different
    sizes, all heads of an attention that must keep one, and an attention with layers of another method that cannot lose
    heads: those of LowRank and HeadMask can, and of Quantize with int8. While the model is trained, none of them can, and
    attentions cannot be random. Also for a begin or end outside 0..1 or in the wrong order, an unknown ramp or scope, any of
    these without `share`, and a penalty outside 0..1e9.
    """

    heads: dict[str, list[int]] | None = None
    share: float | Literal["auto"] | None = None
    layers: dict[str, list[int]] | None = None
    begin: float | None = None
    end: float | None = None
    ramp: str = "cubic"
    scope: str = "attention"
    penalty: float | None = None

    def __post_init__(self) -> None:
        check_layers_type(self.layers)
        check_one_given("HeadPruning", heads=self.heads, share=self.share, penalty=self.penalty)
        check_choice(self.ramp, RAMPS, "HeadPruning", "ramp")
        check_choice(self.scope, HEAD_SCOPES, "HeadPruning", "scope")
        check_training_span(self.begin, self.end, "HeadPruning")
        if self.share is None or (self.begin, self.end) == (None, None):
            for field, default in (("begin", None), ("end", None), ("ramp", "cubic"), ("scope", "attention")):
                if (value := getattr(self, field)) != default and not (field == "scope" and self.share is not None):
                    raise ValueError(
                        f"HeadPruning({field}={value!r}): is for heads that are removed during training: give share, and begin "
                        "or end"
                    )
        if self.share == AUTO:
            if self._in_training:
                raise ValueError("HeadPruning(share='auto'): is decided before training: leave begin and end out")
        elif self.share is not None:
            check_share(self.share, "HeadPruning", "share")
        if self.penalty is not None:
            check_number(self.penalty, 0, _MOST_PENALTY, "HeadPruning", "penalty")
        if self.heads is None:
            return
        if self.layers is not None:
            raise ValueError("HeadPruning(heads=..., layers=...): heads names the attentions already; leave layers out")
        check_heads_type(self.heads, "HeadPruning")

    @property
    def parts(self) -> tuple[Part, ...]:
        if self.penalty is not None:
            return (OpenGates(self, self.penalty),)
        return (FewerHeads(self),) if self._in_training else (Selection(self.origins, self.decided, self.must_decide),)

    @property
    def facts(self) -> Facts:
        facts = super().facts
        if not self._in_training:
            return replace(facts, selects=self.heads is not None)
        gates = self.penalty is not None  # which are all open at first
        ends: dict[str, Any] = {"finalizable": True, "refers_to": {"layers"}, "holds": {"scores"}, "cuts": {"attention"}}
        return replace(facts, exact=True, stochastic=gates, shrinks=not gates, **ends)

    @property
    def _in_training(self) -> bool:
        """Whether heads go while the model is trained."""
        return self.penalty is not None or (self.begin, self.end) != (None, None)

    @property
    def _competes(self) -> bool:
        """Whether a calibration decides how many heads each attention keeps."""
        return self.share == AUTO or (self.scope == "global" and not self._in_training)

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        check_attentions(self.heads, "HeadPruning", architecture, config)
        check_any_selected(self._attentions(architecture, config), self.layers, "HeadPruning")

    def _attentions(self, architecture: Architecture, config: Any) -> dict[str, Attention]:
        """Name -> attention, for each one that the method changes."""
        return chosen_attentions(self.heads, self.layers, architecture, config)

    def _with_heads(self, model: Any, architecture: Architecture) -> dict[str, Attention]:
        """As `_attentions`; `share` leaves out those that have lost all their heads."""
        attentions = self._attentions(architecture, model.config)
        if self.heads is not None:
            return attentions
        return {name: attention for name, attention in attentions.items() if not surgery.is_removed(model, attention.q)}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for name, attention in self._with_heads(model, architecture).items():
            heads = surgery.count_heads(model, attention, self.name)
            if self._in_training:
                linear = surgery.dense_module(model, attention.o, self.name, advice="leave it out by layers=")
                masked = MaskedHeads if self.penalty is None else HardConcrete
                surgery.replace(
                    model, attention.o, masked.from_linear(linear, heads // self.per_mask(model, attention))
                )
                continue
            if self.heads is not None:
                group = surgery.group_size(model.base_model, attention, model.config, heads)
                self._check_removed(name, heads, group, thins=attention.thins)
                if len(self.heads[name]) == heads and _has_more_than_linears(model, attention):
                    raise ValueError(
                        f"HeadPruning(heads={{{name!r}: {self.heads[name]!r}}}): no head would be left, and this attention has "
                        "more than its projections, such as a norm or a bias on its scores; keep one"
                    )
            surgery.take_heads(model, attention, self._kept(name, attention, model, heads), heads)

    def _kept(self, name: str, attention: Attention, model: Any, heads: int) -> list[int]:
        """The heads that stay, out of `heads`; with `share`, the first ones stand for those of the largest magnitude."""
        if self.heads is None:
            self._check_decided()
            unit = _removed_together(model, attention)
            return list(range(kept_count(self.share, heads, unit)))  # type: ignore[arg-type]
        return [head for head in range(heads) if head not in self.heads[name]]

    def per_mask(self, model: Any, attention: Attention) -> int:
        """The number of heads for each mask or gate."""
        return 1 if self.penalty is None else _removed_together(model, attention)

    def _check_removed(self, name: str, heads: int, group: int, *, thins: bool) -> None:
        removed = self.heads[name]  # type: ignore[index]
        check_head(removed[-1], heads, name, "HeadPruning")
        left = Counter(head // group for head in range(heads) if head not in removed)
        if len({*left.values()} | (set() if thins else {group})) > 1:
            whole = [list(range(number, number + group)) for number in range(0, heads, group)]
            counts = [left[number] for number in range(heads // group)]
            raise ValueError(
                f"HeadPruning(heads={{{name!r}: {removed!r}}}): of the heads that share keys and values, {whole}, {counts} would "
                f"be left; remove whole groups{', or the same number from every group that stays' * thins}"
            )

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        if self._in_training:  # the matrices are as they were
            return
        attentions = self._with_heads(old, new.architecture)
        plain = {name: self._chosen(name, attention, old) for name, attention in attentions.items()}
        if statistics is None:
            for name, attention in attentions.items():
                self._take(old, new, attention, plain[name])
            return
        outputs = {attention.o: name for name, attention in attentions.items()}
        for moments in statistics.walk(
            list(outputs), {one.o: (one.module, one.o) for one in attentions.values()}, curvature=True, fit=True
        ):
            for output, moment in moments.items():
                attention = attentions[outputs[output]]
                before = kept = plain[outputs[output]]
                if moment is not None and self.heads is None:
                    groups, order = eliminated_heads(old, attention, moment)
                    kept = [head for number in order.kept(len(before) // len(groups[0])) for head in groups[number]]
                self._take(old, new, attention, kept)
                if moment is not None and kept:
                    now, then = (_inputs(old, attention, heads) for heads in (kept, before))
                    surgery.refit_inputs(old, new, output, moment, now, then, statistics.record)

    def _chosen(self, name: str, attention: Attention, old: Any) -> list[int]:
        """The heads that stay without statistics."""
        heads = surgery.count_heads(old, attention, self.name)
        if self.heads is None:
            return self._largest(old, attention, heads)
        return [head for head in range(heads) if head not in self.heads[name]]

    def _take(self, old: Any, new: Any, attention: Attention, kept: list[int]) -> None:
        surgery.copy_heads(old, new, attention, kept, surgery.count_heads(old, attention, self.name))
        surgery.release(old, attention.linears)

    def _kept_by(self, statistics: Statistics, old: Any, attentions: dict[str, Attention]) -> dict[str, list[int]]:
        """Attention -> the heads that stay by what the model sees; with `scope="global"` the heads of all attentions compete."""
        found = _orders(statistics, old, attentions)
        share: Any = self.share
        units = {name: len(groups[0]) for name, (groups, _) in found.items()}
        heads = {name: len(groups) * units[name] for name, (groups, _) in found.items()}
        counts = {name: kept_count(share, heads[name], units[name]) // units[name] for name in found}
        if self.scope == "global" and len(set(units.values())) == 1:
            total, unit = sum(heads.values()), next(iter(units.values()))
            curves = [order.losses.tolist() for _, order in found.values()]
            removals = (total - max(round(share * total), len(found) * unit)) // unit
            removed = allocate(curves, removals, most=[heads[name] // unit - 1 for name in found])
            counts = {name: heads[name] // unit - gone for name, gone in zip(found, removed, strict=True)}
        kept = {name: self._chosen(name, attention, old) for name, attention in attentions.items()}
        for name, (groups, order) in found.items():
            kept[name] = [head for number in order.kept(counts[name]) for head in groups[number]]
        return kept

    def _check_decided(self) -> None:
        if self._competes:
            raise ValueError(
                f"HeadPruning(share={self.share!r}, scope={self.scope!r}): a calibration compares heads of different attentions, "
                "or training does: give make_variant calibration=, or begin or end"
            )

    def _largest(self, model: Any, attention: Attention, heads: int) -> list[int]:
        group = _removed_together(model, attention)
        score = surgery.head_magnitudes(model, attention, heads).view(-1, group).sum(1)
        count = kept_count(self.share, heads, group) // group  # type: ignore[arg-type]
        groups = score.argsort(descending=True, stable=True)[:count]
        return [number * group + head for number in groups.sort().values.tolist() for head in range(group)]

    def origins(self, model: Model, architecture: Architecture) -> dict[str, Origin]:
        origins: dict[str, Origin] = {}
        for name, attention in self._with_heads(model, architecture).items():
            heads = surgery.count_heads(model, attention, self.name)
            kept = self._kept(name, attention, model, heads)
            origins |= surgery.head_origins(model, attention, kept, heads)
        return origins

    def decided(self, old: Any, architecture: Architecture, statistics: Statistics | None) -> "HeadPruning":
        if self.heads is not None:
            return self
        attentions = self._with_heads(old, architecture)
        if statistics is None:
            self._check_decided()
            kept = {name: self._chosen(name, attention, old) for name, attention in attentions.items()}
        else:
            kept = self._kept_by(statistics, old, attentions)
        return self.keeping(kept, old, architecture)

    def keeping(self, kept: Mapping[str, Sequence[int]], old: Any, architecture: Architecture) -> "HeadPruning":
        """The method that names the heads to remove: all but those that are `kept`, by attention; others stay as they are."""
        removed = {}
        for name, attention in self._with_heads(old, architecture).items():
            heads = range(surgery.count_heads(old, attention, self.name))
            if gone := [head for head in heads if head not in kept.get(name, heads)]:
                removed[name] = gone
        return HeadPruning(heads=removed) if removed else HeadPruning(share=1.0, layers=self.layers)

    def competing(self, old: Any, architecture: Architecture, statistics: Statistics) -> dict[str, Competing]:
        """Attention -> its heads, or groups of heads that go together, for `share="auto"`."""
        attentions = self._with_heads(old, architecture)
        found = _orders(statistics, old, attentions)
        return {
            name: Competing(
                order.losses.tolist(),
                len(groups) - 1,
                1,
                size_of(old, attentions[name].linears, len(groups)),
                lambda count, groups=groups, order=order: [head for n in order.kept(count) for head in groups[n]],
            )
            for name, (groups, order) in found.items()
        }

    def must_decide(self, architecture: Architecture, config: Any) -> bool:
        """Whether heads differ in more than their weights, or attentions keep different numbers: the config must name them."""
        return self._competes or any(attention.knows_heads for attention in architecture.attentions(config).values())

    def masked(self, model: Any, architecture: Architecture) -> dict[str, Any]:
        """Attention -> its output projection, which has a mask or gates, before `finalize()`."""
        outputs = {name: attention.o for name, attention in self._attentions(architecture, model.config).items()}
        modules = {name: model.base_model.get_submodule(output) for name, output in outputs.items()}
        return {name: module for name, module in modules.items() if isinstance(module, MaskedHeads | HardConcrete)}

    def mask(self, model: Any, architecture: Architecture, share: float) -> None:
        """Mask the least important heads, so that `share` of them is kept."""
        attentions, modules = self._attentions(architecture, model.config), self.masked(model, architecture)

        def magnitudes(name: str) -> Any:
            return surgery.head_magnitudes(model, attentions[name], modules[name].mask.numel())

        groups = {name: _removed_together(model, attentions[name]) for name in modules}
        mask_least(modules, groups, magnitudes, share, self.scope)

    def finalize(self, model: Model, architecture: Architecture) -> "HeadPruning":
        if self.share is not None:
            self.mask(model, architecture, self.share)  # type: ignore[arg-type]
        attentions, kept = self._attentions(architecture, model.config), {}
        for name, module in self.masked(model, architecture).items():
            each = self.per_mask(model, attentions[name])
            numbers = module.kept() or ([module.largest()] if _has_more_than_linears(model, attentions[name]) else [])
            kept[name] = [number * each + head for number in numbers for head in range(each)]
        self.merge(model, architecture)
        removed = {}
        for name, heads in kept.items():
            count = surgery.count_heads(model, attentions[name], self.name)
            if gone := [head for head in range(count) if head not in heads]:
                removed[name] = gone
                surgery.take_heads(model, attentions[name], heads, count, with_values=True)
        return HeadPruning(heads=removed) if removed else HeadPruning(share=1.0, layers=self.layers)

    def merge(self, model: Model, architecture: Architecture) -> None:
        if self._in_training:
            for name, module in self.masked(model, architecture).items():
                output = self._attentions(architecture, model.config)[name].o
                surgery.replace(model, output, surgery.dense_linear(module))
            return
        for name, attention in self._attentions(architecture, model.config).items():
            heads = attention.head_count(model.config)
            kept = self._kept(name, attention, model, heads) if attention.knows_heads else None
            surgery.pad_heads(model, attention, kept)


def _orders(
    statistics: Statistics, old: Any, attentions: dict[str, Attention]
) -> dict[str, tuple[list[list[int]], Elimination]]:
    """Attention -> as `eliminated_heads`."""
    outputs = {attention.o: name for name, attention in attentions.items()}
    found = {}
    for moments in statistics.walk(list(outputs), curvature=True):
        for output, moment in moments.items():
            if moment is not None:
                found[outputs[output]] = eliminated_heads(old, attentions[outputs[output]], moment)
    return found


def eliminated_heads(model: Any, attention: Attention, moments: Moments) -> tuple[list[list[int]], Elimination]:
    """The groups of heads that can go, and the order in which they do, by their inputs of the output projection."""
    heads, unit = surgery.count_heads(model, attention, "head_pruning"), _removed_together(model, attention)
    groups = [list(range(first, first + unit)) for first in range(0, heads, unit)]
    linear = model.base_model.get_submodule(attention.o)
    columns = [_inputs(model, attention, group) for group in groups]
    return groups, eliminate(surgery.effective_weight(linear), linear.bias, moments, columns)


def _inputs(model: Any, attention: Attention, heads: Sequence[int]) -> list[int]:
    """The inputs of the output projection that come from these heads."""
    size = attention.head_size(model.config)
    return [head * size + position for head in heads for position in range(size)]


def _removed_together(model: Any, attention: Attention) -> int:
    """The least number of heads that can be removed of an attention, which may have lost some, on their own."""
    heads = features(model.base_model.get_submodule(attention.o))[0] // attention.head_size(model.config)
    group = surgery.group_size(model.base_model, attention, model.config, heads)
    return 1 if attention.thins and group == heads else group


def _has_more_than_linears(model: Any, attention: Attention) -> bool:
    """Whether an attention has something that would be lost together with its last head."""
    prefix = f"{attention.module}."
    linears = tuple(f"{name.removeprefix(prefix)}." for name in attention.linears)
    parameters = model.base_model.get_submodule(attention.module).named_parameters()
    return attention.knows_heads or any(not name.startswith(linears) for name, _ in parameters)
