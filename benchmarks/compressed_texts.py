"""How well a sentence encoder finds captions after `hf-freeze compress --texts`, with no labels and within a share of its bytes.

    python benchmarks/compressed_texts.py MODEL --captions captions --budgets 12% 8%

Claims: none; the table says what comes of it.

The captions train.1.en.gz to train.5.en.gz of a folder are of the same images, a line each. Those of the last 5,000 images are
kept out; all others are the texts. For each budget, MODEL is compressed. Then the model itself, the whole of it in int8, and each
compressed folder, in ONNX Runtime, search caption 1 of each image that was kept out by its caption 5. Columns:

- folder: MB of all files, tokenizer included, and the share of the model's;
- recall@1, and its difference from the model's with a 95 % interval, by a paired bootstrap over images;
- cosine: of the vectors of the captions to the model's, the mean;
- seconds: of the compression, the search not included; other work on the machine makes them longer.
"""

import gzip
import tempfile
from pathlib import Path
from typing import Any

import _shared
import numpy as np

import hf_freeze
from hf_freeze.compression.budget import Budget
from hf_freeze.publish.export.served import answers, opened


def captions(folder: Path, number: int) -> list[str]:
    with gzip.open(folder / f"train.{number}.en.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def vectors(folder: Any, texts: list[str]) -> np.ndarray:
    """(texts, D), of length 1"""
    found = np.stack([each["vector"] for each in answers(opened(folder), texts).items])
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def interval(differences: np.ndarray) -> str:
    """The mean of the differences (N,), and the ends of its 95 % interval."""
    drawn = np.random.default_rng(0).integers(len(differences), size=(2000, len(differences)))
    low, high = np.quantile(differences[drawn].mean(1), [0.025, 0.975])
    return f"{differences.mean():+.4f} ({low:+.4f} to {high:+.4f})"


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", metavar="MODEL", help="a folder or Hub id of a sentence encoder")
    parser.add_argument("--captions", type=Path, required=True, help="folder with train.1.en.gz to train.5.en.gz")
    parser.add_argument("--budgets", nargs="+", default=["12%"], help="of bytes, such as 12%% or 11MB")
    parser.add_argument("--images", type=int, default=5000, help="that are kept out")
    parser.add_argument("--heal", default="0", help="0, 10min or 1epoch")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--keep", type=Path, help="folder for the compressed models; a run that was stopped goes on there"
    )
    options = parser.parse_args()
    every = [captions(options.captions, number) for number in range(1, 6)]
    texts = [line for lines in zip(*(lines[: -options.images] for lines in every), strict=True) for line in lines]
    wanted, queries = (every[number][-options.images :] for number in (0, 4))

    def hits(folder: Any) -> tuple[np.ndarray, np.ndarray]:
        found, asked = vectors(folder, wanted), vectors(folder, queries)
        return (asked @ found.T).argmax(1) == np.arange(len(wanted)), found

    before, of_model = hits(options.model)
    rows = []

    def add(label: str, folder: Path, size: int, whole: int, seconds: float | None) -> None:
        after, found = hits(folder)
        cosine = (found * of_model).sum(1).mean() if found.shape == of_model.shape else float("nan")
        change = interval(after.astype(float) - before)
        shown = "–" if seconds is None else f"{seconds:.0f}"
        rows.append(
            [label, f"{size / 1e6:.2f} ({size / whole:.1%})", f"{after.mean():.4f}", change, f"{cosine:.4f}", shown]
        )

    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            for budget in options.budgets:
                out = (options.keep or Path(temporary)) / f"{budget.strip('%')}-seed-{seed}"
                limits = Budget(max_bytes=budget)
                heal = 0 if options.heal == "0" else options.heal
                made = hf_freeze.compress(options.model, texts=texts, budget=limits, out=out, heal=heal, seed=seed)
                if not rows:
                    model = made.original_bytes
                    rows.append(["the model", f"{model / 1e6:.2f} (100%)", f"{before.mean():.4f}", "", "1", ""])
                    add("whole, int8", made.whole.folder, made.whole.bytes, model, None)
                add(
                    f"{budget}, seed {seed}: {made.kept}",
                    made.after.folder,
                    made.after.bytes,
                    made.original_bytes,
                    made.seconds,
                )
    headings = ["", "folder, MB", "recall@1", "difference", "cosine", "seconds"]
    summary = f"{len(wanted):,} images that were kept out, {len(texts):,} captions of the others as texts"
    _shared.report(options, _shared.markdown(headings, rows), summary)


if __name__ == "__main__":
    main()
