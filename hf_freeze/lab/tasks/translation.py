"""Translation: parallel text, scored by BLEU and chrF."""

from functools import partial
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.io import write_whole
from hf_freeze.lab import data as hf_data
from hf_freeze.lab.data import Progress
from hf_freeze.lab.metrics import load as load_metric
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.tasks.base import Outcome, Task
from hf_freeze.lab.tasks.items import bleu_items
from hf_freeze.lab.tasks.splits import read_splits, reader, take
from hf_freeze.lab.training.decoding import teacher_translations, translate
from hf_freeze.lab.training.precision import uses_bf16


def load_data(data: Data) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with columns `source` and `target`, as the recipe's `data` section says."""
    if data.builtin is not None:
        return take(hf_data.builtin_corpus(**data.builtin.given()), data)
    sides = {name: column for name, column in data.given().items() if name in ("source", "target")}
    read = reader(data, partial(hf_data.read_pairs, **sides), partial(hf_data.load_hub_parallel, **sides))
    return read_splits(data, read)


def encode(split: datasets.Dataset, tokenizer: Any, run: Run | None = None, progress: Progress | None = None) -> Any:
    """Columns `input_ids` and `labels` from `source` and `target`."""
    return hf_data.tokenise(split, tokenizer, {"input_ids": "source", "labels": "target"}, progress=progress)


def taught(split: datasets.Dataset, teacher: Path, run: Run) -> datasets.Dataset:
    """`split` with the translations of the run in the folder `teacher` as its targets, decoded once and kept there."""
    translations = teacher_translations(
        teacher / "model",
        list(split["source"]),
        teacher / "translations-train.jsonl",
        bf16=uses_bf16(run.training.bf16),
        **run.decoding.given(),
    )
    return split.remove_columns("target").add_column("target", translations)


def _test(run: Run, folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
    model = trainer.accelerator.unwrap_model(trainer.model)
    sentences, references = list(split["source"]), list(split["target"])
    translations = translate(model, tokenizer, sentences, bf16=trainer.args.bf16, **run.decoding.given())
    if trainer.is_world_process_zero():
        write_whole(folder / "translations.txt", "\n".join(translations) + "\n")
    scores: dict[str, Any] = {
        name: load_metric(name).compute(predictions=translations, references=references)
        for name in ("sacrebleu", "chrf")
    }
    return Outcome(
        metrics={"test_bleu": scores["sacrebleu"]["score"], "test_chrf": scores["chrf"]["score"]},
        items=bleu_items(translations, references),
        signatures={"test_bleu": scores["sacrebleu"]["signature"], "test_chrf": scores["chrf"]["signature"]},
    )


TASK = Task(
    head="seq2seq-lm",
    eos="after",
    load=load_data,
    texts=lambda split: hf_data.Texts(split, ["source", "target"]),
    encode=encode,
    test=_test,
)
