"""What the parts of an exported model read when it works on texts, for the scales of their activations in int8."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_freeze.publish.export.exported import CLASSES, ExportedConfig
from hf_freeze.publish.export.folders import Export

TEXTS, _BATCH, _NEW_TOKENS = 64, 8, 16
_MAX_LENGTH = 128  # tokens of a text


class _Recording:
    """A runner that keeps what it reads."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.shapes, self.outputs = runner, runner.shapes, runner.outputs
        self.inputs: list[dict[str, Tensor]] = []

    def __call__(self, inputs: dict[str, Tensor]) -> Mapping[str, Tensor]:
        self.inputs.append({name: inputs[name] for name in self.shapes})
        return self.runner(inputs)


def check(quantization: str, texts: Iterable[str] | None) -> None:
    """Raises ValueError without texts."""
    if texts is None:
        raise ValueError(
            f"{quantization} needs texts to calibrate with, such as those that the model was trained on: --texts FILE"
        )


def check_model(model: Any, tokenizer: Any, quantization: str) -> None:
    """Raises ValueError for a model that does not read text, and one without a tokenizer."""
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{quantization} calibrates with texts, but {type(model).__name__} reads {model.main_input_name}; choose int8"
        )
    if tokenizer is None:
        raise ValueError(f"{quantization} needs a tokenizer beside the model, for the texts to calibrate with")


@torch.no_grad()
def record_inputs(export: Export, runners: Mapping[str, Any]) -> dict[str, list[dict[str, Tensor]]]:
    """part -> its inputs while `runners` process the first texts of `export.texts`; what generates does so for some tokens.

    Raises ValueError for texts that are all empty.
    """
    texts = list(itertools.islice((text for text in export.texts or () if text.strip()), TEXTS))
    if not texts:
        raise ValueError("the texts to calibrate with are empty; give some that the model was trained on")
    recording = {name: _Recording(runner) for name, runner in runners.items()}
    model: Any = CLASSES[export.task](ExportedConfig.of(export.model.config), recording)
    generates = model.can_generate()
    if generates:
        model.generation_config = export.model.generation_config
    if export.tokenizer.pad_token is None:
        export.tokenizer.pad_token = export.tokenizer.eos_token
    if export.task == "causal-lm":
        export.tokenizer.padding_side = "left"
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        encoded = export.tokenizer(batch, return_tensors="pt", padding=True, truncation=True, max_length=_MAX_LENGTH)
        if generates:
            encoded.pop("token_type_ids", None)
            model.generate(**encoded, max_new_tokens=_NEW_TOKENS, do_sample=False, num_beams=1)
        else:
            model(**encoded)
    return {name: runner.inputs for name, runner in recording.items()}
