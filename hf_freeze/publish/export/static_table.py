"""Static vectors: a sentence encoder as a table with one vector for each token; a text is the mean of its tokens' vectors.

The table begins like that of Model2Vec (https://github.com/MinishLab/model2vec, Tulkens and van Dongen, 2024): the encoder's
vector of each token alone, times a / (a + its frequency) (Arora et al., 2017, "A simple but tough-to-beat baseline for sentence
embeddings", equation 1). With texts, ridge regression moves it to where the mean of a text's tokens is the encoder's vector.

The folder is a `StaticEmbedding` of sentence-transformers. Shapes: N texts, V tokens, D size of a vector.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_freeze.publish.export.folders import Export, Format
from hf_freeze.publish.export.served_answers import answers_of
from hf_freeze.publish.export.served_questions import Questions, Served
from hf_freeze.publish.sentence_files import read_sentence_files

_RARE = 1e-3  # `a` of the weights: the frequency at which a token counts half
_RIDGE = 1e-2  # as if each token had one more text of ten tokens, in which it is as it was
_MOST = 20_000  # tokens that move, of which a matrix (V, V) is kept
_BATCH = 512
_MODULES = [("StaticEmbedding", ""), ("Normalize", "1_Normalize")]


def write(export: Export, folder: Path) -> None:
    """Write the table and its modules to `folder`. Raises ValueError for a model that is no sentence encoder, and a tokenizer
    without tokenizer.json."""
    if export.task != "feature-extraction":
        raise ValueError(
            f"static is for sentence encoders (feature-extraction), not {type(export.model).__name__} ({export.task})"
        )
    tokenizer = export.tokenizer
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"static has no {type(tokenizer).__name__}, which has no tokenizer.json; choose --format onnx")
    sentence = read_sentence_files(export.source)
    served = Served(model=export.model, task=export.task, tokenizer=tokenizer, sentence=sentence)
    texts = [text for text in export.texts or () if text.strip()]
    export.say(f"computing the vectors of {len(tokenizer):,} tokens")
    alone = vectors_of_tokens(served)
    ids = _ids(served, texts)
    table = alone * _weights(ids, len(alone))[:, None]
    if texts:
        export.say(f"computing the vectors of {len(texts):,} texts")
        table = fitted(table, ids, _vectors(served, texts))
    table[tokenizer.all_special_ids] = 0
    dtype = torch.float32 if export.quantization is None else getattr(torch, export.quantization)
    save_file({"embedding.weight": table.to(dtype).contiguous()}, folder / "model.safetensors")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(_MODULES)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2), encoding="utf-8")
    (folder / _MODULES[1][1]).mkdir()


FORMAT = Format(write, quantizations=("float16",), needs_tokenizer=True, learns=True, is_complete=True)


def vectors_of_tokens(served: Served) -> Tensor:
    """(V, D), length 1: what the encoder makes of each token alone, with the special tokens around it."""
    tokenizer = served.tokenizer
    whole, plain = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    place = whole.index(plain[0])
    before, after = whole[:place], whole[place + len(plain) :]
    ids = torch.tensor([[*before, token, *after] for token in range(len(tokenizer))])
    batches = [{"input_ids": some, "attention_mask": torch.ones_like(some)} for some in ids.split(_BATCH)]
    return _vectors(served, batches)


@torch.no_grad()
def _vectors(served: Served, items: Sequence[Any]) -> Tensor:
    """(N, D), length 1: of texts, or of the rows of batches"""
    found = sorted(answers_of(Questions(served, items)), key=lambda answer: answer[0])
    return nn.functional.normalize(torch.from_numpy(np.stack([answer["vector"] for _, answer in found])), dim=-1)


def _ids(served: Served, texts: Sequence[str]) -> list[list[int]]:
    read = [served.read(text) for text in texts]
    return served.tokenizer(read, add_special_tokens=False, truncation=True).input_ids if texts else []


def _weights(ids: list[list[int]], size: int) -> Tensor:
    """(V,): less for frequent tokens. Without texts, the token with the number i is taken to be the i-th most frequent (Zipf)."""
    if ids:
        counts = torch.bincount(torch.tensor([token for row in ids for token in row]), minlength=size) + 1.0
    else:
        counts = 1 / torch.arange(1, size + 1)
    return _RARE / (_RARE + counts / counts.sum())


def fitted(table: Tensor, ids: list[list[int]], vectors: Tensor) -> Tensor:
    """(V, D): the table E for which ‖A E − S‖² + λ ‖E − E₀‖² is smallest, in double precision. Row i of A (N, V) takes the mean
    of the tokens of text i, S (N, D) are the `vectors` of texts, E₀ the `table`, scaled to them. Of more than 20,000 tokens, the
    most frequent ones move."""
    flat = torch.tensor([token for row in ids for token in row])
    seen, counts = flat.unique(return_counts=True)
    seen = seen[counts.argsort(descending=True, stable=True)[:_MOST]].sort().values
    rows = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(row) for row in ids]))
    shares = torch.cat([torch.full((len(row),), 1 / len(row), dtype=torch.float64) for row in ids if row])
    means = torch.sparse_coo_tensor(
        torch.stack([rows, flat]), shares, (len(ids), len(table)), check_invariants=True
    ).coalesce()
    start, vectors = table.double(), vectors.double()
    first = means @ start
    scale = (first * vectors).sum() / first.square().sum()
    start = start * scale
    some = means.index_select(1, seen)
    matrix = (some.T @ some).to_dense() + _RIDGE * torch.eye(len(seen), dtype=torch.float64)
    step = torch.cholesky_solve(some.T @ (vectors - first * scale), torch.linalg.cholesky(matrix))
    start[seen] += step
    return start.float()


class StaticForward(nn.Module):
    """The forward of a folder written by `hf-freeze export --format static`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.table = load_file(folder / "model.safetensors")["embedding.weight"].float()

    def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
        """(B, T) ids -> last_hidden_state (B, T, D), whose mean has the direction of the text's vector"""
        return {"last_hidden_state": self.table[input_ids]}
