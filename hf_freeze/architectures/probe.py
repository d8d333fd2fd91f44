"""A small model of the same config class, with noise for weights: what probes and proofs run on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, initialization

from hf_freeze.architectures.examples import probe_inputs
from hf_freeze.architectures.roles import is_norm

_STD = 0.15  # of matrices: large enough that every layer matters, small enough that nothing overflows


class Probe:
    """A base model made from a small `config`, in eval mode, and inputs for it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        with torch.random.fork_rng(devices=[]), initialization.no_init_weights():
            torch.manual_seed(0)
            self.model: Any = AutoModel.from_config(config, attn_implementation="eager").eval()
        fill_with_noise(self.model)
        whole = probe_inputs(config, self.model)
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

    def differs(self, outputs: torch.Tensor | None = None, **inputs: torch.Tensor) -> float:
        """The largest difference to the outputs at construction, relative to their size."""
        outputs = self.run(**inputs) if outputs is None else outputs
        if outputs.shape != self.outputs.shape:
            return float("inf")
        return float((outputs - self.outputs).abs().max() / self.outputs.abs().max().clamp(min=1e-6))

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Inside, weights may be changed in place; afterwards they are as before."""
        saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.load_state_dict(saved)


@torch.no_grad()
def fill_with_noise(model: nn.Module) -> None:
    """Fill all parameters with noise, except that the weights of norms become 1 and their biases 0."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        norm = is_norm(module)
        for name, parameter in module.named_parameters(recurse=False):
            if norm:
                # Some families store the scale minus 1.
                zero = name == "bias" or "1.0 +" in _source(type(module)) or "1 +" in _source(type(module))
                parameter.fill_(0.0 if zero else 1.0)
            elif parameter.is_floating_point():
                std = _STD if parameter.ndim > 1 else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _source(module_class: type) -> str:
    import inspect

    try:
        return inspect.getsource(module_class)
    except (OSError, TypeError):
        return ""


def _first_tensor(outputs: Any) -> torch.Tensor:
    values = outputs if isinstance(outputs, tuple) else list(outputs.values())
    return next(value for value in values if torch.is_tensor(value) and value.is_floating_point())
