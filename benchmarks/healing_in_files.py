"""Memory, reads and time of healing a model whose weights lie in files, with adapters on its weights and on 8 bits of them
(`training.healing.heal(int8=True)`).

    python benchmarks/healing_in_files.py                              # 0.34 billion parameters in bf16, some steps
    python benchmarks/healing_in_files.py --trained stories260k/hf     # what a trained model loses by the 8 bits

Claim: while it trains, the weights of a model in 8 bits take at most 0.65 of the memory of those in bf16, if all stay in memory;
token tables and the output matrix, a fifth of them here, stay in bf16.

Weights are fresh: those of the student and those of the original are drawn apart. Each healing runs in a new process. Its peak is
VmHWM, reset before the steps that are timed, when the pages of all files have been given back, less what it has after its
imports; "of it files": what of the weights is in memory after the last step. "all": pages stay in memory; "limit": they are given
back above 0.3 GB, as of a model that is larger than the memory. A step has 128 tokens at most; what it reads from the disk is
that of /proc/self/io. Activations, adapters and their optimizer state are in the peak.

With `--trained`, FFNs lose 40 % of their neurons without calibration, and the model heals by texts that it writes itself. The
loss is that of held-out texts, in nats, at temperature 2 and times 4.
"""

import itertools
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _shared
import torch
from compressed_language import written
from convert import write_backbone
from transformers import LlamaConfig

from hf_freeze import surgery
from hf_freeze.compression.shape import quantized
from hf_freeze.methods import FFNPruning
from hf_freeze.methods.base import Method
from hf_freeze.model.convert import convert
from hf_freeze.model.loading import load_model, load_tokenizer
from hf_freeze.model.paging import Paged, page_out, resident
from hf_freeze.model.samples import samples_of
from hf_freeze.training.healing import heal

SIZES = (1024, 2816, 24, 16, 4)  # hidden size, FFN width, layers, heads, key-value heads
ROWS, TOKENS = 9, 16  # texts, of which one is held out
LIMITS = {"all": 10**12, "limit": 3 * 10**8}
KINDS = {"bf16": False, "int8": True}


def of_healing(source: Path, student: Path, folder: Path, kind: str, limit: int, steps: int) -> dict[str, float]:
    """Figures of the steps of one healing."""
    torch.set_num_threads(1)
    imports, in_files, marks = resident(), 1024 * _field("/proc/self/status", "RssFile"), []

    def heard(message: dict[str, Any]) -> None:
        if message["stage"] == "healing":
            if not marks:
                page_out()
                surgery.return_freed_memory()
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            status = [1024 * _field("/proc/self/status", name) for name in ("VmHWM", "RssFile")]
            marks.append((time.process_time(), _field("/proc/self/io", "read_bytes"), *status))

    original, model = load_model(source), load_model(student)
    ids = torch.randint(3, 32_000, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    samples = samples_of(original, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    options: Any = {"limit": f"{steps}epochs", "callback": heard, "int8": KINDS[kind]}
    with Paged(folder, limit) as paged:
        heal(model, original, samples, folder, paged=paged, **options)
    times, reads, peaks, files = zip(*marks, strict=True)
    return {
        "parameters": float(model.num_parameters()),
        "peak": peaks[-1] - imports,
        "files": files[-1] - in_files,
        "seconds": statistics.median(b - a for a, b in itertools.pairwise(times)),
        "read": (reads[-1] - reads[0]) / (len(reads) - 1),
    }


def _field(file: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))


def measure_sizes(options: Any, folder: Path) -> tuple[str, str]:
    for name, scale in (("original", 0.02), ("student", 0.025)):
        (folder / name).mkdir()
        write_backbone(folder / name, SIZES, lambda _, s, scale=scale: torch.randn(s) * scale + (len(s) == 1))
    lines, files = [], {}
    for limit in options.pages:
        for kind in KINDS:
            (out := folder / "out").mkdir()
            paths = (folder / "original", folder / "student", out)
            run = _shared.in_new_process(of_healing, *paths, kind, LIMITS[limit], options.steps, OMP_NUM_THREADS="1")
            files[limit, kind] = run["files"]
            sizes = [f"{run[name] / 1e9:.2f}" for name in ("parameters", "peak", "files", "read")]
            lines.append([kind, limit, *sizes, f"{run['seconds']:.1f}"])
            print(_shared.markdown(HEADER, lines), flush=True)
            shutil.rmtree(out)
    ratio = files["all", "int8"] / files["all", "bf16"]
    return _shared.markdown(
        HEADER, lines
    ), f"weights in memory: int8 {ratio:.2f} of bf16; at most 0.65: {ratio <= 0.65}"


HEADER = [
    "below the adapters",
    "pages",
    "10⁹ parameters",
    "peak GB",
    "of it files GB",
    "read GB a step",
    "CPU seconds a step",
]


def measure_trained(options: Any, folder: Path) -> tuple[str, str]:
    torch.set_num_threads(1)
    source, tokenizer = options.trained, load_tokenizer(options.trained)
    original, config = load_model(source).eval(), LlamaConfig.from_pretrained(source)
    cut = FFNPruning(width=8 * round(0.6 * config.intermediate_size / 8))
    parts = ["attention", "ffn"]
    students: dict[str, tuple[list[Method], bool]] = {
        "the cut model": ([cut], False),
        "8 bits of it, merged into it": ([cut], True),
        "an int8 variant, rounded again": ([cut, quantized(parts, bits=8)], False),
        "an int4 variant, rounded again": ([cut, quantized(parts, bits=4)], False),
    }
    rows: dict[str, list[Any]] = {name: [] for name in students}
    for seed in options.seeds:
        samples = samples_of(original, written(original, tokenizer, options.texts, seed), tokenizer)
        for name, (methods, int8) in students.items():
            student = convert(source, folder / f"{seed} {name}", methods)
            (out := folder / f"heal {seed} {name}").mkdir()
            limits: Any = {"limit": f"{options.epochs}epochs", "seed": seed}
            with Paged(out, 10**9) as paged:
                rows[name].append(heal(load_model(student), original, samples, out, paged=paged, int8=int8, **limits))
    lines = [
        [name, *(_spread([getattr(one, loss) for one in found]) for loss in ("loss_before", "loss_after"))]
        for name, found in rows.items()
    ]
    return _shared.markdown(
        ["adapters on", "loss before", "after"], lines
    ), f"seeds {options.seeds}: mean, least to most"


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pages", nargs="+", default=list(LIMITS), choices=LIMITS)
    parser.add_argument("--trained", type=Path, help="folder of a trained Llama with its tokenizer")
    parser.add_argument("--texts", type=int, default=128, help="with --trained")
    parser.add_argument("--epochs", type=int, default=5, help="with --trained")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="with --trained")
    parser.add_argument("--folder", type=Path, help="where the files go; the system's temporary folder if not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        table, summary = (measure_trained if options.trained else measure_sizes)(options, Path(folder))
    _shared.report(options, table, summary)


if __name__ == "__main__":
    main()
