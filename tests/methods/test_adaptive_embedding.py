"""Embeddings by bands and the adaptive softmax: against dense tables and torch's own, what training computes, what is refused."""

import copy
import itertools

import pytest
import torch
from safetensors.torch import load_file
from support import cases
from support.generation import generation_problems
from support.models import outputs
from support.training import training_step
from test_factorized_embedding import BACKBONES, TWO_TABLES, backbone, batch_of, bert, logits, no_dropout
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, BertForMaskedLM

from hf_freeze import count_parameters, make_variant, methods, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers import AdaptiveInputEmbedding, AdaptiveSoftmax

V, H, CUTOFFS = 40, 16, [7, 20]
WIDTHS = [16, 8, 4]
every_backbone = pytest.mark.parametrize("name", BACKBONES)
every_output = pytest.mark.parametrize("output", ["adaptive", "dense"])


def adaptive(model, *others, **settings):
    chosen = {"cutoffs": CUTOFFS, "factor": 2} | settings
    return make_variant(model, [methods.AdaptiveEmbedding(**chosen), *others]).eval()


def wide_batch(name):
    """The tiny batch with ids and labels of all bands."""
    batch = batch_of(name)
    batch["input_ids"] = torch.tensor([[5, 39, 3, 7, 1], [20, 19, 1, 0, 0]])
    batch["labels"] = torch.tensor([[6, 25, 9, 7, 1], [20, 39, 1, -100, -100]])
    return batch


