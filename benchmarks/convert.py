"""Memory and time of `hf-freeze convert` for large models, and of `hf-freeze merge`, the way back.

    python benchmarks/convert.py                                 # Llama of 1.1 billion parameters in bf16, shards of 500 MB
    python benchmarks/convert.py --sizes 6.7                     # 13.5 GB on the disk, as much again for each variant

Claim: the peak of resident memory is at most two shards and 300 MB, imports included; at most 4 GB for 6.7 billion parameters.

Each of them runs in a new process with one thread. Its resident memory is sampled every 10 ms. Limit: every byte is read and
written once, at the rate at which the disk copies the files.
"""

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _shared
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_freeze.io import bytes_of, sync
from hf_freeze.methods import FFNPruning, Freeze, HeadPruning, LowRank, Quantize
from hf_freeze.model.convert import convert, merge
from hf_freeze.model.paging import resident

SIZES = {  # billions of parameters -> (hidden size, FFN width, layers, heads, key-value heads)
    "0.1": (768, 2048, 12, 12, 4),
    "1.1": (2048, 5632, 22, 32, 4),
    "3.0": (2560, 8704, 32, 32, 8),
    "6.7": (4096, 11008, 32, 32, 32),
}
METHODS: dict[str, Callable[[Any], list[Any]]] = {
    "freeze": lambda config: [Freeze(ffn="frozen")],
    "freeze random": lambda config: [Freeze(ffn="random")],
    "half FFN": lambda config: [FFNPruning(width=config.intermediate_size // 2)],
    "half heads": lambda config: [HeadPruning(share=0.5)],
    "low rank": lambda config: [LowRank(rank=64, solver="randomized")],
    "int8": lambda config: [Quantize(scheme="int8")],
}
SHARD_BYTES = 500 * 10**6


def fresh(name: str, shape: torch.Size) -> torch.Tensor:
    """Fresh values of a parameter."""
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape).mul_(0.02)


def write_backbone(
    folder: Path,
    sizes: Sequence[int],
    values: Callable[[str, torch.Size], torch.Tensor] = fresh,
) -> None:
    """Write a Llama of these `sizes` (as in `SIZES`) in bf16, shard by shard: it may be larger than the memory. `values`: of
    each parameter, by its name and shape."""
    torch.manual_seed(0)
    hidden, width, layers, heads, groups = sizes
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=32_000,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in AutoModelForCausalLM.from_config(config).state_dict().items()}
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, shape in shapes.items():
        if 2 * shape.numel() > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= 2 * shape.numel()
    places = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weights = {name: values(name, shapes[name]).bfloat16() for name in names}
        save_file(weights, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def measured(source: Path, out: Path, name: str | None) -> dict[str, float]:
    """Figures of the conversion by the methods of this name, or of merging."""
    torch.set_num_threads(1)
    shard = f"{SHARD_BYTES // 10**6}MB"
    with watched() as run:
        if name is None:
            merge(source, out, max_shard_size=shard)
        else:
            convert(source, out, METHODS[name](LlamaConfig.from_pretrained(source)), max_shard_size=shard)
    return run


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Filled in at the end: bytes of resident memory "before" and at their "peak" inside, and the "seconds"."""
    run = {"before": float(resident()), "peak": float(resident())}
    end = threading.Event()

    def sample() -> None:
        while not end.wait(0.01):
            run["peak"] = max(run["peak"], resident())

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    try:
        yield run
    finally:
        run["seconds"] = time.perf_counter() - start
        end.set()
        thread.join()


def copy_seconds(source: Path, out: Path) -> float:
    """Of copying the files and having them on the disk."""
    start = time.perf_counter()
    out.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, out / path.name)
        sync(out / path.name)
    return time.perf_counter() - start


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--sizes", nargs="+", default=["1.1"], choices=SIZES, help="billions of parameters")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument(
        "--folder", type=Path, help="where the files go; that of the system for temporary files if not given"
    )
    options = parser.parse_args()
    lines, peaks = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size in options.sizes:
            source, out, merged = (Path(folder) / name for name in (size, "out", "merged"))
            source.mkdir()
            _shared.in_new_process(write_backbone, source, SIZES[size], OMP_NUM_THREADS="1")
            copied = copy_seconds(source, out)
            shutil.rmtree(out)
            for name in options.methods:
                for old, new, methods, label in ((source, out, name, name), (out, merged, None, f"{name}, merged")):
                    run = _shared.in_new_process(measured, old, new, methods, OMP_NUM_THREADS="1")
                    gigabytes = (bytes_of(old), bytes_of(new), run["before"], run["peak"])
                    cells = [f"{value / 1e9:.2f}" for value in gigabytes]
                    lines.append([size, label, *cells, f"{run['seconds']:.0f}", f"{copied:.0f}"])
                    peaks.append((run["peak"] / (2 * SHARD_BYTES + 300e6), f"{size} {label}"))
                shutil.rmtree(out)
                shutil.rmtree(merged)
            shutil.rmtree(source)
    header = [
        "10⁹ parameters",
        "",
        "source GB",
        "out GB",
        "after imports GB",
        "peak GB",
        "s",
        "copying the backbone, s",
    ]
    summary = f"peak at most two shards of 500 MB and 300 MB: {_shared.verdict(peaks, lambda x: x <= 1)}"
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
