"""The first module of an exported sentence encoder in sentence-transformers (https://www.sbert.net).

`modules.json` of the folder names it, and `SentenceTransformer(folder, trust_remote_code=True)` opens it.

Shapes: B texts, T tokens, D hidden size.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.modules import InputModule  # pyright: ignore[reportMissingImports]
from sentence_transformers.util import load_dir_path  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer

from hf_freeze.publish.export.exported import CLASSES
from hf_freeze.publish.sentence_files import read_sentence_files


class ExportedEncoder(InputModule):
    """The vectors of tokens, computed by the engine of the folder; it cannot be trained."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)
        self.model = CLASSES["feature-extraction"].from_pretrained(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        sentence = read_sentence_files(folder)
        self.max_seq_length = sentence.get("longest") or self.tokenizer.model_max_length
        self._lower = sentence.get("lower", False)

    def preprocess(self, inputs: list[str], prompt: str | None = None, **_: Any) -> dict[str, torch.Tensor]:
        texts = [(prompt or "") + text for text in inputs]
        texts = [text.lower() for text in texts] if self._lower else texts
        options = {"padding": True, "truncation": True, "max_length": self.max_seq_length, "return_tensors": "pt"}
        return dict(self.tokenizer(texts, **options))

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        """input_ids (B, T), attention_mask (B, T) ... -> with token_embeddings (B, T, D)"""
        return features | {"token_embeddings": self.model(**features)["last_hidden_state"]}

    def get_embedding_dimension(self) -> int:
        return self.model.config.hidden_size

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Copy the files of the folder."""
        for path in self._folder.iterdir():
            if path.is_file() and path.name != "modules.json":
                shutil.copy(path, output_path)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **options: Any) -> "ExportedEncoder":
        """From a directory or Hub id."""
        where: dict[str, Any] = {name: options.get(name) for name in ("token", "cache_folder", "revision")}
        where["local_files_only"] = bool(options.get("local_files_only"))
        return cls(str(load_dir_path(model_name_or_path, subfolder, **where)))
