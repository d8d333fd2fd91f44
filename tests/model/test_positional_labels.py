"""Labels given by position are treated as labels given by name."""

import inspect

import pytest
import torch
from support.cases import BASELINES
from support.models import build
from transformers import AutoConfig

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES

with_labels = pytest.mark.parametrize(
    "case", [case for case in BASELINES if "labels" in case.batch()], ids=lambda case: case.id
)


def by_position(model, batch):
    """The arguments of the forward in order, up to the labels."""
    names = list(inspect.signature(model.forward).parameters)
    return [batch.get(name) for name in names[: names.index("labels") + 1]]


@with_labels
def test_the_loss_is_divided_by_all_labels_of_the_step(case):
    model, batch = build(case).train(), case.batch()
    by_name = model(**batch, num_items_in_batch=torch.tensor(40)).loss
    assert not torch.allclose(by_name, model(**batch).loss)
    torch.testing.assert_close(model(*by_position(model, batch), num_items_in_batch=torch.tensor(40)).loss, by_name)


def test_an_adaptive_softmax_computes_the_loss_without_the_logits():
    """Also in an encoder-decoder, whose decoder inputs come from the labels."""
    for model_type in ("gpt2", "marian"):
        architecture = ARCHITECTURES[model_type]
        config = AutoConfig.for_model(model_type, **architecture.tiny)
        task = architecture.tasks[0]
        model = make_variant(config, [methods.AdaptiveEmbedding.example], task=task).train()
        batch = architecture.tiny_inputs(task)
        torch.manual_seed(0)
        by_name = model(**batch)
        torch.manual_seed(0)
        positional = model(*by_position(model, batch))
        assert by_name.logits is None
        assert positional.logits is None
        torch.testing.assert_close(positional.loss, by_name.loss)


@with_labels
def test_wrong_arguments_are_refused_as_in_the_backbone(case):
    model, batch = build(case), case.batch()
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(batch["input_ids"], **batch)
    with pytest.raises(TypeError, match="positional arguments"):
        model(*[None] * 40)
