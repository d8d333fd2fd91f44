"""The adaptive softmax as the output of a model: against torch's own, the loss by labels, what training computes."""

import copy

import pytest
import torch
from support.embeddings import (
    CUTOFFS,
    WIDTHS,
    WITH_BERT,
    H,
    V,
    adaptive,
    backbone,
    batch_of,
    edges,
    trained,
    wide_batch,
    with_labels,
)
from support.models import outputs
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import AdaptiveSoftmax


def softmax_of_torch(module, bias):
    """torch's adaptive softmax with the same weights. It has a bias in the head only, so a constant input takes its part."""
    reference = nn.AdaptiveLogSoftmaxWithLoss(H + 1, V, CUTOFFS, div_value=1.0, head_bias=False).double()
    extra = torch.zeros(V) if bias is None else bias
    first = torch.cat([module.weight @ module.projection, module.to_tails.weight])
    with torch.no_grad():
        reference.head.weight.copy_(
            torch.cat([first, torch.cat([extra[: CUTOFFS[0]], torch.zeros(2)])[:, None]], dim=1)
        )
        for (down, up), band, (start, end) in zip(reference.tail, module.tails, edges()[1:], strict=True):
            down.weight.copy_(torch.eye(H + 1))
            up.weight.copy_(torch.cat([band.weight @ band.projection, extra[start:end, None]], dim=1))
    return reference


def filled_softmax(bias):
    torch.manual_seed(0)
    layer = AdaptiveSoftmax(nn.Linear(H, V, bias=bias), CUTOFFS, WIDTHS, 0.02)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


@pytest.mark.parametrize("bias", [False, True])
def test_the_softmax_is_that_of_torch(bias):
    layer, x = filled_softmax(bias), torch.randn(2, 30, H)
    labels = torch.randint(V, (60,))
    assert {int((labels >= start).sum()) > 0 for start in (0, *CUTOFFS)} == {True}
    reference = softmax_of_torch(layer, layer.bias)
    wide = functional.pad(x.flatten(0, 1).double(), (0, 1), value=1.0)
    expected = reference.log_prob(wide).float()
    found = layer(x)
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(2, 30))
    loss = layer.loss(x.flatten(0, 1), labels)
    torch.testing.assert_close(loss, (reference(wide, labels).loss * 60).float(), rtol=1e-5, atol=0)
    full = functional.cross_entropy(found.flatten(0, 1), labels, reduction="sum")
    parameters = [*layer.parameters()]
    wanted = torch.autograd.grad(full, parameters)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), wanted, rtol=1e-5, atol=1e-5)
    assert all(gradient.abs().max() > 1e-3 for gradient in wanted)


