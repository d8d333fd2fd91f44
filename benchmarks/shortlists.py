"""Lexical shortlists of a translator: BLEU, the share of the references' tokens that they hold, and times.

    python benchmarks/shortlists.py MODEL --train train.de.gz train.en.gz --test test.de.gz test.en.gz

Claims: with 100 best and 100 first tokens, BLEU differs by at most 0.2 from that of all logits, for one sentence and for batches
of 32, greedy and with 4 beams. With 32,000 tokens and lists of 1,000, greedy search takes at most 0.7 of the time of all logits,
in PyTorch and in ONNX Runtime, at both batch sizes.

MODEL: a folder with its tokenizer. Shortlists come from `--train` by IBM model 1. "Held" is the share of the references' tokens
that the list of their sentence, or of their batch, has; "tokens" the mean length of the lists. BLEU is sacrebleu's, in PyTorch.

Times are of MODEL with the last of `--lists`, and of a Marian with random weights, `--vocabulary` tokens, width 256, FFN 1536,
6 + 2 layers and 8 heads (students of this size are common on CPUs) with lists of random tokens of the sizes `--lengths`. All
sources have 20 random tokens and all translations exactly 20. A ratio is the median over rounds of the turns list, all, all,
list. Times are CPU times of one thread, without tokenization, and include the encoder, the search and the choice of rows.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Any

import _shared
import numpy as np
import sacrebleu
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel, PreTrainedTokenizerFast
from transformers.utils import logging

from hf_freeze import analysis, runtime
from hf_freeze.lab import data
from hf_freeze.publish.export import export_model

BATCHES, CLAIMED = (1, 32), 100
LOSS, RATIO, LENGTH, TOKENS = 0.2, 0.7, 1000, 20
BLEU_HEADER = ["best + first", "batch", "tokens", "held"]
TIME_HEADER = ["model", "engine", "tokens", "batch", "all, ms a step", "list, ms a step", "to all"]


def batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    yield from (items[start : start + size] for start in range(0, len(items), size))


@torch.no_grad()
def translations(model: Any, tokenizer: Any, texts: list[str], size: int, beams: int) -> list[str]:
    found = []
    for part in batches(texts, size):
        encoded = tokenizer(part, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = model.generate(**encoded, num_beams=beams, do_sample=False, max_new_tokens=100)
        found += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return found


def held(shortlist: Any, tokenizer: Any, sources: list[str], targets: list[str], size: int) -> tuple[float, float]:
    """(the mean length of the lists, the share of the targets' tokens in them)"""
    lengths, inside = [], []
    for texts, references in zip(batches(sources, size), batches(targets, size), strict=True):
        tokens = shortlist.tokens([token for ids in tokenizer(texts).input_ids for token in ids])
        lengths.append(len(tokens))
        inside += [np.isin(ids, tokens) for ids in tokenizer(text_target=references).input_ids]
    return mean(lengths), float(np.concatenate(inside).mean())


def in_pytorch(model: Any, ids: np.ndarray) -> Callable[[Any], Callable[[], object]]:
    """A shortlist or None -> a function that writes TOKENS tokens for each row of `ids`."""
    settings = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS, "num_beams": 1, "do_sample": False}
    source = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.ones(ids.shape, dtype=torch.long)}

    @torch.no_grad()
    def write(shortlist: Any) -> None:
        with nullcontext() if shortlist is None else analysis.shortlisted(model, shortlist):
            model.generate(**source, **settings)

    return lambda shortlist: lambda: write(shortlist)


def in_onnx(folder: Path, model: Path, ids: np.ndarray) -> Callable[[Any], Callable[[], object]]:
    """The same by the runtime; the model is exported once."""
    settings = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS, "num_beams": 1, "do_sample": False}
    opened: dict[bool, Any] = {}

    def writer(shortlist: Any) -> Callable[[], object]:
        if not (folder / "decoder_shortlist.onnx").is_file():
            export_model(model, "onnx", out=folder, shortlist=shortlist)
        uses = shortlist is not None
        if uses not in opened:
            opened[uses] = runtime.open(folder, threads=1, use_shortlist=uses)
        if uses:
            opened[uses].parts.shortlist = shortlist
        return lambda: opened[uses].ids(ids.tolist(), batch_size=len(ids), **settings)

    return writer


def times(name: str, model: Path, lists: list[Any], options: argparse.Namespace, ratios: list[Any]) -> list[list[str]]:
    """A line for each engine, list and batch size. Ratios at LENGTH tokens go to `ratios`."""
    lines, torch_model = [], AutoModelForSeq2SeqLM.from_pretrained(model).eval()
    random, rows = np.random.default_rng(0), len(lists[0].starts) - 1
    for size in BATCHES:
        ids = random.integers(2, rows, (size, TOKENS))
        for engine, writer in (
            ("PyTorch", in_pytorch(torch_model, ids)),
            ("ONNX", in_onnx(model / "onnx", model, ids)),
        ):
            for shortlist in lists:
                pair = _shared.in_turns(writer(shortlist), writer(None), options.rounds, clock=time.process_time)
                steps = [f"{1e3 * median(each) / TOKENS:.2f}" for each in (pair.other, pair.one)]
                length = len(shortlist.tokens(ids))
                lines.append([name, engine, f"{length:,} of {rows:,}", str(size), *steps, str(pair)])
                print(*lines[-1], sep=" | ", flush=True)
                if length == LENGTH and rows == options.vocabulary:
                    ratios.append((pair.ratio, f"{engine}, batch {size}"))
    return lines


