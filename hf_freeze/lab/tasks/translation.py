"""Translation: parallel text, scored by BLEU and chrF."""

from functools import partial
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.io import write_whole
from hf_freeze.lab import data as hf_data
from hf_freeze.lab.data import Progress
from hf_freeze.lab.metrics import load as load_metric
from hf_freeze.lab.tasks.base import Outcome, Task
from hf_freeze.lab.tasks.data_forms import data_form
from hf_freeze.lab.tasks.items import bleu_items
from hf_freeze.lab.tasks.splits import read_splits, reader, take
from hf_freeze.lab.training.decoding import teacher_translations, translate
from hf_freeze.lab.training.precision import AUTO, uses_bf16


def load_data(settings: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with columns `source` and `target`, as the recipe's `data` section says."""
    if data_form(settings) == "builtin":
        return take(hf_data.builtin_corpus(**settings["builtin"]), settings)
    sides = {side: settings[side] for side in ("source", "target") if side in settings}
    read = reader(settings, partial(hf_data.read_pairs, **sides), partial(hf_data.load_hub_parallel, **sides))
    return read_splits(settings, read)


def encode(
    split: datasets.Dataset, tokenizer: Any, run: dict[str, Any] | None = None, progress: Progress | None = None
) -> Any:
    """Columns `input_ids` and `labels` from `source` and `target`."""
    return hf_data.tokenise(split, tokenizer, {"input_ids": "source", "labels": "target"}, progress=progress)


def taught(split: datasets.Dataset, teacher: Path, run: dict[str, Any]) -> datasets.Dataset:
    """`split` with the translations of the run in the folder `teacher` as its targets, decoded once and kept there."""
    translations = teacher_translations(
        teacher / "model",
        list(split["source"]),
        teacher / "translations-train.jsonl",
        bf16=uses_bf16(run["training"].get("bf16", AUTO)),
        **run["decoding"],
    )
    return split.remove_columns("target").add_column("target", translations)


def _test(run: dict[str, Any], folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
    model = trainer.accelerator.unwrap_model(trainer.model)
    sentences, references = list(split["source"]), list(split["target"])
    translations = translate(model, tokenizer, sentences, bf16=trainer.args.bf16, **run["decoding"])
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
