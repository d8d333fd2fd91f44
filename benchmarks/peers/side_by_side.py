"""A model made smaller by each tool: what it then scores, weighs, and takes.

    python benchmarks/peers/side_by_side.py encoder --install --environments FOLDER
    python benchmarks/peers/side_by_side.py encoder MODEL --data captions --environments FOLDER --keep runs/encoders
    python benchmarks/peers/side_by_side.py translator MODEL --data multi30k --environments FOLDER --keep runs/translators
    python benchmarks/peers/side_by_side.py language-model MODEL --environments FOLDER --keep runs/language_models
    python benchmarks/peers/side_by_side.py language-model MODEL --data wikitext2 --environments FOLDER --keep runs/wiki
    python benchmarks/peers/side_by_side.py classifier MODEL --data sst2 --environments FOLDER --keep runs/classifiers
    python benchmarks/peers/train_vit.py MNIST MODEL
    python benchmarks/peers/side_by_side.py image-classifier MODEL --data mnist --environments FOLDER --keep runs/images

Claims: none; the table says what comes of it.

An encoder: the captions train.1.en.gz to train.5.en.gz of the folder are of the same images, a line each. Caption 1 of
each of the last 5,000 images is searched for by its caption 5; tools that learn do so from all captions of the other
images. A translator into English: tools that learn do so from the other language of train.*.gz, and BLEU is of the
first 1,000 lines of test*.gz. A language model writes all texts itself, drawn at random with all probabilities: 2,000
to learn from, and 500 of which the perplexity is, in the number of its own tokens. Nothing can predict those better
than the model, but by chance: the log of a ratio of perplexities is a KL divergence. With --data, these are lines of
train.txt.gz and test.txt.gz, of 16 to 256 tokens. A classifier: tools that learn do so from the texts, or pairs of
texts, of train.jsonl.gz, without their labels, and accuracy is of dev.jsonl.gz. A classifier of images: tools that
learn do so from the first 512 training images of MNIST, and accuracy is of its 10,000 test images.

Each tool runs in an environment of its own, as its documentation says: once to make the model, and once more, in a
new process on one core, to open and use it. Columns:

- folder: MB of all files, tokenizer included;
- the score, and its difference from the model's (of perplexities, the ratio) with a 95 % interval, by a paired
  bootstrap over what is asked;
- ms: of the core, for a text or image alone (of a language model, what it costs in nats), the median of 300, in the
  faster of two turns, and its share of the model's; seconds to make it; peak memory of answering these;
- again: whether the new process computes exactly what was computed before saving;
- lines of code to make it, imports included.

Below, the tools that score better than all of hf_freeze's of no more bytes and ms (5 % more ms are no more), by more than
the interval of the difference. What is done is kept in `--keep`: the command continues where it stopped. The picture
front.png has all of them.
"""

import base64
import gzip
import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import classify
import encode
import numpy as np
import predict
import see
import translate

sys.path.insert(0, str(Path(__file__).parents[1]))

import _shared
from accepted import install
from compressed_language import written
from compressed_texts import captions, hits
from train_vit import mnist
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from hf_freeze.analysis import compare
from hf_freeze.io import bytes_of
from hf_freeze.lab.data import sample
from hf_freeze.scores import bleu, bleu_items

HERE, IMAGES, SEEN, SENTENCES, SHORTEST, LONGEST = Path(__file__).parent, 5000, 512, 1000, 16, 256
NOISE = 0.05  # by which the times of one tool differ from run to run


@dataclass(frozen=True)
class Kind:
    tools: ModuleType
    auto: Any  # the class of transformers that opens the model
    title: str
    score: str
    format: str
    texts: Callable[[Any], tuple[list[str], list[str]]]  # options -> those to learn from, those that are asked
    items: Callable[[np.ndarray, Any], np.ndarray]  # answers, options -> (N, k) to sum
    of_sums: Callable[[np.ndarray], np.ndarray]
    is_log: bool = False  # of_sums gives the log of the score, which is better if lower; differences are then ratios
    item: str = "text"  # that is asked


