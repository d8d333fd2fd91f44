"""Leave layers out at random in training (Fan et al., 2020, https://arxiv.org/abs/1909.11556)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_freeze import surgery
from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.layer_forward import Skipped
from hf_freeze.methods._checks import check_seed, check_share
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.parts import Part, Schedule
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import draws


@register_method("layer_drop", example={"p": 0.5, "seed": 8}, exact=True)
@dataclass(frozen=True, kw_only=True)
class LayerDrop(Method):
    """In each training step, skip every layer of `stacks` (None: all) with probability `p`. In eval mode all layers run, and
    nothing is rescaled. A model trained this way can be used at smaller depths without further training:
    `make_variant(model, [analysis.extract_depth(model, {"encoder": 3})])`. p = 0.2 regularises; 0.5 is for models cut to half
    of their layers or fewer. Lower the ordinary dropout by about 0.1. The authors report that LayerDrop in fine-tuning only does
    not work well.

    The draws are a function of `seed` and the step. All processes, accumulated batches and a resumed run get equal draws, so
    training needs `VariantCallback` or `model.advance`. DistributedDataParallel needs `find_unused_parameters=True`. The method
    works on all architectures. It refuses the `encoder_layerdrop` and `decoder_layerdrop` of some native configs, which draw
    separately in each process.

    Raises ValueError for p outside [0, 1), an unknown stack, a second LayerDrop, and a native LayerDrop.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"layers"})
    repeatable: ClassVar[bool] = False
    p: float = 0.2
    stacks: list[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_share(self.p, "LayerDrop", "p", below_one=True)
        stacks = self.stacks
        fits = stacks is None or (isinstance(stacks, list | tuple) and all(isinstance(name, str) for name in stacks))
        if not fits or (stacks is not None and len(set(stacks)) != max(len(stacks), 1)):
            raise ValueError(
                f"LayerDrop(stacks={stacks!r}): must be None or a list of different stacks such as ['encoder']"
            )
        check_seed(self.seed, "LayerDrop")

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers({stack: [] for stack in self.stacks or ()}, config)
        for field in ("encoder_layerdrop", "decoder_layerdrop"):
            if getattr(config, field, 0):
                raise ValueError(
                    f"LayerDrop: the backbone skips layers already, by {field}={getattr(config, field)}; set that to 0"
                )

    def restructure(self, model: Model, architecture: Architecture) -> None:
        for stack in self._stacks(architecture):
            for layer in surgery.layers_of(model, architecture, stack):
                Skipped(layer, returns_tuple=architecture.stacks[stack].returns_tuple)

    def _stacks(self, architecture: Architecture) -> list[str]:
        return [stack for stack in architecture.stacks if self.stacks is None or stack in self.stacks]

    def affected_layers(self, model: Any, architecture: Architecture) -> list[Any]:
        """The layers of `stacks`, in order: those that a step may skip."""
        return [
            layer for stack in self._stacks(architecture) for layer in surgery.layers_of(model, architecture, stack)
        ]

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_Draws(self),) if self.p > 0 else ()


class _Draws(Schedule):
    """Draws the layers that a step skips."""

    skips = True

    def __init__(self, method: LayerDrop) -> None:
        self.method = method

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        return {"share of layers left out": self.method.p}

    def advance(self, model: Model, architecture: Architecture, step: int, total_steps: int) -> None:
        layers = self.method.affected_layers(model, architecture)
        for layer, draw in zip(layers, draws(self.method.seed, f"layer_drop/{step}", len(layers)), strict=True):
            Skipped.of(layer).active = draw < self.method.p

    def rewind(self, model: Model, architecture: Architecture) -> None:
        for layer in self.method.affected_layers(model, architecture):
            Skipped.of(layer).active = False
