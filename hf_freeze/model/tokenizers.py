"""The tokenizer beside a model."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer


def load_tokenizer(name: str | os.PathLike[str]) -> Any:
    """The tokenizer of a directory or Hub id; None if it has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, TypeError, KeyError):  # any of these, depending on the missing file
        return None
    # For some families, such as BERT, transformers makes a tokenizer of the special tokens alone if the files are missing.
    files = {"tokenizer.json", *tokenizer.vocab_files_names.values()} if tokenizer.vocab_files_names else set()
    return tokenizer if not files or any(_has(name, file) for file in files) else None


def _has(name: str | os.PathLike[str], file: str) -> bool:
    """Whether a directory, or a Hub id of which it was downloaded, has this file."""
    if Path(name).is_dir():
        return Path(name, file).is_file()
    return isinstance(try_to_load_from_cache(os.fspath(name), file), str)
