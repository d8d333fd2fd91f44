"""The model of a new recipe: its sections `tokenizer`, `backbone` and `training`, and its sizes."""

from dataclasses import dataclass
from typing import Any

import torch

from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.roles import features
from hf_freeze.lab.init.data import BUILTIN
from hf_freeze.lab.recipes import settings as recipe_settings
from hf_freeze.lab.recipes.load import read_recipe
from hf_freeze.lab.runs.backbones import Untrained, backbone_config
from hf_freeze.lab.tasks.registry import task_of
from hf_freeze.model.loading import check_exists, load_tokenizer
from hf_freeze.model.make import make_variant

NEW = "new"
_PRESETS = {  # of each task, the recipe and its presets of a fresh model: for the built-in data, for files
    "translation": ("translation", "demo", "tiny"),
    "sequence-classification": ("classification", "demo", "small"),
    "language-modelling": ("freeze_ablation/lm", "lm-demo", "lm-tiny"),
    "masked-lm": ("factorized_embeddings/bert", "demo", "small"),
}
# Rates as for the fine-tuning of BERT (Devlin et al., 2019).
_FINE_TUNING = {"epochs": 2, "max_tokens": 1024, "learning_rate": 5e-5, "warmup_steps": 100, "bf16": "auto"}


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """`model`: the dense one, on `meta`; `sections`: of the recipe. `width` and `ffn`: columns of the model, neurons of its
    narrowest FFN, which is 0 where it has none of two or three linears."""

    model: Any
    sections: dict[str, Any]
    width: int
    ffn: int
    is_fresh: bool


def builtin_data(task: str) -> dict[str, Any]:
    return read_recipe(_PRESETS[task][0])["data"]


def backbone_for(task: str, name: str, data: str) -> Backbone:
    """`name`: "new", or a folder or Hub id. Raises ValueError and OSError, in one line, where the model cannot be had, has no
    tokenizer, or does not fit the task."""
    of_text: Any = task_of(task)
    head = of_text.head
    if name == NEW:
        recipe, on_builtin, on_files = _PRESETS[task]
        preset = read_recipe(recipe, [f"preset={on_builtin if data == BUILTIN else on_files}"])
        sections = {key: preset[key] for key in ("tokenizer", "backbone", "training")}
        if data != BUILTIN:  # those of the recipe are for a text of a certain size
            sections["training"] = {**sections["training"], "epochs": 6 if task == "translation" else 3}
            sections["training"].pop("evaluations", None)
        settings = recipe_settings.Backbone.model_validate(sections["backbone"])
        config = backbone_config(settings, Untrained(sections["tokenizer"]["vocab_size"]))
    else:
        check_exists(name)
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(name)
        if load_tokenizer(name) is None:
            raise ValueError(
                f"--model {name} has no tokenizer; save it into the same folder: tokenizer.save_pretrained(FOLDER)"
            )
        sections = {"backbone": {"pretrained": name}, "training": dict(_FINE_TUNING)}
        if task == "translation":
            sections["training"]["label_smoothing"] = 0.1
        if task in ("language-modelling", "masked-lm"):
            sections["training"]["block_size"] = min(128, getattr(config, "max_position_embeddings", 512) - 2)
    try:
        with torch.device("meta"):
            model = make_variant(config, [], task=head)
    except ValueError as error:
        raise ValueError(f"--model {name} does not fit --task {task}: {error}") from error
    width, ffn = _sizes(model)
    return Backbone(model=model, sections=sections, width=width, ffn=ffn, is_fresh=name == NEW)


def _sizes(model: Any) -> tuple[int, int]:
    architecture = architecture_for(model)
    modules = dict(model.base_model.named_modules(remove_duplicate=False))
    ffns = []
    for name, stack in architecture.stacks.items():
        for number in range(architecture.depths(model.config)[name]):
            linears = [modules.get(f"{stack.layers.format(number)}.{ffn[0]}") for ffn in stack.ffns_in(number) if ffn]
            ffns += [features(linear) for linear in linears if linear is not None]
    return (min(inputs for inputs, _ in ffns), min(outputs for _, outputs in ffns)) if ffns else (0, 0)
