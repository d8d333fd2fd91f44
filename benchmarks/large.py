"""Memory and time of calibrated conversions of Llamas that are larger than the memory (`hf-freeze convert --texts`).

    python benchmarks/large.py                              # 1.1 billion parameters in bf16, 128 samples of 512 tokens
    python benchmarks/large.py --sizes 6.7 --layers 3       # the first three layers; the time of all is extrapolated
    python benchmarks/large.py --slopes                     # time and memory against parameters, samples and width
    python benchmarks/large.py --planted                    # neurons and layers that do nothing: are just these found?
    python benchmarks/large.py --compared stories260k/hf    # a trained model: other ways to as many bytes

Claims: at most the bytes of two layers of the original and 2.5 GB of resident memory, imports included; 60 minutes for 1.1
billion parameters on two cores; with `--slopes`, time that grows at most as parameters, samples and the cube of the width.

With `--planted`, 15 % of the neurons of a Llama of 0.1 billion parameters are dead, 15 % are copies of others, and two of its 12
layers are idle: cutting just these loses nothing, and `compress --layer-by-layer` chooses just these.

With `--compared`, `compress --layer-by-layer --engine torch` makes a trained language model small enough for shares of its bytes,
without healing. Others take as many bytes or fewer: all weights of attention and FFN in 8 or 4 bits, and in 4 bits the largest
equal share of the heads and neurons of each layer, or evenly spaced layers, all with the same texts by `convert`; and `compress`
for ONNX, which has weights and tables in 8 or 4 bits and trims tokens. The model writes the texts itself: those of each seed, and
100 to compare on, which are the same for all.

Otherwise weights are fresh: quality means nothing here. Each matrix is noise with columns of different sizes plus a part of low
rank whose singular values fall as 1 / k, and tokens are as frequent as 1 / rank, so that solvers see spectra as in trained
models. Each conversion runs in a new process, whose resident memory is sampled every 10 ms. Limit: a forward of all samples
through both models, at the rate at which this machine multiplies matrices of bf16.
"""

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _shared
import torch
from compressed_language import written
from convert import SIZES, watched, write_backbone
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, PreTrainedTokenizerFast

from hf_freeze.analysis.answers import compare_answers
from hf_freeze.compression.budget import Budget
from hf_freeze.compression.compression import Compression
from hf_freeze.compression.large import compress_large
from hf_freeze.compression.settings import Settings
from hf_freeze.compression.shape import quantized
from hf_freeze.io import bytes_of
from hf_freeze.methods import FFNPruning, HeadPruning, LayerSelection, LowRank, Quantize
from hf_freeze.model.convert import convert
from hf_freeze.model.fidelity import fidelity_on
from hf_freeze.model.loading import load_model
from hf_freeze.publish.export.served import answers, opened