def trained(name, **settings):
    """In training mode without dropout, from weights as if trained, with another matrix of tails."""
    variant = adaptive(backbone(name, **no_dropout(name)), **settings).train()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in variant.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for module in variant.modules():  # natively a padding row stays zero
            if isinstance(module, AdaptiveInputEmbedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return variant


def edges(rows=V):
    return list(itertools.pairwise([0, *CUTOFFS, rows]))


# -- tables ------------------------------------------------------------------------------------------------------------------


def filled(padding=None):
    torch.manual_seed(0)
    layer = AdaptiveInputEmbedding(nn.Embedding(V, H, padding), CUTOFFS, WIDTHS)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def by_rows(layer, ids):
    """Each token by itself."""
    found = []
    for token in ids.flatten().tolist():
        band = next(b for b, (start, end) in zip(layer.bands, edges(), strict=True) if start <= token < end)
        found.append(band.weight[token - max(c for c in (0, *CUTOFFS) if c <= token)] @ band.projection)
    return torch.stack(found).view(*ids.shape, H)


@pytest.mark.parametrize("shape", [(50,), (3, 20), (1,)])
def test_look_ups_are_those_of_each_row(shape):
    layer, ids = filled(), torch.randint(V, shape)
    expected = by_rows(layer, ids)
    torch.testing.assert_close(layer(ids), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(functional.embedding(ids, layer.dense_weight()), expected, rtol=1e-5, atol=1e-6)
    parameters = list(layer.parameters())
    weights = torch.randn(*shape, H)
    wanted = torch.autograd.grad((by_rows(layer, ids) * weights).sum(), parameters, allow_unused=True)
    for found in (layer(ids), layer._summed(ids.flatten()).view(*shape, H)):  # as on a CPU, as elsewhere
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        gradients = torch.autograd.grad((found * weights).sum(), parameters)
        for gradient, each in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, torch.zeros_like(gradient) if each is None else each)


@pytest.mark.parametrize("path", [AdaptiveInputEmbedding.forward, AdaptiveInputEmbedding._summed])
@pytest.mark.parametrize("padding", [3, 7, 39])
def test_a_padding_row_gets_no_gradient_in_any_band(padding, path):
    layer = filled(padding)
    assert layer.dense_padding_idx == padding
    path(layer, torch.arange(V)).square().sum().backward()
    moved = torch.cat([band.weight.grad.abs().sum(1) > 0 for band in layer.bands])
    assert moved.tolist() == [token != padding for token in range(V)]


@pytest.mark.parametrize("path", [AdaptiveInputEmbedding.forward, AdaptiveInputEmbedding._summed])
@pytest.mark.parametrize("token", [-1, V])
def test_what_is_no_token_is_an_error(token, path):
    with pytest.raises(IndexError):
        path(filled(), torch.tensor([token]))


def test_look_ups_keep_the_precision_of_the_table_under_autocast():
    layer, ids = filled(), torch.arange(V)
    with torch.autocast("cpu", torch.bfloat16):
        found = [layer(ids), layer._summed(ids)]
    for each in found:
        assert each.dtype == torch.float32
        torch.testing.assert_close(each, layer(ids), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("init", ["backbone", "marian"])
@pytest.mark.parametrize("padding", [0, 1999])
def test_fresh_rows_have_the_variance_of_the_dense_table(init, padding):
    sizes = {"vocab_size": 2000, "decoder_vocab_size": 2000, "d_model": 256, "pad_token_id": padding}
    config = AutoConfig.for_model("marian", **ARCHITECTURES["marian"].tiny | sizes)
    dense = make_variant(config, [], task="seq2seq-lm", init=init)
    method = methods.AdaptiveEmbedding(cutoffs=[500, 1000])
    model = make_variant(config, [method], task="seq2seq-lm", init=init)
    rows = model.model.shared.dense_weight()
    for start, end in ((0, 500), (500, 1000), (1000, 2000)):
        assert rows[start:end].std().item() == pytest.approx(dense.model.shared.weight.std().item(), rel=0.1)
    assert not rows[padding].any() or init == "marian"
    assert model.lm_head.to_tails.weight.std() > 0


# -- the output: dense -------------------------------------------------------------------------------------------------------


def dense_weights(native, variant, name):
    """Those of the native model that the variant stands for, as differentiable functions of its own."""
    weights = {n: variant.get_parameter(n) for n, p in native.named_parameters() if n not in bands_of(variant, name)}
    for own in BACKBONES[name][2]:
        weights[f"{own}.weight"] = torch.cat([b.weight @ b.projection for b in variant.get_submodule(own).bands])
    return weights


def bands_of(variant, name):
    """Full name -> parameter, of all tables and projections."""
    return {
        f"{own}.{n}": p
        for own in BACKBONES[name][2]
        for n, p in variant.get_submodule(own).named_parameters()
        if "to_tails" not in n
    }


@every_backbone
def test_a_dense_output_is_that_of_the_dense_matrix(name):
    native, batch = backbone(name, **no_dropout(name)), wide_batch(name)
    variant = trained(name, output="dense")
    expected = torch.func.functional_call(native.train(), dense_weights(native, variant, name), (), batch)
    factors = list(bands_of(variant, name).values())
    assert len(factors) == 6 * len(BACKBONES[name][2])
    wanted = torch.autograd.grad(expected.loss, factors)
    actual = variant(**batch)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(actual.loss, factors), wanted, rtol=1e-4, atol=1e-6)
    merged = variant.eval().merge()
    assert type(merged) is type(native)
    torch.testing.assert_close(logits(merged, batch), expected.logits, rtol=1e-5, atol=1e-5)


# -- the output: an adaptive softmax -----------------------------------------------------------------------------------------


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


ALL = [*BACKBONES, "bert"]


def with_labels(name, **settings):
    """(variant in training mode, a batch with labels of all bands, those that are predicted, which logits predict them)"""
    if name == "bert":
        native = bert(BertForMaskedLM, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        variant, batch = adaptive(native, **settings).train(), ARCHITECTURES["bert"].tiny_inputs("masked-lm")
        batch["labels"] = torch.tensor([[-100, 25, 9, 7, -100], [20, 39, 1, -100, -100]])
    else:
        variant, batch = trained(name, **settings), wide_batch(name)
    shift = int(variant.shifts_labels)
    return variant, batch, batch["labels"][:, shift:], slice(None, batch["labels"].shape[1] - shift)


def full_loss(variant, batch, labels, places):
    """By the logits of every token, in training mode."""
    inputs = {n: v for n, v in batch.items() if n != "labels"}
    if variant.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = variant.prepare_decoder_input_ids_from_labels(batch["labels"])
    found = variant(**inputs)
    assert found.logits.shape[-1] == V
    return functional.cross_entropy(found.logits[:, places].flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ALL)
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


# -- from trained tables -----------------------------------------------------------------------------------------------------


@every_output
@every_backbone
def test_each_band_is_the_nearest_of_its_rank(name, output):
    native = backbone(name)
    variant = adaptive(native, output=output)
    for own in BACKBONES[name][2]:
        module, dense = variant.get_submodule(own), native.get_submodule(own).weight.detach().double()
        for band, (start, end) in zip(module.bands, edges(), strict=True):
            part = dense[start:end]
            error = (band.weight.double() @ band.projection.double() - part).norm()
            rank = band.weight.shape[1]
            torch.testing.assert_close(error, torch.linalg.svdvals(part)[rank:].norm(), rtol=1e-5, atol=1e-5)
    if output == "adaptive":
        dense = native.lm_head.weight.detach()
        means = torch.stack([dense[start:end].mean(0) for start, end in edges()[1:]])
        torch.testing.assert_close(variant.lm_head.to_tails.weight, means)


def test_bands_of_full_width_are_exact():
    native, batch = backbone("llama"), wide_batch("llama")
    variant = adaptive(native, factor=1, output="dense")
    torch.testing.assert_close(logits(variant, batch), logits(native, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["marian", "llama-untied", "bert"])
def test_a_dense_output_merges(name):
    variant, batch, *_ = with_labels(name, output="dense")
    expected = outputs(variant, batch)["logits"]
    merged = variant.merge()
    assert "hf_freeze" not in type(merged).__module__
    torch.testing.assert_close(outputs(merged, batch)["logits"], expected, rtol=1e-5, atol=1e-5)
    table = merged.get_input_embeddings()
    assert table.padding_idx == (None if name == "gpt2" else 0)


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


# -- what is stored ----------------------------------------------------------------------------------------------------------


@every_output
@every_backbone
def test_each_factor_is_stored_once(name, output, tmp_path):
    variant = adaptive(backbone(name), output=output)
    variant.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    expected = set(bands_of(variant, name)) | ({"lm_head.to_tails.weight"} if output == "adaptive" else set())
    tables = {key for key in written if "layers." not in key and ".h." not in key and written[key].ndim == 2}
    assert tables - {"final_logits_bias", "transformer.wpe.weight"} == expected
    assert sum(tensor.numel() * 4 for tensor in written.values()) == stored_bytes(variant)
    assert generation_problems(variant, wide_batch(name)) == []


def test_wikitext_103_by_hand():
    """METHODS of the released code: cut-offs of 20,000 and 60,000 of 267,744 ids, 128 wide, halved from band to band."""
    config = AutoConfig.for_model("gpt2", vocab_size=267_744, n_embd=128, n_head=2, n_layer=1)
    method = methods.AdaptiveEmbedding(cutoffs=[20_000, 60_000], width=128, factor=2, output="dense")
    with torch.device("meta"):
        model = make_variant(config, [method], task="causal-lm")
    size = sum(p.numel() for n, p in model.named_parameters() if n.startswith("transformer.wte."))
    assert size == 20_000 * 128 + 40_000 * 64 + 207_744 * 32 + 128 * (128 + 64 + 32)
    assert round(size / 1e6, 2) == 11.80
    assert count_parameters(model).by_component["embeddings"].total == size + config.n_positions * 128


def check_rows(table, before, rows):
    """`before`, `rows`: what a table had of parameters and dense rows. It has the same bits of the parameters; the dense rows are
    products, which not every CPU rounds alike for other numbers of rows."""
    for name, value in table.named_parameters():
        kept = min(len(value), len(before[name]))
        assert torch.equal(value[:kept], before[name][:kept]), name
    kept = min(table.num_embeddings, len(rows))
    torch.testing.assert_close(table.dense_weight()[:kept], rows[:kept], rtol=0, atol=1e-6)


def test_random_bands_are_made_again_from_the_seed(tmp_path):
    variant = adaptive(backbone("marian"), methods.Freeze(embeddings="random", seed=4))
    factors = bands_of(variant, "marian")
    assert set(variant.seeded_tensors) == set(factors)
    rows = variant.model.shared.dense_weight()
    assert rows.std().item() == pytest.approx(H**-0.5, rel=0.15)
    variant.save_pretrained(tmp_path)
    assert not set(load_file(tmp_path / "model.safetensors")) & set(factors)
    again = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    assert torch.equal(logits(again, wide_batch("marian")), logits(variant, wide_batch("marian")))
    again.resize_token_embeddings(50)
    check_rows(again.model.shared, dict(variant.model.shared.named_parameters()), rows)
    training_step(again, wide_batch("marian"))
    again.save_pretrained(tmp_path / "resized")
    twice = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path / "resized")
    assert torch.equal(logits(twice, wide_batch("marian")), logits(again, wide_batch("marian")))


def test_the_base_model_holds_the_same_bands(tmp_path):
    variant = adaptive(backbone("marian-two-tables"))
    variant.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base.decoder.embed_tokens.dense_weight(), variant.model.decoder.embed_tokens.dense_weight())
    assert base.decoder.embed_tokens.tails[0].weight is not base.encoder.embed_tokens.tails[0].weight


# -- resizing ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "output"),
    [
        (name, rows, output)
        for i, name in enumerate(ALL)
        for j, output in enumerate(("adaptive", "dense"))
        for k, rows in enumerate((47, 33))
        if cases.ALL or (i + j + k) % 2 == 0
    ],
)
def test_resizing_is_of_the_last_band(name, rows, output, tmp_path):
    variant, batch, *_ = with_labels(name, output=output)
    variant.eval()
    table = variant.get_input_embeddings()
    before, dense = {name: p.detach().clone() for name, p in table.named_parameters()}, table.dense_weight()
    shape = outputs(variant, batch)["logits"].shape[:-1]
    assert variant.resize_token_embeddings(rows, mean_resizing=False) is variant.get_input_embeddings()
    if name in BACKBONES and TWO_TABLES.items() <= BACKBONES[name][0].items():
        assert variant.config.vocab_size == rows != variant.config.decoder_vocab_size
        variant.resize_decoder_token_embeddings(rows)
    table, head = variant.get_input_embeddings(), variant.get_output_embeddings()
    check_rows(table, before, dense)
    assert [len(band.weight) for band in table.bands] == [len(b.weight) for b in head.bands] == [7, 13, rows - 20]
    assert table.num_embeddings == head.out_features == variant.config.vocab_size == rows
    assert (head.tails[1].weight is table.tails[1].weight) == (name in ("marian", "gpt2", "llama", "bert"))
    batch = {n: v.clamp(max=rows - 1) for n, v in batch.items()}
    batch["input_ids"][0, 0] = rows - 1
    found = outputs(variant, batch)
    assert found["logits"].shape == (*shape, rows)
    if output == "adaptive":
        torch.testing.assert_close(found["logits"].exp().sum(-1), torch.ones(shape))
    variant.save_pretrained(tmp_path)
    again, info = AUTO_CLASSES[variant.architecture.tasks[0]].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(outputs(again, batch)["logits"], found["logits"])
    training_step(again, batch)
    assert not torch.equal(outputs(again, batch)["logits"], found["logits"])


