"""Perplexity in windows is that of a loop over tokens, each predicted from its own window alone."""

import math

import pytest
import torch
from support.small import small_config
from transformers import AutoModelForCausalLM

from hf_freeze import make_variant, methods
from hf_freeze.analysis import window_losses, window_perplexity


def model_of(family, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family, vocab_size=40, max_position_embeddings=32))
    with torch.no_grad():  # far from a uniform choice, so that a wrong token shows
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.to(dtype)


def ids_of(count):
    return torch.randint(40, (count,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def one_by_one(model, ids, window):
    """Mean nats of each whole window: a forward for each token, with the tokens of its window before it."""
    means = []
    for start in range(0, len(ids) - window + 1, window):
        nats = []
        for at in range(start + 1, start + window):
            logits = model(input_ids=ids[None, start:at]).logits[0, -1].double()
            nats.append(float(logits.logsumexp(-1) - logits[ids[at]]))
        means.append(sum(nats) / len(nats))
    return means


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_losses_are_those_of_a_loop_over_tokens_and_the_incomplete_window_is_dropped(family, batch_size):
    model, ids = model_of(family).eval(), ids_of(29)
    expected = one_by_one(model, ids, 9)
    losses = window_losses(model, ids, 9, batch_size=batch_size)
    assert losses.dtype == torch.float64
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 3
    assert max(expected) - min(expected) > 0.01
    assert window_perplexity(model, ids, 9, batch_size=batch_size) == pytest.approx(
        math.exp(sum(expected) / 3), rel=1e-5
    )


def test_a_variant_is_measured_as_it_computes():
    variant = make_variant(model_of("llama"), [methods.LowRank(components=["ffn"], rank=2)]).eval()
    ids = ids_of(20)
    assert window_losses(variant, ids, 10).tolist() == pytest.approx(one_by_one(variant, ids, 10), rel=1e-5)


def test_a_model_in_bf16_is_summed_in_fp32_one_window_at_a_time(monkeypatch):
    model, ids, seen = model_of("llama", torch.bfloat16).eval(), ids_of(24), []
    original = torch.nn.functional.cross_entropy

    def watched(logits, tokens):
        seen.append((logits.dtype, tuple(logits.shape)))
        return original(logits, tokens)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", watched)
    losses = window_losses(model, ids, 8, batch_size=3)
    assert seen == [(torch.float32, (7, 40))] * 3
    with torch.no_grad():
        logits = model(input_ids=ids.view(3, 8)).logits[:, :-1].double()
    expected = -logits.log_softmax(-1).gather(-1, ids.view(3, 8)[:, 1:, None]).mean((1, 2))
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-6)  # bf16 sums would be off by 1e-3


def test_dropout_is_off_and_the_mode_is_restored():
    model, ids = model_of("gpt2").train(), ids_of(20)
    assert torch.equal(window_losses(model, ids, 10), window_losses(model, ids, 10))
    assert model.training


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (15, {"window": 8}, "15 tokens are fewer than two windows of 8: choose a window of at most 7"),
        (3, {"window": 2}, "3 tokens are fewer than two windows of 2: give a longer text"),
        (20, {"window": 1}, "window 1, batch_size 1: at least 2 tokens and 1 window"),
        (20, {"window": 4, "batch_size": 0}, "window 4, batch_size 0: at least 2 tokens and 1 window"),
    ],
)
def test_what_gives_no_two_windows_is_refused(count, options, message):
    with pytest.raises(ValueError, match=message):
        window_losses(model_of("llama"), ids_of(count), **options)
