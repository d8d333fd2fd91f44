"""ONNX files compute what PyTorch computes, for any batch and length; methods that cannot be merged are traced as they are."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.cases import PLAIN, Case, plain
from support.models import build, merge_or_none
from support.text import marian_tokenizer
from test_export import TEXTS, marian, save, words
from transformers import AutoTokenizer, pipeline

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.publish.export import OnnxTranslator, export_model
from hf_freeze.publish.export import onnx as onnx_format

ENGINE = {"intra_op_num_threads": 1}
BERT = [case for case in PLAIN if case.architecture.model_type == "bert" and not case.finalized]
BASELINES = {task: plain(ARCHITECTURES["bert"], task=task) for task in onnx_format.SUPPORTED_TASKS["bert"]}
# Tracing takes seconds: one task here and one in int8, and each method that leaves other modules than the native ones.
TRACED = [BASELINES["feature-extraction"]]
TRACED += [case for case in BERT if case.methods and merge_or_none(build(case)) is None]


@pytest.mark.parametrize("case", TRACED, ids=lambda case: case.id)
@torch.no_grad()
def test_encoders_return_the_same(case: Case, tmp_path, capfd):
    model = build(case)
    model.save_pretrained(tmp_path / "model")
    try:
        folder = export_model(tmp_path / "model", "onnx")
    except ValueError as refused:  # a forward whose steps depend on the values
        pytest.raises(ValueError, model.merge).match(r"method 'adaptive_embedding' cannot be merged")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert "aten" not in "".join(capfd.readouterr())  # torch prints the graph that it could not finish
        pytest.skip(str(refused))
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for rows, length in ((1, 3), (5, 12)):
        ids = torch.randint(model.config.vocab_size, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, length - 1 :] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (ids > 9).long()}
        found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        expected = model(**inputs)
        assert names == list(expected)
        for name, value in zip(names, found, strict=True):
            np.testing.assert_allclose(value, expected[name].numpy(), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """(folder of a variant with factors and shared layers, what it was exported to)"""
    folder = tmp_path_factory.mktemp("marian")
    tokenizer = marian_tokenizer(folder)
    sharing = methods.LayerSharing(stacks=["decoder"])
    model = make_variant(marian(tokenizer, encoder_layers=1), [sharing, methods.FactorizedEmbedding(rank=8)])
    model.generation_config.bad_words_ids = [[tokenizer.pad_token_id]]
    return save(folder, model, tokenizer), export_model(folder, "onnx")


def test_translations_are_those_of_the_pipeline(translator):
    source, folder = translator
    expected, found = pipeline("translation", model=str(source)), OnnxTranslator(folder, **ENGINE)
    assert found(TEXTS, batch_size=3) == expected(TEXTS)
    assert found(TEXTS[1]) == expected(TEXTS[1])
    assert found(TEXTS, max_new_tokens=3) == expected(TEXTS, max_new_tokens=3)
    assert found([]) == []
    with pytest.raises(ValueError, match=r"onnx has no setting 'num_beams'; choose from \['max_new_tokens'"):
        found("katze", num_beams=4)
    with pytest.raises(ValueError, match="this greedy search can ban single tokens only"):
        found("katze", bad_words_ids=[[3, 4]])
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()


def test_int8_is_smaller_and_near(tmp_path):
    case = BASELINES["sequence-classification"]
    model = build(case)
    model.save_pretrained(tmp_path / "model")
    file = export_model(tmp_path / "model", "onnx", quantization="int8") / "model.onnx"
    assert file.parent.name == "model-onnx-int8"
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    ids = case.batch()["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        expected = model(**inputs)
    (found,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
    assert 0 < np.abs(found - expected.logits.numpy()).mean() < 0.1 * expected.logits.std().item()
    quantized = {
        tensor.name for tensor in onnx.load(file).graph.initializer if tensor.data_type == onnx.TensorProto.INT8
    }
    assert len(quantized) >= 2 * 6  # the matrices of two layers


def test_methods_that_no_decoder_file_can_hold_are_refused_by_name(tmp_path):
    light = methods.LiteTransformer.example
    model = make_variant(marian(words(40)).config, [light], task="seq2seq-lm")
    with pytest.raises(ValueError, match="onnx cannot hold this model: lite_transformer: no native model has"):
        export_model(save(tmp_path / "model", model), "onnx")
