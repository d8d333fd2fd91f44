"""What lies beside a model: how it reads images or sound, and what sentence-transformers writes: how token vectors become one."""

import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "[0-9]_*/*")


_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def copy_sentence_files(source: Any, target: Path) -> None:
    """Copy those of sentence-transformers from a directory or Hub id, if it has them."""
    root = _folder(source, _FILES)
    if (root / "modules.json").is_file():
        _copy(root, target, _FILES)


def copy_processors(source: Any, target: Path) -> None:
    """Copy the settings of the image processor or feature extractor from a directory or Hub id, if it has them."""
    _copy(_folder(source, _PROCESSORS), target, _PROCESSORS)


def _folder(source: Any, patterns: tuple[str, ...]) -> Path:
    root = Path(source)
    return root if root.is_dir() else Path(snapshot_download(os.fspath(source), allow_patterns=list(patterns)))


def _copy(root: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in root.glob(pattern):
            if path.is_file():
                (target / path.relative_to(root)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target / path.relative_to(root))
