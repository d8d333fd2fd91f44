"""Remove attention heads: rows of the matrices of queries, keys and values, columns of that of the output (Michel et al., 2019,
https://arxiv.org/abs/1905.10650).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention, check_layers_type
from hf_freeze.methods._gradual_heads import HEAD_SCOPES, FewerHeads, HeadsInTraining, OpenGates, marked
from hf_freeze.methods._heads import (
    check_attentions,
    check_head,
    check_heads_type,
    chosen_attentions,
    has_more_than_linears,
    inputs_of,
    kept_count,
    removed_together,
)
from hf_freeze.methods._ramps import RAMPS
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.budget import AUTO, Competing, allocated, size_of
from hf_freeze.methods.checks import (
    check_any_selected,
    check_fields,
    check_one_given,
    check_share,
    number_in,
    one_of,
)
from hf_freeze.methods.parts import Part, Selection
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin
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
        shares = {} if self.share == AUTO else {"share": check_share}
        gates = number_in(0, _MOST_PENALTY)
        check_fields(self, ramp=one_of(RAMPS), scope=one_of(HEAD_SCOPES), penalty=gates, **shares)
        if self.share is None or (self.begin, self.end) == (None, None):
            for field, default in (("begin", None), ("end", None), ("ramp", "cubic"), ("scope", "attention")):
                if (value := getattr(self, field)) != default and not (field == "scope" and self.share is not None):
                    raise ValueError(
                        f"HeadPruning({field}={value!r}): is for heads that are removed during training: give share, and begin "
                        "or end"
                    )
        if self.share == AUTO and self._training is not None:
            raise ValueError("HeadPruning(share='auto'): is decided before training: leave begin and end out")
        if self.heads is None:
            return
        if self.layers is not None:
            raise ValueError("HeadPruning(heads=..., layers=...): heads names the attentions already; leave layers out")
        check_heads_type(self.heads, "HeadPruning")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self._training or Selection(self.origins, self.decided, self.must_decide),)

    @property
    def facts(self) -> Facts:
        facts = super().facts
        if self._training is None:
            return replace(facts, selects=self.heads is not None)
        gates = self.penalty is not None  # which are all open at first
        ends: dict[str, Any] = {
            "finalizable": True,
            "refers_to": {"layers"},
            "holds": {"scores"},
            "cuts": {"attention"},
        }
        return replace(facts, exact=True, stochastic=gates, shrinks=not gates, **ends)

    @property
    def _training(self) -> HeadsInTraining | None:
        """How heads go while the model is trained; None if they go before."""
        if self.penalty is not None:
            return OpenGates(self)
        return None if (self.begin, self.end) == (None, None) else FewerHeads(self)

    def masked(self, model: Any, architecture: Architecture) -> dict[str, Any]:
        """Attention -> its output projection, which has a mask or gates, before `finalize()`."""
        return marked(model, self.chosen(architecture, model.config))

    @property
    def _competes(self) -> bool:
        """Whether a calibration decides how many heads each attention keeps."""
        return self.share == AUTO or (self.scope == "global" and self._training is None)

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        check_attentions(self.heads, "HeadPruning", architecture, config)
        check_any_selected(self.chosen(architecture, config), self.layers, "HeadPruning")

    def chosen(self, architecture: Architecture, config: Any) -> dict[str, Attention]:
        """Name -> attention, for each one that the method changes."""
        return chosen_attentions(self.heads, self.layers, architecture, config)

    def _with_heads(self, model: Any, architecture: Architecture) -> dict[str, Attention]:
        """As `chosen`; `share` leaves out those that have lost all their heads."""
        attentions = self.chosen(architecture, model.config)
        if self.heads is not None:
            return attentions
        return {name: attention for name, attention in attentions.items() if not surgery.is_removed(model, attention.q)}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for name, attention in self._with_heads(model, architecture).items():
            heads = surgery.count_heads(model, attention, self.name)
            if self._training is not None:
                self._training.mark(model, attention, heads)
                continue
            if self.heads is not None:
                self._check_removed(name, self.heads[name], attention, model, heads)
            surgery.take_heads(model, attention, self._kept(name, attention, model, heads), heads)

    def _kept(self, name: str, attention: Attention, model: Any, heads: int) -> list[int]:
        """The heads that stay, out of `heads`; with `share`, the first ones stand for those of the largest magnitude."""
        if self.heads is not None:
            return [head for head in range(heads) if head not in self.heads[name]]
        self._check_decided()
        return list(range(kept_count(self.share, heads, removed_together(model, attention))))  # type: ignore[arg-type]

    @staticmethod
    def _check_removed(name: str, removed: list[int], attention: Attention, model: Any, heads: int) -> None:
        check_head(removed[-1], heads, name, "HeadPruning")
        group, thins = surgery.group_size(model.base_model, attention, model.config, heads), attention.thins
        left = Counter(head // group for head in range(heads) if head not in removed)
        if len({*left.values()} | (set() if thins else {group})) > 1:
            whole = [list(range(number, number + group)) for number in range(0, heads, group)]
            counts = [left[number] for number in range(heads // group)]
            raise ValueError(
                f"HeadPruning(heads={{{name!r}: {removed!r}}}): of the heads that share keys and values, {whole}, {counts} would "
                f"be left; remove whole groups{', or the same number from every group that stays' * thins}"
            )
        if len(removed) == heads and has_more_than_linears(model, attention):
            raise ValueError(
                f"HeadPruning(heads={{{name!r}: {removed!r}}}): no head would be left, and this attention has more than its "
                "projections, such as a norm or a bias on its scores; keep one"
            )

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        if self._training is not None:  # the matrices are as they were
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
                    now, then = (inputs_of(old, attention, heads) for heads in (kept, before))
                    surgery.refit_inputs(old, new, output, moment, now, then, statistics.record)

    def _chosen(self, name: str, attention: Attention, old: Any) -> list[int]:
        """The heads that stay without statistics."""
        heads = surgery.count_heads(old, attention, self.name)
        return self._largest(old, attention, heads) if self.heads is None else self._kept(name, attention, old, heads)

    def _take(self, old: Any, new: Any, attention: Attention, kept: list[int]) -> None:
        surgery.copy_heads(old, new, attention, kept, surgery.count_heads(old, attention, self.name))
        surgery.release(old, attention.linears)

    def _kept_by(self, statistics: Statistics, old: Any, attentions: dict[str, Attention]) -> dict[str, list[int]]:
        """Attention -> the heads that stay by what the model sees; with `scope="global"` the heads of all attentions compete."""
        found, share = self._curves(old, attentions, statistics), cast(float, self.share)
        groups = {name: len(part.losses) - 1 for name, part in found.items()}
        kept = {name: self._chosen(name, attention, old) for name, attention in attentions.items()}
        units = {len(part.kept(1)) for part in found.values()}
        if self.scope == "global" and len(units) == 1:
            total, unit = sum(groups.values()) * min(units), min(units)
            return kept | allocated(found, (total - max(round(share * total), len(found) * unit)) // unit)
        return kept | {name: part.kept(kept_count(share, groups[name], 1)) for name, part in found.items()}

    def _check_decided(self) -> None:
        if self._competes:
            raise ValueError(
                f"HeadPruning(share={self.share!r}, scope={self.scope!r}): a calibration compares heads of different attentions, "
                "or training does: give make_variant calibration=, or begin or end"
            )

    def _largest(self, model: Any, attention: Attention, heads: int) -> list[int]:
        group = removed_together(model, attention)
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
        return self._naming(removed)

    def _curves(self, old: Any, attentions: dict[str, Attention], statistics: Statistics) -> dict[str, Competing]:
        """Attention -> its heads, or groups of heads that go together, by what the model sees."""
        outputs, found = {attention.o: name for name, attention in attentions.items()}, {}
        for moments in statistics.walk(list(outputs), curvature=True):
            for output, moment in moments.items():
                if moment is not None:
                    groups, order = eliminated_heads(old, attentions[name := outputs[output]], moment)
                    found[name] = Competing(order.losses.tolist(), len(groups) - 1, 1, 0.0, _of_groups(groups, order))
        return found

    def competing(self, old: Any, architecture: Architecture, statistics: Statistics) -> dict[str, Competing]:
        """As `_curves`, for `share="auto"`."""
        attentions = self._with_heads(old, architecture)
        curves = self._curves(old, attentions, statistics).items()
        return {
            name: replace(part, size=size_of(old, attentions[name].linears, len(part.losses) - 1))
            for name, part in curves
        }

    def must_decide(self, architecture: Architecture, config: Any) -> bool:
        """Whether heads differ in more than their weights, or attentions keep different numbers: the config must name them."""
        return self._competes or any(attention.knows_heads for attention in architecture.attentions(config).values())

    def finalize(self, model: Model, architecture: Architecture) -> "HeadPruning":
        attentions = self.chosen(architecture, model.config)
        kept = cast(HeadsInTraining, self._training).kept(model, attentions)
        self.merge(model, architecture)
        removed = {}
        for name, heads in kept.items():
            count = surgery.count_heads(model, attentions[name], self.name)
            if gone := [head for head in range(count) if head not in heads]:
                removed[name] = gone
                surgery.take_heads(model, attentions[name], heads, count, with_values=True)
        return self._naming(removed)

    def _naming(self, removed: dict[str, list[int]]) -> "HeadPruning":
        """The method that names the heads to remove."""
        return HeadPruning(heads=removed) if removed else HeadPruning(share=1.0, layers=self.layers)

    def merge(self, model: Model, architecture: Architecture) -> None:
        attentions = self.chosen(architecture, model.config)
        if self._training is not None:
            for name, module in marked(model, attentions).items():
                surgery.replace(model, attentions[name].o, surgery.dense_linear(module))
            return
        for name, attention in attentions.items():
            heads = attention.head_count(model.config)
            kept = self._kept(name, attention, model, heads) if attention.knows_heads else None
            surgery.pad_heads(model, attention, kept)


def eliminated_heads(model: Any, attention: Attention, moments: Moments) -> tuple[list[list[int]], Elimination]:
    """The groups of heads that can go, and the order in which they do, by their inputs of the output projection."""
    heads, unit = surgery.count_heads(model, attention, "head_pruning"), removed_together(model, attention)
    groups = [list(range(first, first + unit)) for first in range(0, heads, unit)]
    linear = model.base_model.get_submodule(attention.o)
    columns = [inputs_of(model, attention, group) for group in groups]
    return groups, eliminate(surgery.effective_weight(linear), linear.bias, moments, columns)


def _of_groups(groups: list[list[int]], order: Elimination) -> Callable[[int], list[int]]:
    """How many groups stay -> their heads."""
    return lambda count: [head for number in order.kept(count) for head in groups[number]]
