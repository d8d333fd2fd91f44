"""What trimming the vocabulary of a sentence encoder does to the vectors of texts that it was not trimmed for.

    python benchmarks/trimming.py MODEL --texts train.en.gz --held-out test_2016_flickr.en.gz

Claims: a held-out text whose tokens are all kept gets the vector of the whole model, bit for bit.

For each `--coverages`, MODEL is trimmed for `--texts`. Then the whole and the trimmed model encode the held-out texts, one at a
time: the mean of the last hidden states, of length 1, as all-MiniLM-L6-v2 is used. Columns:

- tokens, MB of the token table, and of all tensors;
- tokens per held-out text;
- same: the share of held-out texts whose ids are only renumbered;
- cosine: between the two vectors of a text: the mean of all held-out texts, of those that are not the same, and the least;
- neighbour: the share of held-out texts whose nearest other held-out text stays the same;
- similarity: the Pearson correlation, over all pairs of held-out texts, of their cosine before and after.

The whole model is the first row. Limit: 1.0 in all of the last columns.
"""

import tempfile
from pathlib import Path
from typing import Any

import _shared
import torch
from transformers import AutoModel, AutoTokenizer

from hf_freeze.lab.data import read_text
from hf_freeze.publish.trimming import trim_model


@torch.no_grad()
def encoded(folder: str | Path, texts: list[str]) -> tuple[list[list[str]], torch.Tensor]:
    """(the tokens of each text, vectors of length 1, (texts, D))"""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, vectors = [], []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")["input_ids"]
        tokens.append(tokenizer.convert_ids_to_tokens(ids[0].tolist()))
        vectors.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)[0])
    return tokens, torch.nn.functional.normalize(torch.stack(vectors), dim=1)


def neighbours(similarities: torch.Tensor) -> torch.Tensor:
    """The nearest other text of each one."""
    return similarities.clone().fill_diagonal_(-2).argmax(1)


def sizes(folder: str | Path) -> list[str]:
    """Tokens, MB of the token table and of all tensors."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    table: Any = model.get_input_embeddings().weight
    tensors = sum(parameter.nbytes for parameter in model.parameters())
    return [f"{len(table):,}", f"{table.nbytes / 1e6:.2f}", f"{tensors / 1e6:.2f}"]


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", metavar="MODEL", help="a folder or Hub id of an encoder")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=1000, help="of held-out texts, the first ones")
    parser.add_argument("--coverages", type=float, nargs="+", default=[0.99, 0.999, 1.0])
    parser.add_argument("--characters", default="all", help="as of hf-freeze trim")
    options = parser.parse_args()
    texts = read_text(options.texts, unit="filled lines")["text"]
    held_out = list(read_text(options.held_out, unit="filled lines")["text"][: options.count])
    tokens, vectors = encoded(options.model, held_out)
    similarities = vectors @ vectors.T
    lines = [["whole", *sizes(options.model), f"{sum(map(len, tokens)) / len(tokens):.2f}", *[""] * 6]]
    failed = []
    for coverage in options.coverages:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "trimmed"
            trim_model(options.model, texts, out=out, coverage=coverage, characters=options.characters)
            small_tokens, small_vectors = encoded(out, held_out)
            small_sizes = sizes(out)
        same = torch.tensor([old == new for old, new in zip(tokens, small_tokens, strict=True)])
        if not torch.equal(small_vectors[same], vectors[same]):
            failed.append(f"{coverage:g}")
        cosines = (small_vectors * vectors).sum(1)
        small_similarities = small_vectors @ small_vectors.T
        pairs = torch.triu_indices(len(held_out), len(held_out), 1)
        both = torch.stack([each[pairs[0], pairs[1]] for each in (similarities, small_similarities)])
        kept = (neighbours(small_similarities) == neighbours(similarities)).float().mean()
        others = f"{cosines[~same].mean():.4f}" if not same.all() else ""
        text_length = sum(map(len, small_tokens)) / len(held_out)
        lines.append([f"{coverage:g}", *small_sizes, f"{text_length:.2f}", f"{same.float().mean():.1%}"])
        lines[-1] += [f"{cosines.mean():.4f}", others, f"{cosines.min():.4f}"]
        lines[-1] += [f"{kept:.1%}", f"{torch.corrcoef(both)[0, 1]:.4f}"]
    header = [
        "coverage",
        "tokens",
        "table MB",
        "tensors MB",
        "tokens per text",
        "same",
        "cosine",
        "of the others",
        "least",
    ]
    verdict = f"missed at coverage {', '.join(failed)}" if failed else f"passed in all {len(options.coverages)}"
    summary = f"{len(held_out):,} held-out texts; covered texts get the same vectors bit for bit: {verdict}"
    _shared.report(options, _shared.markdown([*header, "neighbour", "similarity"], lines), summary)


if __name__ == "__main__":
    main()
