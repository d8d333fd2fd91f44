"""Group pruning of Torch-Pruning: by magnitude, and by first-order Taylor expansion of the loss."""

from typing import Any

import blocks

PACKAGES = ["torch-pruning"]
REQUIREMENTS = ["torch==2.13.0", "torch-pruning==1.6.1", "transformers==5.23.0"]
METHODS = {"Torch-Pruning, magnitude": {"neurons", "heads"}, "Torch-Pruning, Taylor": {"neurons", "heads"}}
BLIND = {"Torch-Pruning, magnitude"}
CANNOT: dict[tuple[str, ...], str] = {}


def prepare() -> None:
    import torch_pruning  # noqa: F401


def compress(model: Any, batches: list[blocks.Batch], job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch_pruning as tp

    taylor = job["method"] == "Torch-Pruning, Taylor"
    importance = tp.importance.GroupTaylorImportance() if taylor else tp.importance.GroupMagnitudeImportance()
    if taylor:
        for batch in batches:
            (blocks.loss_of(model, batch) * len(batch["input_ids"])).backward()
    cut, chosen = job["cut"], blocks.blocks(model)
    roots: dict[Any, float] = {}
    heads: dict[Any, int] = {}
    for block in chosen:
        if block.attention and "heads" in cut:
            heads |= {model.get_submodule(name): block.units for name in block.ins}
        elif not block.attention and "neurons" in cut:
            roots |= {model.get_submodule(name): 1 - cut["neurons"] for name in block.ins}
    pruned = {*roots, *heads}
    roots |= dict.fromkeys(heads, 1 - cut.get("heads", 1))  # with 0 it would remove no heads either
    ignored = [module for module in model.modules() if not list(module.children()) and module not in pruned]
    example = {key: value[:2] for key, value in blocks.arguments(batches[0]).items()}
    pruner = tp.pruner.BasePruner(
        model,
        example_inputs=example,
        importance=importance,
        pruning_ratio=0.0,
        pruning_ratio_dict=roots,
        num_heads=heads,
        prune_num_heads=bool(heads),
        prune_head_dims=False,
        head_pruning_ratio=1 - cut.get("heads", 1),
        ignored_layers=ignored,
        forward_fn=lambda module, inputs: module(**inputs),
        output_transform=lambda output: next(value for value in output.values() if value is not None),
    )
    pruner.step()
    return model.state_dict(), {}
