"""What sentence-transformers writes beside a model: how its token vectors become one vector."""

import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "[0-9]_*/*")


def copy_sentence_files(source: Any, target: Path) -> None:
    """Copy them from a directory or Hub id, if it has them."""
    root = Path(source)
    if not root.is_dir():
        root = Path(snapshot_download(os.fspath(source), allow_patterns=list(_FILES)))
    if not (root / "modules.json").is_file():
        return
    for pattern in _FILES:
        for path in root.glob(pattern):
            if path.is_file():
                (target / path.relative_to(root)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target / path.relative_to(root))
