"""How faithful models are as they are served: a model to itself in each engine, planted losses, other vocabularies."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from support.cases import plain
from support.models import add_noise, native
from support.text import SOURCE, marian_tokenizer, words
from support.tokenizers_of_each_kind import byte_fallback, wordpiece
from test_export import marian, save
from test_trimming import model_of
from transformers import BertModel, LlamaForCausalLM, MarianMTModel

from hf_freeze.analysis.answers import Answers, compare_answers
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.served import Served, answers, opened, served_fidelity
from hf_freeze.publish.trimming import trim_model
from support.cases import native_config
import random

DRAW = random.Random(0)
TEXTS = [" ".join(f"w{DRAW.randrange(3, 40)}" for _ in range(DRAW.randrange(3, 9))) for _ in range(24)]
TASKS = {
    "feature-extraction": TEXTS,
    "sequence-classification": TEXTS,
    "masked-lm": TEXTS,
    "token-classification": TEXTS,
    "question-answering": [(text, " ".join(reversed(text.split()))) for text in TEXTS],
    "multiple-choice": [(text, [other, text]) for text, other in zip(TEXTS, TEXTS[1:], strict=False)],
}


def bert_for(task):
    torch.manual_seed(1)
    architecture = ARCHITECTURES["bert"]
    return add_noise(AUTO_CLASSES[task].from_config(native_config(architecture)), architecture).eval()


@pytest.mark.parametrize("task", TASKS)
def test_a_model_is_itself_and_a_planted_loss_is_found(task, tmp_path):
    model, items = bert_for(task), TASKS[task]
    original = opened(save(tmp_path / "model", model, words(40)))
    expected = answers(original, items)
    assert compare_answers(expected, answers(original, items, like=expected)).distance == pytest.approx(0, abs=1e-9)
    model.base_model.encoder.layer[0].output.dense.weight.data *= 1.5
    found = compare_answers(expected, answers(replace(original, model=model), items, like=expected))
    assert found.distance > 1e-3
    assert (found.compared, found.left_out) == (len(items), 0)
    assert all(low <= getattr(found, name) <= high for name, (low, high) in found.intervals.items())


def test_marian(tmp_path):
    tok = marian_tokenizer(tmp_path / "tok")
    source = save(tmp_path / "model", marian(tok), tok)
    for f in ("onnx", "ctranslate2"):
        print(f, served_fidelity(source, export_model(source, f), SOURCE))
    print(served_fidelity(source, export_model(source, "ctranslate2", quantization="int8"), SOURCE))
    trim_model(source, SOURCE[:3], out=tmp_path / "trim", size=40)
    print(served_fidelity(source, tmp_path / "trim", SOURCE))
