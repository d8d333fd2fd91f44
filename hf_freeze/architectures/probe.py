"""A small model of the same config class, with noise for weights: what probes and proofs run on."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, initialization

from hf_freeze.architectures.examples import probe_inputs
from hf_freeze.architectures.roles import is_norm
from hf_freeze.architectures.tasks import AUTO_CLASSES

_STD = 0.15  # of matrices: large enough that every layer matters, small enough that nothing overflows


def on_cpu() -> AbstractContextManager[Any]:
    """Inside, tensors are made on the CPU, also where the caller builds on meta: proofs compute values.

    A device as a context intercepts every call of torch, which takes longer than the forward of a small model.
    """
    return nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu")


class Probe:
    """A model of `task` made from a small `config`, in eval mode, and inputs for it. Its ties are tied if it has a task."""

    def __init__(self, config: Any, task: str | None = None) -> None:
        self.config, self.task = config, task
        auto = AutoModel if task is None else AUTO_CLASSES[task]
        with torch.random.fork_rng(devices=[]), initialization.no_init_weights():
            torch.manual_seed(0)
            self.model: Any = auto.from_config(
                copy.deepcopy(config),  # some classes change it
                attn_implementation="eager",
            ).eval()
        if task is not None:
            tie(self.model)
        fill_with_noise(self.model)
        whole = probe_inputs(config, self.model)
        if task == "multiple-choice":  # (examples, choices, tokens)
            whole = {name: value[:, None] for name, value in whole.items()}
        text = {name: value for name, value in whole.items() if name != "pixel_values"}
        try:
            self.inputs = text if "input_ids" in whole else whole
            self.outputs = self.run()
        except Exception:  # whatever the native forward raises without an image
            if self.inputs.keys() == whole.keys():
                raise
            self.inputs = whole
            self.outputs = self.run()

    @torch.no_grad()
    def run(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The first output, fp32."""
        with torch.random.fork_rng(devices=[]):
            return _first_tensor(self.model(**(self.inputs | inputs))).float()

    def watch(self, modules: Mapping[str, nn.Module], see: Callable[[str, tuple[Any, ...], Any], None]) -> None:
        """Run once, and have `see(name, positional inputs, outputs)` called after each of the modules."""
        with ExitStack() as handles:
            for name, module in modules.items():
                hook = module.register_forward_hook(lambda _, args, outputs, name=name: see(name, args, outputs))
                handles.callback(hook.remove)
            self.run()

    def differs(self, **inputs: torch.Tensor) -> float:
        """The largest difference to the outputs at construction, relative to their size."""
        return difference(self.run(**inputs), self.outputs)

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Inside, weights may be changed in place; afterwards they are as before."""
        saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.load_state_dict(saved)


def tie(model: Any) -> None:
    """Tie weights as the native class says. Its own function does nothing while `from_pretrained` builds another model."""
    for target, source in model.all_tied_weights_keys.items():
        owner, _, name = target.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(source))


def difference(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the size of `expected`; infinite for another shape."""
    if outputs.shape != expected.shape:
        return float("inf")
    return float((outputs - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


@torch.no_grad()
def fill_with_noise(model: nn.Module) -> None:
    """Fill all parameters with noise, except that norms get the scale 1 and no shift."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        norm = is_norm(module)
        for name, parameter in module.named_parameters(recurse=False):
            if norm:
                parameter.fill_(1.0 if name != "bias" else 0.0)
            elif parameter.is_floating_point():
                std = _STD if parameter.ndim > 1 else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        if norm and "weight" in module._parameters and adds_one(module):  # Falcon Mamba has norms with a fixed scale
            module.get_parameter("weight").zero_()


@torch.no_grad()
def adds_one(norm: Any) -> bool:
    """Whether a norm keeps its scale less 1, as Gemma's do: then it is not zero for a weight of zero."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.ndim != 1:
        return False
    before = weight.clone()
    weight.zero_()
    try:
        with torch.random.fork_rng(devices=[]):
            shifted = getattr(norm, "bias", None)
            outputs = norm(torch.randn(2, weight.numel(), generator=torch.Generator().manual_seed(3)))
            return shifted is None and bool(outputs.abs().max() > 0)
    except Exception:  # a norm that takes more than what it normalises
        return False
    finally:
        weight.copy_(before)


def _first_tensor(outputs: Any) -> torch.Tensor:
    values = outputs if isinstance(outputs, tuple) else list(outputs.values())
    return next(value for value in values if torch.is_tensor(value) and value.is_floating_point())
