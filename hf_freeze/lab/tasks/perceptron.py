"""A multilayer perceptron that the methods of transformers work on: the network of published tables on MNIST.

It is no transformers model, so it lies in no registry. It gives the methods what they ask a variant for: `base_model`,
`config`, and an `Architecture` with one stack, `mlp`, whose layers are one linear each.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from hf_freeze.architectures.base import Architecture, Stack
from hf_freeze.methods.base import Method
from hf_freeze.methods.linear import LinearMethod
from hf_freeze.methods.parts import Objective, Schedule, parts_of
from hf_freeze.methods.registry import METHODS, method_from_dict, method_to_dict

ARCHITECTURE = Architecture(
    model_type="perceptron",
    tasks=("image-classification",),
    stacks={
        "mlp": Stack(layers="layers.{}", depth="depth", attentions={}, ffn=("linear",), width="sizes", activation=None)
    },
    embeddings=(),
    token_tables={},
    norms=(),
    sizes={},
    tiny={"sizes": [12, 8, 3]},
    tiny_inputs=lambda task: {"images": torch.zeros(2, 12)},
)


@dataclass
class PerceptronConfig:
    """`sizes`: inputs, hidden units, classes. `methods`: those applied, in order, as plain data."""

    sizes: list[int]
    methods: list[dict[str, Any]] = field(default_factory=list)
    model_type: str = ARCHITECTURE.model_type

    def __post_init__(self) -> None:
        whole = isinstance(self.sizes, list) and all(type(size) is int and size > 0 for size in self.sizes)
        if not whole or len(self.sizes) < 2:
            raise ValueError(f"sizes={self.sizes!r}: must be a list of positive numbers such as [784, 256, 10]")

    @property
    def depth(self) -> int:
        return len(self.sizes) - 1


class _Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs) to (B, outputs)."""
        y = self.linear(x)
        return y if self.last else functional.relu(y)


class Perceptron(nn.Module):
    """Linear layers with ReLU between them, `methods` applied to them, with fresh weights.

    Raises ValueError for sizes that are none, and for a method that does not fit or is not one of single linears.
    """

    base_model_prefix = ""
    architecture = ARCHITECTURE

    def __init__(self, config: PerceptronConfig) -> None:
        super().__init__()
        self.config = config
        self.methods = [method_from_dict(data) for data in config.methods]
        for method in self.methods:
            if not isinstance(method, LinearMethod):
                choices = sorted(name for name, known in METHODS.items() if issubclass(known, LinearMethod))
                raise ValueError(f"method {method.name!r} does not work on a perceptron; choose from {choices}")
            method.check(ARCHITECTURE, config)
        last = config.depth - 1
        self.layers = nn.ModuleList(
            _Layer(config.sizes[i], config.sizes[i + 1], last=i == last) for i in range(config.depth)
        )
        for method in self.methods:
            method.restructure(self._hooked, ARCHITECTURE)

    @property
    def base_model(self) -> "Perceptron":
        return self

    @property
    def _hooked(self) -> Any:
        """What the hooks of methods take for a variant."""
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, inputs) to logits (B, classes)."""
        for layer in self.layers:
            images = layer(images)
        return images

    # -- what methods do in training: as a variant and `make_variant` do it ---------------------------------------------------

    @property
    def scheduled(self) -> bool:
        return any(True for _ in parts_of(self.methods, Schedule))

    def advance(self, step: int, total_steps: int) -> None:
        """Say before an optimiser step that `step` of `total_steps` are done."""
        for _, schedule in parts_of(self.methods, Schedule):
            schedule.advance(self._hooked, ARCHITECTURE, step, total_steps)

    def auxiliary_loss(self) -> torch.Tensor | None:
        """What the methods add to the mean loss of a batch, or None."""
        losses = [part.loss(self._hooked, ARCHITECTURE) for _, part in parts_of(self.methods, Objective)]
        terms = [loss for loss in losses if loss is not None]
        return torch.stack(terms).sum() if terms else None

    def finalize(self) -> None:
        """End the training: what only it needs is dropped, and the config says what is left."""
        self.methods = [
            method.finalize(self._hooked, ARCHITECTURE) if method.facts.finalizable else method
            for method in self.methods
        ]
        self.config.methods = [method_to_dict(method) for method in self.methods]

    # -- files --------------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write `model.safetensors` and `config.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        config = {"model_type": self.config.model_type, "sizes": self.config.sizes, "methods": self.config.methods}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Perceptron":
        """What `save` wrote, ready for use or for further training."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with _no_trace():
            model = cls(PerceptronConfig(sizes=config["sizes"], methods=config["methods"]))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.eval()


@torch.no_grad()
def make_perceptron(backbone: Perceptron | list[int], methods: Sequence[Method]) -> Perceptron:
    """Apply `methods`, in order, to a trained perceptron, whose weights they convert, or to sizes, for fresh weights."""
    if isinstance(backbone, Perceptron):
        model = backbone
        for method in methods:
            model = _converted(model, method)
            method.prepare(model._hooked, ARCHITECTURE)
        return model
    model = Perceptron(PerceptronConfig(backbone, [method_to_dict(method) for method in methods]))
    for method in methods:
        method.prepare(model._hooked, ARCHITECTURE)
    return model


def _converted(old: Perceptron, method: Method) -> Perceptron:
    with _no_trace():
        new = Perceptron(PerceptronConfig(old.config.sizes, [*old.config.methods, method_to_dict(method)]))
    shapes = {name: tensor.shape for name, tensor in new.state_dict().items()}
    state = {name: tensor for name, tensor in old.state_dict().items() if shapes.get(name) == tensor.shape}
    new.load_state_dict(state, strict=False)
    method.convert(old._hooked, new._hooked)
    return new


@contextmanager
def _no_trace() -> Iterator[None]:
    """Weights that are replaced next are drawn without moving the global random state."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
