"""A trained translator in all formats for serving: bytes on disk, load time, latency, memory, BLEU.

    python benchmarks/ship.py runs/theseus-multi30k/row-0-seed-1/model runs/theseus-multi30k/row-3-1-seed-1/model \
        --text test_2016_flickr.de.gz --target test_2016_flickr.en.gz --out ship.md

Claim: the small translator in int8 for CTranslate2 loses at most 1 BLEU against the dense baseline, takes less than 2 MB
including its tokenizer, and decodes one sentence at least 10 times faster than the baseline's `generate` and faster than the
baseline in int8 for CTranslate2.

The first model is the dense baseline. Forms of each model: PyTorch (`generate`, with cache) as saved, in fp32; merged into the
native class (`native`), also in bf16 and with int8 and nf4 weights (bitsandbytes); ONNX and CTranslate2, in fp32 and int8. All
use greedy search on one thread.

MB: all files of the folder, including tokenizer and settings. Load: the median of three loads in a new process that has imported
the libraries, from files in the page cache. Memory: the peak of that process after 64 sentences, minus its memory before loading.
Times are per sentence including tokenization, one by one or 64 at once. Ratios are to the baseline's `generate` in fp32, the
median over rounds of the turns form, baseline, baseline, form, with quartiles. BLEU is sacrebleu's on `--sentences` sentences.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _shared
import sacrebleu
import torch
from export import engine, pytorch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from hf_freeze import data, make_variant, methods
from hf_freeze.io import bytes_of
from hf_freeze.publish.export import export_model

TOGETHER, ALONE = 64, 20
BARS = {"bleu": 1.0, "bytes": 2_000_000, "speed": 10.0}
FORMS = ("fp32", "native", "bf16", "int8", "nf4", "onnx", "onnx int8", "ctranslate2", "ctranslate2 int8")
Translate = Callable[[list[str], int, int], list[str]]


def converted(source: Path, form: str, root: Path) -> Path:
    """The folder of `source` in `form`, created in `root` if it does not exist; each source needs its own `root`."""
    name, _, quantization = form.partition(" ")
    folder = root / form
    if form == "fp32":
        return source
    if folder.exists():
        return folder
    if name in ("onnx", "ctranslate2"):
        return export_model(source, name, quantization=quantization or None, out=folder)
    if form == "native":
        return export_model(source, "dense", out=folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(converted(source, "native", root))
    if form == "bf16":
        model = model.bfloat16()
    else:
        model = make_variant(model, [methods.Quantize(scheme=form, components=["attention", "ffn", "embeddings"])])
    for part in (model, AutoTokenizer.from_pretrained(source)):
        part.save_pretrained(folder)
    return folder


def loaded(form: str, folder: Path, common: dict[str, Any]) -> Translate:
    name = form.partition(" ")[0]
    return engine(name, folder, common) if name in ("onnx", "ctranslate2") else pytorch(folder, common)


def alone(form: str, folder: Path, common: dict[str, Any], texts: list[str]) -> tuple[float, float]:
    """(seconds to load, peak of additional bytes); call it in a new process."""
    quiet()
    before, times = _shared.resident("VmRSS"), []
    for _ in range(3):
        start = time.perf_counter()
        translate = loaded(form, folder, common)
        times.append(time.perf_counter() - start)
        if len(times) < 3:
            del translate
    translate(texts, len(texts), 1)
    return statistics.median(times), _shared.resident("VmHWM") - before


def quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def main() -> None:
    parser: argparse.ArgumentParser = _shared.parser(__doc__, presets=False)
    parser.add_argument("models", type=Path, nargs="+", help="directories of Marian models, the dense baseline first")
    parser.add_argument("--text", required=True, help="source sentences, one per line, plain or gzipped")
    parser.add_argument("--target", required=True, help="their translations")
    parser.add_argument("--sentences", type=int, default=1000, help="sentences for BLEU")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of four turns")
    options = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory() as temporary:
        report(options, Path(temporary))


def report(options: argparse.Namespace, root: Path) -> None:
    sources, targets = (data.read_lines(path)[: options.sentences] for path in (options.text, options.target))
    dense, *others = options.models
    pad = AutoModelForSeq2SeqLM.from_pretrained(dense).generation_config.pad_token_id
    common = {"max_new_tokens": options.new_tokens, "bad_words_ids": [[pad]]}
    baseline = pytorch(dense, common)
    texts = {1: sources[:ALONE], TOGETHER: sources[:TOGETHER]}
    lines: list[list[str]] = []
    results: dict[tuple[Path, str], dict[str, Any]] = {}
    for model in options.models:
        for form in options.forms:
            folder = converted(model, form, root / str(options.models.index(model)))
            translate = loaded(form, folder, common)
            parts = [translate(sources[i : i + TOGETHER], TOGETHER, 1) for i in range(0, len(sources), TOGETHER)]
            score = sacrebleu.corpus_bleu([text for part in parts for text in part], [targets]).score
            pairs = {
                size: _shared.in_turns(
                    lambda run=translate, size=size: run(texts[size], size, 1),
                    lambda size=size: baseline(texts[size], size, 1),
                    options.rounds,
                )
                for size in texts
            }
            load, peak = _shared.in_new_process(alone, form, folder, common, texts[TOGETHER], OMP_NUM_THREADS="1")
            results[model, form] = {
                "translate": translate,
                "bytes": bytes_of(folder),
                "bleu": score,
                "speed": 1 / pairs[1].ratio,
            }
            cells = [f"{_name(model)}, {form}", f"{results[model, form]['bytes'] / 1e6:.2f}", f"{score:.2f}"]
            cells += [f"{load:.2f}", f"{peak / 1e6:.0f}"]
            for size, pair in pairs.items():
                cells += [f"{1e3 * statistics.median(pair.one) / len(texts[size]):.2f}", str(pair)]
            lines.append(cells)
            print(*cells, sep=" | ", flush=True)
    header = [
        "model, form",
        "MB on disk",
        "BLEU",
        "load, s",
        "memory, MB",
        "one by one: ms a sentence",
        "to the baseline",
    ]
    header += [f"{TOGETHER} at once: ms a sentence", "to the baseline"]
    summary = "; ".join([*(verdicts(results, dense, model, texts[1], options.rounds) for model in others), ""])
    summary += f"{len(sources)} sentences of BLEU, greedy, 1 thread"
    _shared.report(options, _shared.markdown(header, lines), summary)


def verdicts(results: dict, dense: Path, model: Path, texts: list[str], rounds: int) -> str:
    """Whether the small translator `model` satisfies each part of the claim."""
    small, baseline = (results.get((path, "ctranslate2 int8")) for path in (model, dense))
    if small is None or (dense, "fp32") not in results:
        return f"{_name(model)}: not measured"
    lost = results[dense, "fp32"]["bleu"] - small["bleu"]
    pair = _shared.in_turns(
        lambda: small["translate"](texts, 1, 1), lambda: baseline["translate"](texts, 1, 1), max(rounds, 5)
    )
    checks = {
        f"{lost:.2f} BLEU lost (at most {BARS['bleu']})": lost <= BARS["bleu"],
        f"{small['bytes']:,} bytes (below {BARS['bytes']:,})": small["bytes"] < BARS["bytes"],
        f"{small['speed']:.1f} times faster than the baseline's generate (at least {BARS['speed']:.0f})": (
            small["speed"] >= BARS["speed"]
        ),
        f"{pair} of the time of the baseline in int8 for CTranslate2 (below 1)": pair.ratio < 1,
    }
    return f"{_name(model)}: " + ", ".join(
        f"{'passed' if holds else 'MISSED'} {text}" for text, holds in checks.items()
    )


def _name(model: Path) -> str:
    """The name of the folder; for the `model` folder of a run, the name of the run."""
    return model.resolve().parent.name if model.resolve().name == "model" else model.resolve().name


if __name__ == "__main__":
    main()
