"""What lies beside a model: how it reads images or sound, and what sentence-transformers writes: how token vectors become one."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn

from hf_freeze.runtime import sentences
from hf_freeze.runtime.folders import read_json

_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "[0-9]_*/*")
_EXPORTED = "hf_freeze.publish.sentence_module.ExportedEncoder"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def copy_sentence_files(source: str | os.PathLike[str], target: Path, *, exported: bool = False) -> None:
    """Copy those of sentence-transformers from a directory or Hub id, if it has them. `exported`: an engine computes the vectors
    of tokens, through a module of hf_freeze."""
    root = _folder(source, _FILES)
    if not (root / "modules.json").is_file():
        return
    _copy(root, target, _FILES)
    if exported:
        modules: Any = read_json(target / "modules.json")
        modules[0]["type"] = _EXPORTED
        (target / "modules.json").write_text(json.dumps(modules, indent=2), encoding="utf-8")


def read_sentence_files(source: str | os.PathLike[str]) -> dict[str, Any]:
    """How a directory or Hub id makes one vector of those of the tokens; {} if it has no files of sentence-transformers.

    See `runtime.sentences.read_sentence_files`; here "dense" has (weight, bias, activation) of torch.
    """
    found = sentences.read_sentence_files(_folder(source, _FILES))
    for number, (weight, bias, activation) in enumerate(found.get("dense", [])):
        bias = None if bias is None else torch.from_numpy(bias)
        found["dense"][number] = torch.from_numpy(weight), bias, getattr(nn, activation)()
    return found


def copy_processors(source: str | os.PathLike[str], target: Path) -> None:
    """Copy the settings of the image processor or feature extractor from a directory or Hub id, if it has them."""
    _copy(_folder(source, _PROCESSORS), target, _PROCESSORS)


def _folder(source: str | os.PathLike[str], patterns: tuple[str, ...]) -> Path:
    root = Path(source)
    return root if root.is_dir() else Path(snapshot_download(os.fspath(source), allow_patterns=list(patterns)))


def _copy(root: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in root.glob(pattern):
            if path.is_file():
                (target / path.relative_to(root)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target / path.relative_to(root))
