"""Exported translators against `generate`: the same translations, how many bytes, and how long they take.

    python benchmarks/export.py runs/theseus/row-0-seed-1/model --text test.de.gz --target test.en.gz --out export.md

Claims: in fp32, CTranslate2 and ONNX Runtime find the translation of `generate` for every sentence, and CTranslate2 takes less
than half of its time; int8 costs at most 0.5 BLEU.

Translates the first `--sentences` sentences with the merged model (`generate`, with cache) and with each exported folder,
greedily and, but for ONNX, with `--beams`, under the same limit of `--new-tokens` and length penalty, the pad token banned.
Identical: translations that are the same text. BLEU is sacrebleu's with the targets. MB: the model files alone; of PyTorch the
fp32 file of the merged model.

A time is that of one sentence, its tokenization included, of the first 100 in batches of 25, or of the first 20 one by one; a
ratio the median over rounds of engine, PyTorch, PyTorch, engine, with quartiles. All on one thread.
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
        made = []
        for start in range(0, len(texts), batch):
            encoded = tokenizer(texts[start : start + batch], return_tensors="pt", padding=True)
            encoded.pop("token_type_ids", None)
            found = model.generate(**encoded, num_beams=beams, do_sample=False, **common)
            made += tokenizer.batch_decode(found, skip_special_tokens=True)
        return made

    return translate


def engine(name: str, folder: Path, common: dict[str, Any]) -> Callable[[list[str], int, int], list[str]]:
    """The same by an exported folder."""
    translator = ENGINES[name](folder)

    def translate(texts: list[str], batch: int, beams: int) -> list[str]:
        settings = common | ({"num_beams": beams} if name == "ctranslate2" else {})
        parts = [texts[start : start + batch] for start in range(0, len(texts), batch)]
        return [found["translation_text"] for part in parts for found in translator(part, batch_size=batch, **settings)]

    return translate


def megabytes(folder: Path) -> float:
    kinds = (".safetensors", ".bin", ".onnx", ".data")
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in kinds) / 1e6


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
    def bleu(found: list[str]) -> float:
        return sacrebleu.corpus_bleu(found, [targets]).score

    dense = export_model(options.model, "dense", out=folder / "dense")
    pad = AutoModelForSeq2SeqLM.from_pretrained(dense).generation_config.pad_token_id
    common = {"max_new_tokens": options.new_tokens, "bad_words_ids": [[pad]]}
    plain = pytorch(dense, common)
    expected = {beams: plain(sources, BATCH, beams) for beams in dict.fromkeys((1, options.beams))}
    lines, differ, slow, worse = [], [], [], []
    for beams, found in expected.items():
        lines.append(["PyTorch", str(beams), f"{megabytes(dense):.2f}", f"{bleu(found):.2f}", *[""] * 5])
    for name in options.engines:
        for quantization in (None, "int8"):
            exported = export_model(options.model, name, quantization=quantization, out=folder / "exported")
            translate = engine(name, exported, common)
            for beams in expected if name == "ctranslate2" else (1,):
                where = f"{name} {quantization or 'fp32'}"
                found = translate(sources, BATCH, beams)
                same = sum(one == other for one, other in zip(found, expected[beams], strict=True))
                score = bleu(found)
                cells = [where, str(beams), f"{megabytes(exported):.2f}", f"{score:.2f}", f"{same} of {len(sources)}"]
                for texts, batch in ((sources[:TOGETHER], BATCH), (sources[:ALONE], 1)):
                    pair = _shared.in_turns(
                        lambda run=translate, texts=texts, batch=batch, beams=beams: run(texts, batch, beams),
                        lambda texts=texts, batch=batch, beams=beams: plain(texts, batch, beams),
                        options.rounds,
                    )
                    cells += [f"{1e3 * median(pair.one) / len(texts):.2f}", str(pair)]
                    if name == "ctranslate2":
                        slow.append((pair.ratio, f"{where}, {beams} beams, batch {batch}"))
                if quantization is None:
                    differ.append((len(sources) - same, f"{where}, {beams} beams"))
                else:
                    worse.append((bleu(expected[beams]) - score, f"{where}, {beams} beams"))
                lines.append(cells)
                print(*cells, sep=" | ", flush=True)
    header = ["engine", "beams", "MB", "BLEU", "identical", f"batch {BATCH}: ms a sentence", "to PyTorch"]
    summary = (
        f"fp32 as PyTorch: {_shared.verdict(differ, lambda count: count == 0)}; CTranslate2 at most {BARS['ratio']} of the time: "
        f"{_shared.verdict(slow, lambda ratio: ratio <= BARS['ratio'])}; int8 at most {BARS['int8']} BLEU worse: "
        f"{_shared.verdict(worse, lambda lost: lost <= BARS['int8'])}; {len(sources)} sentences, 1 thread"
    )
    _shared.report(options, _shared.markdown([*header, "batch 1: ms a sentence", "to PyTorch"], lines), summary)


if __name__ == "__main__":
    main()
