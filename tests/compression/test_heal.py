"""Healing: what a student learns, what is stored, and that a killed call ends as an uninterrupted one."""

from typing import Any

import pytest
import torch
from support.small import small_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hf_freeze import make_variant
from hf_freeze.compression import heal as healing
from hf_freeze.compression import targets
from hf_freeze.compression.heal import heal, parse_limit
from hf_freeze.compression.targets import Objective, texts_of
from hf_freeze.methods.ffn_pruning import FFNPruning
from hf_freeze.methods.vocabulary_trimming import VocabularyTrimming
from hf_freeze.model.samples import samples_of
from hf_freeze.seeded.tensor import fingerprint

CASES = {
    "sentences": ("bert", AutoModel),
    "classes": ("bert", AutoModelForSequenceClassification),
    "token classes": ("bert", AutoModelForTokenClassification),
    "answers": ("bert", AutoModelForQuestionAnswering),
    "choices": ("bert", AutoModelForMultipleChoice),
    "next tokens": ("llama", AutoModelForCausalLM),
    "translations": ("marian", AutoModelForSeq2SeqLM),
}


def original_of(case: str) -> Any:
    model_type, auto_class = CASES[case]
    torch.manual_seed(0)
    model = auto_class.from_config(small_config(model_type)).eval()
    with torch.no_grad():
        for p in model.parameters():  # outputs that differ by text
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


def samples_for(model: Any, case: str, count: int = 24, batch: int = 3) -> Any:
    """Texts of 3..10 tokens; the first and last real token are anything."""
    draw, vocabulary, batches = torch.Generator().manual_seed(1), model.config.vocab_size, []
    for _ in range(count // batch):
        shape = (batch, 2, 10) if case == "choices" else (batch, 10)
        ids = torch.randint(3, vocabulary, shape, generator=draw)
        mask = torch.arange(10).expand(shape) < torch.randint(3, 11, (*shape[:-1], 1), generator=draw)
        batches.append({"input_ids": ids.masked_fill(~mask, 1), "attention_mask": mask.long()})
        if case == "translations":
            batches[-1]["labels"] = torch.randint(3, vocabulary, (batch, 6), generator=draw)
            batches[-1]["labels"][0, 4:] = -100
    return samples_of(model, batches)


def student_of(original: Any) -> Any:
    return make_variant(original, [FFNPruning(width=8)])


@pytest.mark.parametrize("case", CASES)
def test_the_loss_falls(case, tmp_path):
    original = original_of(case)
    student = student_of(original)
    healed = heal(student, original, samples_for(original, case), tmp_path, limit="8epochs", learning_rate=3e-3)
    assert healed.better and healed.loss_after < 0.9 * healed.loss_before
    assert healed.epochs == 8 and healed.steps == 8
