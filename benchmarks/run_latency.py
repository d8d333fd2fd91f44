"""Decoding and training time of the finished runs of a translation grid, against row 0 of the same grid.

    hf-freeze run recipes/freeze_ablation/recipe.yaml --out runs/demo
    python benchmarks/run_latency.py runs/demo --out run_latency.md

Claim: no row takes more than 1.05 of row 0's time to decode, at batch 1 or 64. Training steps are measured without a claim.

The model of each row (with the smallest seed that row 0 has too) is loaded as it was saved, in fp32, with the attention
implementation of the runs. A ratio is the median over rounds of the turns row, row 0, row 0, row in one process, with quartiles.
Row 0 against itself, loaded twice, shows the noise.

Decoding: `--sentences` sentences of the built-in test split with the settings of the runs, or of `--text`; greedy search with
cache, one sentence at a time and in batches of 64. Each sentence gets exactly `--new-tokens` new tokens, which excludes the gain
of a row with shorter translations. With `--until-end`, decoding runs until the model ends the translation, the time for which a
user waits. Rows with different vocabularies, whose tokens are different pieces of text, can only be compared with `--until-end`.

Decoding times are written to `latency.json` in the folder of each measured run; `hf-freeze report` compares the rows by them too.

Training: forward, label-smoothed loss, backward and fused AdamW step of the trainable parameters, in training mode, on one batch
of 64 of these sentences with their targets (`--target`; by default `--text` itself). Rows with distillation include the forward
of the teacher.
"""

import argparse
import json
import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _shared
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from hf_freeze.io import write_whole
from hf_freeze.lab import data
from hf_freeze.lab.runs.environment import environment
from hf_freeze.lab.runs.text_training import choose_attention
from hf_freeze.run_folder import LATENCY, run_folder
from hf_freeze.training import label_smoothed_loss

BAR = 1.05
BATCH = 64


def find_rows(folder: Path, seed: int | None) -> dict[str, Path]:
    """{row: folder of its finished run}, row 0 first. Raises SystemExit if there is no finished run of row 0."""
    runs: dict[str, dict[int, Path]] = {}
    for path in folder.glob("row-*-seed-*"):
        row, number = re.fullmatch(r"row-(.+)-seed-(\d+)", path.name).groups()  # type: ignore[union-attr]
        if (path / "metrics.json").exists() and (path / "model").is_dir() and (seed is None or int(number) == seed):
            runs.setdefault(row, {})[int(number)] = path
    if "0" not in runs:
        of_seed = "" if seed is None else f" of seed {seed}"
        raise SystemExit(
            f"{folder} holds no finished run of row 0{of_seed}: run `hf-freeze run RECIPE --out {folder}` first"
        )
    order = sorted(runs, key=lambda row: (row != "0", row))
    return {row: runs[row][min(set(runs[row]) & set(runs["0"]) or runs[row])] for row in order}


def read_text(options: argparse.Namespace, folder: Path) -> tuple[list[str], list[str]]:
    """(sources, targets); `folder` is that of a run."""
    if options.text is not None:
        sources = data.read_lines(options.text)
        targets = data.read_lines(options.target or options.text)
        pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s and t]
    else:
        file = folder / "run.json"
        settings = json.loads(file.read_text(encoding="utf-8"))["data"] if file.exists() else {}
        test = data.builtin_corpus(**settings.get("builtin", {}))["test"]
        pairs = list(zip(test["source"], test["target"], strict=True))
    pairs = pairs[: options.sentences]
    return [source for source, _ in pairs], [target for _, target in pairs]


def load(folder: Path) -> Any:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model").to(_shared.DEVICE)
    choose_attention(model)
    if getattr(model, "needs_teacher", False):
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        model.set_teacher(load(run_folder(folder.parent, run["teacher"])))
    return model


def decoder(model: Any, batches: list[Any], new_tokens: int | None) -> Callable[[], None]:
    """A function that decodes all batches, to `new_tokens` new tokens each, or if None until the model ends."""
    model.eval()
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    limits = {"max_new_tokens": min(2 * longest + 10, model.config.max_position_embeddings - 1)}
    if new_tokens is not None:
        limits = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}

    @torch.no_grad()
    def decode() -> None:
        for batch in batches:
            outputs = model.generate(**batch, num_beams=1, do_sample=False, **limits)
            if new_tokens is not None and outputs.shape[1] != new_tokens + 1:
                raise RuntimeError(f"{outputs.shape[1] - 1} new tokens instead of {new_tokens}")

    return decode


