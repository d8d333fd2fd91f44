"""The values of a variant: fresh draws, seeds, casts, and what a checkpoint refuses."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_variants import (
    FC1,
    MARIAN,
    QUERY,
    TABLE,
    bert_config,
    fresh_marian,
    logits,
    marian_config,
    shake,
    tensors,
    trainable,
)
from transformers import (
    AutoModelForSeq2SeqLM,
    BertForMaskedLM,
    MarianConfig,
    MarianMTModel,
)

from hf_freeze import make_variant
from hf_freeze.methods import Freeze
from hf_freeze.seeded.tensor import SeededTensor, digest

# -- values ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_opening_in_half_precision_casts_once(saved, dtype, tmp_path):
    full = AutoModelForSeq2SeqLM.from_pretrained(saved)
    half = AutoModelForSeq2SeqLM.from_pretrained(saved, dtype=dtype)
    for name, value in tensors(half).items():
        assert value.dtype == dtype, name
        assert torch.equal(value, tensors(full)[name].to(dtype)), name
    for name, definition in half.seeded_tensors.items():
        assert torch.equal(half.get_parameter(name), definition.generate().to(dtype)), name
    assert half.config.digests == full.config.digests
    half.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert again.config.digests == full.config.digests  # of the fp32 values, before any cast
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype)), logits(half))


def test_marian_initialisation_has_its_bounds():
    model = make_variant(
        marian_config(vocab_size=300, decoder_vocab_size=300, d_model=48, encoder_ffn_dim=96, decoder_ffn_dim=80),
        [],
        task="seq2seq-lm",
        init="marian",
    )
    checked = 0
    for name, parameter in model.named_parameters():
        if "embed_positions" in name:
            continue
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("layer_norm.weight")))), name
        elif name == "final_logits_bias":
            assert not parameter.any()
        else:
            bound = math.sqrt(3 / 48) if name == TABLE else math.sqrt(6 / sum(parameter.shape))
            scaled = parameter / bound
            assert 0.99 < scaled.abs().max() <= 1, name
            assert scaled.mean().abs() < 0.07, name
            assert scaled.var().item() == pytest.approx(1 / 3, rel=0.12), name
            checked += 1
    assert checked == 1 + 2 * (4 + 2) + 2 * (8 + 2)
    assert model.get_parameter(TABLE).pow(2).sum(1).mean().item() == pytest.approx(1, abs=0.02)


def test_marian_initialisation_of_bert():
    model = make_variant(bert_config(num_labels=40), [], task="sequence-classification", init="marian")
    weights = {n: p for n, p in model.named_parameters() if p.ndim == 2}
    for name, weight in weights.items():
        bound = math.sqrt(3 / 16) if "embeddings" in name else math.sqrt(6 / sum(weight.shape))
        assert 0.9 < (weight / bound).abs().max() <= 1, name
    assert {"classifier.weight", "bert.pooler.dense.weight"} < weights.keys()


def test_the_native_initialisation_is_the_native_one():
    model = make_variant(marian_config(d_model=64, encoder_ffn_dim=128), [], task="seq2seq-lm", seed=5)
    assert model.get_parameter(FC1).std().item() == pytest.approx(0.02, rel=0.1)
    torch.manual_seed(5)
    native = MarianMTModel(marian_config(d_model=64, encoder_ffn_dim=128))
    assert all(torch.equal(p, tensors(native)[name]) for name, p in tensors(model).items())


def test_the_output_bias_is_trained_and_keeps_its_key(tmp_path):
    model = fresh_marian()
    assert dict(model.named_parameters())["final_logits_bias"].shape == (1, 40)
    assert "final_logits_bias" not in dict(model.named_buffers())
    outputs = model.eval()(**MARIAN.tiny_inputs("seq2seq-lm"))
    outputs.logits.retain_grad()
    outputs.loss.backward()
    assert model.final_logits_bias.grad.abs().max() > 1e-3
    torch.testing.assert_close(model.final_logits_bias.grad[0], outputs.logits.grad.sum((0, 1)))
    shake(model).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["final_logits_bias"].abs().max() > 0
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(again.final_logits_bias, model.final_logits_bias)
    assert isinstance(again.final_logits_bias, torch.nn.Parameter)
    merged = model.merge()
    assert isinstance(merged.get_buffer("final_logits_bias"), torch.Tensor)
    assert torch.equal(merged.final_logits_bias, model.final_logits_bias)
    native = make_variant(marian_config(), [], task="seq2seq-lm")
    assert "final_logits_bias" in dict(native.named_buffers())


@pytest.mark.parametrize("init", ["backbone", "marian"])
def test_the_global_random_state_does_not_matter(init):
    def make(global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        model = make_variant(marian_config(), [Freeze(ffn="random", seed=3)], task="seq2seq-lm", init=init, seed=8)
        assert torch.equal(torch.get_rng_state(), before), "make_variant must not touch the global state"
        return tensors(model)

    first, second = make(1), make(2)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    other = make_variant(marian_config(), [Freeze(ffn="random", seed=3)], task="seq2seq-lm", init=init, seed=9)
    assert not torch.equal(other.get_parameter(QUERY), first[QUERY])
    assert torch.equal(other.get_parameter(FC1), first[FC1])


def test_a_model_as_backbone_draws_nothing_from_the_global_state():
    native = MarianMTModel(marian_config())
    before = torch.get_rng_state()
    make_variant(native, [Freeze(ffn="random")])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("init", ["backbone", "marian"])
def test_rows_of_an_ablation_begin_with_the_same_trainable_weights(init):
    def make(**modes):
        return make_variant(marian_config(), [Freeze(**modes, seed=1)], task="seq2seq-lm", init=init, seed=1)

    full = tensors(make())
    for modes in (
        {"embeddings": "random"},
        {"attention": "diagonal"},
        {"ffn": "random"},
        {"attention": "random", "ffn": "random"},
    ):
        row = make(**modes)
        names = trainable(row)
        assert names
        assert all(torch.equal(row.get_parameter(name), full[name]) for name in names), modes


# -- saving ----------------------------------------------------------------------------------------------------------------------


def test_a_changed_seeded_weight_cannot_be_saved_silently(tmp_path):
    model = fresh_marian(Freeze(ffn="random"))
    with torch.no_grad():
        model.get_parameter(FC1)[3, 5] += 1e-6
    with pytest.raises(
        ValueError, match=rf"'{FC1}' is frozen at random values that are not stored, but it was changed"
    ):
        model.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(model.merge().get_parameter(FC1), model.get_parameter(FC1))


def test_a_changed_state_dict_cannot_be_saved_silently(tmp_path):
    model = fresh_marian(Freeze(ffn="random"))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state[FC1][0, 0] = 5
    with pytest.raises(ValueError, match="but it was changed"):
        model.save_pretrained(tmp_path, state_dict=state)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)), logits(model))


def test_the_config_holds_the_digests_of_what_is_not_stored(saved):
    config = json.loads((saved / "config.json").read_text())
    assert set(config["digests"]) == {"shared.weight"} | {
        f"{stack}.layers.{i}.{linear}.{part}"
        for stack in ("encoder", "decoder")
        for i in range(2)
        for linear in ("fc1", "fc2")
        for part in ("weight", "bias")
    }
    assert config["digests"]["shared.weight"] == digest(
        SeededTensor(13, "shared.weight", (40, 16), "embedding").generate()
    )
    assert config["architectures"] == ["VariantMarianMTModel"]
    assert config["model_type"] == "hf_freeze_marian"


def test_merged_bert_opens_without_the_package(tmp_path, saved_bert):
    _, model = saved_bert
    model.merge().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert config["architectures"] == ["BertForMaskedLM"]
    assert not {"methods", "init", "digests", "hf_freeze_version"} & set(config)
    plain, info = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(logits(plain, "masked-lm"), logits(model, "masked-lm"))


def test_loading_draws_no_weights_for_seeded_tensors(tmp_path):
    states = []
    for frozen in ([], [Freeze(embeddings="random", ffn="random")]):
        make_variant(MarianConfig(**MARIAN.tiny), frozen, task="seq2seq-lm", init="marian").save_pretrained(tmp_path)
        torch.manual_seed(0)
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
