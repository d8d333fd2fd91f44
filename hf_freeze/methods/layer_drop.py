"""Leave layers, or parts of them, out at random in training (Fan et al., 2020, https://arxiv.org/abs/1909.11556)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.layer_forward import Skipped
from hf_freeze.layers.thinned import Thinned
from hf_freeze.methods._checks import check_positive, check_seed, check_share
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.parts import Part, Schedule
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import draws
from hf_freeze.surgery.sublayers import ATTENTION, FFN, check_sublayers, head_count, is_part_of, kinds_of, last_linears

LAYERS, HEADS, NEURONS = "layers", "heads", "neurons"


@register_method("layer_drop", example={"p": 0.5, "seed": 8}, exact=True)
@dataclass(frozen=True, kw_only=True)
class LayerDrop(Method):
    """In each training step, skip every layer of `stacks` (None: all) with probability `p`. In eval mode all layers run, and
    nothing is rescaled. A model trained this way can be used at smaller depths without further training:
    `make_variant(model, [analysis.extract_depth(model, {"encoder": 3})])`. p = 0.2 regularises; 0.5 is for models cut to half
    of their layers or fewer. Lower the ordinary dropout by about 0.1. The authors report that LayerDrop in fine-tuning only does
    not work well.

    `p` may be a dict from units to probabilities, such as `{"layers": 0.2, "heads": 0.1}`; a number is that of `"layers"`.

    - `"attention"`, `"ffn"`, or one kind of attention, `"self"` or `"cross"`: each such sublayer adds nothing to the hidden
      states. A norm after the sum still runs. The products are computed all the same, so this saves no time.
    - `"heads"`: each head of each attention.
    - `"neurons"`: each of the `groups` of consecutive neurons into which every FFN is divided.

    The draws are a function of `seed`, the unit and the step. All processes, accumulated batches and a resumed run get equal
    draws, so training needs `VariantCallback` or `model.advance`. DistributedDataParallel needs `find_unused_parameters=True`.
    Whole layers work on all architectures, smaller units where heads and neurons are proved. The method refuses the
    `encoder_layerdrop` and `decoder_layerdrop` of some native configs, which draw separately in each process.

    Raises ValueError for p outside [0, 1), an unknown stack or unit, a unit that the layers lack (FFNs of experts count as
    lacking), "attention" beside one of its kinds, a second LayerDrop, and a native LayerDrop.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"layers"})
    repeatable: ClassVar[bool] = False
    p: float | dict[str, float] = 0.2
    stacks: list[str] | None = None
    groups: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.p == {}:
            raise ValueError("LayerDrop(p={}): must be a share, or a dict such as {'layers': 0.2, 'heads': 0.1}")
        for unit, share in self.p.items() if isinstance(self.p, dict) else [("", self.p)]:
            check_share(share, "LayerDrop", f"p[{unit!r}]" if unit else "p", below_one=True)
        stacks = self.stacks
        fits = stacks is None or (isinstance(stacks, list | tuple) and all(isinstance(name, str) for name in stacks))
        if not fits or (stacks is not None and len(set(stacks)) != max(len(stacks), 1)):
            raise ValueError(
                f"LayerDrop(stacks={stacks!r}): must be None or a list of different stacks such as ['encoder']"
            )
        check_positive(self.groups, "LayerDrop", "groups")
        check_seed(self.seed, "LayerDrop")

    @property
    def probabilities(self) -> dict[str, float]:
        """Unit -> probability, in the order of names, which is that of JSON."""
        return dict(sorted(self.p.items())) if isinstance(self.p, dict) else {LAYERS: self.p}

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers({stack: [] for stack in self.stacks or ()}, config)
        for field in ("encoder_layerdrop", "decoder_layerdrop"):
            if getattr(config, field, 0):
                raise ValueError(
                    f"LayerDrop: the backbone skips layers already, by {field}={getattr(config, field)}; set that to 0"
                )
        self._check_units(architecture, config)

    def _check_units(self, architecture: Architecture, config: Any) -> None:
        stacks, units = self.chosen_stacks(architecture), self.probabilities
        kinds = kinds_of(architecture, config, stacks)
        choices = [LAYERS, ATTENTION, *kinds, FFN, HEADS, NEURONS]
        for unit in units:
            if unit not in choices:
                raise ValueError(
                    f"LayerDrop(p={self.p!r}): no unit {unit!r} in {architecture.model_type}; choose from {choices}"
                )
            if unit in kinds and ATTENTION in units:
                raise ValueError(
                    f"LayerDrop(p={self.p!r}): 'attention' and {unit!r} name the same; leave one of them out"
                )
            if unit != LAYERS:
                sublayer = {HEADS: ATTENTION, NEURONS: FFN}.get(unit, unit)
                check_sublayers(sublayer, architecture, config, stacks, f"LayerDrop(p={self.p!r})")

    def restructure(self, model: Model, architecture: Architecture) -> None:
        units = self.probabilities
        for stack in self.chosen_stacks(architecture):
            for layer in surgery.layers_of(model, architecture, stack):
                if units.keys() - {LAYERS}:
                    Thinned(layer)
                if LAYERS in units:
                    Skipped(layer, returns_tuple=architecture.stacks[stack].returns_tuple)

    def chosen_stacks(self, architecture: Architecture) -> list[str]:
        """The stacks that it acts on, in order."""
        return [stack for stack in architecture.stacks if self.stacks is None or stack in self.stacks]

    def affected_layers(self, model: Any, architecture: Architecture) -> list[Any]:
        """The layers of `stacks`, in order: those that a step may skip."""
        return [
            layer
            for stack in self.chosen_stacks(architecture)
            for layer in surgery.layers_of(model, architecture, stack)
        ]

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_Draws(self),) if any(self.probabilities.values()) else ()


