"""What each method saves, and how fast it is, in every engine: the rows of a translation grid, saved, merged and exported.

    hf-freeze run recipes/served/multi30k.yaml --set data.root=DIRECTORY --out runs/served
    python benchmarks/served.py runs/served --text test.de.gz --target test.en.gz --out served.md

Claims: the model files in ONNX weigh at most 1.05 of the saved ones, but for random parts, which a seed does not generate there;
in int8, at most 0.30 of those saved in fp32. In fp32, ONNX Runtime gives the translations of the variant; int8 costs at most 0.3
BLEU. No row is slower than 1.02 of row 0 in the same engine, in batches of 1 and 32; half the heads, half the FFN and a quarter
by low rank are faster.

Bytes are of the model files alone, without tokenizer. Times are of `hf-freeze latency`, whose processes take turns: greedy search
by `generate` (CTranslate2: by its own search) of exactly `--new-tokens` tokens for every text, tokenization included, on one
thread. A ratio is the median, with quartiles, over batches of the same texts. "Inside the engine" is the share of the time of
`generate` that ONNX Runtime computes in; the rest is Python.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import _shared
import sacrebleu
import torch
from run_latency import find_rows
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from hf_freeze import data
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.runners import OnnxRunner
from hf_freeze.publish.latency import Latency, measure, megabytes

ENGINES = {
    "onnx": ("onnx", None),
    "onnx int8": ("onnx", "int8"),
    "torch": ("torch", None),
    "ctranslate2 int8": ("ctranslate2", "int8"),
    "aotinductor": ("aotinductor", None),
}
COMPILED = "aotinductor"  # for minutes a row: only if asked for
FASTER = ("heads", "ffn", "low-rank")
SEEDED, QUANTISED = "random", "nf4"
BARS = {"onnx": 1.05, "int8": 0.30, "BLEU": 0.3, "slower": 1.02}
BATCH = 32


def translations(folder: Path, texts: list[str]) -> list[str]:
    """By greedy search, in batches."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH):
            encoded = tokenizer(texts[start : start + BATCH], return_tensors="pt", padding=True)
            encoded.pop("token_type_ids", None)
            outputs = model.generate(**encoded, num_beams=1, do_sample=False, max_new_tokens=100)
            found += tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return found


def inside(folder: Path, texts: list[str]) -> float:
    """The share of the time of `generate`, one text at a time, that ONNX Runtime computes in."""
    seconds = 0.0
    call = OnnxRunner.__call__

    def timed(self: OnnxRunner, inputs: dict[str, Any]) -> Any:
        nonlocal seconds
        begin = time.perf_counter()
        try:
            return call(self, inputs)
        finally:
            seconds += time.perf_counter() - begin

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, engine={"intra_op_num_threads": 1})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    OnnxRunner.__call__ = timed  # type: ignore[method-assign]
    try:
        begin = time.perf_counter()
        for text in texts:
            model.generate(
                **tokenizer(text, return_tensors="pt", return_token_type_ids=False), num_beams=1, do_sample=False
            )
        return seconds / (time.perf_counter() - begin)
    finally:
        OnnxRunner.__call__ = call  # type: ignore[method-assign]


def main() -> None:
    parser: argparse.ArgumentParser = _shared.parser(__doc__, presets=False)
    parser.add_argument("folder", type=Path, help="folder of the finished grid")
    parser.add_argument("--text", required=True, help="source sentences, one a line, plain or gzipped")
    parser.add_argument("--target", required=True, help="their translations")
    parser.add_argument("--sentences", type=int, default=200, help="to translate, for equality and BLEU")
    parser.add_argument("--new-tokens", type=int, default=24, help="of each text, for times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", help="rows beside row 0; all if not given")
    parser.add_argument(
        "--engines", nargs="+", choices=list(ENGINES), default=[name for name in ENGINES if name != COMPILED]
    )
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    sources, targets = (data.read_lines(path)[: options.sentences] for path in (options.text, options.target))
    rows = {row: run / "model" for row, run in find_rows(options.folder, None).items()}
    rows = {row: model for row, model in rows.items() if row == "0" or options.rows is None or row in options.rows}
    with tempfile.TemporaryDirectory() as temporary:
        report(options, rows, sources, targets, Path(temporary))


