"""RecurrentDecoder on the families whose descriptions are derived: what the contract tests show of those described by hand."""

import pytest
import torch
from families.contract import task_of, tiny_config
from support.generation import generation_problems
from support.models import differences, outputs, perturbed
from support.training import training_step

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES, architecture_of
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods import RecurrentDecoder

DERIVED = sorted(set(RecurrentDecoder.registered.architectures) - set(ARCHITECTURES))


@pytest.mark.parametrize("model_type", DERIVED)
def test_it_generates_trains_and_reloads(model_type, tmp_path):
    config = tiny_config(model_type)
    if model_type == "mistral":
        config.sliding_window = None
    task = task_of(architecture_of(config))
    model = make_variant(config, [RecurrentDecoder()], task=task, init="marian", seed=1)
    torch.manual_seed(2)
    model = perturbed(model).eval()
    batch = model.architecture.tiny_inputs(task)
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert generation_problems(model, source) == []
    ids = torch.randint(3, 30, (1, 7), generator=torch.Generator().manual_seed(3))
    changed = ids.clone()
    changed[0, 4] = 3 + (ids[0, 4] - 2) % 27
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    with torch.no_grad():
        before, after = (model(**({"input_ids": ids} | {name: each})).logits[0] for each in (ids, changed))
    assert torch.equal(before[:4], after[:4])
    assert (before[4:] != after[4:]).any(-1).all()
    training_step(model, batch)
    model.save_pretrained(tmp_path)
    reloaded = AUTO_CLASSES[task].from_pretrained(tmp_path)
    assert differences(outputs(reloaded, batch), outputs(model, batch)) == []
