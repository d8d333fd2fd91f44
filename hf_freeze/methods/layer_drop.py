"""Leave layers, or parts of them, out at random in training (Fan et al., 2020, https://arxiv.org/abs/1909.11556)."""

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.layer_forward import Skipped
from hf_freeze.layers.learnt_skip import LearntSkip, draw, drop_rates, drop_scores
from hf_freeze.layers.thinned import Thinned
from hf_freeze.methods.base import Facts, Method, Model
from hf_freeze.methods.checks import check_bool, check_fields, check_positive, check_share, wrong
from hf_freeze.methods.parts import Kept, Part, Schedule
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import draws
from hf_freeze.surgery.sublayers import ATTENTION, FFN, check_sublayers, head_count, is_part_of, kinds_of, last_linears

LAYERS, HEADS, NEURONS = "layers", "heads", "neurons"


@register_method(
    "layer_drop",
    example={"p": 0.5, "seed": 8},
    modes={"learnt": {"p": 0.3, "learned": True, "seed": 10}},
    facts=Facts(needs={"layers"}, exact=True, repeatable=False),
)
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

    With `learned`, each layer has a rate of its own, and `p` is their mean in each stack ("data driven pruning" in the paper).
    `finalize()` puts them into `rates`, and drops what they were computed from; from then on they stay as they are.
    `analysis.select_layers(analysis.keep_rates(model), {"encoder": 3})` keeps the layers that are left out least. Other `rates`,
    such as `{"encoder": [0.0, 0.1, 0.2, 0.3]}`, a number for each layer, take the place of `p` for whole layers.

    The paper learns a softmax of a nonlinear function of each layer's activation, and leaves open which one, and how a draw has a
    gradient. Here a trained score of each layer gives its rate, 1 - sigmoid(score + c), where one c for the stack holds the mean
    at `p` in every step. A score does not depend on the input, as the choice of layers must not; the sigmoid ranks layers as a
    softmax does, and keeps each rate below 1. The gradient estimates the loss with the layer less that without it, to second
    order (`layers.learnt_skip.LearntSkip`); for this a skipped layer runs as well, without gradients of its own. Scores need a
    higher learning rate than weights (`training.parameter_groups(model, {"gates": 0.02}, lr=...)`) and no weight decay, which
    pulls all rates to `p`. FSDP cannot train them.

    Whole layers work on all architectures, smaller units where heads and neurons are proved. The method refuses the
    `encoder_layerdrop` and `decoder_layerdrop` of some native configs, which draw separately in each process.

    Raises ValueError for p outside [0, 1), an unknown stack or unit, a unit that the layers lack (FFNs of experts count as
    lacking), "attention" beside one of its kinds, `learned` without a share of layers, rates that are not one for each layer of
    `stacks`, a second LayerDrop, and a native LayerDrop.
    """

    p: float | dict[str, float] = 0.2
    stacks: list[str] | None = None
    groups: int = 8
    seed: int = 0
    learned: bool = False
    rates: dict[str, list[float]] | None = None

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
        check_fields(self, groups=check_positive, learned=check_bool)
        if self.learned and not self.probabilities.get(LAYERS):
            raise ValueError(
                f"LayerDrop(p={self.p!r}, learned=True): give 'layers' a share above 0, the mean of their rates"
            )
        if self.rates is not None:
            self._check_rates(self.rates)

    def _check_rates(self, rates: Any) -> None:
        if self.learned or LAYERS not in self.probabilities:
            raise ValueError(
                f"LayerDrop(p={self.p!r}, learned={self.learned}, rates={rates!r}): rates are those of 'layers', "
                "learnt or given; leave one of them out"
            )
        if not isinstance(rates, dict) or not rates or not all(isinstance(of, list) and of for of in rates.values()):
            raise ValueError(f"LayerDrop(rates={rates!r}): must be a dict such as {{'encoder': [0.0, 0.1]}}")
        for stack, of in rates.items():
            for number, rate in enumerate(of):
                check_share(rate, "LayerDrop", f"rates[{stack!r}][{number}]")

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
        if self.rates is not None:
            depths = architecture.depths(config)
            expected = {stack: depths[stack] for stack in self.chosen_stacks(architecture)}
            if (given := {stack: len(of) for stack, of in self.rates.items()}) != expected:
                raise ValueError(
                    f"LayerDrop(rates=...): {given} numbers by stack; must be {expected}, one for each layer"
                )

    def _check_units(self, architecture: Architecture, config: Any) -> None:
        stacks, units = self.chosen_stacks(architecture), self.probabilities
        kinds = kinds_of(architecture, config, stacks)
        choices = [LAYERS, ATTENTION, *kinds, FFN, HEADS, NEURONS]
        for unit in units:
            if unit not in choices:
                raise wrong(self, f"no unit {unit!r} in {architecture.model_type}; choose from {choices}", "p")
            if unit in kinds and ATTENTION in units:
                raise wrong(self, f"'attention' and {unit!r} name the same; leave one of them out", "p")
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
                    skip = LearntSkip if self.learned else Skipped
                    skip(layer, returns_tuple=architecture.stacks[stack].returns_tuple)

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
        return (_Draws(self),) if any(self.probabilities.values()) or self.rates is not None else ()

    @property
    def facts(self) -> Facts:
        named = {"layers"} if self.learned or self.rates is not None else frozenset()
        return replace(
            super().facts, refers_to=named, finalizable=self.learned, holds={"scores"} if self.learned else frozenset()
        )

    def renumbered(self, architecture: Architecture, kept: Kept) -> "LayerDrop":
        if self.rates is None:
            return self
        of_kept = {
            stack: [of[number] for number in kept.get(stack, range(len(of)))] for stack, of in self.rates.items()
        }
        return replace(self, rates=of_kept)

    def learnt_rates(self, model: Any, architecture: Architecture) -> dict[str, list[float]]:
        """Stack -> the probability of each of its layers to be left out, by their scores or as `finalize()` has fixed it."""
        if self.rates is not None:
            return self.rates
        stacks = {stack: surgery.layers_of(model, architecture, stack) for stack in self.chosen_stacks(architecture)}
        return {stack: drop_rates(layers, self.probabilities[LAYERS]) for stack, layers in stacks.items()}

    def finalize(self, model: Model, architecture: Architecture) -> "LayerDrop":
        rates = self.learnt_rates(model, architecture)
        self.merge(model, architecture)
        return replace(self, learned=False, rates=rates)

    def merge(self, model: Model, architecture: Architecture) -> None:
        if self.learned:
            drop_scores(self.affected_layers(model, architecture))


class _Draws(Schedule):
    """Draws what a step leaves out."""

    skips = True

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        shares = self.method.probabilities
        if self.method.rates is not None:
            shares = shares | {LAYERS: fmean(rate for of in self.method.rates.values() for rate in of)}
        return {f"share of {unit} left out": share for unit, share in shares.items()}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        units = self.method.probabilities
        if LAYERS in units:
            count = len(self.method.affected_layers(model, architecture))
            self._skip(model, architecture, self._draws(LAYERS, step, count))
        if units.keys() - {LAYERS}:
            self._thin(model, architecture, step)

    def _skip(self, model: Model, architecture: Architecture, drawn: list[float]) -> None:
        """Draw whole layers."""
        p, start = self.method.probabilities[LAYERS], 0
        for stack in self.method.chosen_stacks(architecture):
            layers = surgery.layers_of(model, architecture, stack)
            own, start = drawn[start : start + len(layers)], start + len(layers)
            if self.method.learned:
                draw(layers, p, own)
                continue
            rates = [p] * len(layers) if self.method.rates is None else self.method.rates[stack]
            for layer, number, rate in zip(layers, own, rates, strict=True):
                Skipped.of(layer).active = number < rate

    def _draws(self, unit: str, step: int, count: int) -> list[float]:
        """A number in 0..1 for each of `count` units: in this step, those below their probability are left out."""
        name = f"layer_drop/{step}" if unit == LAYERS else f"layer_drop/{unit}/{step}"
        return draws(self.method.seed, name, count)

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
            drawn = iter(self._draws(unit, step, sum(counts)))
            for (_, layer, _, linear), count in zip(places, counts, strict=True):
                out = [next(drawn) < units[unit] for _ in range(count)]
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
