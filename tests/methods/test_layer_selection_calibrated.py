"""Layers removed with a calibration: which go, and what closes the gap."""

import pytest
import torch
from support.models import perturbed
from support.small import small_config
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_freeze import make_variant
from hf_freeze.methods import LayerSelection
from hf_freeze.model.fidelity import fidelity_on

DEPTH = 4
FAMILIES = {"llama": (AutoModelForCausalLM, "decoder"), "bert": (AutoModelForMaskedLM, "encoder")}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    torch.manual_seed(0)
    config = small_config(request.param, num_hidden_layers=DEPTH)
    return perturbed(FAMILIES[request.param][0].from_config(config)).eval()


def stack_of(model):
    return FAMILIES[model.config.model_type][1]


def batches(model, rows, seed=0):
    """Two batches."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, model.config.vocab_size, (rows, 12), generator=generator)} for _ in range(2)]


def without(model, *layers):
    return LayerSelection(keep={stack_of(model): [layer for layer in range(DEPTH) if layer not in layers]})


def kl(model, variant, texts):
    return fidelity_on(model, variant, texts).kl


@pytest.mark.parametrize("gap", [(2,), (1, 2), (3,), (1, 3)])
def test_a_gap_that_is_bridged_is_nearer_to_the_original(model, gap):
    """On other texts than those of the calibration."""
    method = without(model, *gap)
    plain = make_variant(model, [method])
    bridged = make_variant(model, [method], calibration=batches(model, 32))
    texts = batches(model, 8, seed=1)
    assert kl(model, bridged, texts) < 0.9 * kl(model, plain, texts)
    assert not bridged.calibration_report.notes
    assert {name: value.shape for name, value in bridged.state_dict().items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }


def test_the_layer_whose_loss_changes_the_predictions_least_goes(model):
    texts = batches(model, 16)
    made = make_variant(model, [LayerSelection(share=0.75)], calibration=texts)
    losses = [kl(model, make_variant(model, [without(model, layer)]), texts) for layer in range(DEPTH)]
    assert made.methods[0] == without(model, losses.index(min(losses)))


def test_two_layers_go_one_after_another(model):
    texts = batches(model, 16)
    made = make_variant(model, [LayerSelection(share=0.5)], calibration=texts)
    gone: list[int] = []
    for _ in range(2):
        losses = {
            layer: kl(model, make_variant(model, [without(model, *gone, layer)]), texts)
            for layer in range(DEPTH)
            if layer not in gone
        }
        gone.append(min(losses, key=lambda layer: losses[layer]))
    assert made.methods[0] == without(model, *gone)