def test_gradients_of_the_loss_by_finite_differences():
    layer, x, labels = (
        filled_softmax(True).double(),
        torch.randn(9, H).double(),
        torch.tensor([0, 7, 3, 19, 20, 39, 5, 6, 1]),
    )

    def loss(x, *parameters):
        named = dict(zip((n for n, _ in layer.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(Loss(layer), {f"layer.{n}": p for n, p in named.items()}, (x, labels))

    assert torch.autograd.gradcheck(loss, (x.requires_grad_(), *layer.parameters()), fast_mode=True)


class Loss(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, labels):
        return self.layer.loss(x, labels)


def test_tails_without_labels_cost_nothing_and_get_zero_gradients():
    layer, x = filled_softmax(False), torch.randn(5, H)

    def flops(labels):
        with FlopCounterMode(display=False) as counter:
            loss = layer.loss(x, torch.tensor(labels))
        return counter.get_total_flops() / 2, loss

    head = 5 * (H * WIDTHS[0] + WIDTHS[0] * CUTOFFS[0] + H * 2)
    multiply_adds, loss = flops([0, 1, 2, 3, 4])
    assert multiply_adds == head
    loss.backward()
    for tail in layer.tails:
        assert not tail.weight.grad.any()
        assert not tail.projection.grad.any()
    assert layer.to_tails.weight.grad.any()
    assert flops([0, 39, 2, 20, 4])[0] == head + 2 * (H * WIDTHS[2] + WIDTHS[2] * (V - CUTOFFS[1]))


def full_loss(variant, batch, labels, places):
    """By the logits of every token, in training mode."""
    inputs = {n: v for n, v in batch.items() if n != "labels"}
    if variant.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = variant.prepare_decoder_input_ids_from_labels(batch["labels"])
    found = variant(**inputs)
    assert found.logits.shape[-1] == V
    return functional.cross_entropy(found.logits[:, places].flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", WITH_BERT)
def test_the_loss_by_labels_is_the_cross_entropy_of_the_logits(name, biased):
    variant, batch, labels, places = with_labels(name)
    if biased and getattr(variant, "final_logits_bias", None) is not None:
        variant.final_logits_bias.normal_()
    elif biased and name != "bert":
        pytest.skip("no bias")
    full = full_loss(variant, batch, labels, places)
    full.backward()
    wanted = {n: p.grad.clone() for n, p in variant.named_parameters() if p.grad is not None}
    variant.zero_grad()
    result = variant(**batch)
    assert result.logits is None
    assert "logits" not in result
    torch.testing.assert_close(result.loss, full, rtol=1e-5, atol=1e-5)
    result.loss.backward()
    for n, p in variant.named_parameters():
        assert (p.grad is not None) == p.requires_grad, n
        if p.grad is not None:
            torch.testing.assert_close(p.grad, wanted[n], rtol=1e-4, atol=1e-5)
    # In eval mode, and without gradients: both, and the logits are log-probabilities.
    with torch.no_grad():
        results = [variant(**batch), variant.eval()(**batch)]
    for each in results:
        torch.testing.assert_close(each.loss, full, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(each.logits.exp().sum(-1), torch.ones(each.logits.shape[:2]))


def test_a_trained_bias_of_the_logits_counts_inside():
    config = AutoConfig.for_model("marian", **ARCHITECTURES["marian"].tiny, dropout=0.0)
    method = methods.AdaptiveEmbedding(cutoffs=CUTOFFS, factor=2)
    variant = make_variant(config, [method], task="seq2seq-lm", init="marian").train()
    assert isinstance(variant.final_logits_bias, nn.Parameter)
    with torch.no_grad():
        variant.final_logits_bias.normal_()
    batch = wide_batch("marian")
    loss = variant(**batch).loss
    full = full_loss(variant, batch, batch["labels"], slice(None))
    torch.testing.assert_close(loss, full)
    wanted, found = (torch.autograd.grad(each, variant.final_logits_bias)[0] for each in (full, loss))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert found.abs().min() > 1e-4

    # Inside the softmax of each band: more for one token of a tail takes from its own tail alone.
    def probabilities():
        return variant.eval()(**batch).logits.softmax(-1)

    before = probabilities()
    with torch.no_grad():
        variant.final_logits_bias[0, 30] += 3
    after = probabilities()
    torch.testing.assert_close(after[..., : CUTOFFS[1]], before[..., : CUTOFFS[1]])
    assert (after[..., 30] > before[..., 30] * 1.01).all()
    # A copy asks its own bias.
    twin = copy.deepcopy(variant)
    assert twin.lm_head.external_bias[0] is twin
    assert not [name for name, _ in variant.named_modules() if "outside" in name]


@pytest.mark.parametrize("name", ["marian", "gpt2", "llama", "bert"])
def test_what_else_training_returns(name):
    variant, batch, *_ = with_labels(name)
    batch["labels"] = batch["labels"].clone()
    native = variant(**batch, output_hidden_states=True)
    states = native.decoder_hidden_states if name == "marian" else native.hidden_states
    assert len(states) == 3
    plain = variant(**batch, return_dict=False)
    assert isinstance(plain, tuple)
    torch.testing.assert_close(plain[0], native.loss)
    assert not any(torch.is_tensor(each) and each.shape[-1:] == (V,) for each in plain)
    items = variant(**batch, num_items_in_batch=torch.tensor(40)).loss
    counted = int((batch["labels"][:, int(variant.shifts_labels) :] != -100).sum())
    torch.testing.assert_close(items, native.loss * counted / 40)
    # Where the logits are asked for in part, or the labels are shifted already, the backbone decides.
    if variant.shifts_labels:
        shifted = functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        found = variant(**batch, shift_labels=shifted)
        torch.testing.assert_close(found.loss, native.loss)
        assert found.logits is not None


def test_no_label_of_a_tail_leaves_no_gradient_out():
    variant = trained("marian")
    batch = batch_of("marian")
    batch["labels"] = torch.tensor([[6, 2, 3, 1], [5, 1, -100, -100]])
    batch["input_ids"] = batch["input_ids"].clamp(max=6)
    variant(**batch).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in variant.parameters())
    assert not variant.model.shared.tails[1].weight.grad.any()


def test_autocast_takes_the_softmax_in_full_precision():
    variant, batch, labels, places = with_labels("marian")
    exact = variant(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss, full = variant(**batch).loss, full_loss(variant, batch, labels, places)
        found = variant.eval()(**batch).logits
    assert loss.dtype == found.dtype == torch.float32
    torch.testing.assert_close(loss, full, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.05)
    assert loss != exact
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(found.shape[:2]), rtol=1e-4, atol=1e-4)


def test_an_adaptive_softmax_does_not_merge():
    message = (
        r"\Amethod 'adaptive_embedding' cannot be merged: no single matrix computes .*output='dense' can be merged\)\Z"
    )
    with pytest.raises(ValueError, match=message):
        adaptive(backbone("marian")).merge()
    config = AutoConfig.for_model("bert", **ARCHITECTURES["bert"].tiny)
    method = methods.AdaptiveEmbedding(cutoffs=CUTOFFS)
    variant = make_variant(config, [method], task="sequence-classification").eval()  # here, there is none
    batch = ARCHITECTURES["bert"].tiny_inputs("sequence-classification")
    torch.testing.assert_close(outputs(variant.merge().eval(), batch), outputs(variant, batch), rtol=1e-5, atol=1e-5)
