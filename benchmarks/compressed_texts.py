"""How well a sentence encoder finds captions after `hf-freeze compress --texts`, with no labels and within a share of its bytes.

    python benchmarks/compressed_texts.py MODEL --captions captions --budgets 12% 8%
    python benchmarks/compressed_texts.py MODEL --captions captions --budgets 12% --controls --model2vec ENVIRONMENT/bin/python
    python benchmarks/compressed_texts.py MODEL --captions captions --budgets 12% --others sst2/dev.jsonl.gz --column sentence
    python benchmarks/compressed_texts.py MODEL --texts sst2/train.jsonl.gz --others sst2/dev.jsonl.gz --column sentence

Claims: none; the table says what comes of it.

The captions train.1.en.gz to train.5.en.gz of a folder are of the same images, a line each. Those of the last 5,000 images are
kept out; all others are the texts. For each budget, MODEL is compressed. Then the model itself, the whole of it in int8, and each
compressed folder, in ONNX Runtime, search caption 1 of each image that was kept out by its caption 5. With `--texts` in place of
captions, nothing is searched. Columns:

- folder: MB of all files, tokenizer included, and the share of the model's;
- recall@1, and its difference from the model's with a 95 % interval, by a paired bootstrap over images;
- cosine: of the vectors of the captions to the model's, the mean, and of texts of another kind (`--others`, the first column);
- seconds: of the compression, the search not included; other work on the machine makes them longer.

`--controls`: other ways to as many bytes, in the same engine, with the tokens that the texts have:

- the same share of heads and of neurons in each layer, in int8, with the same calibration;
- a random shape: tokens, bits, and what stays of each layer are drawn until the bytes fit, with the same calibration;
- fewer layers, evenly spaced, with nothing else cut and no calibration, as the layer reduction of sentence-transformers begins
  (https://sbert.net/examples/sentence_transformer/training/distillation/README.html); its training is not done here.

`--model2vec`: static vectors of as many bytes (https://github.com/MinishLab/model2vec, without training), in int8: each token has
as many numbers as fit.
"""

import gzip
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import _shared
import numpy as np

import hf_freeze
from hf_freeze.compression.budget import Budget
from hf_freeze.compression.choose import levels
from hf_freeze.compression.compression import Compression
from hf_freeze.compression.engine import serve
from hf_freeze.compression.settings import Settings
from hf_freeze.compression.shape import Shape, full_shape, methods_of
from hf_freeze.io import bytes_of
from hf_freeze.lab.data import read_text, sample
from hf_freeze.publish.export.served import answers, opened

_DRAWS = 100_000  # of random shapes, of which one has the right size
_STATIC = """
import json, sys
import numpy as np
from pathlib import Path
from model2vec.distill import distill
model, out, size, texts = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text())
dims = 384
while True:  # numbers of a token, until the folder fits
    static = distill(model, pca_dims=dims, quantize_to="int8")
    static.save_pretrained(str(out))
    made = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if made <= size:
        break
    dims = min(dims - 1, int(dims * size / made))
np.save(out.with_suffix(".npy"), np.stack(static.encode(texts)))
print(json.dumps([dims, made]))
"""


