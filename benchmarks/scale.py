"""Time and memory of making, saving and loading variants of large models, against the native load.

    python benchmarks/scale.py                                  # Llama of 0.1, 0.3, 0.6 and 1.1 billion parameters in bf16
    python benchmarks/scale.py --sizes 0.1 --methods freeze     # quick

Claims: `make_variant(folder, methods)` has a peak of resident memory of at most 1.15 times the backbone and what the methods add,
and takes at most 1.3 times as long as the native load, singular value decompositions and random draws aside; the variant is saved
and reloaded bit-equal. Time and memory grow with at most the power 1.05 of the number of parameters.

Each measurement runs in a new process with one thread. Memory is the peak of that process less what it has after its imports. The
native load maps the file and reads nothing, so each work ends with reading one number of every page of every tensor. Limit: the
native load itself, since every tensor must be read once.
"""

import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _shared
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_freeze import make_variant
from hf_freeze.methods import FFNPruning, Freeze, HeadPruning, LayerSelection, LowRank, Quantize

SIZES = {  # billions of parameters -> (hidden size, FFN width, layers, heads)
    "0.1": (768, 2048, 12, 12),
    "0.3": (1024, 2816, 24, 16),
    "0.6": (1536, 4096, 20, 24),
    "1.1": (2048, 5632, 22, 32),
}
METHODS: dict[str, Callable[[Any], list[Any]]] = {
    "freeze": lambda config: [Freeze(ffn="frozen")],
    "freeze random": lambda config: [Freeze(ffn="random")],
    "half FFN": lambda config: [FFNPruning(width=config.intermediate_size // 2)],
    "half heads": lambda config: [HeadPruning(share=0.5)],
    "half layers + low rank": lambda config: [LayerSelection(share=0.5), LowRank(rank=64, solver="randomized")],
    "int8": lambda config: [Quantize(scheme="int8")],
}
TIMED_APART = ("freeze random", "half layers + low rank")  # draws; a singular value decomposition of each linear


def write_backbone(folder: str, size: str) -> int:
    """Write a sharded Llama with fresh weights in bf16; returns its bytes."""
    hidden, width, layers, heads = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=32_000,
        max_position_embeddings=2048,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")
    return _bytes(model)


def native(folder: str) -> dict[str, float]:
    """The native load."""
    return _measured(lambda: AutoModelForCausalLM.from_pretrained(folder), {})[0]


def made(folder: str, name: str) -> dict[str, float]:
    """Making, saving and loading a variant."""
    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        backbone = AutoModelForCausalLM.from_config(config).state_dict()
    figures, variant = _measured(lambda: make_variant(folder, METHODS[name](config), task="causal-lm"), backbone)
    with tempfile.TemporaryDirectory() as out:
        figures["save"] = _shared.seconds(lambda: variant.save_pretrained(out))
        start = time.perf_counter()
        reloaded = AutoModelForCausalLM.from_pretrained(out)
        figures["load"] = time.perf_counter() - start
        expected, actual = variant.state_dict(), reloaded.state_dict()
        figures["equal"] = expected.keys() == actual.keys() and all(
            torch.equal(actual[key], value) for key, value in expected.items()
        )
    return figures


def _measured(work: Callable[[], Any], backbone: dict[str, torch.Tensor]) -> tuple[dict[str, float], Any]:
    """Figures of making a model; `added`: bytes of its tensors that are generated, or that the backbone has not in this shape."""
    torch.set_num_threads(1)
    before = _shared.resident("VmRSS")
    start = time.perf_counter()
    model = work()
    for tensor in model.state_dict().values():
        tensor.flatten()[:: 4096 // tensor.element_size()].clone()
    seconds = time.perf_counter() - start
    seeded = getattr(model, "seeded_tensors", {})
    added = {
        tensor.data_ptr(): tensor.nbytes
        for name, tensor in model.state_dict().items()
        if name in seeded or name not in backbone or backbone[name].shape != tensor.shape
    }
    figures = {"seconds": seconds, "peak": _shared.resident("VmHWM") - before, "bytes": _bytes(model)}
    return figures | {"added": sum(added.values())}, model


def _bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def slope(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line through the logarithms."""
    xs, ys = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="billions of parameters")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    options = parser.parse_args()
    lines, memory, times, unequal = [], [], [], []
    growth: dict[str, list[tuple[float, float, float]]] = {}
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            _shared.in_new_process(write_backbone, folder, size, OMP_NUM_THREADS="1")
            base = min((_shared.in_new_process(native, folder) for _ in range(3)), key=lambda run: run["seconds"])
            lines.append([size, "native load", *_cells(base), "", "", "", "", ""])
            for name in options.methods:
                run = _shared.in_new_process(made, folder, name)
                peak = run["peak"] / (base["bytes"] + run["added"])
                ratio = run["seconds"] / base["seconds"]
                rest = [f"{peak:.2f}", f"{ratio:.2f}", f"{run['save']:.1f}", f"{run['load']:.1f}", "yes" * run["equal"]]
                lines.append([size, name, *_cells(run), *rest])
                memory.append((peak, f"{size} {name}"))
                times += [] if name in TIMED_APART else [(ratio, f"{size} {name}")]
                unequal += [] if run["equal"] else [f"{size} {name}"]
                growth.setdefault(name, []).append((base["bytes"], run["seconds"], run["peak"]))
    header = ["10⁹ parameters", "", "s", "peak GB", "tensors GB", "peak / (backbone + added)", "time / native load"]
    table = _shared.markdown([*header, "save s", "load s", "reloaded equal"], lines)
    slopes = [
        (slope([(point[0], point[axis]) for point in points]), f"{name}, {('', 'time', 'memory')[axis]}")
        for name, points in growth.items()
        for axis in (1, 2)
        if len(points) > 2
    ]
    summary = (
        f"peak at most 1.15: {_shared.verdict(memory, lambda x: x <= 1.15)}; time at most 1.3: "
        f"{_shared.verdict(times, lambda x: x <= 1.3)}; reloaded unequal: {unequal or 'none'}; slopes at most 1.05: "
        f"{_shared.verdict(slopes, lambda x: x <= 1.05)} ({', '.join(f'{case} {x:.2f}' for x, case in slopes)})"
    )
    _shared.report(options, table, summary)


def _cells(run: dict[str, float]) -> list[str]:
    return [f"{run['seconds']:.1f}", f"{run['peak'] / 1e9:.2f}", f"{run['bytes'] / 1e9:.2f}"]


if __name__ == "__main__":
    main()
