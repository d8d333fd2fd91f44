"""Exported translators against `generate`: identical translations, sizes and times.

    python benchmarks/export.py runs/theseus/row-0-seed-1/model --text test.de.gz --target test.en.gz --out export.md

Claims: in fp32, CTranslate2 and ONNX Runtime give the same translation as `generate` for every sentence, and CTranslate2 takes
less than half of its time; int8 costs at most 0.5 BLEU.

Translates the first `--sentences` sentences with the merged model (`generate`, with cache) and with each exported folder: by
greedy search and, except for ONNX, with `--beams`. All have the same limit of `--new-tokens` and length penalty; the pad token
is banned. "Identical" counts translations with the same text. BLEU is sacrebleu's. MB counts the model files only; for PyTorch,
the fp32 file of the merged model.

Times are per sentence including tokenization: of the first 100 sentences in batches of 25, or of the first 20 one by one. A
ratio is the median over rounds of the turns engine, PyTorch, PyTorch, engine, with quartiles. All run on one thread.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import _shared
import sacrebleu
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from hf_freeze import data
from hf_freeze.publish.export import CTranslate2Translator, OnnxTranslator, export_model
from hf_freeze.publish.latency import megabytes

BATCH, TOGETHER, ALONE = 25, 100, 20
BARS = {"ratio": 0.5, "int8": 0.5}
ENGINES: dict[str, Callable[[Path], Any]] = {
    "ctranslate2": lambda folder: CTranslate2Translator(folder, inter_threads=1, intra_threads=1),
    "onnx": lambda folder: OnnxTranslator(folder, intra_op_num_threads=1),
}


def pytorch(folder: Path, common: dict[str, Any]) -> Callable[[list[str], int, int], list[str]]:
    """(texts, batch size, beams) -> translations by `generate`."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def translate(texts: list[str], batch: int, beams: int) -> list[str]:
        translations = []
        for start in range(0, len(texts), batch):
            encoded = tokenizer(texts[start : start + batch], return_tensors="pt", padding=True)
            encoded.pop("token_type_ids", None)
            outputs = model.generate(**encoded, num_beams=beams, do_sample=False, **common)
            translations += tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return translations

    return translate


def engine(name: str, folder: Path, common: dict[str, Any]) -> Callable[[list[str], int, int], list[str]]:
    """(texts, batch size, beams) -> translations by an exported folder."""
    translator = ENGINES[name](folder)

    def translate(texts: list[str], batch: int, beams: int) -> list[str]:
        settings = common | {"num_beams": beams}
        parts = [texts[start : start + batch] for start in range(0, len(texts), batch)]
        return [
            result["translation_text"] for part in parts for result in translator(part, batch_size=batch, **settings)
        ]

    return translate


def main() -> None:
    parser: argparse.ArgumentParser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", type=Path, help="directory of a Marian model or variant, with its tokenizer")
    parser.add_argument("--text", required=True, help="source sentences, one a line, plain or gzipped")
    parser.add_argument("--target", required=True, help="their translations")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=2, help="of four turns each")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    sources, targets = (data.read_lines(path)[: options.sentences] for path in (options.text, options.target))
    with tempfile.TemporaryDirectory() as temporary:
        report(options, sources, targets, Path(temporary))


def report(options: argparse.Namespace, sources: list[str], targets: list[str], folder: Path) -> None:
    def bleu(translations: list[str]) -> float:
        return sacrebleu.corpus_bleu(translations, [targets]).score

    dense = export_model(options.model, "dense", out=folder / "dense")
    pad = AutoModelForSeq2SeqLM.from_pretrained(dense).generation_config.pad_token_id
    common = {"max_new_tokens": options.new_tokens, "bad_words_ids": [[pad]]}
    plain = pytorch(dense, common)
    expected = {beams: plain(sources, BATCH, beams) for beams in dict.fromkeys((1, options.beams))}
    lines, differences, time_ratios, bleu_losses = [], [], [], []
    for beams, translations in expected.items():
        lines.append(["PyTorch", str(beams), f"{megabytes(dense):.2f}", f"{bleu(translations):.2f}", *[""] * 5])
    for name in options.engines:
        for quantization in (None, "int8"):
            exported = export_model(options.model, name, quantization=quantization, out=folder / "exported")
            translate = engine(name, exported, common)
            for beams in expected if name == "ctranslate2" else (1,):
                label = f"{name} {quantization or 'fp32'}"
                translations = translate(sources, BATCH, beams)
                same = sum(one == other for one, other in zip(translations, expected[beams], strict=True))
                score = bleu(translations)
                cells = [label, str(beams), f"{megabytes(exported):.2f}", f"{score:.2f}", f"{same} of {len(sources)}"]
                for texts, batch in ((sources[:TOGETHER], BATCH), (sources[:ALONE], 1)):
                    pair = _shared.in_turns(
                        lambda run=translate, texts=texts, batch=batch, beams=beams: run(texts, batch, beams),
                        lambda texts=texts, batch=batch, beams=beams: plain(texts, batch, beams),
                        options.rounds,
                    )
                    cells += [f"{1e3 * median(pair.one) / len(texts):.2f}", str(pair)]
                    if name == "ctranslate2":
                        time_ratios.append((pair.ratio, f"{label}, {beams} beams, batch {batch}"))
                if quantization is None:
                    differences.append((len(sources) - same, f"{label}, {beams} beams"))
                else:
                    bleu_losses.append((bleu(expected[beams]) - score, f"{label}, {beams} beams"))
                lines.append(cells)
                print(*cells, sep=" | ", flush=True)
    header = ["engine", "beams", "MB", "BLEU", "identical", f"batch {BATCH}: ms a sentence", "to PyTorch"]
    summary = (
        f"fp32 as PyTorch: {_shared.verdict(differences, lambda count: count == 0)}; CTranslate2 at most {BARS['ratio']} of the "
        f"time: {_shared.verdict(time_ratios, lambda ratio: ratio <= BARS['ratio'])}; int8 at most {BARS['int8']} BLEU worse: "
        f"{_shared.verdict(bleu_losses, lambda loss: loss <= BARS['int8'])}; {len(sources)} sentences, 1 thread"
    )
    _shared.report(options, _shared.markdown([*header, "batch 1: ms a sentence", "to PyTorch"], lines), summary)


if __name__ == "__main__":
    main()
