"""What a compression came to, for people and for a model card: sentences, tables and a record."""

import functools
import json
from dataclasses import asdict
from typing import Any

from hf_freeze.compression.budget import in_bytes
from hf_freeze.experiments.compress.compress import Compressed, Compression
from hf_freeze.experiments.compress.scores import Scoring
from hf_freeze.experiments.compress.serving import Served
from hf_freeze.experiments.runs.environment import environment
from hf_freeze.io import write_whole
from hf_freeze.publish.cards import COMPRESSION, model_card, read_trained_model
from hf_freeze.publish.hub import write_record
from hf_freeze.publish.markdown import markdown_table

FILES = ("compressed.json", "report.md")
_PUBLISHED = {  # task -> its pipeline, its score in a card, and the unit of that score
    "translation": ("translation", "test_bleu", 1.0),
    "sequence-classification": ("text-classification", "test_accuracy", 0.01),
}


def write_result(compression: Compression, result: Compressed) -> list[str]:
    """Write `FILES` into the folder of the compression; returns the lines that tell the result."""
    out, rows = compression.out, rows_of(result, compression.scoring)
    facts = sentences(result, compression.scoring, len(compression.trainings.splits["dev"]))
    if compression.targets == "model":
        texts = len(compression.trainings.splits["train"])
        facts.append(("Learned from", f"It learned from the model's own translations of the {texts:,} training texts."))
    lines = [f"Kept: {result.words}.", *(sentence for _, sentence in facts), f"Budget: {compression.budget.words()}."]
    table = "\n".join(markdown_table(list(rows[0]), [list(row.values()) for row in rows], left=1))
    made = f"`{compression.command}`; {about()}"
    picture = f"![{compression.scoring.name} against bytes, and what is kept](report.png)"
    write_whole(out / FILES[1], "\n\n".join(["# Compressed", table, picture, *lines, made]) + "\n")
    record: dict[str, Any] = json.loads(json.dumps(asdict(result), default=str))
    record |= {"command": compression.command, "environment": environment()}
    record["budget"] = compression.budget.to_dict() | {"hours": compression.hours}
    record["seconds_by_phase"] = compression.phases.seconds_by_phase
    write_whole(out / FILES[0], json.dumps(record, indent=1) + "\n")
    _write_cards(compression, result, rows, [sentence for _, sentence in facts])
    where = f"{result.after.folder} (to serve), {result.model} (to train on), {out / 'report.html'}"
    return [table, *lines, f"Written: {where}"]


def _write_cards(compression: Compression, result: Compressed, rows: list[dict[str, str]], facts: list[str]) -> None:
    """A model card beside the variant, and one in the folder of the compression. The folder for the engine has none: it would
    take bytes of the budget."""
    test_score = result.after.test_score or 0.0
    pipeline, key, unit = _PUBLISHED[compression.trainings.base["task"]]
    record = {
        "budget": compression.budget.words(),
        "kept": result.words,
        "parts": [(part.name, part.words) for part in compression.parts()],
        "table": rows,
        "facts": facts,
        "engine": compression.engine.format or "torch",
        "served": result.after.folder.name,
        "pipeline": pipeline,
        "command": compression.command,
        "metrics": {key: test_score * unit} if compression.scoring.metric is None else {},
    }
    write_whole(result.model / COMPRESSION, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    source = read_trained_model(result.model.parent)
    model_card(source).save(result.model / "README.md")
    # Its code runs in this folder.
    model_card(source, result.model.relative_to(compression.out).as_posix()).save(compression.out / "README.md")
    write_record(source, result.model)


def rows_of(result: Compressed, scoring: Scoring) -> list[dict[str, str]]:
    """A table of before and after, a dict a row."""
    return [_row("before", result.before, scoring), _row("after", result.after, scoring)]


def _row(label: str, served: Served, scoring: Scoring) -> dict[str, str]:
    row = {"": label, "folder": in_bytes(served.bytes)}
    if served.ms is not None:
        row["ms a text"] = f"{served.ms:.2f}"
    test = "–" if served.test_score is None else scoring.shown(served.test_score)
    return row | {f"{scoring.name}, dev": scoring.shown(served.dev_score), f"{scoring.name}, test": test}


def sentences(result: Compressed, scoring: Scoring, examples: int) -> list[tuple[str, str]]:
    """(what, a sentence on it). `examples`: of the dev split."""
    smaller = f"{result.before.bytes / result.after.bytes:.1f} times smaller"
    if result.after.ms and result.before.ms:
        share = 100 * result.after.ms / result.before.ms
        smaller += f", {100 / share:.1f} times faster ({result.after.ms:.2f} ms a text, {share:.3g} % of the model's)"
    difference, low, high = (scoring.shown(value, signed=True) for value in result.difference)
    interval = f"95 % interval over its {scoring.item}: {low} to {high}; one seed"
    return [
        ("Smaller", f"{smaller}; {scoring.name} on the test split {difference} ({interval})."),
        (
            "Resolution",
            f"The dev split of {examples:,} {scoring.item} tells no difference below {scoring.shown(result.resolution)}.",
        ),
        (
            "Trained",
            f"{result.epochs:.4g} epochs, {result.seconds / 60:.0f} minutes in all, of which "
            f"{100 * result.measuring / result.seconds:.1f} % went into measuring.",
        ),
    ]


@functools.cache
def about() -> str:
    """The code and machine, of figures."""
    where = environment()
    return f"code {where['commit']}, {where['device']}, torch {where['torch']}"
