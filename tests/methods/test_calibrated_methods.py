"""What a calibration changes in methods that act on single linears and on tables: nearer outputs, and the same files."""

import warnings

import pytest
import torch
from support.models import perturbed
from support.small import small_config
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_freeze import make_variant
from hf_freeze.methods import (
    FactorizedEmbedding,
    MagnitudePruning,
    Quantize,
    TensorTrain,
    Tucker,
)
from hf_freeze.model.fidelity import fidelity_on

INT4 = {"weights": "int4", "components": ["ffn", "attention"]}
METHODS = {
    "tensor train": TensorTrain(rank=6),
    "tucker": Tucker(rank=3),
    "wanda": MagnitudePruning(sparsity=0.6, criterion="wanda"),
    "obs": MagnitudePruning(sparsity=0.6, criterion="obs"),
    "obs in each layer": MagnitudePruning(sparsity=0.6, criterion="obs", scope="layer"),
    "int4": Quantize(**INT4),
    "int4 in groups": Quantize(**INT4, granularity="group-64"),
    "int8": Quantize(weights="int8"),
    "table": FactorizedEmbedding(rank=10),
}
MODELS = {"gpt2": AutoModelForCausalLM, "marian": AutoModelForSeq2SeqLM, "llama": AutoModelForCausalLM}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return perturbed(MODELS[request.param].from_config(small_config(request.param))).eval()


def batches(model, seed=1):
    """Texts of which few tokens make most, in rows of different lengths."""
    torch.manual_seed(seed)
    tokens = min(model.config.vocab_size, 24)
    likely = torch.arange(1, tokens + 1).float().reciprocal()

    def ids(rows, length):
        return torch.multinomial(likely, rows * length, replacement=True).view(rows, length)

    result = []
    for length in (9, 12):
        mask = torch.ones(16, length, dtype=torch.int64)
        mask[::3, -4:] = 0
        batch = {"input_ids": ids(16, length), "attention_mask": mask}
        if model.config.is_encoder_decoder:
            batch |= {"decoder_input_ids": ids(16, 10), "decoder_attention_mask": torch.ones(16, 10, dtype=torch.int64)}
        result.append(batch)
    return result


def variant(model, *methods, texts=None):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="calibration has")
        return make_variant(model, list(methods), calibration=texts).eval()


def error(model, other, texts):
    return fidelity_on(model, other, texts).error


def uncalibrated(method):
    """What the method does without texts."""
    return MagnitudePruning(sparsity=method.sparsity) if isinstance(method, MagnitudePruning) else method


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_outputs_are_nearer_and_the_files_are_the_same(model, method, tmp_path):
    texts = batches(model)
    plain, calibrated = variant(model, uncalibrated(method)), variant(model, method, texts=texts)
    assert error(model, calibrated, texts) < 0.9 * error(model, plain, texts)
    shapes = {name: (value.shape, value.dtype) for name, value in plain.state_dict().items()}
    assert {name: (value.shape, value.dtype) for name, value in calibrated.state_dict().items()} == shapes
    calibrated.save_pretrained(tmp_path)
    again = (
        (AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM)
        .from_pretrained(tmp_path)
        .eval()
    )
    with torch.no_grad():
        assert torch.equal(again(**texts[0]).logits, calibrated(**texts[0]).logits)
        merged = calibrated.merge()
        torch.testing.assert_close(merged(**texts[0]).logits, again(**texts[0]).logits, rtol=1e-4, atol=1e-4)