def every_caption(options: Any) -> tuple[list[str], list[str]]:
    every = [captions(options.data, number) for number in range(1, 6)]
    learnt = [line for lines in zip(*(lines[:-IMAGES] for lines in every), strict=True) for line in lines]
    return learnt, every[0][-IMAGES:] + every[4][-IMAGES:]


def found_images(answers: np.ndarray, options: Any) -> np.ndarray:
    vectors = answers / np.linalg.norm(answers, axis=1, keepdims=True).clip(1e-9)
    right = hits(vectors, IMAGES)
    return np.stack([right, np.ones_like(right)], axis=1)


def stories(options: Any) -> tuple[list[str], list[str]]:
    """Its own, or paragraphs of --data that fit into its positions."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(options.model), AutoTokenizer.from_pretrained(options.model)
    if options.data is None:
        learnt, asked = (written(model, tokenizer, count, seed) for count, seed in ((2000, 0), (500, 999)))
        return learnt, asked
    most = min(model.config.max_position_embeddings, LONGEST)
    fitting = (
        [
            text
            for text in lines_of(options.data / f"{split}.txt.gz")
            if SHORTEST <= len(tokenizer(text)["input_ids"]) <= most
        ]
        for split in ("train", "test")
    )
    learnt, asked = (sample(texts, count) for texts, count in zip(fitting, (2000, 500), strict=True))
    return learnt, asked


def costs(answers: np.ndarray, options: Any) -> np.ndarray:
    """Nats of each text, and its tokens as the model splits it: a smaller one may have fewer tokens to split it into."""
    return np.stack([answers[:, 0], np.load(options.keep / "whole" / "answers.npy")[:, 1]], axis=1)


def mean_of_first(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]


def lines_of(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def english(folder: Path, split: str) -> Path:
    """The one file of a split that is in English."""
    return only(folder, f"{split}*.en.gz", set(folder.glob(f"{split}*.en.gz")))


def into_english(folder: Path, split: str) -> list[str]:
    """The lines of the split's one file in another language."""
    return lines_of(
        only(folder, f"{split}*.gz in another language", set(folder.glob(f"{split}*.gz")) - {english(folder, split)})
    )


def only(folder: Path, name: str, found: set[Path]) -> Path:
    if len(found) != 1:
        sys.exit(
            f"--data {folder} has {len(found)} files {name}, not one: {', '.join(sorted(path.name for path in found)) or 'none'}"
        )
    return found.pop()


def sentences(options: Any) -> tuple[list[str], list[str]]:
    learnt, asked = ([text_of(row) for row in labelled(options.data, split)] for split in ("train", "dev"))
    return learnt, asked


def text_of(row: dict[str, Any]) -> Any:
    return row["sentence"] if "sentence" in row else [row["sentence1"], row["sentence2"]]


def right_classes(answers: np.ndarray, options: Any) -> np.ndarray:
    return right_of(answers, [row["label"] for row in labelled(options.data, "dev")])


def right_of(answers: np.ndarray, labels: Any) -> np.ndarray:
    right = answers.argmax(1) == labels
    return np.stack([right, np.ones_like(right)], axis=1)


def labelled(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(folder / f"{split}.jsonl.gz")]


def digits(options: Any) -> tuple[list[str], list[str]]:
    images, classes = mnist(options.data, "train")
    learnt = [f"{in_base64(image)} {label}" for image, label in zip(images[:SEEN], classes[:SEEN], strict=True)]
    return learnt, [in_base64(image) for image in mnist(options.data, "t10k")[0]]


def in_base64(image: np.ndarray) -> str:
    return base64.b64encode(image.tobytes()).decode()


