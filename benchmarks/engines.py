"""One model in every engine: as it is, in int8, and with half of its heads and neurons.

    python benchmarks/engines.py MODEL --texts texts.txt --out engines.md

Claims: none; the table says what each costs. MODEL: a sentence encoder, classifier, language model or translator with its
tokenizer. The cut model keeps half of the heads and half of the neurons of each layer, chosen and refitted by a calibration with
the first texts (`HeadPruning(share=0.5)`, `FFNPruning(share=0.5)`), without training. Columns:

- MB of all files of the folder, tokenizer included;
- cold start and memory: of a process of `hf-freeze latency` from its start to the first answer; times: of one text alone, on one
  thread, in turns: medians with quartiles. Models that write get exactly `--new-tokens` tokens;
- fidelity to MODEL on the last texts: cosine of sentence vectors, share of equal top choices, BLEU / 100 of translations.

A cell that an engine cannot hold says why. `--fresh`: a Llama of 110 million parameters with fresh weights instead (time only);
MODEL then gives the tokenizer.
"""

import tempfile
from pathlib import Path
from typing import Any

import _shared
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hf_freeze import make_variant, methods
from hf_freeze.io import bytes_of
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.served import opened, served_fidelity
from hf_freeze.publish.latency import measure

ENGINES = [
    ("onnx", None), ("onnx", "int8"),
    ("openvino", None), ("openvino", "int8"),
    ("ctranslate2", "float32"), ("ctranslate2", "int8_float32"),
    ("gguf", None), ("gguf", "q8_0"), ("gguf", "q4_0"),
    ("static", None), ("static", "float16"),
]  # fmt: skip
CALIBRATED, COMPARED = 500, 300


def fresh(tokenizer: Any, folder: Path) -> Path:
    """A Llama of 110 million parameters, saved with a tokenizer of fewer tokens than its own."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def cut(source: Path, texts: list[str], folder: Path, *, calibrated: bool) -> Path:
    served = opened(source)
    halves = [methods.HeadPruning(share=0.5), methods.FFNPruning(share=0.5)]
    if not calibrated:
        config = served.model.config
        halves = [methods.HeadPruning(share=0.5), methods.FFNPruning(width=config.intermediate_size // 2)]
    options = {"calibration": texts, "tokenizer": served.tokenizer} if calibrated else {}
    make_variant(served.model, halves, **options).save_pretrained(folder)
    served.tokenizer.save_pretrained(folder)
    for name in (
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
    ):
        if (source / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((source / name).read_bytes())
    return folder


def folders_of(sources: dict[str, Path], texts: list[str], root: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """(label -> folder of each model in each engine, label -> why it has none)"""
    found, refused = {f"{name}, PyTorch": folder for name, folder in sources.items()}, {}
    for name, source in sources.items():
        for format, kind in ENGINES:
            label = f"{name}, {format}{f' {kind}' if kind else ''}"
            needs = kind in ("int8-static",) or format == "static"
            try:
                out = root / label.replace(", ", "-").replace(" ", "-")
                found[label] = export_model(source, format, quantization=kind, out=out, texts=texts if needs else None)
            except ValueError as error:
                refused[label] = str(error).partition(";")[0]
            print(label, refused.get(label, "written"), flush=True)
    return found, refused


def spread(values: Any, digits: int = 2) -> str:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def rows_of(found: dict[str, Path], texts: list[str], options: Any, original: Path | None) -> list[list[str]]:
    held_out = texts[-options.timed :]
    settings = {"batches": (1,), "new_tokens": options.new_tokens, "exactly": True, "rounds": options.rounds}
    results = measure([*found.values()], held_out, **settings, say=print)
    rows = []
    for (label, folder), result in zip(found.items(), results, strict=True):
        score = "" if original is None else f"{served_fidelity(original, folder, texts[-COMPARED:]).score:.4f}"
        first = spread(result.first) if result.first else ""
        speed = f"{result.tokens_per_second(1):,.0f}" if result.first else ""
        rows.append(
            [
                *(label, f"{bytes_of(folder) / 1e6:.2f}", f"{result.cold_start:.2f}", f"{result.memory:,.0f}"),
                *(first, spread(result.batches[1]), speed, score),
            ]
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", type=Path, help="a directory")
    parser.add_argument("--texts", type=Path, required=True, help="a text per line")
    parser.add_argument("--fresh", action="store_true", help="a Llama of 110M parameters with fresh weights")
    parser.add_argument("--timed", type=int, default=16, help="texts that are timed, at most 16")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    texts = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = fresh(AutoTokenizer.from_pretrained(options.model), root / "fresh") if options.fresh else options.model
        sources = {"dense": source, "cut": cut(source, texts[:CALIBRATED], root / "cut", calibrated=not options.fresh)}
        found, refused = folders_of(sources, texts[:-COMPARED], root)
        rows = rows_of(found, texts, options, None if options.fresh else source)
    rows += [[label, *[""] * 6, why] for label, why in refused.items()]
    heading = ["model", "MB", "cold start, s", "memory, MB", "first token, ms", "text, ms", "tokens/s", "fidelity"]
    _shared.report(options, _shared.markdown(heading, rows), "claims: none")


if __name__ == "__main__":
    main()