def captions(folder: Path, number: int) -> list[str]:
    with gzip.open(folder / f"train.{number}.en.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def read(options: Any) -> tuple[list[str], list[str], list[str]]:
    """(texts to learn from, captions to be found, and those that search for them)"""
    if options.texts is not None:
        return list(read_text([options.texts], unit="filled lines", column=options.column)["text"]), [], []
    every = [captions(options.captions, number) for number in range(1, 6)]
    texts = [line for lines in zip(*(lines[: -options.images] for lines in every), strict=True) for line in lines]
    return texts, every[0][-options.images :], every[4][-options.images :]


def vectors(folder: Any, texts: list[str]) -> np.ndarray:
    """(texts, D), of length 1"""
    found = np.stack([each["vector"] for each in answers(opened(folder), texts).items])
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def hits(found: np.ndarray, count: int) -> np.ndarray:
    """For each of `count` images, 1.0 if its query is nearest to its own caption; `found`: (2 × count or more, D), length 1."""
    if not count:
        return np.zeros(0)
    return ((found[count : 2 * count] @ found[:count].T).argmax(1) == np.arange(count)).astype(float)


def interval(differences: np.ndarray) -> str:
    """The mean of the differences (N,), and the ends of its 95 % interval."""
    drawn = np.random.default_rng(0).integers(len(differences), size=(2000, len(differences)))
    low, high = np.quantile(differences[drawn].mean(1), [0.025, 0.975])
    return f"{differences.mean():+.4f} ({low:+.4f} to {high:+.4f})"


def controls(compression: Compression, size: int, seed: int) -> Iterator[tuple[str, Path]]:
    """(what was done, the served folder) of other ways to at most `size` bytes. `compression`: one that has run."""
    found = {
        "the same share in each layer": (uniform(compression, size), True),
        "a random shape": (drawn(compression, size, np.random.default_rng(seed)), True),
        "fewer layers, not calibrated": (shallow(compression, size), False),
    }
    original, engine = compression.original, compression.engine
    for name, (shape, calibrated) in found.items():
        if shape is None:
            continue
        subject = original.subject(shape.tokens)
        folder = compression.out / f"control-{shape.digest}"
        if not folder.exists():
            cut = methods_of(shape, compression.blocks, compression.depths)
            variant = subject.cut(cut) if calibrated else hf_freeze.make_variant(subject.model, cut)
            original.save(variant, subject.tokenizer, folder)
        served = serve(folder, engine.format, engine.quantization, compression.out / "engine" / folder.name)
        yield f"{name}: {compression.original.words(shape)}", served


def uniform(compression: Compression, size: int) -> Shape | None:
    """With the most heads and neurons, in equal shares, that fit in int8; with as many tokens as leave room for any."""
    blocks = compression.blocks
    for tokens in sorted(compression.search.distances.tokens, reverse=True):
        for share in np.linspace(1, 0.05, 96):
            units = {name: nearest(block, share, compression) for name, block in blocks.items()}
            shape = replace(full_shape(compression.depths, blocks, 8), units=units, tokens=tokens)
            if compression.search.prices.cost(shape)[0] <= size:
                return shape
    return None


def nearest(block: Any, share: float, compression: Compression) -> int:
    return min(levels(block, compression.options), key=lambda count: abs(count - share * block.units))


def drawn(compression: Compression, size: int, random: np.random.Generator) -> Shape | None:
    blocks = compression.blocks
    for _ in range(_DRAWS):
        shape = Shape(
            layers=full_shape(compression.depths, blocks, 8).layers,
            units={name: int(random.choice(levels(b, compression.options))) for name, b in blocks.items()},
            bits={name: int(random.choice(compression.options.bits)) for name in [*blocks, "tables"]},
            tokens=int(random.choice(sorted(compression.search.distances.tokens))),
        )
        if 0.97 * size <= compression.search.prices.cost(shape)[0] <= size:
            return shape
    return None


def shallow(compression: Compression, size: int) -> Shape | None:
    """With the most tokens and layers, in 8 or 4 bits."""
    (stack, depth), *_ = compression.depths.items()
    for tokens in sorted(compression.search.distances.tokens, reverse=True):
        for bits in (8, 4):
            for count in range(depth - 1, 0, -1):
                kept = sorted({round(at) for at in np.linspace(0, depth - 1, count)})
                every = full_shape(compression.depths, compression.blocks, bits)
                shape = replace(every, layers={stack: tuple(kept)}, tokens=tokens)
                if compression.search.prices.cost(shape)[0] <= size:
                    return shape
    return None


def static_vectors(python: Path, model: str, size: int, texts: list[str], folder: Path) -> tuple[str, int, np.ndarray]:
    """(what was done, bytes, vectors of length 1) of model2vec."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "texts.json").write_text(json.dumps(texts))
    command = [str(python), "-c", _STATIC, model, str(folder / "static"), str(size), str(folder / "texts.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    dims, made = json.loads(done.stdout.splitlines()[-1])
    found = np.load(folder / "static.npy")
    return f"Model2Vec, {dims} numbers a token", made, found / np.linalg.norm(found, axis=1, keepdims=True).clip(1e-9)


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", metavar="MODEL", help="a folder or Hub id of a sentence encoder")
    learnt = parser.add_mutually_exclusive_group(required=True)
    learnt.add_argument("--captions", type=Path, help="folder with train.1.en.gz to train.5.en.gz")
    learnt.add_argument("--texts", type=Path, help="a file of other texts, to compare on --others")
    parser.add_argument("--budgets", nargs="+", default=["12%"], help="of bytes, such as 12%% or 11MB; see --time")
    parser.add_argument("--time", action="store_true", help="budgets are of time, shares of that of the whole in int8")
    parser.add_argument("--controls", action="store_true", help="other ways to as many bytes, too")
    parser.add_argument("--model2vec", type=Path, help="Python of an environment with model2vec[distill]")
    parser.add_argument("--others", type=Path, help="a file with texts of another kind")
    parser.add_argument("--column", default="text", help="of these files")
    parser.add_argument("--images", type=int, default=5000, help="that are kept out")
    parser.add_argument("--heal", default="0", help="0, 10min or 1epoch")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--keep", type=Path, help="folder for the compressed models; a run that was stopped goes on there"
    )
    options = parser.parse_args()
    if options.texts is not None and options.others is None:
        parser.error("--texts needs --others to compare on")
    texts, wanted, queries = read(options)
    count, others = len(wanted), []
    if options.others is not None:
        others = sample(read_text([options.others], unit="filled lines", column=options.column)["text"], options.images)
    asked = [*wanted, *queries, *others]

    of_model = vectors(options.model, asked)
    before, rows = hits(of_model, count), []
    of_model_recall = f"{before.mean():.4f}" if count else "–"

    def add(label: str, found: np.ndarray, size: int, whole: int, seconds: float | None = None) -> None:
        after, cosines = hits(found, count), []
        for some in [slice(count)] * bool(count) + [slice(2 * count, None)] * bool(others):
            same = found.shape == of_model.shape
            cosines.append(f"{(found[some] * of_model[some]).sum(1).mean():.4f}" if same else "–")
        change = interval(after - before) if count else "–"
        recall = f"{after.mean():.4f}" if count else "–"
        shown = "–" if seconds is None else f"{seconds:.0f}"
        row = [
            label,
            f"{size / 1e6:.2f} ({size / whole:.1%})",
            recall,
            change,
            ", ".join(cosines),
            shown,
        ]
        print(json.dumps(row, ensure_ascii=False), flush=True)
        rows.append(row)

    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            for budget in options.budgets:
                out = (options.keep or Path(temporary)) / f"{budget.strip('%')}-seed-{seed}"
                heal = 0 if options.heal == "0" else options.heal
                limit = {"max_ms": budget} if options.time else {"max_bytes": budget}
                compression = Compression(options.model, texts, Budget(**limit), out, Settings(heal=heal, seed=seed))
                made = compression.run()
                model = made.original_bytes
                if not rows:
                    rows.append(["the model", f"{model / 1e6:.2f} (100%)", of_model_recall, "", "1", ""])
                    add("whole, int8", vectors(made.whole.folder, asked), made.whole.bytes, model)
                label, after = f"{budget}, seed {seed}: {made.kept}", made.after
                if after.ms is not None and made.whole.ms is not None:
                    label += f"; {after.ms / made.whole.ms:.2f} of the time of int8"
                add(label, vectors(after.folder, asked), after.bytes, model, made.seconds)
                for name, folder in controls(compression, after.bytes, seed) if options.controls else ():
                    add(name, vectors(folder, asked), bytes_of(folder), model)
                if options.model2vec is not None:
                    name, size, found = static_vectors(
                        options.model2vec, options.model, after.bytes, asked, out / "static"
                    )
                    add(name, found, size, model)
    headings = ["", "folder, MB", "recall@1", "difference", "cosine", "seconds"]
    summary = f"{count:,} images that were kept out, {len(texts):,} texts"
    _shared.report(options, _shared.markdown(headings, rows), summary)


if __name__ == "__main__":
    main()
