"""Small inputs for any model: for probes, and with labels for tests."""

import inspect
from typing import Any

import torch

# Two sentences of 5 and 3 tokens; 0 is the padding.
_IDS = [[5, 9, 3, 7, 6], [8, 4, 6, 0, 0]]
_MASK = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
_SHIFTED = [[5, 9, 3, 7, 6], [8, 4, 6, -100, -100]]
_TARGETS = [[6, 3, 9, 5], [7, 5, -100, -100]]
_DECODER = [[3, 6, 3, 9], [3, 7, 5, 0]]


def example_batch(config: Any, task: str, *, pixels: bool = True) -> dict[str, torch.Tensor]:
    """A batch of two examples with labels for `task`, of different lengths, with padding. `pixels`: with images beside text, if
    the model takes both."""
    batch = _inputs(config, _MASK)
    if not pixels and "input_ids" in batch:
        batch.pop("pixel_values", None)
    if "input_ids" in batch and task == "multiple-choice":
        batch = {name: torch.stack([value, value.flip(0)], dim=1) for name, value in batch.items()}
    labels: dict[str, Any] = {
        "masked-lm": {"labels": [[-100, 9, -100, 7, -100], [-100, 4, -100, -100, -100]]},
        "causal-lm": {"labels": _SHIFTED},
        "seq2seq-lm": {"labels": _TARGETS},
        "speech-seq2seq": {"labels": _TARGETS},
        "token-classification": {"labels": [[0, 1, 1, 0, 1], [1, 0, 0, -100, -100]]},
        "question-answering": {"start_positions": [1, 0], "end_positions": [3, 1]},
        "ctc": {"labels": [[5], [3]]},
    }.get(task, {"labels": [1, 0]})
    if labels.get("labels") is _TARGETS and not getattr(config, "is_encoder_decoder", False):
        labels = {"labels": _SHIFTED}  # a decoder alone, which also reads sound
    if task == "feature-extraction":
        labels = {"decoder_input_ids": _DECODER} if getattr(config, "is_encoder_decoder", False) else {}
    return batch | {name: torch.tensor(values) for name, values in labels.items()}


def probe_inputs(config: Any, model: Any) -> dict[str, torch.Tensor]:
    """A batch without padding or labels that the forward of a base model takes."""
    batch = _inputs(config, [[1] * 5, [1] * 5])
    if "input_ids" in batch:
        batch["input_ids"] = torch.tensor([[5, 9, 3, 7, 6], [8, 4, 6, 10, 11]])
    known = inspect.signature(model.forward).parameters
    if "decoder_input_ids" in known and getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.tensor([[3, 6, 3, 9], [3, 7, 5, 4]])
    if getattr(config, "add_cross_attention", False):  # a decoder that attends to the states of an encoder
        batch["encoder_hidden_states"] = torch.randn(
            2, 4, config.hidden_size, generator=torch.Generator().manual_seed(6)
        )
    return {name: value for name, value in batch.items() if name in known}


def masks_for(config: Any, model: Any) -> dict[str, torch.Tensor]:
    """Further inputs, with which a forward uses what it keeps for patches that are masked."""
    known = inspect.signature(model.forward).parameters
    if "bool_masked_pos" not in known or type(getattr(config, "patch_size", None)) is not int:
        return {}
    patches = (config.image_size // config.patch_size) ** 2
    return {"bool_masked_pos": torch.arange(patches).remainder(2).bool().repeat(2, 1)}


def _inputs(config: Any, mask: list[list[int]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch: dict[str, torch.Tensor] = {}
    vision = getattr(config, "vision_config", config)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return {"input_features": noise(2, config.num_mel_bins, 2 * config.max_source_positions)}
    if hasattr(config, "conv_kernel") and hasattr(config, "conv_dim"):
        return {"input_values": noise(2, 8000)}
    if getattr(config.get_text_config(), "vocab_size", None):
        batch = {"input_ids": torch.tensor(_IDS), "attention_mask": torch.tensor(mask)}
    if isinstance(getattr(vision, "image_size", None), int):
        batch["pixel_values"] = noise(2, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
    return batch
