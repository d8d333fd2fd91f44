"""Decoders with recurrent units that are exported: their states are tensors of the past, and formats without these refuse."""

import onnx
import pytest
import torch
from support.models import perturbed
from support.text import fast_tokenizer
from test_export import TEXTS, marian, save
from transformers import AutoModelForCausalLM, GPT2Config, pipeline

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.publish.export import OnnxTranslator, export_model

AAN = methods.RecurrentDecoder(kind="aan", ffn_width=24)


def language_model(method, **fields):
    tiny = ARCHITECTURES["gpt2"].tiny | {"n_layer": 1} | fields
    model = make_variant(GPT2Config(**tiny), [method], task="causal-lm", init="marian", seed=1)
    torch.manual_seed(2)
    return perturbed(model).eval()


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """The folder of a translator with SSRU in its decoder of two layers."""
    folder = tmp_path_factory.mktemp("marian")
    tokenizer = fast_tokenizer(folder)
    config = marian(tokenizer, encoder_layers=1, decoder_layers=2).config
    model = make_variant(config, [methods.RecurrentDecoder()], task="seq2seq-lm", init="marian", seed=1)
    torch.manual_seed(2)
    return save(folder, perturbed(model), tokenizer)


def test_translations_from_onnx_are_those_of_the_variant(translator):
    folder = export_model(translator, "onnx")
    expected, found = (pipeline("translation", model=str(path)) for path in (translator, folder))
    for settings in ({}, {"batch_size": 3}, {"num_beams": 3}, {"use_cache": False}):
        assert found(TEXTS, **settings) == expected(TEXTS, **settings), settings
    assert OnnxTranslator(folder, intra_op_num_threads=1)(TEXTS, batch_size=3) == expected(TEXTS)
    inputs = {one.name: one.type.tensor_type.shape.dim for one in onnx.load(folder / "decoder.onnx").graph.input}
    hidden = expected.model.config.d_model
    for number in (0, 1):
        assert [d.dim_value for d in inputs[f"past_key_values.{number}.decoder.state"]][1:] == [1, 1, hidden]
        assert inputs[f"past_key_values.{number}.decoder.tokens"][3].dim_value == 0
        assert f"past_key_values.{number}.decoder.key" not in inputs


@pytest.mark.parametrize(
    ("method", "format"),
    [(methods.RecurrentDecoder(kind="lstm"), "onnx"), (methods.RecurrentDecoder(kind="ssru"), "torch"), (AAN, "torch")],
    ids=["lstm-onnx", "ssru-torch", "aan-torch"],
)
def test_texts_are_those_of_the_variant(method, format, tmp_path):
    model = language_model(method)
    model.save_pretrained(tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(export_model(tmp_path / "model", format))
    ids = torch.tensor([[0, 0, 7, 5, 9], [3, 8, 2, 6, 4]])
    for beams in (1, 3):
        settings = {"num_beams": beams, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        expected, actual = (each.generate(ids, attention_mask=(ids != 0).long(), **settings) for each in (model, found))
        assert torch.equal(actual, expected), beams


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("ctranslate2", r"ctranslate2 cannot hold this model: recurrent_decoder: .*; it cannot be merged"),
        ("dense", r"dense cannot hold this model: recurrent_decoder: .*; it cannot be merged"),
        (
            "transformers-js",
            "transformers-js keeps keys and values, and no states of recurrent units; choose --format onnx",
        ),
    ],
)
def test_formats_without_a_place_for_a_state_refuse(translator, format, message):
    with pytest.raises(ValueError, match=message) as error:
        export_model(translator, format)
    assert "\n" not in str(error.value)


def test_gguf_refuses(tmp_path):
    tokenizer = fast_tokenizer(tmp_path)
    model = language_model(methods.RecurrentDecoder(), vocab_size=len(tokenizer))
    folder = save(tmp_path / "model", model, tokenizer)
    with pytest.raises(ValueError, match=r"gguf cannot hold this model: recurrent_decoder: .*; it cannot be merged"):
        export_model(folder, "gguf")
