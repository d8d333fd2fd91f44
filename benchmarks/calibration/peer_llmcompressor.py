"""SparseGPT, Wanda and GPTQ of llm-compressor, as its `oneshot` runs them, with its own dampening and order of columns.

Of a translator it gets the part without the output matrix: it moves that to the meta device, where adding a Marian's bias of
logits fails. Its sequential pipeline finds no layer in an encoder-decoder (it ends with all weights unchanged), so the basic one
runs, in which layers do not see the errors of earlier ones. Groups of GPTQ must divide the columns; they have the largest size
up to 64 that does.
"""

from typing import Any

import blocks
import torch

PACKAGES = ["llmcompressor", "compressed-tensors"]
REQUIREMENTS = ["torch==2.13.0", "llmcompressor==0.14.0.1"]
METHODS = {
    "llm-compressor SparseGPT": {"zeros"},
    "llm-compressor Wanda": {"zeros"},
    "llm-compressor GPTQ": {"bits"},
}
CANNOT: dict[tuple[str, ...], str] = {}
_LAYERS = {
    "bert": ["BertLayer"],
    "llama": ["LlamaDecoderLayer"],
    "marian": ["MarianEncoderLayer", "MarianDecoderLayer"],
}
_GROUP = 64


def prepare() -> None:
    import llmcompressor  # noqa: F401
    from llmcompressor.modifiers.gptq import GPTQModifier  # noqa: F401
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier  # noqa: F401


def compress(model: Any, batches: list[blocks.Batch], job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    from llmcompressor import oneshot

    layers = _LAYERS[model.config.model_type]
    inner, prefix = (model.model, "model.") if model.config.model_type == "marian" else (model, "")
    # Text by text: its statistics have no mask for padding.
    texts = torch.utils.data.DataLoader(_texts(model, batches), batch_size=None)
    recipe = _recipe(model, prefix, job)
    pipeline = "basic" if prefix else "sequential"
    oneshot(model=inner, dataset=texts, recipe=recipe, pipeline=pipeline, sequential_targets=layers)
    return _dense(model), {"pipeline": pipeline}


def _texts(model: Any, batches: list[blocks.Batch]) -> Any:
    texts = []
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            text = {key: value[row : row + 1] for key, value in blocks.arguments(batch).items()}
            if "attention_mask" in text:
                real = text["attention_mask"][0].bool()
                text = {key: value[:, real] if key != "labels" else value for key, value in text.items()}
            if "labels" in text:
                labels = text.pop("labels")
                start = torch.tensor([[model.config.decoder_start_token_id]])
                text["decoder_input_ids"] = torch.cat([start, labels[:, labels[0] != -100][:, :-1]], 1)
            texts.append(text)
    return texts


def _recipe(model: Any, prefix: str, job: dict[str, Any]) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier

    if job["method"] == "llm-compressor GPTQ":
        groups: dict[int, list[str]] = {}
        for block in blocks.blocks(model):
            for name in block.linears:
                groups.setdefault(_group(blocks.weight(model, name).shape[1]), []).append(name.removeprefix(prefix))
        schemes = {}
        for number, (size, names) in enumerate(groups.items()):
            weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=size)
            schemes[f"group_{number}"] = QuantizationScheme(targets=names, weights=weights)
        return GPTQModifier(config_groups=schemes)
    names = [name.removeprefix(prefix) for block in blocks.ffns(model) for name in block.linears]
    modifier = SparseGPTModifier if job["method"] == "llm-compressor SparseGPT" else WandaPruningModifier
    return modifier(sparsity=job["cut"]["zeros"], mask_structure="0:0", targets=names)


def _group(columns: int) -> int:
    """The largest size of groups up to 64 that divides the columns, which it needs: 43 of 172."""
    return max(size for size in range(1, _GROUP + 1) if columns % size == 0)


def _dense(model: Any) -> dict[str, torch.Tensor]:
    """The state in which weights are rounded to their grids."""
    from compressed_tensors.quantization import forward

    state = dict(model.state_dict())
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.weights is not None:
            state[f"{name}.weight"] = forward.fake_quantize(
                module.weight, module.weight_scale, getattr(module, "weight_zero_point", None), scheme.weights
            ).detach()
    return state