KINDS = {
    "encoder": Kind(
        encode,
        AutoModel,
        "A sentence encoder",
        "recall@1",
        ".4f",
        every_caption,
        found_images,
        mean_of_first,
    ),
    "translator": Kind(
        translate,
        AutoModelForSeq2SeqLM,
        "A translator",
        "BLEU",
        ".2f",
        lambda options: (into_english(options.data, "train"), into_english(options.data, "test")[:SENTENCES]),
        lambda answers, options: bleu_items(answers.tolist(), lines_of(english(options.data, "test"))[:SENTENCES]),
        bleu,
    ),
    "language-model": Kind(
        predict,
        AutoModelForCausalLM,
        "A language model",
        "perplexity",
        ".3f",
        stories,
        costs,
        mean_of_first,
        is_log=True,
    ),
    "classifier": Kind(
        classify,
        AutoModelForSequenceClassification,
        "A classifier",
        "accuracy",
        ".4f",
        sentences,
        right_classes,
        mean_of_first,
    ),
    "image-classifier": Kind(
        see,
        AutoModelForImageClassification,
        "An image classifier",
        "accuracy",
        ".4f",
        digits,
        lambda answers, options: right_of(answers, mnist(options.data, "t10k")[1]),
        mean_of_first,
        item="image",
    ),
}


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="its folder")
    parser.add_argument("--data", type=Path, help="folder with the files that are named above")
    parser.add_argument("--peers", nargs="+", help="some of the tools, by name")
    parser.add_argument("--install", action="store_true", help="make the environments of the tools, no more")
    parser.add_argument("--environments", type=Path, default=Path("runs/peers/environments"))
    parser.add_argument("--keep", type=Path, default=Path("runs/peers"), help="for models and results")
    options = parser.parse_args()
    kind = KINDS[options.kind]
    if options.install:
        for name, requirements in kind.tools.ENVIRONMENTS.items():
            install(options.environments / name, requirements)
        return
    if options.model is None or (options.data is None and options.kind != "language-model"):
        parser.error("MODEL and --data are needed, or --install; a language model needs no --data")
    peers = options.peers or list(kind.tools.PEERS)
    if unknown := set(peers) - kind.tools.PEERS.keys():
        parser.error(f"--peers has no {', '.join(sorted(unknown))}; choose from {', '.join(kind.tools.PEERS)}")
    options.keep.mkdir(parents=True, exist_ok=True)
    files = [options.keep / f"{name}.json" for name in ("learnt", "asked")]
    if not all(file.exists() for file in files):
        for file, some in zip(files, kind.texts(options), strict=True):
            file.write_text(json.dumps(some))
    learnt, asked = (json.loads(file.read_text()) for file in files)
    if not (options.keep / "plain").exists():
        plain(options.model, options.keep / "plain", kind.auto)
    found = {name: run(kind, name, options) for name in dict.fromkeys(["whole", *peers])}
    items = {
        name: [kind.items(np.load(options.keep / name / "answers.npy"), options)]
        for name, facts in found.items()
        if "error" not in facts
    }
    rows, points = table(kind, found, items, options)
    picture(kind, points, options.keep / "front.png")
    change = "ratio" if kind.is_log else "difference"
    headings = ["", "folder, MB", kind.score, change, "ms", "seconds", "memory, MB", "again", "lines"]
    summary = f"{better(kind, points, items)}\n\n{len(asked):,} {kind.item}s asked, {len(learnt):,} to learn from"
    _shared.report(options, _shared.markdown(headings, rows), summary)


def plain(model: str, folder: Path, auto: Any) -> None:
    """What every tool reads: a model without hf_freeze, and of a tokenizer the name that its class had before transformers 5."""
    shutil.copytree(model, folder)
    if (whole := auto.from_pretrained(model)).config.model_type.startswith("hf_freeze"):
        whole.merge().save_pretrained(folder)
    if not (folder / "tokenizer_config.json").exists():
        return
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def run(kind: Kind, name: str, options: Any) -> dict[str, Any]:
    """Both steps of one tool, where they are not done; what they found."""
    peer, folder, found = kind.tools.PEERS[name], options.keep / name, {}
    python = options.environments / peer.environment / "bin" / "python" if peer.environment else Path(sys.executable)
    if not python.exists():
        raise SystemExit(f"{python} is missing: run this with --install")
    for step in ("make", "use"):
        if not (folder / f"{step}.json").exists():
            print(f"{step} {name}", flush=True)
            command = [python, kind.tools.__file__, name, step, options.keep / "plain", options.keep, folder]
            threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} if step == "use" else {}
            subprocess.run([str(part) for part in command], check=True, env=os.environ | threads)
        found |= json.loads((folder / f"{step}.json").read_text())
        if "error" in found:
            break
    return found


