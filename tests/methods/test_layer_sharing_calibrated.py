"""Layers that share their parameters, with a calibration: what is fitted to all of their places."""

import pytest
import torch
from support.models import perturbed
from support.small import small_config
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_freeze import analysis, make_variant
from hf_freeze.methods import LayerSharing, LowRank
from hf_freeze.model.fidelity import fidelity_on

FAMILIES = {
    "llama": (AutoModelForCausalLM, ("o_proj", "down_proj")),
    "bert": (AutoModelForMaskedLM, ("output.dense",)),
    "marian": (AutoModelForSeq2SeqLM, ("out_proj", "fc2")),
}
DEPTH = {"llama": {"num_hidden_layers": 3}, "bert": {"num_hidden_layers": 3}}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    torch.manual_seed(0)
    depth = DEPTH.get(request.param, {"encoder_layers": 3, "decoder_layers": 3})
    return perturbed(FAMILIES[request.param][0].from_config(small_config(request.param, **depth))).eval()


def batches(model, rows, seed=0):
    """Two batches."""
    generator = torch.Generator().manual_seed(seed)

    def ids():
        return torch.randint(3, model.config.vocab_size, (rows, 12), generator=generator)

    names = ["input_ids", *(["decoder_input_ids"] if model.config.is_encoder_decoder else ())]
    return [{name: ids() for name in names} for _ in range(2)]


def shared(model, calibration=None, **settings):
    return make_variant(model, [LayerSharing(**settings)], calibration=calibration).eval()


@pytest.mark.parametrize(
    "settings",
    [{}, {"groups": 2, "start": "middle", "norms": "separate"}, {"components": ["ffn"], "start": "middle"}],
    ids=["all", "groups", "ffn"],
)
def test_outputs_are_nearer_on_other_texts(model, settings):
    plain, fitted = shared(model, **settings), shared(model, batches(model, 32), **settings)
    texts = batches(model, 8, seed=1)
    assert not fitted.calibration_report.notes
    assert fidelity_on(model, fitted, texts).kl < 0.9 * fidelity_on(model, plain, texts).kl
    one, other = dict(plain.named_parameters()), dict(fitted.named_parameters())
    assert one.keys() == other.keys(), "the same are shared"
    changed = {name.rpartition(".")[0] for name in one if not torch.equal(one[name], other[name])}
    assert changed
    assert all(name.endswith(FAMILIES[model.config.model_type][1]) for name in changed), changed


def test_the_error_at_each_place_is_reported(model):
    errors = shared(model, batches(model, 32), components=["ffn"]).calibration_report.errors
    places = [name.removeprefix("model.") for name in errors]
    assert len(places) == 3 * (1 + model.config.is_encoder_decoder)
    before, after = (sum(error) for error in zip(*errors.values(), strict=True))
    assert after < before


def test_what_has_no_form_of_its_own_is_as_without():
    """Layers of another depth, factors, and inputs that were seen before layers were shared."""
    torch.manual_seed(0)
    model = perturbed(AutoModelForCausalLM.from_config(small_config("llama", num_hidden_layers=3))).eval()
    texts = batches(model, 32)
    saved = analysis.calibrate(model, texts)
    for start, settings, calibration in (
        (model, {"depth": {"decoder": 5}}, texts),
        (make_variant(model, [LowRank(rank=4, components=["ffn", "attention"])]), {}, texts),
        (model, {}, saved),
    ):
        plain, fitted = shared(start, **settings), shared(start, calibration, **settings)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fitted.parameters(), strict=True))
        assert not fitted.calibration_report.errors
