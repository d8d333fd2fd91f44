"""Learning from the model's own translations instead of those in the data (Kim and Rush, 2016, "Sequence-level knowledge
distillation", https://arxiv.org/abs/1606.07947): the training texts are translated once, in the engine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_freeze.experiments.compress.serving import Engine, translator_of
from hf_freeze.io import write_whole
from hf_freeze.training.decoding import stored_translations

TARGETS = ("data", "model")
_BEAMS = 4  # where the recipe names no number


def check_targets(targets: str, task: str) -> None:
    """Raise ValueError for other targets than `TARGETS`, and for "model" where nothing is translated."""
    if targets not in TARGETS:
        raise ValueError(f"unknown targets {targets!r}; choose from {list(TARGETS)}")
    if targets == "model" and task != "translation":
        raise ValueError(f"targets='model' is for the task 'translation', not {task!r}; leave it out")


def taught_data(
    served: Path,
    engine: Engine,
    splits: Mapping[str, Any],
    decoding: Mapping[str, Any],
    folder: Path,
    *,
    model: str,
    console: Console,
) -> dict[str, Any]:
    """The `data` section of a recipe whose training targets are translations by the model in `served`; the other splits stay as
    they are. Its files are written to `folder`, where a stopped translation resumes. `model`: the digest of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    decoding = {"num_beams": _BEAMS} | dict(decoding)
    sources = list(splits["train"]["source"])
    translations = stored_translations(
        sources,
        folder / "translations.jsonl",
        {"model": model, "engine": engine.format or "torch", "decoding": decoding},
        translator_of(served, engine, decoding),
        console=console,
    )
    for name, split in splits.items():
        targets = translations if name == "train" else list(split["target"])
        rows = ({"source": source, "target": target} for source, target in zip(split["source"], targets, strict=True))
        write_whole(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {"root": str(folder)} | {name: [f"{name}.jsonl"] for name in ("train", "dev", "test")}
