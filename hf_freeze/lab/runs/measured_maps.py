"""What the pictures of a finished run show: where its attentions look, and which of its embeddings are alike."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze import analysis
from hf_freeze.io import write_whole
from hf_freeze.run_folder import MAPS

REACH = 8  # tokens to each side
TOKENS = 24  # of the embeddings' picture, whose names can be read


def measure(wanted: Sequence[str], folder: Path, model: Any, tokenizer: Any, train: Any, dev: Iterable[Any]) -> None:
    """Write the numbers of the `wanted` pictures into `folder`.

    `attention`: the mean over the dev set, `dev` in batches, by relative position. `embeddings`: cosine similarities of the
    tokens that are most frequent in the training set, `train`, and those of a random table with as many columns.
    """
    maps: dict[str, Any] = {}
    if "attention" in wanted:
        weights = analysis.attention_by_position(model, dev, reach=REACH)
        maps["attention"] = {name: _rounded(values) for name, values in weights.items()}
    if "embeddings" in wanted:
        counts = np.zeros(model.config.vocab_size, dtype=np.int64)
        for ids in train["input_ids"]:
            for some in ids if isinstance(ids[0], list) else [ids]:  # a list for each choice, of unlike lengths
                np.add.at(counts, some, 1)
        tokens = analysis.most_frequent(counts, TOKENS, leave_out=tokenizer.all_special_ids)
        similarity = analysis.embedding_similarity(model, tokens)
        order = analysis.clustered(similarity)
        random = analysis.random_similarity(len(tokens), model.config.hidden_size)
        of_random = analysis.clustered(random)  # as the trained one is, or the eye compares unlike orders
        maps["embeddings"] = {
            "tokens": [tokenizer.decode([tokens[place]]).strip() or "␣" for place in order],
            "similarity": _rounded(similarity[order][:, order]),
            "random": _rounded(random[of_random][:, of_random]),
        }
    write_whole(folder / MAPS, json.dumps(maps) + "\n")


def _rounded(values: Any) -> list[Any]:
    return np.round(values.double().numpy(), 4).tolist()