TOKENS, ROWS = 512, 8  # of a sample, of a batch
MB = 10**6
METHODS: dict[str, Callable[[Any], Any]] = {
    "half of the neurons": lambda config: FFNPruning(width=config.intermediate_size // 2),
    "low rank, 0.7 of the weights": lambda config: LowRank(
        rank=_ranks(config, 0.7), components=["ffn", "attention"], solver="randomized"
    ),
    "int4 in groups of 64": lambda config: Quantize(weights="int4", granularity="group-64"),
}
SLOPES = {  # what grows -> (hidden size, FFN width, layers, heads, key-value heads, samples) of four models
    "parameters": [(512, 1408, layers, 8, 4, 8) for layers in (2, 4, 8, 16)],
    "samples": [(512, 1408, 2, 8, 4, samples) for samples in (8, 16, 32, 64)],
    "width": [(hidden, 11 * hidden // 4, 2, hidden // 64, 4, 8) for hidden in (256, 512, 1024, 2048)],
}


def _ranks(config: Any, share: float) -> dict[str, int]:
    """The rank of each linear that leaves this share of its weights."""
    hidden, width = config.hidden_size, config.intermediate_size
    groups = hidden * config.num_key_value_heads // config.num_attention_heads
    sizes = {
        f"self_attn.{name}_proj": (hidden, size)
        for name, size in zip("qkvo", (hidden, groups, groups, hidden), strict=True)
    }
    sizes |= {f"mlp.{name}_proj": (hidden, width) for name in ("gate", "up", "down")}
    return {
        f"layers.{layer}.{name}": int(share * inputs * outputs / (inputs + outputs))
        for layer in range(config.num_hidden_layers)
        for name, (inputs, outputs) in sizes.items()
    }


def values(name: str, shape: torch.Size) -> torch.Tensor:
    """Of a matrix, noise with columns of different sizes and a part of low rank; of a vector, factors around 1."""
    if len(shape) == 1:
        return torch.randn(shape).mul_(0.3).exp_()
    rank = min(shape) // 16
    falling = torch.randn(shape[0], rank) / torch.arange(1, rank + 1)
    part = falling @ torch.randn(rank, shape[1])
    noise = torch.randn(shape) * torch.randn(shape[1]).mul_(0.5).exp_()
    return noise.div_(noise.norm()).add_(part.div_(part.norm()), alpha=0.7).mul_(0.02 * shape.numel() ** 0.5)


def batches(samples: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens, as frequent as 1 / rank."""
    draw = torch.Generator().manual_seed(0)
    frequency = 1 / torch.arange(1.0, 32_000)
    drawn = torch.multinomial(frequency, samples * TOKENS, replacement=True, generator=draw)
    return [{"input_ids": ids} for ids in drawn.view(samples, TOKENS).split(ROWS)]


def cut(source: Path, out: Path, name: str, samples: int, threads: int) -> dict[str, float]:
    """Figures of a conversion by the method of this name."""
    torch.set_num_threads(threads)
    method = METHODS[name](LlamaConfig.from_pretrained(source))
    with watched() as run:
        convert(source, out, [method], max_shard_size="500MB", calibration=batches(samples), say=_say)
    return run


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def rate(threads: int) -> float:
    """Floating-point operations a second of products of bf16, as large as those of a batch."""
    torch.set_num_threads(threads)
    x, weight = (torch.randn(size, 2048, dtype=torch.bfloat16) for size in (ROWS * TOKENS, 5632))
    seconds = min(_shared.seconds(lambda: torch.nn.functional.linear(x, weight)) for _ in range(5))
    return 2 * x.numel() * len(weight) / seconds


def layer_parameters(sizes: tuple[int, ...]) -> int:
    hidden, width, _, heads, groups, *_ = sizes
    return 2 * hidden * hidden * (1 + groups / heads) + 3 * hidden * width  # type: ignore[return-value]


def measure_sizes(options: Any, folder: Path) -> tuple[str, str]:
    peaks, hours, lines = [], [], []
    speed = _shared.in_new_process(rate, options.threads, OMP_NUM_THREADS=str(options.threads))
    for size in options.sizes:
        hidden, width, depth, *heads = SIZES[size]
        sizes = (hidden, width, min(options.layers or depth, depth), *heads)
        source, out = folder / "source", folder / "out"
        source.mkdir()
        _shared.in_new_process(write_backbone, source, sizes, values, OMP_NUM_THREADS=str(options.threads))
        for name in options.methods:
            run = _shared.in_new_process(
                cut, source, out, name, options.samples, options.threads, OMP_NUM_THREADS=str(options.threads)
            )
            limit = 4 * layer_parameters(sizes) + 2.5e9  # two layers of two bytes a weight
            minutes = run["seconds"] / 60 * depth / sizes[2]
            forward = 2 * 2 * layer_parameters(sizes) * depth * options.samples * TOKENS / speed / 60
            memory = [
                f"{value / 1e9:.2f}" for value in (bytes_of(source), bytes_of(out), run["before"], run["peak"], limit)
            ]
            lines.append([size, name, f"{sizes[2]} of {depth}", *memory, f"{minutes:.0f}", f"{forward:.0f}"])
            print(_shared.markdown(HEADER, lines), flush=True)
            peaks.append((run["peak"] / limit, f"{size} {name}"))
            hours += [(minutes / 60, f"{size} {name}")] if size == "1.1" else []
            shutil.rmtree(out)
        shutil.rmtree(source)
    summary = (
        f"memory: {_shared.verdict(peaks, lambda x: x <= 1)}; 60 minutes: {_shared.verdict(hours, lambda x: x <= 1)}"
    )
    return _shared.markdown(HEADER, lines), summary


HEADER = [
    "10⁹ parameters",
    "method",
    "layers that ran",
    "source GB",
    "out GB",
    "after imports GB",
    "peak GB",
    "limit GB",
    "minutes, of all layers",
    "of which a forward of both models takes at least",
]


def measure_slopes(options: Any, folder: Path) -> tuple[str, str]:
    lines, found = [], []
    for what, models in SLOPES.items():
        for name in options.methods:
            points = []
            for *sizes, samples in models:
                source, out = folder / "source", folder / "out"
                source.mkdir()
                write_backbone(source, sizes, values)
                run = _shared.in_new_process(
                    cut, source, out, name, samples, options.threads, OMP_NUM_THREADS=str(options.threads)
                )
                grows = {"parameters": sizes[2], "samples": samples, "width": sizes[0]}[what]
                points.append((grows, run["seconds"], run["peak"] - run["before"]))
                shutil.rmtree(source)
                shutil.rmtree(out)
            slopes = [_slope([(x, point[index]) for x, *point in points]) for index in (0, 1)]
            cells = [f"{seconds:.1f} s, {memory / MB:.0f} MB" for _, seconds, memory in points]
            lines.append([what, name, *cells, *(f"{slope:.2f}" for slope in slopes)])
            print(_shared.markdown(SLOPE_HEADER, lines), flush=True)
            found.append((slopes[0] / (3 if what == "width" else 1.15), f"{what}, {name}"))
    summary = f"time grows at most as parameters, samples and the cube of the width: {_shared.verdict(found, lambda x: x <= 1)}"
    return _shared.markdown(SLOPE_HEADER, lines), summary


SLOPE_HEADER = ["what grows", "method", "×1", "×2", "×4", "×8", "log-log slope of time", "of memory"]


def _slope(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line through the logarithms."""
    xs, ys = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    middle = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - middle[0]) * (y - middle[1]) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - middle[0]) ** 2 for x in xs)


IDLE = (4, 8)  # layers


def planted(name: str, shape: torch.Size) -> torch.Tensor:
    """As `values`, of a Llama with dead neurons, copies and idle layers."""
    found = values(name, shape)
    layer = int(name.split(".")[2]) if ".layers." in name else -1
    if layer in IDLE and ("o_proj" in name or "down_proj" in name):
        return found.zero_()
    width = max(shape)
    part = round(0.15 * width)
    if "down_proj" in name:
        found[:, :part] = 0
    if "gate_proj" in name or "up_proj" in name:
        found[part : 2 * part] = found[width // 2 : width // 2 + part]
    return found


def cut_planted(source: Path, out: Path, threads: int) -> list[tuple[str, Any, float]]:
    """(cut, shape or None, KL to the original) of the planted model."""
    torch.set_num_threads(threads)
    config, calibration = LlamaConfig.from_pretrained(source), batches(24)
    keep = [layer for layer in range(config.num_hidden_layers) if layer not in IDLE]
    width = config.intermediate_size - 2 * round(0.15 * config.intermediate_size)
    cuts = [FFNPruning(width=width), LayerSelection(keep={"decoder": keep})]
    held_out = [{"input_ids": ids} for ids in batches(32)[-1]["input_ids"].split(1)]
    original, found = load_model(source).eval(), []
    for label, methods, given in (
        ("just these, with texts", cuts, calibration),
        ("just these, without texts", cuts, None),
        (
            "as many others, with texts",
            [FFNPruning(width=width), LayerSelection(keep={"decoder": sorted([*keep[2:], *IDLE])})],
            calibration,
        ),
    ):
        convert(source, out, sorted(methods, key=lambda method: method.name, reverse=True), calibration=given)
        found.append((label, None, fidelity_on(original, load_model(out).eval(), held_out).kl))
        shutil.rmtree(out)
    tokenizer = Tokenizer(WordLevel({"<pad>": 0} | {str(token): token + 1 for token in range(31_999)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(source)
    texts = [" ".join(map(str, row)) for batch in batches(96) for row in batch["input_ids"].tolist()]
    hidden = config.hidden_size
    gone = sum(layer_parameters(SIZES["0.1"]) for _ in IDLE) + 3 * hidden * (config.intermediate_size - width) * len(
        keep
    )
    size = bytes_of(source)
    result = compress_large(
        source, texts=texts, max_bytes=int(size - 2 * gone + 0.02 * size), out=out, engine="torch", samples=24, say=_say
    )
    found.append(("chosen by compress", result.model, result.fidelity.kl))
    return found


def measure_planted(options: Any, folder: Path) -> tuple[str, str]:
    source, out = folder / "source", folder / "out"
    source.mkdir()
    write_backbone(source, SIZES["0.1"], planted)
    found = _shared.in_new_process(cut_planted, source, out, options.threads, OMP_NUM_THREADS=str(options.threads))
    by_name = {method.name: method for method in load_model(found[-1][1]).methods}
    width, part = SIZES["0.1"][1], round(0.15 * SIZES["0.1"][1])
    may_go = {*range(2 * part), *range(width // 2, width // 2 + part)}
    wrong = planned = 0
    for neurons in by_name["ffn_pruning"].keep.values():
        removed = set(range(width)) - set(neurons)
        wrong, planned = wrong + len(removed - may_go), planned + len(removed)
    layers = [layer for layer in range(SIZES["0.1"][2]) if layer not in by_name["layer_selection"].keep["decoder"]]
    summary = (
        f"layers that `compress` removed: {layers}, planted: {list(IDLE)}; neurons: {planned:,}, of which {wrong} not planted; "
        f"other methods: {sorted(by_name.keys() - {'ffn_pruning', 'layer_selection'}) or 'none'}"
    )
    return _shared.markdown(
        ["cut", "KL to the original, nats a token"], [[label, f"{kl:.2g}"] for label, _, kl in found]
    ), summary


LEARNT, SAMPLES, UNSEEN = 300, 128, 100  # texts of each seed, those for statistics, those to compare on
PARTS = ["attention", "ffn"]


def equal_shares(config: Any) -> Iterator[list[Any]]:
    """Of the heads and neurons of each layer, the most first."""
    for share in (5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6):
        yield [HeadPruning(share=share), FFNPruning(width=8 * round(share * config.intermediate_size / 8))]


def spaced_layers(config: Any) -> Iterator[list[Any]]:
    depth = config.num_hidden_layers
    for count in range(depth - 1, 0, -1):
        keep = sorted({round(number * (depth - 1) / max(count - 1, 1)) for number in range(count)})
        yield [LayerSelection(keep={"decoder": keep})]


OTHERS = {"equal shares in each layer, 4 bits": equal_shares, "evenly spaced layers, 4 bits": spaced_layers}


def compare(options: Any, folder: Path) -> dict[str, list[tuple[float, float, float]]]:
    """What was done -> for each seed (share of the bytes, KL to the original, perplexity) on texts that nothing has seen."""
    torch.set_num_threads(options.threads)
    source, whole, found = options.compared, bytes_of(options.compared), {}
    served = opened(source)
    unseen = written(served.model, served.tokenizer, UNSEEN, seed=999)
    expected = answers(served, unseen)

    def add(label: str, made: Path) -> None:
        there = compare_answers(expected, answers(opened(made), unseen, like=expected))
        found.setdefault(label, []).append((bytes_of(made) / whole, there.kl, there.perplexity))
        _say(f"{label}: {found[label][-1]}")

    for seed in options.seeds:
        texts = written(served.model, served.tokenizer, LEARNT, seed)

        def converted(label: str, cuts: list[Any], bits: int, seed: int = seed, texts: Any = texts) -> Path:
            shutil.rmtree(out := folder / f"{label} {seed}", ignore_errors=True)
            methods = [*cuts, quantized(PARTS, bits=bits)]
            return convert(source, out, methods, calibration=texts[:SAMPLES], tokenizer=served.tokenizer)

        sizes = {share: int(float(share.rstrip("%")) / 100 * whole) for share in options.budgets}
        for bits in (8, 4):
            add(f"all in {bits} bits", made := converted(f"all in {bits} bits", [], bits))
            sizes[f"as all in {bits} bits"] = bytes_of(made)
        for label, size in sizes.items():
            out, limits = folder / f"{label} {seed}", {"texts": texts, "seed": seed}
            made = compress_large(source, max_bytes=size, out=out, engine="torch", samples=SAMPLES, **limits)
            _say(made.kept)
            add(f"{label}: layer by layer", made.model)
            for other, cuts in OTHERS.items() if label in options.budgets else ():
                tries = (converted(other, fewer, 4) for fewer in cuts(served.model.config))
                if (fits := next((made for made in tries if bytes_of(made) <= size), None)) is not None:
                    add(f"{label}: {other}", fits)
            if label in options.budgets:
                settings = Settings(heal=0, seed=seed)
                in_onnx = Compression(str(source), texts, Budget(max_bytes=size), folder / f"onnx {out.name}", settings)
                add(f"{label}: compress for ONNX, 8 or 4 bits", in_onnx.run().after.folder)
    return found


def measure_compared(options: Any, folder: Path) -> tuple[str, str]:
    lines = []
    for label, rows in compare(options, folder).items():
        shares, kls, perplexities = zip(*rows, strict=True)
        spread = [f"{statistics.mean(some):.3g} ({min(some):.3g} to {max(some):.3g})" for some in (kls, perplexities)]
        lines.append([label, f"{statistics.mean(shares):.1%}", *spread])
    header = ["what", "bytes", "KL to the original, nats a token", "perplexity"]
    return _shared.markdown(header, lines), f"seeds {options.seeds}: the mean, and the least to the most"


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--sizes", nargs="+", default=["1.1"], choices=SIZES, help="billions of parameters")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--layers", type=int, help="only so many layers of each model")
    parser.add_argument("--samples", type=int, default=128, help=f"of {TOKENS} tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slopes", action="store_true", help="time and memory against parameters, samples and width")
    parser.add_argument("--planted", action="store_true", help="a model with parts that do nothing")
    parser.add_argument("--compared", type=Path, help="folder of a trained language model: other ways to as many bytes")
    parser.add_argument("--budgets", nargs="+", default=["40%", "25%", "20%", "16%"], help="with --compared")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of texts, with --compared")
    parser.add_argument("--folder", type=Path, help="where the files go; the system's temporary folder if not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure = measure_planted if options.planted else measure_slopes if options.slopes else measure_sizes
        measure = measure_compared if options.compared else measure
        table, summary = measure(options, Path(folder))
    _shared.report(options, table, summary)


if __name__ == "__main__":
    main()
