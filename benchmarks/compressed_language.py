"""What `hf-freeze compress --texts` makes of a language model, with no labels and within a share of its bytes in int8.

    python benchmarks/compressed_language.py MODEL --texts wikitext2/train.txt.gz --test wikitext2/test.txt.gz --budgets 50% 70%
    python benchmarks/compressed_language.py stories260k/hf --own 2000 --budgets 50% --controls

Claims: none; the table says what comes of it.

A budget is a share of the folder that the whole model takes in ONNX Runtime in int8. The texts are paragraphs of `--texts`, or
stories that the model writes itself, drawn at random with all probabilities (`--own`). All folders are compared in the engine
with the model, on up to 500 texts that took no part. Columns:

- folder: MB of all files, tokenizer included, and the share of the whole in int8;
- KL: of the probabilities of the next token, in nats, the mean over tokens, with a 95 % interval by a bootstrap over texts;
- agreement: the share of tokens for which both have the same first choice;
- perplexity: to that of the model, on the same texts, in the number of its tokens;
- seconds: of the compression; other work on the machine makes them longer.

`--controls`: 4 bits in all weights, rounded and calibrated, and other ways to as many bytes: see compressed_texts.py.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _shared
import torch
from compressed_texts import controls

import hf_freeze
from hf_freeze.analysis.answers import compare_answers
from hf_freeze.compression.budget import Budget
from hf_freeze.compression.compression import Compression
from hf_freeze.compression.engine import engine_for, serve
from hf_freeze.compression.settings import Settings
from hf_freeze.compression.shape import quantized
from hf_freeze.io import bytes_of
from hf_freeze.lab.data import read_text, sample
from hf_freeze.publish.export.served import answers, opened

_MOST_TEXTS, _TESTED = 200_000, 500
_STORY, _AT_ONCE = 200, 100  # tokens of a story, stories that are written at once
_PARTS = ["attention", "ffn", "embeddings"]


@torch.no_grad()
def written(model: Any, tokenizer: Any, count: int, seed: int) -> list[str]:
    """Stories of the model's own."""
    torch.manual_seed(seed)
    texts: list[str] = []
    while len(texts) < count:
        start = torch.full((_AT_ONCE, 1), model.config.bos_token_id)
        ids = model.generate(start, do_sample=True, top_k=0, max_new_tokens=_STORY)
        texts += [text for text in tokenizer.batch_decode(ids, skip_special_tokens=True) if text.strip()]
    return texts[:count]


def in_four_bits(compression: Compression) -> Iterator[tuple[str, Path]]:
    """(what was done, the served folder) of the whole model in 4 bits. `compression`: one that has run."""
    original, engine = compression.original, compression.engine
    subject = original.subject()
    for name, calibration in (("4 bits, rounded", None), ("4 bits, calibrated", subject.samples)):
        folder = compression.out / f"control-{name}"
        if not folder.exists():
            variant = hf_freeze.make_variant(subject.model, [quantized(_PARTS)], calibration=calibration)
            original.save(variant, subject.tokenizer, folder)
        yield name, serve(folder, engine.format, engine.quantization, compression.out / "engine" / folder.name)


def texts_of(options: Any) -> tuple[list[str], list[str]]:
    """(to learn from, to compare on at the end)"""
    if options.own:
        served = opened(options.model)
        model, tokenizer = served.model, served.tokenizer
        return written(model, tokenizer, options.own, seed=0), written(model, tokenizer, _TESTED, seed=999)
    learnt, test = (
        [str(text) for text in read_text(some, unit="documents")["text"]] for some in (options.texts, options.test)
    )
    return sample(learnt, _MOST_TEXTS), sample([text for text in test if text.strip()], _TESTED)


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", metavar="MODEL", help="a folder or Hub id of a language model")
    parser.add_argument("--texts", nargs="+", type=Path, help="files to learn from")
    parser.add_argument("--test", nargs="+", type=Path, help="files to compare on at the end")
    parser.add_argument("--own", type=int, default=0, help="in place of files: so many texts of the model's own")
    parser.add_argument("--budgets", nargs="+", default=["50%"], help="of bytes, shares of those in int8, such as 50%%")
    parser.add_argument("--samples", type=int, default=512, help="texts that tell what parts are worth")
    parser.add_argument("--heal", default="default", help="0, 10min or 1epoch; a tenth of an epoch if not given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--controls", action="store_true", help="other ways to as many bytes, too")
    parser.add_argument("--keep", type=Path, help="folder for the compressed models; a stopped run goes on there")
    options = parser.parse_args()
    if not options.own and not (options.texts and options.test):
        parser.error("give --texts and --test, or --own")
    texts, test = texts_of(options)
    served = opened(options.model)
    expected = answers(served, test)
    engine = engine_for(None, served.task, served.model.config.model_type)
    rows: list[list[str]] = []

    def add(label: str, folder: Path, whole: int, seconds: float | None = None) -> None:
        found = compare_answers(expected, answers(opened(folder), test, like=expected))
        (low, high), size = found.intervals["kl"], bytes_of(folder)
        ratio = (found.perplexity or 0.0) / (found.original_perplexity or 1.0)
        kl = f"{found.kl:.4f} ({low:.4f} to {high:.4f})"
        shown = "–" if seconds is None else f"{seconds:.0f}"
        row = [label, f"{size / 1e6:.3f} ({size / whole:.1%})", kl, f"{found.agreement:.3f}", f"× {ratio:.3f}", shown]
        print(json.dumps(row, ensure_ascii=False), flush=True)
        rows.append(row)

    with tempfile.TemporaryDirectory() as temporary:
        out = options.keep or Path(temporary)
        everything = serve(Path(options.model), engine.format, engine.quantization, out / "whole")
        size = bytes_of(everything)
        add("whole, int8", everything, size)
        for seed in options.seeds:
            for share in options.budgets:
                budget = Budget(max_bytes=int(float(share.rstrip("%")) / 100 * size))
                heal = 0 if options.heal == "0" else options.heal
                where = out / f"{share.strip('%')}-heal-{heal}-seed-{seed}"
                settings = Settings(heal=heal, seed=seed, samples=options.samples)
                compression = Compression(options.model, texts, budget, where, settings)
                made = compression.run()
                add(f"{share}, seed {seed}: {made.kept}", made.after.folder, size, made.seconds)
                if options.controls:
                    for name, folder in (*in_four_bits(compression), *controls(compression, made.after.bytes, seed)):
                        add(name, folder, size)
    headings = ["", "folder, MB", "KL, nats", "agreement", "perplexity", "seconds"]
    summary = f"{len(texts):,} texts to learn from, {len(test):,} to compare on"
    _shared.report(options, _shared.markdown(headings, rows), summary)


if __name__ == "__main__":
    main()
