"""Seeded weights that are generated where they are used: memory and time beside weights in memory.

    python benchmarks/on_the_fly.py
    python benchmarks/on_the_fly.py --width 64 --layers 1 --vocabulary 500 --new-tokens 2 --rounds 1   # seconds

Claims: all seeded tensors of Transformer-big (widths 1024 and 4096, 6 + 6 layers, 16 heads, 32,000 tokens; FFN, attention and
embeddings random) take at most 4 MB when streamed or fused; the fused generator makes values at least 5 times as fast as numpy by
tiles, on one core; on an H100, a fused bf16 product with 4096 x 4096 weights of int8 is at least as fast as cuBLAS with weights
in memory at 1 and 16 tokens, and at least half as fast at 256.

Method. The roofline, on paper: a call of Philox-4x32-10 takes 10 rounds of 4 multiplications and 2 exclusive ors of three words;
unpacking takes about 4 operations a weight (uniform: shift, convert, add, multiply; int8: extract, double and add, convert,
multiply) or 3 (sign). A core does 2 vector operations of 512 bits a cycle at --ghz; in Philox a lane takes 64 bits and makes a
product with one multiplication instead of two. Beside it, the best of --rounds times of the generator and of products with a
--square matrix, in processor time, since another process may share the core. The memory of the model is that of forked processes:
resident bytes (VmRSS) after loading, less those before, and the rise of the peak (VmHWM) during --new-tokens greedy steps of one
sentence; the weights that are not seeded are in it.

On a GPU, a time is that of a product in a CUDA graph of 20: the lowest and highest of three medians of 30 replays. cuBLAS
multiplies by 20 weights in turn, so that they come from memory and not from the second-level cache. Errors are relative to the
product in fp64 with weights that are not rounded. On paper, an H100 does 132 x 64 integer operations a cycle at 1.98 GHz.
Unpacking takes 4 a weight (uniform); an exclusive or, two permutations and two packed subtractions for 4 weights (int8); or a
shift and an and-or for 2 (sign).
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import _shared
import torch
from transformers import MarianConfig

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.analysis import inference_memory
from hf_freeze.layers.fused_weight import Fused, why_not
from hf_freeze.layers.seeded_weight import Engine, SeededWeight
from hf_freeze.model.loading import load_model
from hf_freeze.seeded.tensor import SeededTensor

# Name in Python, values of a call of Philox, operations that unpack a weight on a CPU and on a GPU.
SCHEMES = {"glorot_uniform": ("glorot", 4, 4, 4), "int8": ("int8", 16, 4, 5 / 4), "sign": ("sign", 128, 3, 2 / 2)}
ENGINES = {"streamed": Engine(), "fused": Fused()}
ALL_RANDOM = dict.fromkeys(("ffn", "attention", "embeddings"), "random")
CALL = 60  # operations of a call of Philox
MB = 1 << 20
SIZES = {"width": 1024, "layers": 6, "vocabulary": 32000, "new-tokens": 8}  # of Transformer-big, and of a decoding
GPU_TOKENS = (1, 4, 16, 32, 64, 256, 1024)
GPU_BARS = {("int8", 1): 1.0, ("int8", 16): 1.0, ("int8", 256): 0.5}  # speed, that of cuBLAS being 1
GPU_RATE = 132 * 64 * 1.98e9  # integer operations of an H100 in a second
IN_TURN = 20  # products of a CUDA graph


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    for name, default in (SIZES | {"square": 4096, "rounds": 5}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ghz", type=float, default=2.6, help="clock of the CPU, for the roofline on paper")
    parts = ["generator", "products", "model", "gpu"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.width < 512:
        options.square = min(options.square, 256)
    # The model first, while this process is small: it is forked.
    of_model, memory = model_table(options) if "model" in options.parts else ("", "")
    paper, speeds = roofline(options) if "generator" in options.parts else ("", {})
    of_products = products(options) if "products" in options.parts else ""
    of_gpu, bars = on_gpu(options) if "gpu" in options.parts else ("", "")
    said = []
    if speeds:
        faster = [(new / old, scheme) for scheme, (old, new) in speeds.items()]
        said += [
            f"fused against tiles of numpy, at least 5 times as fast: {_shared.verdict(faster, lambda ratio: ratio >= 5)}"
        ]
    said += [memory] * ("model" in options.parts)
    said += [f"int8 on a GPU, beside cuBLAS: {bars}"] * ("gpu" in options.parts)
    summary = "; ".join(said)
    _shared.report(options, "\n\n".join(filter(None, (paper, of_products, of_model, of_gpu))), summary)


def processor_seconds(work: Callable[[], object], rounds: int, at_least: float = 0.05) -> float:
    """The best mean of a call, over rounds of calls that take some time."""
    work()
    start = time.process_time()
    work()
    calls = max(1, round(at_least / max(time.process_time() - start, 1e-6)))
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            work()
        times.append((time.process_time() - start) / calls)
    return min(times)


def roofline(options: argparse.Namespace) -> tuple[str, dict[str, tuple[float, float]]]:
    """Time of making a weight against that of reading it; {scheme: values a second by numpy, and fused}."""
    rows, columns = min(131072 // options.square, options.square), options.square
    values = torch.ones((64 if options.square >= 1024 else 1) * MB)
    read = 4 * len(values) / processor_seconds(lambda: torch.dot(values, values), options.rounds)
    lines, speeds = [], {}
    for name, (scheme, per_call, unpack, _) in SCHEMES.items():
        weight = SeededWeight(
            SeededTensor(1, "w", (options.square, columns), scheme), torch.float32, "cpu", ENGINES["fused"]
        )
        out = torch.empty(rows, columns)

        def filled(engine: Engine, weight: Any = weight, out: torch.Tensor = out) -> None:
            engine.fill(weight.tiles, slice(0, len(out)), slice(None), out)

        numpy, fused = (
            out.numel() / processor_seconds(lambda engine=engine: filled(engine), options.rounds)
            for engine in ENGINES.values()
        )
        speeds[name] = numpy, fused
        operations = CALL / per_call + unpack
        # 40 of 60 operations are multiplications, of which a CPU needs half.
        on_cpu = ((CALL - 20) / per_call / 8 + unpack / 16) / (2 * options.ghz)
        lines.append(
            [
                name,
                f"{128 / per_call:g}",
                f"{operations:.1f}",
                f"{on_cpu:.3f}",
                f"{1e9 / fused:.3f}",
                f"{1e9 / numpy:.2f}",
                f"{4e9 / read:.3f}",
            ]
        )
    header = [
        *("scheme", "random bits", "operations", "ns to make, on paper"),
        *("fused", "numpy by tiles", "ns to read fp32 here"),
    ]
    return _shared.markdown(header, lines), speeds


def products(options: argparse.Namespace) -> str:
    """Milliseconds of a linear without a bias."""
    size, lines = options.square, []
    for name, (scheme, *_) in SCHEMES.items():
        definition = SeededTensor(1, "w", (size, size), scheme)
        weights: dict[str, Any] = {"resident": definition.generate()}
        weights |= {mode: SeededWeight(definition, torch.float32, "cpu", engine) for mode, engine in ENGINES.items()}
        for tokens in (1, 16, 256):
            x = torch.randn(tokens, size)
            times = {
                mode: 1e3 * processor_seconds(lambda w=w, x=x: torch.nn.functional.linear(x, w), options.rounds)
                for mode, w in weights.items()
            }
            cells = [f"{times[mode]:.2f}" for mode in weights]
            lines.append([f"{name}, {tokens} tokens", *cells, f"{times['fused'] / times['resident']:.2f}"])
    header = [f"{size} x {size}, ms", "resident", "streamed", "fused", "fused / resident"]
    return _shared.markdown(header, lines)


def graph_microseconds(work: Callable[[int], object]) -> float:
    """Of a call `work(i)` in a CUDA graph of IN_TURN calls: the median of 30 replays."""
    for i in range(3):  # compiles
        work(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(IN_TURN):
            work(i)
    graph.replay()
    times = []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / IN_TURN)
    return statistics.median(times)


def on_gpu(options: argparse.Namespace) -> tuple[str, str]:
    """The table of `gpu_products` and its verdict, or why there is none."""
    if reason := why_not("cuda") if torch.cuda.is_available() else "PyTorch finds no GPU":
        return f"Products on a GPU: not measured, {reason}.", "not measured"
    return gpu_products(options.square, torch.empty(0, device="cuda").device)


@torch.no_grad()
def gpu_products(
    size: int, device: torch.device, microseconds: Callable[[Callable[[int], object]], float] = graph_microseconds
) -> tuple[str, str]:
    """Times and errors of a bf16 linear without a bias, and a verdict; `microseconds` is replaced in tests."""
    linear, lines, speeds = torch.nn.functional.linear, [], {}
    definitions = {name: SeededTensor(1, "w", (size, size), scheme) for name, (scheme, *_) in SCHEMES.items()}
    exact = {name: definition.generate().to(device) for name, definition in definitions.items()}
    held = [exact["int8"].bfloat16().clone() for _ in range(IN_TURN)]
    for tokens in GPU_TOKENS:
        x = torch.randn(tokens, size, device=device).bfloat16()
        cublas = [microseconds(lambda i, x=x: linear(x, held[i])) for _ in range(3)]
        for name, definition in definitions.items():
            weight = SeededWeight(definition, torch.bfloat16, device, ENGINES["fused"])
            fused = [microseconds(lambda _, x=x, weight=weight: linear(x, weight)) for _ in range(3)]
            expected = x.double() @ exact[name].double().T
            products = linear(x, weight), linear(x, exact[name].bfloat16())
            errors = [float((y.double() - expected).norm() / expected.norm()) for y in products]
            speeds[name, tokens] = min(cublas) / min(fused)
            cells = [*(f"{min(times):.2f} to {max(times):.2f}" for times in (cublas, fused))]
            cells += [f"{speeds[name, tokens]:.2f}", *(f"{error:.1e}" for error in errors)]
            lines.append([f"{name}, {tokens} tokens", *cells])
    header = [f"{size} x {size}, bf16, µs", "cuBLAS", "fused", "cuBLAS / fused", "error, fused", "error, resident"]
    rate = _shared.copy_rate()
    made = (
        f"{1e6 * size**2 * (CALL / per_call + unpack) / GPU_RATE:.2f} ({name})"
        for name, (_, per_call, _, unpack) in SCHEMES.items()
    )
    paper = (
        f"On paper, µs for all weights: read in bf16 at the {rate / 1e12:.2f} TB/s of a copy here "
        f"{2e6 * size**2 / rate:.2f}; made by an H100 {', '.join(made)}."
    )
    met = [
        (speeds[case] / bar, f"{case[1]} tokens, {speeds[case]:.2f} of at least {bar:g}")
        for case, bar in GPU_BARS.items()
    ]
    return f"{_shared.markdown(header, lines)}\n\n{paper}", _shared.verdict(met, lambda share: share >= 1)


def model_table(options: argparse.Namespace) -> tuple[str, str]:
    lines, seeded = [], []
    with tempfile.TemporaryDirectory() as folder:
        for scheme in SCHEMES:
            forked(save, options, scheme, f"{folder}/{scheme}")
            for mode in ("resident", *ENGINES):
                facts = forked(decode, options, f"{folder}/{scheme}", mode)
                if mode != "resident":
                    seeded.append((facts["seeded"] / MB, f"{scheme} {mode}"))
                lines.append(
                    [
                        f"{scheme}, {mode}",
                        *(f"{facts[key] / MB:.1f}" for key in ("counted", "seeded", "loaded", "decoding", "read")),
                        *(f"{facts['load']:.2f}", f"{1e3 * facts['encode']:.0f}", f"{1e3 * facts['step']:.0f}"),
                    ]
                )
    header = [
        *("model", "weights, MB", "of them seeded", "process after load", "peak of decoding", "read a step, MB"),
        *("load, s", "first step, ms", "further step, ms"),
    ]
    return _shared.markdown(header, lines), (
        f"memory of seeded tensors, at most 4 MB: {_shared.verdict(seeded, lambda size: size <= 4)}; times are of one processor"
    )


def forked(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work(*arguments)` in a child of this process, which has imported everything already."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def save(options: argparse.Namespace, scheme: str, folder: str, random: dict[str, Any] = ALL_RANDOM) -> float:
    """The share of the parameters that the checkpoint leaves out."""
    config = MarianConfig(
        vocab_size=options.vocabulary,
        d_model=options.width,
        encoder_ffn_dim=4 * options.width,
        decoder_ffn_dim=4 * options.width,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    freeze = [methods.Freeze(**random, scheme=scheme)] if random else []
    model = make_variant(config, freeze, task="seq2seq-lm")
    model.save_pretrained(folder)
    parameters = count_parameters(model)
    return 1 - parameters.stored / parameters.total


@torch.no_grad()
def decode(options: argparse.Namespace, folder: str, mode: str) -> dict[str, float]:
    torch.set_num_threads(1)
    if mode == "fused":  # compiled once, before anything is measured
        SeededWeight(SeededTensor(1, "w", (8, 8), "glorot"), torch.float32, "cpu", Fused()).whole()
    warnings.simplefilter("error")
    before, start = _shared.resident("VmRSS"), time.process_time()
    model = load_model(folder, seeded_execution=mode).eval()
    facts: dict[str, float] = {"load": time.process_time() - start, "loaded": _shared.resident("VmRSS") - before}
    memory = inference_memory(model)
    facts |= {"counted": memory.resident, "read": memory.read}
    held = [model.get_parameter(name) for name in model.seeded_tensors]
    facts["seeded"] = memory.scratch + sum(t.nbytes for t in held if not isinstance(t, SeededWeight))
    ids = torch.arange(2, 18)[None]
    times = []
    for count in (1, 1 + options.new_tokens):
        start = time.process_time()
        model.generate(ids, min_new_tokens=count, max_new_tokens=count, num_beams=1, do_sample=False)
        times.append(time.process_time() - start)
    facts |= {"encode": times[0], "step": (times[1] - times[0]) / options.new_tokens}
    facts["decoding"] = _shared.resident("VmHWM") - before
    return facts


if __name__ == "__main__":
    main()
