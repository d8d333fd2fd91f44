"""A sentence encoder made smaller by each tool: what it then finds, weighs, and takes.

    python benchmarks/peers/encoders.py --install --environments FOLDER
    python benchmarks/peers/encoders.py MODEL --captions captions --environments FOLDER --keep runs/encoders

Claims: none; the table says what comes of it.

The captions train.1.en.gz to train.5.en.gz of a folder are of the same images, a line each. Caption 1 of each of the last 5,000
images is searched for by its caption 5; tools that learn do so from all captions of the other images. Each tool runs in an
environment of its own, as its documentation says: once to make the model, and once more, in a new process with
`OMP_NUM_THREADS=1`, which torch reads and ONNX Runtime does not, to open and use it. Columns:

- folder: MB of all files, tokenizer included;
- recall@1, and its difference from the model's with a 95 % interval, by a paired bootstrap over images;
- ms: of a caption alone, the median of 300, and its share of the model's; seconds to make it;
  peak memory of answering these texts;
- again: whether the new process computes exactly what was computed before saving;
- lines of code to make it, imports included.

What is done is kept in `--keep`: the command continues where it stopped. The picture front.png has bytes and recall of all.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import encode
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import _shared
from accepted import install
from compressed_texts import hits, interval, read

from hf_freeze.io import bytes_of

HERE = Path(__file__).parent


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder of a sentence encoder")
    parser.add_argument("--captions", type=Path, help="folder with train.1.en.gz to train.5.en.gz")
    parser.add_argument("--images", type=int, default=5000, help="that are kept out")
    parser.add_argument("--peers", nargs="+", default=list(encode.PEERS), choices=encode.PEERS)
    parser.add_argument("--install", action="store_true", help="make the environments of the tools, no more")
    parser.add_argument("--environments", type=Path, default=Path("runs/encoders/environments"))
    parser.add_argument("--keep", type=Path, default=Path("runs/encoders"), help="for models and results")
    parser.set_defaults(texts=None)
    options = parser.parse_args()
    if options.install:
        for name, requirements in encode.ENVIRONMENTS.items():
            install(options.environments / name, requirements)
        return
    if options.model is None or options.captions is None:
        parser.error("MODEL and --captions are needed, or --install")
    learnt, wanted, queries = read(options)
    options.keep.mkdir(parents=True, exist_ok=True)
    for name, some in {"learnt": learnt, "asked": [*wanted, *queries]}.items():
        (options.keep / f"{name}.json").write_text(json.dumps(some))
    found = {name: run(name, options) for name in dict.fromkeys(["whole", *options.peers])}
    rows, points = table(found, len(wanted), options.keep)
    picture(points, options.keep / "front.png")
    headings = ["", "folder, MB", "recall@1", "difference", "ms", "seconds", "memory, MB", "again", "lines"]
    summary = f"{len(wanted):,} images that were kept out, {len(learnt):,} texts"
    _shared.report(options, _shared.markdown(headings, rows), summary)


def run(name: str, options: Any) -> dict[str, Any]:
    """Both steps of one tool, where they are not done; what they found."""
    peer, folder, found = encode.PEERS[name], options.keep / name, {}
    python = options.environments / peer.environment / "bin" / "python" if peer.environment else Path(sys.executable)
    if not python.exists():
        raise SystemExit(f"{python} is missing: run this with --install")
    for step in ("make", "use"):
        if not (folder / f"{step}.json").exists():
            print(f"{step} {name}", flush=True)
            command = [python, HERE / "encode.py", name, step, options.model, options.keep, folder]
            threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} if step == "use" else {}
            subprocess.run([str(part) for part in command], check=True, env=os.environ | threads)
        found |= json.loads((folder / f"{step}.json").read_text())
        if "error" in found:
            break
    return found


def table(found: dict[str, dict[str, Any]], count: int, folder: Path) -> tuple[list[list[str]], dict[str, Any]]:
    """Rows, and name -> (MB, recall, ms)."""
    before = hits(vectors(folder / "whole"), count)
    rows, points = [], {}
    for name, facts in found.items():
        peer = encode.PEERS[name]
        if "error" in facts:
            rows.append([peer.title, facts["error"], *["–"] * 7])
            continue
        after = hits(vectors(folder / name), count)
        size = bytes_of(folder / name / "model") / 1e6
        share = facts["ms"] / found["whole"]["ms"]
        lines = len(inspect.getsource(peer.make).splitlines()) - 1
        rows.append(
            [
                peer.title,
                f"{size:.2f}",
                f"{after.mean():.4f}",
                interval(after - before) if name != "whole" else "",
                f"{facts['ms']:.2f} ({share:.2f})",
                f"{facts['seconds']:.0f}",
                f"{facts['memory'] / 1e6:.0f}",
                "yes" if facts["same"] else "no",
                str(lines),
            ]
        )
        points[name] = (size, after.mean(), facts["ms"])
    return rows, points


def vectors(folder: Path) -> np.ndarray:
    """(texts, D), of length 1"""
    found = np.load(folder / "vectors.npy")
    return found / np.linalg.norm(found, axis=1, keepdims=True).clip(1e-9)


def picture(points: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, column, label in zip(axes, (0, 2), ("folder, MB", "ms a caption"), strict=True):
        for (name, point), marker in zip(points.items(), "*osD^vPXh", strict=False):
            color = "C0" if name.startswith("hf_freeze") else "0.45"
            title = encode.PEERS[name].title.replace("`", "")
            axis.scatter(point[column], point[1], color=color, marker=marker, s=60, label=title)
        axis.set(xscale="log", xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("captions found at once (recall@1)")
    handles, titles = axes[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle("A sentence encoder made smaller: hf_freeze in blue, other tools in grey", fontsize=10)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