def report(
    options: argparse.Namespace, rows: dict[str, Path], sources: list[str], targets: list[str], out: Path
) -> None:
    folders: dict[str, dict[str, Path]] = {"PyTorch": dict(rows), **{engine: {} for engine in options.engines}}
    sizes, claims = [], {name: [] for name in ("onnx", "int8", "equal", "BLEU", "faster", "slower")}
    for row, model in rows.items():
        saved = megabytes(model)
        cells = [row, f"{saved:.2f}"]
        try:
            cells.append(f"{megabytes(export_model(model, 'dense', out=out / f'{row}-dense')):.2f}")
        except ValueError:
            cells.append("")
        expected = translations(model, sources)
        score = sacrebleu.corpus_bleu(expected, [targets]).score
        for engine in options.engines:
            format, quantization = ENGINES[engine]
            folder = out / f"{row}-{engine.replace(' ', '-')}"
            try:
                folders[engine][row] = export_model(model, format, quantization=quantization, out=folder)
            except ValueError as refused:
                print(row, engine, refused, flush=True)
                cells.append("")
                continue
            size = megabytes(folder)
            cells.append(f"{size:.2f} ({size / saved:.2f})")
            if engine == "onnx":
                found = translations(folder, sources)
                same = sum(one == other for one, other in zip(found, expected, strict=True))
                claims["equal"].append((len(sources) - same, row))
                claims["onnx"] += [(size / saved, row)] * (row != SEEDED)
            elif engine == "onnx int8":
                loss = score - sacrebleu.corpus_bleu(translations(folder, sources), [targets]).score
                claims["BLEU"].append((loss, row))
                claims["int8"] += [(size / saved, row)] * (row not in (SEEDED, QUANTISED))
                cells[-1] += f", BLEU {-loss:+.2f}"
        sizes.append([*cells, f"{score:.2f}"])
        print(*sizes[-1], sep=" | ", flush=True)
    header = ["row", "saved, MB", "merged", *(f"{engine} (of saved)" for engine in options.engines), "BLEU"]
    text = _shared.markdown(header, sizes) + "\n\n"
    times = {}
    for engine, exported in folders.items():
        print(f"timing {engine}", flush=True)
        settings = {"new_tokens": options.new_tokens, "exactly": True, "rounds": options.rounds}
        times[engine] = dict(zip(exported, measure([*exported.values()], sources, **settings), strict=True))
    text += _shared.markdown(
        ["row", *(f"{engine}, batch {batch}" for engine in times for batch in (1, BATCH))], ratios(times, claims)
    )
    text += "\n\n" + _shared.markdown(
        [
            "row 0 in",
            "files, MB",
            "cold start, s",
            "first token, ms",
            "batch 1, ms a text",
            f"batch {BATCH}, ms a text",
            "memory, MB",
        ],
        [in_words(engine, of["0"]) for engine, of in times.items()],
    )
    shares = {
        engine: inside(folders[engine]["0"], sources[:20]) for engine in ("onnx", "onnx int8") if engine in folders
    }
    text += (
        "\n\nInside the engine, batch 1: "
        + ", ".join(f"{engine} {share:.2f}" for engine, share in shares.items())
        + "."
    )
    bars = [
        (f"ONNX at most {BARS['onnx']} of the saved bytes", "onnx", lambda x: x <= BARS["onnx"]),
        (f"int8 at most {BARS['int8']}", "int8", lambda x: x <= BARS["int8"]),
        (f"translations that differ in ONNX, of {len(sources)}", "equal", lambda x: x == 0),
        (f"int8 at most {BARS['BLEU']} BLEU worse", "BLEU", lambda x: x <= BARS["BLEU"]),
        (f"{', '.join(FASTER)} faster than row 0", "faster", lambda x: x < 1),
        (f"no row slower than {BARS['slower']}", "slower", lambda x: x <= BARS["slower"]),
    ]
    _shared.report(
        options, text, "; ".join(f"{name}: {_shared.verdict(claims[key], holds)}" for name, key, holds in bars)
    )


def ratios(times: dict[str, dict[str, Latency]], claims: dict[str, list[Any]]) -> list[list[str]]:
    """A line for each row but row 0: its time divided by that of row 0 in the same engine."""
    lines = []
    for row in [row for row in times["PyTorch"] if row != "0"]:
        cells = [row]
        for engine, results in times.items():
            for batch in (1, BATCH):
                if row not in results:
                    cells.append("")
                    continue
                middle, low, high = results[row].ratio_to(results["0"], batch)
                cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
                if engine != "PyTorch":
                    claims["slower"].append((middle, f"{row}, {engine}, batch {batch}"))
                    claims["faster"] += [(middle, f"{row}, {engine}, batch {batch}")] * (row in FASTER)
        lines.append(cells)
    return lines


def in_words(engine: str, one: Latency) -> list[str]:
    first = sorted(one.first)[len(one.first) // 2]
    numbers = (one.megabytes, one.cold_start, first, one.per_text(1), one.per_text(BATCH))
    return [engine, *(f"{number:.2f}" for number in numbers), f"{one.memory:.0f}"]


if __name__ == "__main__":
    main()
