"""What a small classifier and a small sentence encoder weigh, take and lose in PyTorch and in ONNX Runtime, in fp32 and int8.

    hf-freeze run recipes/served/sst2.yaml --set data.root=SST2 --set backbone.pretrained=MINILM --out RUNS
    python benchmarks/served_encoders.py --classifier RUNS --texts SST2/train.jsonl.gz --test SST2/dev.jsonl.gz
    python benchmarks/served_encoders.py --embedder MINILM --texts train.en.gz --test val.en.gz

Claims: ONNX Runtime gives the answers of PyTorch in fp32; int8 weighs at most 0.30 of what is saved; it costs at most 1 point of
accuracy, and no vector of the whole encoder gets below a cosine of 0.95; rows with smaller layers are faster in every engine.

The classifier is every finished run of the grid: accuracy of all seeds, times of the first. The interval of a row covers test
items and seeds, as its difference to dense in PyTorch does; * is significant after Holm's correction. "To itself in PyTorch"
compares the answers of the same runs, so it covers test items alone.

The sentence encoder is the normalised mean of the last hidden states. Its rows are made here: "pruned", by a quarter of the
heads of each layer (by magnitude) and of the neurons (by activation on `--texts`); "taught", the same after an epoch of
distillation from the whole model on `--teach` of the texts; "trimmed" for the texts by `hf-freeze trim`; and both. Vectors are
compared with those of the whole model in PyTorch: the cosine of the vectors of a text, and the rank correlation of the cosines
of all pairs of texts. This says how well a smaller encoder stands in for the whole one on texts of this kind, and nothing about
search.

Bytes are of the model files. Times are of `hf-freeze latency`: the rows in one engine, and the dense one in PyTorch, take turns
to answer batches of `--test`, with tokenization, on one thread; median (95th percentile). They are measured twice: ratios are
means, and both times are shown where the medians differ by more than 5 %.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import _shared
import numpy as np
import torch
from run_latency import find_rows
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import (
    AutoModel,
    AutoTokenizer,
    DataCollatorWithPadding,
)
from transformers.utils import logging

from hf_freeze import analysis, make_variant, methods
from hf_freeze.analysis.significance import Difference, compare
from hf_freeze.lab import data
from hf_freeze.lab.scored import items_of
from hf_freeze.lab.tasks.items import accuracy
from hf_freeze.lab.training.precision import uses_bf16
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.folders import MARK
from hf_freeze.publish.latency import Latency, measure, megabytes
from hf_freeze.publish.trimming import trim_model

ENGINES = {"PyTorch": None, "onnx": None, "onnx int8": "int8", "onnx int8-static": "int8-static"}
BATCHES = (1, 32)
BARS = {"bytes": 0.30, "accuracy": 1.0, "cosine": 0.95}
LENGTH = 128  # tokens of a text, at most
RATE = 1e-4

Folders = dict[str, dict[str, Path]]  # row -> engine -> folder


def in_every_engine(name: str, model: Path, texts: list[str], out: Path) -> dict[str, Path]:
    """engine -> folder; what is in `out` from an earlier call is used again."""
    folders = {"PyTorch": model}
    for engine, quantization in list(ENGINES.items())[1:]:
        folders[engine] = out / f"{name}-{engine.replace(' ', '-')}"
        if not (folders[engine] / MARK).exists():
            export_model(model, "onnx", quantization=quantization, texts=texts, out=folders[engine])
    print(f"exported {name}", flush=True)
    return folders


# -- times -------------------------------------------------------------------------------------------------------------------


def times_table(folders: Folders, texts: list[str], rounds: int, claims: dict[str, list[Any]]) -> str:
    """A line for each row and engine: MB, times, and their ratios to the first row in the same engine and in PyTorch."""
    dense = next(iter(folders.values()))
    lines: dict[tuple[str, str], list[str]] = {(row, engine): [] for row in folders for engine in ENGINES}
    for engine in ENGINES:
        times = twice_timed([dense["PyTorch"], *(of_row[engine] for of_row in folders.values())], texts, rounds)
        for row, of_row in folders.items():
            size = megabytes(of_row[engine])
            lines[row, engine] = [row, engine, f"{size:.2f}"]
            if "int8" in engine:
                claims["bytes"].append((size / megabytes(of_row["PyTorch"]), f"{row}, {engine}"))
            for batch in BATCHES:
                turns = [turn[of_row[engine]] for turn in times]
                middles = [each.percentile(batch, 50) for each in turns]
                shown = [f"{each.percentile(batch, 50):.2f} ({each.percentile(batch, 95):.2f})" for each in turns]
                ratios = [
                    statistics.mean(turn[of_row[engine]].ratio_to(turn[dense[base]], batch)[0] for turn in times)
                    for base in (engine, "PyTorch")
                ]
                lines[row, engine].append(" / ".join(shown) if max(middles) > 1.05 * min(middles) else shown[0])
                lines[row, engine] += [f"{ratio:.2f}" for ratio in ratios]
                if of_row is not dense and row != "trimmed":  # whose layers are whole
                    claims["faster"].append((ratios[0], f"{row}, {engine}, batch {batch}"))
    header = ["row", "engine", "MB"]
    header += [f"batch {batch}: {what}" for batch in BATCHES for what in ("ms", "to dense", "to dense, PyTorch")]
    return _shared.markdown(header, list(lines.values()))


def twice_timed(folders: list[Path], texts: list[str], rounds: int) -> list[dict[Path, Latency]]:
    """The times of the folders, which take turns, measured twice."""
    different = list(dict.fromkeys(folders))
    print(f"timing {different[-1].name}", flush=True)
    return [
        dict(zip(different, measure(different, texts, batches=BATCHES, rounds=rounds), strict=True)) for _ in range(2)
    ]


# -- the classifier ----------------------------------------------------------------------------------------------------------


def classifier(options: argparse.Namespace, out: Path, claims: dict[str, list[Any]]) -> str:
    texts, test = (data.read_labelled([path], numbers=True) for path in (options.texts, options.test))
    seeds = sorted(int(path.name.rpartition("-")[2]) for path in options.classifier.glob("row-0-seed-*"))
    folders: list[Folders] = []
    items: dict[tuple[str, str], list[np.ndarray]] = {}
    for seed in seeds:
        folders.append({})
        for row, run in find_rows(options.classifier, seed).items():
            folders[-1][row] = in_every_engine(f"{row}-{seed}", run / "model", list(texts["sentence"][:1000]), out)
            for engine, path in folders[-1][row].items():
                items.setdefault((row, engine), []).append(items_of(path, "sequence-classification", test, {}))
    accuracies = accuracy_table(items, claims)
    return f"{accuracies}\n\n{times_table(folders[0], list(test['sentence']), options.rounds, claims)}"


def accuracy_table(items: dict[tuple[str, str], list[np.ndarray]], claims: dict[str, list[Any]]) -> str:
    """`items`: (row, engine) -> for each seed, (right, 1, class) of each sentence."""
    compared = compare({", ".join(name): runs for name, runs in items.items()}, accuracy)
    to_dense = {difference.row: difference for difference in compared if difference.base == compared[0].base}
    lines = []
    for (row, engine), runs in items.items():
        scores = [float(accuracy(run.sum(0))) for run in runs]
        # The difference to a model that is never right is the accuracy, and has its interval.
        (own,) = compare({"never right": [runs[0] * [0, 1, 1]], "row": runs}, accuracy)
        lines.append([row, engine, f"{own.difference:.1f} ({own.low:.1f} to {own.high:.1f})"])
        lines[-1].append(", ".join(f"{score:.1f}" for score in scores))
        if (difference := to_dense.get(f"{row}, {engine}")) is None:
            lines[-1] += ["", ""]
            continue
        lines[-1].append(signed(difference) + " *" * difference.significant)
        native, exported = (np.mean(items[row, name], axis=0) for name in ("PyTorch", engine))
        (change,) = compare({"PyTorch": [native], "engine": [exported]}, accuracy)
        lines[-1].append("" if engine == "PyTorch" else signed(change))
        if "int8" in engine:
            claims["accuracy"].append((-change.difference, f"{row}, {engine}"))
        elif engine == "onnx":
            claims["same"].append((float(np.abs(native - exported).sum()), row))
    header = ["row", "engine", "accuracy %", "of each seed", "to dense, PyTorch", "to itself in PyTorch"]
    return _shared.markdown(header, lines)


def signed(one: Difference) -> str:
    return f"{one.difference:+.2f} ({one.low:+.2f} to {one.high:+.2f})"


# -- the sentence encoder ----------------------------------------------------------------------------------------------------


def encoder(options: argparse.Namespace, out: Path, claims: dict[str, list[Any]]) -> str:
    texts, test = (list(data.read_text([path], unit="filled lines")["text"]) for path in (options.texts, options.test))
    rows = encoders(options.embedder, texts, options.teach, out)
    folders = {row: in_every_engine(row.replace(", ", "-"), path, texts, out) for row, path in rows.items()}
    whole = vectors(rows["whole"], test)
    lines = []
    for row, of_row in folders.items():
        for engine, path in of_row.items():
            found = vectors(path, test)
            cosines = (found * whole).sum(1)
            least, low = float(cosines.min()), float(cosines.quantile(0.05))
            lines.append([row, engine, f"{cosines.mean():.4f}", f"{low:.4f}", f"{least:.4f}"])
            lines[-1].append(f"{rank_correlation(found, whole):.4f}")
            if row == "whole":
                key = "cosine" if "int8" in engine else "same"
                claims[key].append((1 - least if key == "same" else least, f"{row}, {engine}"))
    timed = {row: of_row for row, of_row in folders.items() if row != "pruned"}  # it has the shapes of "taught"
    header = ["row", "engine", "cosine, mean", "5th percentile", "least", "rank correlation"]
    return _shared.markdown(header, lines) + "\n\n" + times_table(timed, test, options.rounds, claims)


def encoders(whole: Path, texts: list[str], teach: int, out: Path) -> dict[str, Path]:
    """row -> folder; what is in `out` from an earlier call is used again."""
    rows = {"whole": whole} | {
        row: out / row.replace(", ", "-") for row in ("pruned", "taught", "trimmed", "taught, trimmed")
    }
    tokenizer = AutoTokenizer.from_pretrained(whole)
    examples: Any = [tokenizer(text, truncation=True, max_length=LENGTH) for text in texts[:teach]]
    generator = torch.Generator().manual_seed(1)
    batches = DataLoader(examples, 32, shuffle=True, generator=generator, collate_fn=DataCollatorWithPadding(tokenizer))
    model = AutoModel.from_pretrained(whole)
    if not rows["pruned"].exists():
        neurons = analysis.select_neurons(analysis.ffn_importance(model, batches, score="activation"), fraction=0.75)
        save(make_variant(model, [methods.HeadPruning(share=0.75), neurons]), tokenizer, rows["pruned"])
    if not rows["taught"].exists():
        student = make_variant(
            AutoModel.from_pretrained(rows["pruned"]), [methods.Distillation(teacher=model, alpha=1.0)]
        )
        save(teach_by(student, batches), tokenizer, rows["taught"])
    for row, source in (("trimmed", "whole"), ("taught, trimmed", "taught")):
        if not rows[row].exists():
            trim_model(rows[source], texts, out=rows[row])
    return rows


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def teach_by(student: Any, batches: DataLoader) -> Any:
    """The student after an epoch in which it learned its teacher's hidden states."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(batches))
    student.train()
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=uses_bf16("auto")):
            loss = student(**batch)["auxiliary_loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return student.eval()


def vectors(folder: Path, texts: list[str]) -> torch.Tensor:
    """The normalised means of the last hidden states, (texts, D)."""
    model, tokenizer, found = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder), []
    with torch.inference_mode():
        for start in range(0, len(texts), BATCHES[-1]):
            batch = texts[start : start + BATCHES[-1]]
            encoded = tokenizer(batch, return_tensors="pt", padding=True, truncation=True, max_length=LENGTH)
            mask = encoded["attention_mask"][..., None]
            states = model(**encoded).last_hidden_state
            found.append(functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(found)


def rank_correlation(found: torch.Tensor, whole: torch.Tensor) -> float:
    """Spearman's, of the cosines of all pairs of texts."""
    above = torch.triu_indices(len(whole), len(whole), 1).unbind()
    ranks = [(each @ each.T)[above].argsort().argsort().double() for each in (found, whole)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def main() -> None:
    parser: argparse.ArgumentParser = _shared.parser(__doc__, presets=False)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--classifier", type=Path, help="folder of a finished grid")
    model.add_argument("--embedder", type=Path, help="folder of a sentence encoder")
    parser.add_argument(
        "--texts", type=Path, required=True, help="of training: to calibrate, choose neurons, trim and teach"
    )
    parser.add_argument("--test", type=Path, required=True, help="to answer or encode, and to time")
    parser.add_argument("--teach", type=int, default=10_000, help="texts to learn from")
    parser.add_argument("--rounds", type=int, default=20, help="of times")
    parser.add_argument("--models", type=Path, help="where models are kept, to be used again; nowhere if not given")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    claims: dict[str, list[Any]] = {name: [] for name in ("same", "bytes", "accuracy", "cosine", "faster")}
    with tempfile.TemporaryDirectory() as temporary:
        out = options.models or Path(temporary)
        table = (classifier if options.classifier else encoder)(options, out, claims)
    bars = [
        ("in fp32, other answers, or 1 - cosine", "same", lambda x: x < 1e-5),
        (f"int8 at most {BARS['bytes']} of the saved bytes", "bytes", lambda x: x <= BARS["bytes"]),
        (f"int8 at most {BARS['accuracy']} points worse", "accuracy", lambda x: x <= BARS["accuracy"]),
        (f"least cosine in int8 at least {BARS['cosine']}", "cosine", lambda x: x >= BARS["cosine"]),
        ("rows with smaller layers faster than dense", "faster", lambda x: x < 1),
    ]
    verdicts = [f"{name}: {_shared.verdict(claims[key], holds)}" for name, key, holds in bars if claims[key]]
    _shared.report(options, table, "; ".join(verdicts))


if __name__ == "__main__":
    main()
