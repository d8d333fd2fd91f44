"""How reading, tokenising and batching grow with the data: parallel text in files, up to millions of pairs.

    python benchmarks/scale_data.py                                   # 10,000, 100,000 and a million pairs
    python benchmarks/scale_data.py --pairs 10000 100000 1000000 10000000 --folder /data/scale
    python benchmarks/scale_data.py --pairs 2000 20000 --batches 50   # to see that it works

Pairs are drawn from a pool of the built-in corpus and written to two text files. For each number of pairs, in new processes:

- "read": the files are copied into an Arrow file of the cache. "tokenised": `data.tokenise` of these rows, with all that a later
  start finds beside them (lengths, largest id). "map": `datasets.map` with the same tokenizer, processes and rows alone. They
  take turns, and the faster turn of each counts: noise only adds time.
- "second start": from the import of hf_freeze to the first batch, and the part of it after the imports.
- "epoch planned": sorting and shuffling for one epoch, from the lengths.
- "resident": the memory of a process that trains the demo preset for 20 steps and then draws batches from the whole epoch:
  its own, and with the pages of the memory-mapped files, which the system takes back when it needs them. VmHWM is the peak of
  the sum.
- "batches": a second from the memory-mapped files, relative to the same rows in memory (`keep_in_memory`, as in 0.1.0): the
  median of the ratios of rounds of turns, with quartiles.

Claims: tokenised at no less than 0.9 of the speed of `map`; at most 1.5 GB resident; the first batch of a second start within
5 s, without the imports; at least 0.95 of the batches a second; no cost that grows faster than (pairs)^1.05.
"""

import argparse
import functools
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _shared
import datasets
import numpy as np

SIDES = {"input_ids": "source", "labels": "target"}
LINES = 100_000  # of the pool, and written at a time
LARGE = 1_000_000  # pairs; of more, `map` is not measured, which would take longest


def pool_of(words: int) -> Any:
    """Generated pairs whose source has at most so many words."""
    from hf_freeze.lab.data import builtin_corpus

    pairs = builtin_corpus(train=LINES, dev=1, test=1)["train"]
    return pairs.filter(lambda pair: pair["source"].count(" ") < words)


def write_pairs(folder: Path, number: int, pool: Any) -> list[Path]:
    """Two files of `number` lines."""
    paths = [folder / f"{number}.{side}" for side in SIDES.values()]
    texts = {side: np.array(pool[side], dtype=object) for side in SIDES.values()}
    if not all(path.exists() for path in paths):
        draw = np.random.default_rng(number)
        files = [path.open("w", encoding="utf-8") for path in paths]
        for start in range(0, number, LINES):
            which = draw.integers(len(pool), size=min(LINES, number - start))
            for file, side in zip(files, SIDES.values(), strict=True):
                file.write("\n".join(texts[side][which]) + "\n")
        for file in files:
            file.close()
    return paths