def better(kind: Kind, points: dict[str, Any], items: dict[str, Any]) -> str:
    """Which tools score better than all of hf_freeze's models of as few bytes and ms, by a paired bootstrap; and which have none
    such to be compared with. Times count as equal within `NOISE`."""
    found, alone = [], []
    for name, (size, _, ms) in points.items():
        if name == "whole" or name.startswith("hf_freeze"):
            continue
        title = kind.tools.PEERS[name].title
        ours = [
            each
            for each, (bytes, _, time) in points.items()
            if each.startswith("hf_freeze") and bytes <= size and time <= ms * (1 + NOISE)
        ]
        if not ours:
            alone.append(title)
            continue
        changes = [compare({each: items[each], name: items[name]}, kind.of_sums)[0] for each in ours]
        if all(change.high < 0 if kind.is_log else change.low > 0 for change in changes):
            found.append(title)
    lines = [f"Better than each of hf_freeze's that is no larger and no slower: {', '.join(found) or 'none'}"]
    if alone:
        lines.append(f"Smaller or faster than all of hf_freeze's: {', '.join(alone)}")
    return "\n\n".join(lines)


def table(
    kind: Kind, found: dict[str, dict[str, Any]], items: dict[str, Any], options: Any
) -> tuple[list[list[str]], dict[str, Any]]:
    """Rows, and name -> (MB, score, ms)."""
    differences = {each.row: each for each in compare(items, kind.of_sums, to_first=True)}
    shown, sign = (np.exp, "") if kind.is_log else (float, "+")
    rows, points = [], {}
    for name, facts in found.items():
        peer = kind.tools.PEERS[name]
        if "error" in facts:
            rows.append([peer.title, textwrap.shorten(facts["error"], 140), *["–"] * 7])
            continue
        score, size = float(shown(kind.of_sums(items[name][0].sum(0)))), bytes_of(options.keep / name / "model") / 1e6
        share = facts["ms"] / found["whole"]["ms"]
        change = differences.get(name)
        ends = [float(shown(end)) for end in (change.difference, change.low, change.high)] if change else []
        rows.append(
            [
                peer.title,
                f"{size:.{2 if size >= 1 else 3}f}",
                format(score, kind.format),
                "{} ({} to {})".format(*(format(end, f"{sign}{kind.format}") for end in ends)) if ends else "",
                f"{facts['ms']:.2f} ({share:.2f})",
                f"{facts['seconds']:.0f}",
                f"{facts['memory'] / 1e6:.0f}",
                "yes" if facts["same"] else "no",
                str(len(inspect.getsource(peer.make).splitlines()) - 1),
            ]
        )
        points[name] = (size, score, facts["ms"])
    return rows, points


def picture(kind: Kind, points: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(10, max(3.6, 0.19 * len(points))), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, column, label in zip(axes, (0, 2), ("folder, MB", f"ms per {kind.item}"), strict=True):
        for (name, point), marker in zip(points.items(), itertools.cycle("*osD^vPXhd<>8pH1234+x")):
            color = "C0" if name.startswith("hf_freeze") else "0.45"
            title = kind.tools.PEERS[name].title.replace("`", "")
            axis.scatter(point[column], point[1], color=color, marker=marker, s=60, label=title)
        axis.set(xscale="log", xlabel=label, yscale="log" if kind.is_log else "linear")
        for each in (axis.xaxis, axis.yaxis)[: 2 if kind.is_log else 1]:
            low, high = each.get_view_interval()
            each.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            each.set_major_formatter(FormatStrFormatter("%g"))
            each.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"{kind.score} ({'lower' if kind.is_log else 'higher'} is better)")
    handles, titles = axes[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle(f"{kind.title} made smaller: hf_freeze in blue, other tools in grey", fontsize=10)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
