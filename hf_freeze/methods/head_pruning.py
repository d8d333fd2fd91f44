"""Remove attention heads: rows of the matrices of queries, keys and values, columns of that of the output (Michel et al., 2019,
https://arxiv.org/abs/1905.10650).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture, Attention, check_layers_type
from hf_freeze.methods._checks import check_any_selected, check_one_given, check_share
from hf_freeze.methods._head_settings import check_attentions, check_head, check_heads_type, chosen_attentions
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.parts import Part, Selection
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import Origin


@register_method("head_pruning", example={"share": 0.5}, shrinks=True)
@dataclass(frozen=True, kw_only=True)
class HeadPruning(Method):
    """Remove the heads that `heads` names, such as `{"encoder.0.self": [1, 3]}` (`analysis.select_heads`), as Michel et al.
    (2019, https://arxiv.org/abs/1905.10650) do. Or keep `share` of the heads of each attention, at least one, in `layers` (None:
    all): the heads of the largest magnitude. The magnitude is the product of the norm of a head's value weights and the norm of
    its output weights.

    An attention may lose all its heads: then only the bias of its output remains, and nothing is computed. One that has more
    than its projections, such as norms, keeps one. Heads that share keys and values are removed together. Later methods use the
    new numbers. `merge()` gives a native model whose removed heads are zero.

    After a Freeze that makes an attention random, the config names the heads that `share` removes, and the others keep their
    random values. Of fresh weights, `share` then keeps the first heads.

    Raises ValueError for an unknown attention or head, a share outside 0..1, an incomplete group of heads, all heads of an
    attention that must keep one, and an attention with layers of another method that cannot lose heads: those of LowRank and
    HeadMask can, and of Quantize with int8.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"heads"})
    pads: ClassVar[bool] = True
    by_layer: ClassVar[tuple[str, ...]] = ("heads",)
    heads: dict[str, list[int]] | None = None
    share: float | None = None
    layers: dict[str, list[int]] | None = None

    def __post_init__(self) -> None:
        check_layers_type(self.layers)
        check_one_given("HeadPruning", heads=self.heads, share=self.share)
        if self.share is not None:
            check_share(self.share, "HeadPruning", "share")
            return
        if self.layers is not None:
            raise ValueError("HeadPruning(heads=..., layers=...): heads names the attentions already; leave layers out")
        check_heads_type(self.heads, "HeadPruning")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Selection(self.origins, self.decided, self.must_decide),)

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

    @property
    def selects(self) -> bool:
        return self.heads is not None

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for name, attention in self._with_heads(model, architecture).items():
            heads = surgery.count_heads(model, attention, self.name)
            group = attention.group_size(model.config)
            if self.heads is not None:
                self._check_removed(name, heads, group)
                if len(self.heads[name]) == heads and _has_more_than_linears(model, attention):
                    raise ValueError(
                        f"HeadPruning(heads={{{name!r}: {self.heads[name]!r}}}): no head would be left, and this attention has "
                        "more than its projections, such as a norm or a bias on its scores; keep one"
                    )
            surgery.take_heads(model, attention, self._kept(name, attention, model.config, heads), heads)

    def _kept(self, name: str, attention: Attention, config: Any, heads: int) -> list[int]:
        """The heads that stay, out of `heads`; with `share`, the first ones stand for those of the largest magnitude."""
        if self.heads is None:
            return list(range(self._kept_count(heads, attention.group_size(config))))
        return [head for head in range(heads) if head not in self.heads[name]]

    def _kept_count(self, heads: int, group: int) -> int:
        """The number of heads that `share` keeps of `heads`: whole groups of `group` heads."""
        return max(round(self.share * heads / group), 1) * group  # type: ignore[operator]

    def _check_removed(self, name: str, heads: int, group: int) -> None:
        removed = self.heads[name]  # type: ignore[index]
        check_head(removed[-1], heads, name, "HeadPruning")
        groups = {head // group for head in removed}
        if len(removed) < len(groups) * group:
            whole = [list(range(number * group, (number + 1) * group)) for number in sorted(groups)]
            raise ValueError(
                f"HeadPruning(heads={{{name!r}: {removed!r}}}): heads that share keys and values must go together: {whole}"
            )

    def convert(self, old: Any, new: Model) -> None:
        for name, attention in self._with_heads(old, new.architecture).items():
            heads = surgery.count_heads(old, attention, self.name)
            if self.heads is None:
                kept = self._largest(old, attention, heads)
            else:
                kept = [head for head in range(heads) if head not in self.heads[name]]
            surgery.copy_heads(old, new, attention, kept, heads)
            surgery.release(old, attention.linears)

    def _largest(self, model: Any, attention: Attention, heads: int) -> list[int]:
        group = attention.group_size(model.config)
        score = surgery.head_magnitudes(model, attention, heads).view(-1, group).sum(1)
        groups = score.argsort(descending=True, stable=True)[: self._kept_count(heads, group) // group]
        return [number * group + head for number in groups.sort().values.tolist() for head in range(group)]

    def origins(self, model: Model, architecture: Architecture) -> dict[str, Origin]:
        origins: dict[str, Origin] = {}
        for name, attention in self._with_heads(model, architecture).items():
            heads = surgery.count_heads(model, attention, self.name)
            kept = self._kept(name, attention, model.config, heads)
            origins |= surgery.head_origins(model, attention, kept, heads)
        return origins

    def decided(self, old: Any, architecture: Architecture) -> "HeadPruning":
        if self.heads is not None:
            return self
        removed = {}
        for name, attention in self._with_heads(old, architecture).items():
            heads = surgery.count_heads(old, attention, self.name)
            kept = self._largest(old, attention, heads)
            removed[name] = [head for head in range(heads) if head not in kept]
        removed = {name: heads for name, heads in removed.items() if heads}
        return HeadPruning(heads=removed) if removed else self

    def must_decide(self, architecture: Architecture, config: Any) -> bool:
        """Whether heads differ in more than their weights, so that the config must name them."""
        return any(attention.knows_heads for attention in architecture.attentions(config).values())

    def merge(self, model: Model, architecture: Architecture) -> None:
        for name, attention in self._attentions(architecture, model.config).items():
            heads = attention.head_count(model.config)
            kept = self._kept(name, attention, model.config, heads) if attention.knows_heads else None
            surgery.pad_heads(model, attention, kept)


def _has_more_than_linears(model: Any, attention: Attention) -> bool:
    """Whether an attention has something that would be lost together with its last head."""
    prefix = f"{attention.module}."
    linears = tuple(f"{name.removeprefix(prefix)}." for name in attention.linears)
    parameters = model.base_model.get_submodule(attention.module).named_parameters()
    return attention.knows_heads or any(not name.startswith(linears) for name, _ in parameters)
