"""Time to derive and prove a family, and to load a variant of it by its stored description.

    python benchmarks/derive.py                              # roberta, t5 and qwen3 with 24 layers, hidden size 512
    python benchmarks/derive.py --types roberta --layers 2   # quick

Claims: the first derivation of a family takes at most 1.5 s more than the native construction on `meta`, the second, in the same
process, almost nothing; loading a variant of a family that is derived takes at most 1.1 times as long as the native model.

Each first derivation runs in a new process, after one of another family: transformers imports a family's modules once, which is
not counted. Loading: native and variant (a Freeze that stores everything) in alternating turns from the page cache, the median of
the ratios with quartiles. Limit: a variant's tensors are those of the native model, so 1.0 is the least.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _shared
import torch
from transformers import AutoConfig, AutoModel

from hf_freeze import make_variant, methods
from hf_freeze.architectures.derive import base_model, derive
from hf_freeze.architectures.registry import architecture_of


def config_of(model_type: str, layers: int, hidden: int) -> Any:
    """A config of the type with these sizes."""
    sizes = {
        "num_hidden_layers": layers,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "hidden_size": hidden,
        "d_model": hidden,
        "intermediate_size": 4 * hidden,
        "d_ff": 4 * hidden,
        "num_attention_heads": 8,
        "num_heads": 8,
        "num_key_value_heads": 8,
        "layer_types": None,
    }
    default = AutoConfig.for_model(model_type)
    return AutoConfig.for_model(model_type, **{name: size for name, size in sizes.items() if hasattr(default, name)})


def first_derivation(model_type: str, layers: int, hidden: int) -> list[float]:
    """(seconds of the native construction on meta, of the first derivation, of the second)."""
    torch.set_num_threads(1)
    derive(AutoConfig.for_model("bert"))
    config = config_of(model_type, layers, hidden)
    base_model(config)
    times = []
    for work in (lambda: base_model(config), lambda: architecture_of(config), lambda: architecture_of(config)):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def load_ratio(model_type: str, layers: int, hidden: int, rounds: int) -> tuple[float, list[float]]:
    """(seconds of a native load, ratios of the variant's load to it)."""
    native = AutoModel.from_config(config_of(model_type, layers, hidden))
    variant = make_variant(native, [methods.Freeze(ffn="frozen")])
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder) / name for name in ("native", "variant")}
        native.save_pretrained(folders["native"])
        variant.save_pretrained(folders["variant"])
        seconds: dict[str, list[float]] = {"native": [], "variant": []}
        for _ in range(rounds + 1):
            for name, path in folders.items():
                start = time.perf_counter()
                AutoModel.from_pretrained(path)
                seconds[name].append(time.perf_counter() - start)
    ratios = [variant / native for native, variant in zip(seconds["native"], seconds["variant"], strict=True)]
    return statistics.median(seconds["native"][1:]), ratios[1:]


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--types", nargs="+", default=["roberta", "t5", "qwen3"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    sizes = (options.layers, options.hidden)
    lines, summaries = [], []
    for model_type in options.types:
        native, first, again = _shared.in_new_process(first_derivation, model_type, *sizes)
        load, ratios = load_ratio(model_type, *sizes, options.rounds)
        seconds = [f"{native:.2f}", f"{first:.2f}", f"{again:.3f}", f"{load:.2f}"]
        lines.append([model_type, *seconds, _shared.quartiles(ratios, 2)])
        holds = first <= 1.5 + native and statistics.median(ratios) <= 1.1
        summaries.append(f"{model_type}: {'passed' if holds else 'missed'}")
    header = ["family", "native on meta s", "first derivation s", "again s", "native load s", "variant / native load"]
    summary = f"{options.layers} layers, hidden size {options.hidden}; claims: {', '.join(summaries)}"
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
