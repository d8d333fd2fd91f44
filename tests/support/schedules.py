"""A model that is frozen in phases, and its training by the Trainer."""

import torch
from transformers import MarianConfig, Trainer, TrainingArguments

from hf_freeze import VariantCallback, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import Freeze
from hf_freeze.training import parameter_groups

STEPS, ROWS_A_STEP, EPOCH = 8, 4, 4
# Of 8 steps: the FFNs are frozen in 0..3, attention in 5..7, the table in 2..5; something is always trained.
PHASES = [
    Freeze(ffn="frozen", end=0.5),
    Freeze(attention="frozen", begin=0.625),
    Freeze(embeddings="frozen", begin=0.25, end=0.75),
]


def scheduled_model(dropout=0.0, phases=PHASES):
    marian = ARCHITECTURES["marian"]
    config = MarianConfig(**(marian.tiny | {"dropout": dropout}))
    return make_variant(config, phases, task="seq2seq-lm", init="marian", seed=1)


def rows():
    """Sentences with unequal numbers of labels, each another."""
    batch = ARCHITECTURES["marian"].tiny_inputs("seq2seq-lm")
    made = []
    for number in range(ROWS_A_STEP * EPOCH):
        row = {name: values[number % 2].clone() for name, values in batch.items()}
        row["input_ids"][0] = 2 + number
        row["labels"][0] = 30 - number
        made.append(row)
    return made


def trainer(model, folder, *, rows_a_batch=2, accumulate=2, sgd=False, made=Trainer, callback=True, **arguments):
    """`STEPS` steps of `ROWS_A_STEP` rows, by AdamW with a rate for each component, or by SGD."""
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=rows_a_batch,
        gradient_accumulation_steps=accumulate,
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
        **({"max_steps": STEPS, "save_strategy": "no", "logging_strategy": "no", "report_to": "none"} | arguments),
    )
    rates = {"embeddings": 0.002, "ffn": 0.02}
    groups = parameter_groups(model, rates, lr=0.01, weight_decay=0.1)
    optimizer = torch.optim.SGD(groups, momentum=0.9) if sgd else torch.optim.AdamW(groups)
    callbacks = [VariantCallback()] if callback else []
    return made(model, settings, train_dataset=rows(), optimizers=(optimizer, None), callbacks=callbacks)