class _Draws(Schedule):
    """Draws what a step leaves out."""

    skips = True

    def __init__(self, method: LayerDrop) -> None:
        self.method = method

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        return {f"share of {unit} left out": p for unit, p in self.method.probabilities.items()}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        layers = self.method.affected_layers(model, architecture)
        units = self.method.probabilities
        if LAYERS in units:
            for layer, out in zip(layers, self._drawn(LAYERS, step, len(layers)), strict=True):
                Skipped.of(layer).active = out
        if units.keys() - {LAYERS}:
            self._thin(model, architecture, step)

    def _drawn(self, unit: str, step: int, count: int) -> list[bool]:
        """Whether each of `count` units is left out in this step."""
        name = f"layer_drop/{step}" if unit == LAYERS else f"layer_drop/{unit}/{step}"
        return [draw < self.method.probabilities[unit] for draw in draws(self.method.seed, name, count)]

    def _thin(self, model: Model, architecture: Architecture, step: int) -> None:
        """Draw the sublayers, heads and neurons. The description is that of now: later methods may have moved linears and removed
        heads."""
        config, units = model.config, self.method.probabilities
        sublayers = [
            (stack, layer, kind, linear)
            for stack in self.method.chosen_stacks(architecture)
            for number, layer in enumerate(surgery.layers_of(model, architecture, stack))
            for kind, linear in last_linears(architecture, config, stack, number).items()
        ]
        silent: dict[Any, set[str]] = {layer: set() for layer in self.method.affected_layers(model, architecture)}
        kept: dict[Any, dict[str, list[bool]]] = {layer: {} for layer in silent}
        for unit in units.keys() - {LAYERS}:
            inside = {HEADS: ATTENTION, NEURONS: FFN}.get(unit)
            places = [place for place in sublayers if is_part_of(place[2], inside or unit)]
            counts = [1] * len(places)
            if unit == HEADS:
                counts = [head_count(layer, architecture, config, stack, kind) for stack, layer, kind, _ in places]
            elif unit == NEURONS:
                counts = [self.method.groups] * len(places)
            drawn = iter(self._drawn(unit, step, sum(counts)))
            for (_, layer, _, linear), count in zip(places, counts, strict=True):
                out = [next(drawn) for _ in range(count)]
                if inside is None and out[0]:
                    silent[layer].add(linear)
                elif inside is not None and count:
                    kept[layer][linear] = [not left for left in out]
        for layer, linears in silent.items():
            layer.thinned.set(linears, kept[layer])

    def rewind(self, model: Model, architecture: Architecture) -> None:
        units = self.method.probabilities
        for layer in self.method.affected_layers(model, architecture):
            if LAYERS in units:
                Skipped.of(layer).active = False
            if units.keys() - {LAYERS}:
                layer.thinned.set(set(), {})
