"""Remove whole neurons of the FFNs: rows of the matrices before the activation, columns of the one after it (as filters in
Molchanov et al., 2017, https://arxiv.org/abs/1611.06440).
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, check_layers_type, in_layers, set_fields
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.methods._experts import best_experts, check_experts, experts_left
from hf_freeze.methods.base import Facts, Method, Model, Statistics
from hf_freeze.methods.budget import AUTO, Competing, allocated, size_of
from hf_freeze.methods.checks import (
    check_any_selected,
    check_fields,
    check_numbers_by_name,
    check_one_given,
    check_positive,
    check_share,
    is_ascending,
    wrong,
)
from hf_freeze.methods.parts import Part, Selection
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin
from hf_freeze.solvers.columns import Elimination, eliminate
from hf_freeze.solvers.moments import Moments

_WIDE = 64  # neurons from which FFNs keep multiples of 8, where each has its own number
_MULTIPLE = (
    8  # of the neurons of experts: grouped products of matrices need rows of a multiple of 16 bytes, also in bf16
)


@register_method(
    "ffn_pruning",
    example={"width": 13},
    facts=Facts(needs={"neurons"}, shrinks=True, calibration="used", by_layer=("keep", "experts")),
)
@dataclass(frozen=True, kw_only=True)
class FFNPruning(Method):
    """Keep the `width` neurons of the largest magnitude in each FFN in `layers` (None: all). Or `keep`, such as
    `{"encoder.0.ffn": [0, 3, 4]}`: the neurons to keep in each FFN that it names (`analysis.select_neurons`).

    `expert_width`: the neurons to keep of each expert of a mixture, a multiple of 8, where a model stores the matrices of its
    experts in one parameter; `width` is then for its other FFNs, if it has any. In `keep`, experts have a list each:
    `{"decoder.0.experts": [[0, 3, ...], [1, 2, ...], ...]}`.

    `experts`: whole experts to keep of each such mixture, or which, such as `{"decoder.0.experts": [0, 1, 3]}`, for all mixtures
    and as many of each; their router loses the others, too. With a calibration those stay that add most to the outputs of the
    mixture, as the sum of squares over the tokens that they get, each times its factor; without, and with a saved one, those of
    the largest magnitude. Of experts in groups, each group loses as many.

    With a calibration, those neurons stay whose loss would change the outputs most, and the matrix that reads them is refitted:
    in an FFN, or in each expert, on the tokens that it gets. An expert that no or too few tokens reach is cut as without.
    `share`, which needs a calibration, is for FFNs of linears; "auto" is what `budget=` of `make_variant` leaves them.

    The magnitude of a neuron is the product of the norm of its input weights and the norm of its output weights. `merge()`
    gives a native model: of the smaller width if all layers have the same width, otherwise padded with zero neurons.
    Warns where all neurons are kept.

    After a Freeze that makes an FFN random, the config names the neurons that `width` keeps, and they keep their random values.
    Of fresh weights, `width` then keeps the first neurons.

    Raises ValueError for a width or neuron outside the FFN, an unknown layer or FFN, and an FFN with layers of another method
    that cannot lose neurons: those of LowRank can, and of Quantize with int8; and for fewer experts than a token gets, or than
    the groups of a router allow, another setting beside `experts`, and a config that cannot hold their number.
    """

    width: int | None = None
    keep: dict[str, surgery.Kept] | None = None
    layers: dict[str, list[int]] | None = None
    expert_width: int | None = None
    experts: int | dict[str, list[int]] | None = None
    share: float | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        check_layers_type(self.layers)
        if self.experts is not None:
            check_experts(self)
            return
        if self.width is None or self.keep is not None or self.share is not None:
            check_one_given(
                "FFNPruning", width=self.width, keep=self.keep, expert_width=self.expert_width, share=self.share
            )
        shares = {} if self.share == AUTO else {"share": check_share}
        check_fields(self, **shares, width=check_positive, expert_width=check_positive)
        if self.expert_width is not None:
            _check_multiple("expert_width", self.expert_width)
        if self.keep is None:
            return
        if self.layers is not None:
            raise ValueError("FFNPruning(keep=..., layers=...): keep names the FFNs already; leave layers out")
        keep: Any = self.keep
        of_experts = (
            {block: kept for block, kept in keep.items() if _of_experts(kept)} if isinstance(keep, dict) else {}
        )
        for block, kept in of_experts.items():
            if not all(map(is_ascending, kept)) or len(set(map(len, kept))) > 1:
                raise ValueError(
                    f"FFNPruning(keep={{{block!r}: ...}}): must be a list of different neurons, in ascending order, for each "
                    "expert, and as many for each"
                )
            _check_multiple(f"keep={{{block!r}: ...}}", len(kept[0]))
        if not of_experts or keep.keys() != of_experts.keys():
            others = {block: kept for block, kept in keep.items() if block not in of_experts} if of_experts else keep
            check_numbers_by_name(others, "FFNPruning", "keep", items="neurons", example="{'encoder.0.ffn': [0, 3, 4]}")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Selection(self.origins, self.decided, self.must_decide),)

    @classmethod
    def advice(cls, architecture: Architecture, config: Any) -> str | None:
        if not architecture.experts(config):
            return None
        if not architecture.ffns(config):
            return "give expert_width or keep: its FFNs are experts"
        return "width is for its FFNs, expert_width for its experts"

    def check(self, architecture: Architecture, config: Any) -> None:
        if self.experts is not None:
            experts_left(self.experts, architecture, config)
            return
        architecture.check_layers(self.layers, config)
        blocks = surgery.neurons_of(architecture, config)
        for block, kept in (self.keep or {}).items():
            if block not in blocks:
                raise ValueError(
                    f"FFNPruning: no FFN {block!r} in {architecture.model_type}; choose from {list(blocks)}"
                )
            if _of_experts(kept) != (block in architecture.experts(config)):
                wanted = "a list for each expert" if block in architecture.experts(config) else "a list of neurons"
                raise ValueError(f"FFNPruning(keep={{{block!r}: ...}}): must be {wanted}")
        linears = in_layers(architecture.ffns(config), self.layers)
        self._check_share(architecture, config)
        experts = in_layers(architecture.experts(config), self.layers)
        if self.width is not None and experts and not linears:
            raise wrong(self, f"the FFNs of this {architecture.model_type} are experts: give expert_width", "width")
        if self.expert_width is not None and not experts:
            raise ValueError(
                f"FFNPruning(expert_width={self.expert_width}): {architecture.model_type} has no experts with matrices in one "
                "parameter, in these layers: give width"
            )
        check_any_selected(self._blocks(architecture, config), self.layers, "FFNPruning")

    def _check_share(self, architecture: Architecture, config: Any) -> None:
        if self.share is not None and not in_layers(architecture.ffns(config), self.layers):
            missing = f"this {architecture.model_type} has no FFNs of plain linears in these layers; experts take expert_width"
            raise wrong(self, missing, "share")

    @property
    def facts(self) -> Facts:
        return replace(super().facts, selects=self._names_all)

    @property
    def _names_all(self) -> bool:
        """Whether the setting names what stays."""
        return self.keep is not None or isinstance(self.experts, dict)

    def config_changes(self, architecture: Architecture, config: Any) -> dict[str, Any]:
        if self.experts is None:
            return {}
        kept = experts_left(self.experts, architecture, config)
        return {surgery.mixtures_of(architecture, config).field: len(next(iter(kept.values())))}

    def _blocks(self, architecture: Architecture, config: Any) -> dict[str, tuple[surgery.Neurons, int]]:
        """FFN -> its neurons and how many of them stay, for each FFN that the method changes."""
        blocks = surgery.neurons_of(architecture, config)
        if self.keep is not None:
            return {block: (blocks[block], _count(kept)) for block, kept in self.keep.items()}
        if self.share is not None:
            raise ValueError(
                f"FFNPruning(share={self.share}): a calibration chooses what each FFN keeps: give make_variant "
                "calibration=, or give width"
            )
        experts = architecture.experts(config)
        counts = {
            block: self.expert_width if block in experts else self.width for block in in_layers(blocks, self.layers)
        }
        return {block: (blocks[block], count) for block, count in counts.items() if count is not None}

    def restructure(self, model: Model, architecture: Architecture) -> None:
        if self.experts is not None:
            kept = experts_left(self.experts, architecture, model.config)
            if len(next(iter(kept.values()))) == surgery.mixtures_of(architecture, model.config).count:
                warnings.warn(f"{self} keeps all experts: nothing is removed", stacklevel=2)
            surgery.keep_experts(model, architecture, kept, self.name)
            return
        removed = 0
        for block, (neurons, count) in self._blocks(architecture, model.config).items():
            neurons.check_selectable(model, self.name)
            width = neurons.count(model)
            removed += width - count
            if self.keep is None and count > width:
                field = "width" if count == self.width else "expert_width"
                raise ValueError(f"FFNPruning({field}={count}) of {block!r}: must be in 1..{width}")
            if self.keep is not None:
                self._check_kept(block, self.keep[block], neurons.first(model, width))
            neurons.resize(model, count)
        if not removed:
            warnings.warn(f"{self} keeps all neurons of its FFNs: nothing is removed", stacklevel=2)

    def _check_kept(self, block: str, kept: Any, all_neurons: Any) -> None:
        """Raise ValueError for neurons or a number of experts that the FFN does not have."""
        if _of_experts(kept) and len(kept) != len(all_neurons):
            raise ValueError(f"FFNPruning: {len(kept)} lists for {block!r}: it has {len(all_neurons)} experts")
        lists, width = (kept, len(all_neurons[0])) if _of_experts(kept) else ([kept], len(all_neurons))
        if (last := max(numbers[-1] for numbers in lists)) >= width:
            raise ValueError(f"FFNPruning: neuron {last} of {block!r}: must be in 0..{width - 1}")

    def convert(self, old: Any, new: Model, statistics: Statistics | None = None) -> None:
        if self.experts is not None:
            architecture = architecture_for(old)
            surgery.take_experts(new, old, architecture, experts_left(self.experts, architecture, old.config))
            return
        blocks = self._blocks(new.architecture, new.config)
        outputs = {} if statistics is None else _outputs(old, blocks)
        for block, (neurons, count) in blocks.items():
            if block not in outputs.values():
                neurons.take(new, old, self._plain(old, block, neurons, count))
        if statistics is None:
            return
        before = {output: blocks[block][0].modules for output, block in outputs.items()}
        for moments in statistics.walk(list(before), before, fit=True):
            for block in dict.fromkeys(outputs[name] for name in moments):
                neurons, count = blocks[block]
                of_block = {name: moments[name] for name in neurons.outputs(old)}
                self._fit(old, new, neurons, self._plain(old, block, neurons, count), of_block, statistics)

    def _plain(self, old: Any, block: str, neurons: surgery.Neurons, count: int) -> Any:
        """The neurons of an FFN that stay without a calibration."""
        return neurons.largest(old, count) if self.keep is None else self.keep[block]

    def _fit(
        self,
        old: Any,
        new: Model,
        neurons: surgery.Neurons,
        plain: Any,
        moments: Mapping[str, Moments | None],
        statistics: Statistics,
    ) -> None:
        """Take the neurons of an FFN that lose least, unless `keep` names them, and refit each linear that reads them."""
        lists, kept = plain if _of_experts(plain) else [plain], []
        for (name, moment), without in zip(moments.items(), lists, strict=True):
            if moment is not None and self.keep is None:
                linear = surgery.linear_at(old, name)
                without = eliminate(surgery.effective_weight(linear), linear.bias, moment).kept(len(without))
            kept.append(without)
        neurons.take(new, old, kept if lists is plain else kept[0])
        for (name, moment), chosen, without in zip(moments.items(), kept, lists, strict=True):
            if moment is not None:
                surgery.refit_inputs(old, new, name, moment, chosen, without, statistics.record)

    def origins(self, model: Model, architecture: Architecture) -> dict[str, Origin]:
        if self.experts is not None:
            return surgery.experts_origins(model, architecture, experts_left(self.experts, architecture, model.config))
        origins: dict[str, Origin] = {}
        for block, (neurons, count) in self._blocks(architecture, model.config).items():
            neurons.check_selectable(model, self.name)
            origins |= neurons.origins(model, neurons.first(model, count) if self.keep is None else self.keep[block])
        return origins

    def decided(self, old: Any, architecture: Architecture, statistics: Statistics | None) -> "FFNPruning":
        if self._names_all:
            return self
        if isinstance(self.experts, int):
            return FFNPruning(experts=best_experts(self, self.experts, old, architecture, statistics))
        if self.share is not None and statistics is not None:
            curves = self._curves(old, architecture, statistics)  # the neurons of all FFNs compete
            removals = round((1 - self.share) * sum(len(part.losses) - 1 for part in curves.values()))  # type: ignore[operator]
            return FFNPruning(keep={**allocated(curves, removals)})
        blocks = self._blocks(architecture, old.config)
        return FFNPruning(keep={block: neurons.largest(old, count) for block, (neurons, count) in blocks.items()})

    def must_decide(self, architecture: Architecture, config: Any) -> bool:
        return self.share is not None or isinstance(self.experts, int)

    def _curves(self, old: Any, architecture: Architecture, statistics: Statistics) -> dict[str, Competing]:
        """FFN -> its neurons, by what the model sees."""
        self._check_share(architecture, old.config)
        blocks = in_layers(surgery.neurons_of(architecture, old.config), self.layers)
        linears = architecture.ffns(old.config)
        outputs = _outputs(old, {block: (neurons, 0) for block, neurons in blocks.items() if block in linears})
        orders: dict[str, Elimination] = {}
        for moments in statistics.walk(list(outputs), curvature=True):
            for name, moment in moments.items():
                if moment is not None:
                    linear = old.base_model.get_submodule(name)
                    orders[outputs[name]] = eliminate(surgery.effective_weight(linear), linear.bias, moment)
        step = neurons_at_once(len(order.order) for order in orders.values())
        return {
            block: Competing(order.losses.tolist(), len(order.order) - step, step, 0.0, order.kept)
            for block, order in orders.items()
        }

    def competing(self, old: Any, architecture: Architecture, statistics: Statistics) -> dict[str, Competing]:
        """As `_curves`, for `share="auto"`."""
        curves, ffns = self._curves(old, architecture, statistics).items(), architecture.ffns(old.config)
        return {block: replace(part, size=size_of(old, ffns[block], len(part.losses) - 1)) for block, part in curves}

    def keeping(self, kept: dict[str, surgery.Kept], old: Any, architecture: Architecture) -> "FFNPruning":
        """The method that names the neurons that stay, by FFN."""
        return FFNPruning(keep={**kept})

    def merge(self, model: Model, architecture: Architecture) -> None:
        if self.experts is not None:
            return  # the config holds their number
        widths: dict[str, set[int]] = {}  # config field -> the widths of the FFNs whose size it holds
        for neurons in surgery.neurons_of(architecture, model.config).values():
            if neurons.field is not None:
                widths.setdefault(neurons.field, set()).add(neurons.count(model))
        for neurons, _ in self._blocks(architecture, model.config).values():
            width = neurons.native if neurons.field is None else max(widths[neurons.field])
            if width is not None and width > neurons.count(model):
                neurons.pad(model, width)
        set_fields(model.config, {field: max(sizes) for field, sizes in widths.items()})


def _outputs(model: Any, blocks: Mapping[str, tuple[surgery.Neurons, int]]) -> dict[str, str]:
    """Linear that reads neurons -> their FFN."""
    return {output: block for block, (neurons, _) in blocks.items() for output in neurons.outputs(model)}


def neurons_at_once(widths: Iterable[int]) -> int:
    """How many neurons of an FFN go at once, where FFNs of these widths keep different numbers of them."""
    return _MULTIPLE if min(widths) >= _WIDE else 1


def _of_experts(kept: Any) -> bool:
    """Whether `kept` has a list for each expert."""
    return isinstance(kept, list) and bool(kept) and isinstance(kept[0], list)


def _count(kept: Any) -> int:
    """How many neurons stay, of each expert if there are several."""
    return len(kept[0] if _of_experts(kept) else kept)


def _check_multiple(field: str, count: int) -> None:
    if not count or count % _MULTIPLE:
        raise ValueError(
            f"FFNPruning({field}): {count} neurons of each expert: must be a multiple of {_MULTIPLE}, because the grouped "
            "products of experts need rows of a multiple of 16 bytes"
        )
