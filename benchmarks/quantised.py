"""Integer execution against fp32 on one core: a BERT of MiniLM's sizes (6 layers, 384 wide, 1,536 neurons), random weights, in
PyTorch and in ONNX Runtime.

    python benchmarks/quantised.py                      # about a minute
    python benchmarks/quantised.py --tokens 16 128 512 --rounds 20

Claim: with int8 weights and inputs, whose products are products of integers, a forward of 128 tokens takes less time than in
fp32, in either engine.

Turns of fp32 and int8 alternate, so that other work on the machine slows both. Multiply-adds are those of all matrix products,
which are as many in int8. Bytes are those that the checkpoint stores, or of the files of ONNX Runtime. Weights alone in int8
are there for comparison: in PyTorch they are dequantised in every forward. Limit: random weights say nothing about quality
(recipes/quantised does).
"""

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _shared
import torch
from transformers import AutoConfig, AutoModel

from hf_freeze import make_variant, methods, stored_bytes
from hf_freeze.analysis.accounting import multiply_adds
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.runners import open_parts

SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
COMPONENTS = ["ffn", "attention", "embeddings"]
SETTINGS = {
    "fp32": None,
    "int8 weights and inputs, a range for each token": {"weights": "int8", "activations": "int8"},
    "int8 weights and inputs, one range": {"weights": "int8", "activations": "int8", "activation_ranges": "max"},
    "int8 weights alone": {"weights": "int8"},
}


def variant(backbone: Any, settings: dict[str, Any] | None) -> Any:
    """The backbone in few bits; ranges for all tokens are those of a random batch."""
    if settings is None:
        return make_variant(backbone, []).eval()
    tracked = "activation_ranges" in settings
    model = make_variant(backbone, [methods.Quantize(components=COMPONENTS, train=tracked, **settings)])
    if tracked:
        model.train().advance(0, 1)
        with torch.no_grad():
            model(input_ids=torch.randint(1000, (4, 128)))
        model.finalize()
    return model.eval()


def engines(
    backbone: Any, folder: Path
) -> tuple[dict[str, dict[str, Callable[..., Any]]], dict[str, dict[str, float]]]:
    """Engine -> name of a setting -> (function of the inputs; megabytes)."""
    runs: dict[str, dict[str, Callable[..., Any]]] = {"PyTorch": {}, "ONNX Runtime": {}}
    sizes: dict[str, dict[str, float]] = {engine: {} for engine in runs}
    for number, (name, settings) in enumerate(SETTINGS.items()):
        model = runs["PyTorch"][name] = variant(backbone, settings)
        model.save_pretrained(folder / str(number))
        exported = export_model(folder / str(number), "onnx")
        runner = open_parts(exported, "onnx", {"intra_op_num_threads": 1})["model"]
        runs["ONNX Runtime"][name] = functools.partial(_run_onnx, runner)
        sizes["PyTorch"][name] = stored_bytes(model) / 1e6
        files = (path.stat().st_size for path in exported.iterdir() if path.suffix in (".onnx", ".data"))
        sizes["ONNX Runtime"][name] = sum(files) / 1e6
    return runs, sizes


def _run_onnx(runner: Any, **inputs: torch.Tensor) -> Any:
    return runner(inputs)


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--tokens", nargs="+", type=int, default=[128])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": options.layers}
    backbone = AutoModel.from_config(
        AutoConfig.for_model("bert", vocab_size=30522, max_position_embeddings=512, **sizes)
    )
    lines, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        runs, megabytes = engines(backbone, Path(folder))
        for tokens, engine, name in itertools.product(options.tokens, runs, list(SETTINGS)[1:]):
            ids = torch.randint(1000, (1, tokens))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
            before, now = (functools.partial(runs[engine][each], **inputs) for each in ("fp32", name))
            with torch.inference_mode():
                pair = _shared.in_turns(before, now, options.rounds, at_least=0.1)
            products = multiply_adds(backbone, length=tokens).forward * tokens / 1e9
            cells = [products, megabytes[engine]["fp32"], megabytes[engine][name]]
            times = [f"{1e3 * min(each):.1f}" for each in (pair.one, pair.other)]
            lines.append([engine, name, f"{tokens}", *(f"{cell:.2f}" for cell in cells), *times, str(pair)])
            if tokens == 128 and "inputs" in name:
                ratios.append((pair.ratio, f"{engine}, {name}"))
    header = [
        "engine",
        "weights",
        "tokens",
        "10⁹ multiply-adds",
        "MB fp32",
        "MB",
        "ms fp32",
        "ms",
        "times as fast (quartiles)",
    ]
    summary = f"faster than fp32 at 128 tokens: {_shared.verdict(ratios, lambda ratio: ratio > 1)}"
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