def random_model(folder: Path, vocabulary: int, width: int) -> Path:
    """Saves a model and a tokenizer that is never used."""
    from tokenizers import Tokenizer, models

    sizes = {"decoder_layers": 2, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
    sizes |= {"encoder_layers": 6, "encoder_ffn_dim": 6 * width, "decoder_ffn_dim": 6 * width}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
    torch.manual_seed(0)
    model = MarianMTModel(
        MarianConfig(vocab_size=vocabulary, d_model=width, max_position_embeddings=64, **sizes, **ids)
    )
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    return folder


def random_list(vocabulary: int, length: int) -> Any:
    """The same `length` tokens for every text."""
    tokens = np.sort(np.random.default_rng(1).choice(np.arange(2, vocabulary), length - 2, replace=False))
    starts = np.zeros(vocabulary + 1, np.int64)
    return analysis.Shortlist(always=np.append([0, 1], tokens), starts=starts, targets=starts[:0])


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--train", nargs=2, required=True, metavar=("SOURCE", "TARGET"))
    parser.add_argument("--test", nargs=2, required=True, metavar=("SOURCE", "TARGET"))
    parser.add_argument("--sentences", type=int, default=1000, help="of the test files, the first ones")
    parser.add_argument(
        "--lists", type=int, nargs="+", default=[50, CLAIMED], help="best and first tokens, both as many"
    )
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, LENGTH, 4000])
    parser.add_argument("--rounds", type=int, default=3, help="of four turns each; 0: no times")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(options.model).eval()
    pairs = [pair for pair in zip(*map(data.read_lines, options.train), strict=True) if all(pair)]
    sources, targets = (data.read_lines(path)[: options.sentences] for path in options.test)

    def bleu(size: int, beams: int) -> float:
        return sacrebleu.corpus_bleu(translations(model, tokenizer, sources, size, beams), [targets]).score

    whole = {beams: bleu(BATCHES[-1], beams) for beams in options.beams}
    lines = [["all", "", f"{len(tokenizer):,}", "", *(f"{score:.2f}" for score in whole.values())]]
    print(*lines[0], sep=" | ", flush=True)
    losses: list[tuple[float, str]] = []
    ratios: list[tuple[float, str]] = []
    shortlist: Any = None
    for number in options.lists:
        start = time.process_time()
        shortlist = analysis.shortlist(tokenizer, *map(list, zip(*pairs, strict=True)), best=number, first=number)
        spent = time.process_time() - start
        for size in BATCHES:
            is_last = number == options.lists[-1]
            with analysis.shortlisted(model, shortlist):
                scores = {beams: bleu(size, beams) for beams in whole if is_last or size > 1 or beams == 1}
            length, share = held(shortlist, tokenizer, sources, targets, size)
            cells = [f"{number} + {number}", str(size), f"{length:,.0f}", f"{100 * share:.1f} %"]
            lines.append([*cells, *(f"{scores[beams]:.2f}" if beams in scores else "" for beams in whole)])
            print(*lines[-1], f"{spent:.0f} s for the list", sep=" | ", flush=True)
            if number == CLAIMED:
                losses += [(abs(scores[beams] - whole[beams]), f"batch {size}, {beams} beams") for beams in scores]
    timed: list[list[str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "model"
        model.save_pretrained(copy)
        tokenizer.save_pretrained(copy)
        drawn = random_model(Path(temporary) / "random", options.vocabulary, options.width)
        lists = [random_list(options.vocabulary, length) for length in options.lengths]
        for name, folder, chosen in (("MODEL", copy, [shortlist]), ("random", drawn, lists)) if options.rounds else ():
            timed += times(name, folder, chosen, options, ratios)
    summary = "\n".join([
        f"- BLEU within {LOSS}: {_shared.verdict(losses, lambda loss: loss <= LOSS)}",
        f"- {LENGTH:,} of {options.vocabulary:,} tokens, at most {RATIO} of the time: "
        + _shared.verdict(ratios, lambda ratio: ratio <= RATIO),
        f"- {len(sources)} sentences, 1 thread",
    ])  # fmt: skip
    header = [*BLEU_HEADER, *("BLEU, greedy" if beams == 1 else f"BLEU, {beams} beams" for beams in whole)]
    tables = [_shared.markdown(header, lines), *([_shared.markdown(TIME_HEADER, timed)] if timed else [])]
    _shared.report(options, "\n\n".join(tables), summary)


if __name__ == "__main__":
    main()