def stepper(model: Any, batch: Any, labels: torch.Tensor) -> Callable[[], None]:
    """A function that takes one training step."""
    model.train()
    if getattr(model, "scheduled", False):
        model.advance(1, 2)
    loss_of = label_smoothed_loss(0.1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-5, weight_decay=0.0, fused=True)
    inputs = model.prepare_decoder_input_ids_from_labels(labels)

    def step() -> None:
        loss_of(model(**batch, decoder_input_ids=inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument(
        "folder", type=Path, metavar="RUN_FOLDER", help="folder of `hf-freeze run`, with row-NAME-seed-N/model"
    )
    parser.add_argument("--rows", nargs="+", help="default: all; row 0 is always included")
    parser.add_argument("--seed", type=int, help="default: the smallest seed that row 0 has too")
    parser.add_argument("--text", help="source sentences, one per line, plain or gzipped")
    parser.add_argument("--target", help="their translations")
    parser.add_argument("--sentences", type=int, default=BATCH)
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--until-end", action="store_true", help="decode until the model ends, instead of --new-tokens")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of four turns; three times as many for short measurements"
    )
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    print(f"{torch.get_num_threads()} threads")
    folders = find_rows(options.folder, options.seed)
    if unknown := set(options.rows or ()) - set(folders):
        raise SystemExit(f"no finished run of row {sorted(unknown)[0]!r}; choose from {list(folders)}")
    if options.rows:
        folders = {row: folder for row, folder in folders.items() if row in ("0", *options.rows)}
    sources, targets = read_text(options, folders["0"])
    sizes = {row: AutoConfig.from_pretrained(folder / "model").vocab_size for row, folder in folders.items()}
    if len(set(sizes.values())) > 1 and not options.until_end:
        raise SystemExit(f"the rows have vocabularies of different sizes, {sizes}: compare them with --until-end")
    new_tokens = None if options.until_end else options.new_tokens

    def works_of(folder: Path) -> dict[str, Callable[[], None]]:
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")

        def encode(part: list[str]) -> Any:
            return tokenizer(part, return_tensors="pt", padding=True, truncation=True).to(_shared.DEVICE)

        batches = [encode(sources[start : start + BATCH]) for start in range(0, len(sources), BATCH)]
        labels = encode(targets[:BATCH])
        labels = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)
        decoding, training = load(folder), load(folder)
        return {
            "1": decoder(decoding, [encode([source]) for source in sources], new_tokens),
            "64": decoder(decoding, batches, new_tokens),
            "step": stepper(training, batches[0], labels),
        }

    zero = works_of(folders["0"])
    length = "each to the end that the model sets" if new_tokens is None else f"{new_tokens} new tokens each"
    lines, ratios, first_ms = [], [], {}
    for row, folder in folders.items():
        works = works_of(folder)
        record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        decoding = {}
        cells = [f"{row}: {record['label']}", f"{record['parameters']['stored_bytes'] / 1e6:.2f}"]
        for name, work in works.items():
            rounds = options.rounds * (1 if name == "1" else 3)
            pair = _shared.in_turns(work, zero[name], rounds)
            scale = len(sources) if name in ("1", "64") else 1  # decoding a sentence, a step
            first_ms.setdefault(name, 1e3 * statistics.median(pair.other) / scale)  # row 0 comes first
            if name != "step":
                decoding[name] = {"ratio": pair.ratio, "ratios": pair.ratios, "first_ms": first_ms[name]}
            cells += [f"{1e3 * statistics.median(pair.one) / scale:.2f}", str(pair)]
            if name != "step" and row != "0":
                ratios.append((pair.ratio, f"row {row} at batch {name}"))
        conditions = (
            f"{len(sources)} sentences of {Path(options.text).name if options.text else 'the test set'}, {length}"
        )
        latency = {"decoding": decoding, "conditions": conditions, "environment": environment()}
        write_whole(folder / LATENCY, json.dumps(latency, indent=1) + "\n")
        lines.append(cells)
        print(*cells, sep=" | ", flush=True)
    header = ["row", "stored, MB", "batch 1: ms a sentence", "to row 0", "batch 64: ms a sentence", "to row 0",
              "training step, ms", "to row 0"]  # fmt: skip
    missed = [f"{case} ({ratio:.2f})" for ratio, case in ratios if ratio > BAR]
    verdict = (
        f"missed: {', '.join(missed)}" if missed else "passed" if ratios else "not measured: there is no other row"
    )
    summary = (
        f"decoding at most {BAR} of row 0: {verdict}; {len(sources)} sentences, {length}, a step of {len(targets[:BATCH])} "
        f"sentences; {torch.get_num_threads()} threads"
    )
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
