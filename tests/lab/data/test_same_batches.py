"""The batches of the built-in corpus are for ever those of version 0.1.0, bit by bit: the scores of recipes depend on them.

The digests were computed with the code of 0.1.0, which held text and tokens in lists.
"""

import hashlib
import json

import numpy as np
import pytest
from support.recipes import CLASSIFICATION, LM, MASKED, TINY, changed
from transformers import Seq2SeqTrainingArguments

from hf_freeze import make_variant
from hf_freeze.data import TokenBatchSampler, train_tokenizer
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.runs.backbones import backbone_config
from hf_freeze.lab.tasks.registry import task_of

RECIPES = {
    "translation": {},
    "language-modelling": LM,
    "masked-lm": MASKED,
    "sequence-classification": CLASSIFICATION,
}
DIGESTS = {
    "translation": "0453deacfd17c4a0",
    "language-modelling": "5945aa2aeee799c2",
    "masked-lm": "fe3669539ce63bb5",
    "sequence-classification": "7bf8f4ec7f007980",
}
SIZES = {"data": {"builtin": {"seed": 0, "train": 700, "dev": 30, "test": 30}, "holdout": 50, "limit": 600}}


def batches_of(task_name, folder, epochs=3):
    """Every batch of the Trainer's loader, in every epoch, as lists; then those of the dev set."""
    recipe = changed(TINY, RECIPES[task_name] | SIZES)
    run = Run(row="0", seed=1, label="", name="tiny", task=task_name, data=recipe["data"], **recipe["presets"]["small"])
    task = task_of(task_name)
    splits = task.load(run.data)
    kind = run.tokenizer.kind or task.tokenizer
    tokenizer = train_tokenizer(task.texts(splits["train"]), run.tokenizer.vocab_size, kind, eos=task.eos)
    config = backbone_config(run.backbone, tokenizer, **task.config(splits["train"]))
    tokenizer.model_max_length = config.max_position_embeddings
    encoded = {name: task.encode(split, tokenizer, run) for name, split in splits.items()}
    model = make_variant(config, [], task=task.head, seed=1)
    trainer = task.trainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            str(folder), use_cpu=True, report_to="none", seed=3, accelerator_config={"even_batches": False}
        ),
        train_dataset=encoded["train"],
        data_collator=task.collator(tokenizer, model),
        processing_class=tokenizer,
        max_tokens=run.training.max_tokens,
    )
    loader = trainer.get_train_dataloader()
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        yield from ({name: value.tolist() for name, value in sorted(batch.items())} for batch in loader)
    for batch in trainer._token_loader(encoded["dev"], shuffle=False):
        yield {name: value.tolist() for name, value in sorted(batch.items())}


@pytest.mark.parametrize("task_name", RECIPES)
def test_the_batches_of_the_builtin_corpus_stay(task_name, tmp_path):
    digest = hashlib.sha256()
    for batch in batches_of(task_name, tmp_path):
        digest.update(json.dumps(batch).encode())
    assert digest.hexdigest()[:16] == DIGESTS[task_name]


def reference(sources, targets, max_tokens, seed, epoch, shuffle):
    """The order of 0.1.0, sentence by sentence."""
    sources, targets = np.asarray(sources), np.asarray(targets)
    bounds = [0]
    for index, length in enumerate(np.sort(targets)):
        if (index + 1 - bounds[-1]) * length > max_tokens:
            bounds.append(index)
    bounds.append(len(targets))
    rng = np.random.default_rng((seed, epoch))
    ties = rng.random(len(targets)) if shuffle else np.zeros(len(targets))
    bucket = (sources + (rng.integers(4) if shuffle else 0)) // 4
    order = np.lexsort((ties, bucket, targets))
    batches = rng.permutation(len(bounds) - 1) if shuffle else np.arange(len(bounds) - 1)
    return [order[bounds[batch] : bounds[batch + 1]].tolist() for batch in batches]


@pytest.mark.parametrize("longest", [1, 9, 60, 700])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_batches_stays(longest, shuffle):
    draw = np.random.default_rng(longest)
    for number in (1, 2, 50, 3000):
        targets = draw.integers(1, longest + 1, number)
        sources = np.maximum(1, targets + draw.integers(-3, 4, number))
        for max_tokens in (longest, 3 * longest + 1, 1000 * longest):
            sampler = TokenBatchSampler(sources, targets, max_tokens, seed=5, shuffle=shuffle)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                assert list(sampler) == reference(sources, targets, max_tokens, 5, epoch, shuffle)
