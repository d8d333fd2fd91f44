"""Tasks with labels or batches of another form: regression has real labels, multiple choice has batches of three dimensions.
And BERT as a decoder, which generates."""

import pytest
import torch
from support.cases import native_config
from support.generation import generation_problems
from support.models import add_noise, aligned, differences, outputs
from support.training import training_step
from transformers import AutoModelForSequenceClassification

from hf_freeze import make_variant, methods
from hf_freeze.analysis.accounting import multiply_adds
from hf_freeze.architectures.registry import ARCHITECTURES

FACTORS = methods.LowRank(rank=4)


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama"])
def test_regression_is_classification_with_one_label(model_type, tmp_path):
    architecture = ARCHITECTURES[model_type]
    config = native_config(architecture)
    config.num_labels = 1
    torch.manual_seed(1)
    native = add_noise(AutoModelForSequenceClassification.from_config(config), architecture)
    model = make_variant(native, [FACTORS]).eval()
    targets = torch.tensor([0.5, -1.25])
    batch = architecture.tiny_inputs("sequence-classification") | {"labels": targets}

    result = model(**batch)
    assert result.logits.shape == (2, 1)
    squares = (result.logits[:, 0] - targets).square()
    torch.testing.assert_close(result.loss, squares.mean())
    torch.testing.assert_close(model(**batch, num_items_in_batch=8).loss, squares.sum() / 8)  # of accumulated batches

    training_step(model, batch)
    assert model(**batch).loss != result.loss
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert differences(outputs(aligned(loaded), batch), outputs(model, batch)) == []
    assert differences(outputs(model.merge(), batch), outputs(model, batch), 1e-5) == []


def test_a_choice_costs_what_its_sentence_costs():
    config = native_config(ARCHITECTURES["bert"])
    choices, classes = (
        make_variant(config, [FACTORS], task=task) for task in ("multiple-choice", "sequence-classification")
    )
    expected, found = (multiply_adds(model, length=8) for model in (classes, choices))
    for component in ("embeddings", "attention", "ffn", "norm"):
        assert found.by_component[component] == expected.by_component[component]
    assert 0 < found.by_component["head"].forward < expected.by_component["head"].forward  # one score, not two


def test_each_choice_is_scored_on_its_own():
    model = make_variant(native_config(ARCHITECTURES["bert"]), [FACTORS], task="multiple-choice", seed=1).eval()
    batch = ARCHITECTURES["bert"].tiny_inputs("multiple-choice")
    scores = model(**batch).logits
    assert scores.shape == (*batch["labels"].shape, 2)
    flipped = {name: value if name == "labels" else value.flip(1) for name, value in batch.items()}
    torch.testing.assert_close(model(**flipped).logits, scores.flip(1))
    assert not torch.allclose(scores[:, 0], scores[:, 1])


def test_a_bert_that_is_a_decoder_generates_with_and_without_a_cache_alike():
    config = native_config(ARCHITECTURES["bert"])
    config.is_decoder = True
    model = make_variant(config, [FACTORS], task="causal-lm", seed=1)
    add_noise(model, ARCHITECTURES["bert"])
    assert generation_problems(model, ARCHITECTURES["bert"].tiny_inputs("causal-lm")) == []