def use_cache(cache: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = cache
    datasets.disable_progress_bars()


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 256
    return tokenizer


def copied_rows(copied: Path, rows: Any, *_: Any) -> Iterator[Any]:
    """In place of tokenising: the rows of smaller data, again and again."""
    from hf_freeze.lab.data.cache import open_tables

    (path,) = copied.glob("hf_freeze/tokens-*/rows.arrow")
    table, total = open_tables(path).data.table, len(rows.split)
    for start in range(0, total, len(table)):
        yield table.slice(0, min(len(table), total - start))


def first_start(
    paths: list[Path], folder: Path, cache: Path, processes: int, turns: int, has_map: bool, copied: Path | None
) -> dict[str, float]:
    """Seconds of reading, of our tokenising and of `datasets.map` alone."""
    from hf_freeze.lab import data

    tokenizer, seconds = tokenizer_of(folder), {"tokenised": [], "map": []}
    for turn in range(turns):
        shutil.rmtree(cache, ignore_errors=True)
        use_cache(cache)
        began = time.perf_counter()
        rows = data.read_parallel(*paths)
        seconds.setdefault("read", []).append(time.perf_counter() - began)

        def ours(rows: Any = rows) -> None:
            if copied is not None:
                data.tokens.id_tables = functools.partial(copied_rows, copied)
            data.tokenise(rows, tokenizer, SIDES, processes=processes)

        def theirs(rows: Any = rows) -> None:
            def ids(batch: Any) -> dict[str, Any]:
                return {name: tokenizer(batch[side], truncation=True)["input_ids"] for name, side in SIDES.items()}

            path = cache / "map.arrow"
            rows.map(ids, batched=True, remove_columns=rows.column_names, cache_file_name=str(path),
                     num_proc=processes if processes > 1 else None)  # fmt: skip
            for file in cache.glob("map*.arrow"):
                file.unlink()

        both = [("tokenised", ours), ("map", theirs)] if has_map else [("tokenised", ours)]
        for name, work in both if turn % 2 == 0 else both[::-1]:
            seconds[name].append(_shared.seconds(work))
    return {name: min(times, default=float("nan")) for name, times in seconds.items()}


def second_start(paths: list[Path], folder: Path, cache: Path, max_tokens: int) -> dict[str, float]:
    """Seconds to the first batch, after the imports."""
    import transformers

    from hf_freeze.lab import data

    use_cache(cache)
    began = time.perf_counter()
    tokenizer = tokenizer_of(folder)
    tokens = data.tokenise(data.read_parallel(*paths), tokenizer, SIDES)
    sampler = data.TokenBatchSampler(tokens.lengths["input_ids"], tokens.lengths["labels"], max_tokens)
    batch = tokens.__getitems__(next(iter(sampler)))
    transformers.DataCollatorForSeq2Seq(tokenizer)(batch)
    return {"first batch": time.perf_counter() - began}


def training(paths: list[Path], folder: Path, cache: Path, batches: int) -> dict[str, float]:
    """Bytes resident after training and after batches from all over the data; seconds to plan an epoch."""
    import transformers

    from hf_freeze import make_variant
    from hf_freeze.lab import data
    from hf_freeze.lab.runs.text_training import backbone_config
    from hf_freeze.lab.training import TokenBatchTrainer
    from hf_freeze.training import label_smoothed_loss

    use_cache(cache)
    tokenizer = tokenizer_of(folder)
    tokens = data.tokenise(data.read_parallel(*paths), tokenizer, SIDES)
    run = _shared.rows(argparse.Namespace(preset="demo", set=[]))["0"]
    model = make_variant(backbone_config(run.backbone, tokenizer), [], task="seq2seq-lm", init="marian", seed=1)
    arguments = transformers.Seq2SeqTrainingArguments(
        str(folder / "out"), max_steps=20, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        accelerator_config={"even_batches": False},
    )  # fmt: skip
    trainer = TokenBatchTrainer(
        model=model, args=arguments, train_dataset=tokens, processing_class=tokenizer,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_loss_func=label_smoothed_loss(0.1), max_tokens=run.training.max_tokens,
    )  # fmt: skip
    trainer.train()
    loader = trainer.get_train_dataloader()
    began = time.perf_counter()
    indices = iter(trainer.get_train_dataloader().batch_sampler)
    next(indices)
    planned = time.perf_counter() - began
    for number, _ in enumerate(loader):
        if number == batches:
            break
    resident = {name: _shared.resident(name) for name in ("RssAnon", "VmRSS", "VmHWM")}
    return {"planned": planned, **resident}


def batch_rates(paths: list[Path], folder: Path, cache: Path, batches: int, rounds: int) -> _shared.Pair:
    """Seconds for some batches from the mapped files, and from memory."""
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForSeq2Seq

    from hf_freeze.lab import data

    use_cache(cache)
    tokenizer = tokenizer_of(folder)
    mapped = data.tokenise(data.read_parallel(*paths), tokenizer, SIDES)
    in_memory = datasets.Dataset.from_file(str(mapped.folder / "rows.arrow"), in_memory=True)
    order = list(data.TokenBatchSampler(mapped.lengths["input_ids"], mapped.lengths["labels"], 2048))

    def drawn(rows: Any, start: int) -> None:
        chosen = [order[(start + number) % len(order)] for number in range(batches)]
        for _ in DataLoader(rows, batch_sampler=chosen, collate_fn=DataCollatorForSeq2Seq(tokenizer)):
            pass

    pair = _shared.Pair()
    for number in range(rounds + 1):  # the first round reads the batches from the disk, and is not counted
        both = (in_memory, mapped) if number % 2 else (mapped, in_memory)
        times = [_shared.seconds(lambda rows=rows, at=number * batches: drawn(rows, at)) for rows in both]
        if number:
            memory, disk = times if number % 2 else times[::-1]
            pair.one.append(memory)
            pair.other.append(disk)
    return pair


def slope(numbers: list[int], costs: list[float]) -> float:
    """Of log(cost) against log(number), by least squares over what was measured."""
    pairs = [(number, cost) for number, cost in zip(numbers, costs, strict=True) if cost > 0]
    return float(np.polyfit(*np.log(pairs).T, 1)[0]) if len(pairs) > 1 else float("nan")


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--pairs", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--words", type=int, default=20, help="of the longest source sentence; 20 is all of the corpus")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2, help="of tokenising; one for more than a million pairs")
    parser.add_argument("--batches", type=int, default=500, help="drawn in a round; ten times as many for the memory")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--copied", action="store_true", help="of more than a million pairs, the tokens are those of the "
                        "million again and again; their time is not given")  # fmt: skip
    parser.add_argument("--folder", help="for the files; default: a new folder of the system's, which is removed")
    options = parser.parse_args()
    from hf_freeze.data import train_tokenizer

    root = Path(options.folder or tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    pool = pool_of(options.words)
    train_tokenizer([*pool["source"][:20_000], *pool["target"][:20_000]], 4000).save_pretrained(root / "tokenizer")
    lines, costs = [], []
    for number in options.pairs:
        paths, cache = write_pairs(root, number, pool), root / f"cache-{number}"
        fixed = (paths, root / "tokenizer", cache)
        is_large = number > LARGE
        copied = root / f"cache-{LARGE}" if is_large and options.copied else None
        turns = 1 if is_large else options.turns
        cost = _shared.in_new_process(first_start, *fixed, options.processes, turns, not is_large, copied)
        began = time.perf_counter()
        cost |= _shared.in_new_process(second_start, *fixed, 2048)
        cost["second start"] = time.perf_counter() - began
        if copied is not None:
            cost["tokenised"] = float("nan")
        cost |= _shared.in_new_process(training, *fixed, 10 * options.batches)
        rate = _shared.in_new_process(batch_rates, *fixed, options.batches, options.rounds)
        costs.append(cost | {"rate": rate.ratio})
        lines.append([
            f"{number:,}", f"{cost['read']:.1f}", f"{cost['tokenised']:.1f}", f"{cost['map']:.1f}",
            f"{cost['map'] / cost['tokenised']:.2f}", f"{cost['second start']:.1f}", f"{cost['first batch']:.2f}",
            f"{cost['planned']:.2f}", f"{cost['RssAnon'] / 1e9:.2f}", f"{cost['VmRSS'] / 1e9:.2f}",
            f"{cost['VmHWM'] / 1e9:.2f}", str(rate),
        ])  # fmt: skip
        print(lines[-1], flush=True)
    header = ["pairs", "read, s", "tokenised, s", "map, s", "speed / map", "second start, s", "after imports, s",
              "epoch planned, s", "own memory, GB", "resident, GB", "peak, GB", "batches / in memory"]  # fmt: skip
    named = [(f"{number:,}", cost) for number, cost in zip(options.pairs, costs, strict=True)]
    grown = ("read", "tokenised", "second start", "first batch", "planned", "RssAnon", "VmRSS")
    slopes = {name: slope(options.pairs, [cost[name] for cost in costs]) for name in grown}
    claims = {
        "speed / map": (
            [(cost["map"] / cost["tokenised"], pairs) for pairs, cost in named if cost["map"] > 0],
            lambda v: v >= 0.9,
        ),
        "resident, GB": ([(cost["VmHWM"] / 1e9, pairs) for pairs, cost in named], lambda v: v <= 1.5),
        "first batch, s": ([(cost["first batch"], pairs) for pairs, cost in named], lambda v: v <= 5),
        "batches / in memory": ([(cost["rate"], pairs) for pairs, cost in named], lambda v: v >= 0.95),
        "slopes": ([(value, name) for name, value in slopes.items() if len(named) > 1], lambda v: v <= 1.05),
    }
    summary = "slopes: " + ", ".join(f"{name} {value:.2f}" for name, value in slopes.items()) + "; claims: "
    summary += "; ".join(f"{name}: {_shared.verdict(*claim)}" for name, claim in claims.items())
    _shared.report(options, _shared.markdown(header, lines), summary + f"; {options.processes} processes")
    if options.folder is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