@pytest.mark.parametrize("name", ["marian", "llama-untied", "bert"])
def test_resizing_to_a_multiple(name):
    variant, batch, *_ = with_labels(name)
    variant.resize_token_embeddings(41, pad_to_multiple_of=16)
    assert variant.config.vocab_size == variant.get_input_embeddings().num_embeddings == 48
    if name != "marian":  # natively, the bias of its logits does not follow
        assert outputs(variant, batch)["logits"].shape[-1] == 48
    assert variant.resize_token_embeddings() is variant.get_input_embeddings()


def test_resizing_into_the_band_before_is_refused():
    message = (
        r"cutoffs=\[7, 20\] cannot be resized to 20 tokens: the last band begins at 20, so the size must be at least 21"
    )
    variant = adaptive(backbone("marian-two-tables"), output="adaptive")
    expected = logits(variant, wide_batch("marian"))
    with pytest.raises(ValueError, match=message):
        variant.resize_token_embeddings(20)
    with pytest.raises(ValueError, match=message):
        variant.resize_decoder_token_embeddings(20)
    assert torch.equal(logits(variant, wide_batch("marian")), expected)
    variant.resize_token_embeddings(21)


# -- with other methods ------------------------------------------------------------------------------------------------------


def test_after_trimming_the_bands_are_of_what_is_left():
    native = backbone("marian")
    kept = [*range(30), 35, 39]
    variant = make_variant(
        native,
        [methods.VocabularyTrimming(keep=kept), methods.AdaptiveEmbedding(cutoffs=CUTOFFS, factor=1, output="dense")],
    )
    torch.testing.assert_close(
        variant.model.shared.dense_weight(), native.model.shared.weight[kept], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(
        ValueError, match=r"cutoffs=\[7, 32\]\): the last must be below 32, the vocab_size of this marian"
    ):
        make_variant(variant.merge(), [methods.AdaptiveEmbedding(cutoffs=[7, 32])])


def test_what_adds_to_the_loss_adds_to_the_loss_by_labels():
    torch.manual_seed(0)
    variant = adaptive(backbone("marian"), methods.VariationalDropout(training_size=100))
    variant.advance(1, 2)
    batch = wide_batch("marian")
    result = variant.train()(**batch)
    assert result.logits is None
    alone = result.loss - result["auxiliary_loss"]
    assert result["auxiliary_loss"].item() != 0
    result.loss.backward()
    assert 0 < alone.item() < 20
    variant(**batch).loss.backward()  # the term was reached, or this is refused


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cutoffs": []}, r"cutoffs=\[\]\): must be a list of token ids such as \[20000, 60000\], at least one"),
        ({"cutoffs": 7}, r"cutoffs=7\): must be a list"),
        ({"cutoffs": [7.0]}, r"cutoffs=\[7\.0\]\): must be a list"),
        ({"cutoffs": [True]}, r"cutoffs=\[True\]\): must be a list"),
        ({"cutoffs": [20, 7]}, r"cutoffs=\[20, 7\]\): 7 comes after 20; they must ascend, from at least 1"),
        ({"cutoffs": [7, 7]}, r"7 comes after 7; they must ascend"),
        ({"cutoffs": [0]}, r"0 comes after 0; they must ascend, from at least 1"),
        ({"cutoffs": [7, 40]}, r"cutoffs=\[7, 40\]\): the last must be below 40, the vocab_size of this marian"),
        ({"factor": 0}, r"AdaptiveEmbedding\(factor=0\): must be an integer of at least 1"),
        ({"factor": 2.0}, r"factor=2\.0\): must be an integer"),
        ({"width": 0}, r"AdaptiveEmbedding\(width=0\): must be an integer of at least 1"),
        ({"width": 17}, r"width=17\): must be in 1\.\.16, the hidden size of this marian"),
        (
            {"factor": 5},
            r"factor=5, width=None\): the bands would have the widths \[16, 3, 0\], which must be at least 1: give",
        ),
        ({"output": "sparse"}, r"output='sparse'\): choose from \['adaptive', 'dense'\]"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        adaptive(backbone("marian"), **settings)


def test_the_smaller_of_two_vocabularies_limits():
    with pytest.raises(ValueError, match=r"the last must be below 18, the decoder_vocab_size of this marian"):
        adaptive(backbone("marian-two-tables", decoder_vocab_size=18))


@pytest.mark.parametrize("native", [backbone("gpt2"), bert(BertForMaskedLM)], ids=["gpt2", "bert"])
def test_a_table_is_divided_once(native):
    for first in (methods.AdaptiveEmbedding(cutoffs=CUTOFFS, factor=2), methods.FactorizedEmbedding(rank=4)):
        with pytest.raises(ValueError, match=r"\Amethod 'adaptive_embedding': .*another method.*\Z"):
            make_variant(native, [first, methods.AdaptiveEmbedding(cutoffs=[7], factor=2)])
