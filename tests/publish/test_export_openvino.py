"""Exports to OpenVINO: folders that open as models of transformers, compute what PyTorch computes, and stay as small."""

import shutil
import sys

import numpy as np
import pytest
import torch
from support.text import SOURCE, fast_tokenizer
from test_export import TEXTS, marian, save, words
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    pipeline,
)

import hf_freeze
from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.compression.budget import Budget
from hf_freeze.install import how_to_install
from hf_freeze.io import bytes_of as all_bytes_of
from hf_freeze.publish.export import export_model, openvino
from hf_freeze.publish.export.served import opened
from hf_freeze.publish.latency import measure

installed = pytest.importorskip("openvino", reason=f"openvino is not installed; {how_to_install('openvino')}")


def bytes_of(folder) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.bin"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A variant with factors and pruned heads: its folder."""
    torch.manual_seed(0)
    config = BertConfig(**ARCHITECTURES["bert"].tiny | {"vocab_size": 400, "num_hidden_layers": 1, "hidden_size": 32})
    parts = [methods.HeadPruning(share=0.5), methods.LowRank(rank=3, components=["ffn"])]
    model = make_variant(BertForSequenceClassification(config).eval(), parts)
    return save(tmp_path_factory.mktemp("classifier") / "model", model, words(400))


@pytest.fixture(scope="module")
def exported(classifier):
    return export_model(classifier, "openvino")


def test_classes_and_bytes_are_those_of_the_variant(classifier, exported):
    texts = ["w5 w9 w3", "w8 w4 w4 w7 w30"]
    expected, found = (pipeline("text-classification", model=str(path), top_k=None) for path in (classifier, exported))
    for one, other in zip(found(texts), expected(texts), strict=True):
        assert [x["label"] for x in one] == [x["label"] for x in other]
        np.testing.assert_allclose([x["score"] for x in one], [x["score"] for x in other], atol=1e-5)
    assert bytes_of(exported) < 1.02 * (classifier / "model.safetensors").stat().st_size


def test_weights_of_fewer_bits_are_smaller_and_near(classifier, exported):
    pytest.importorskip("nncf")
    texts = [f"w{n} w{n + 1} w{2 * n} w7" for n in range(3, 30)]
    expected = pipeline("text-classification", model=str(exported), top_k=None)(texts)
    sizes = []
    for quantization in ("float16", "int8", "int8-static"):
        folder = export_model(classifier, "openvino", quantization=quantization, texts=texts)
        found = pipeline("text-classification", model=str(folder), top_k=None)(texts)
        scores = [[{x["label"]: x["score"] for x in one}["LABEL_0"] for one in each] for each in (found, expected)]
        np.testing.assert_allclose(*scores, atol=0.02)
        assert found != expected
        sizes.append(bytes_of(folder) / bytes_of(exported))
    assert 0.4 < sizes[0] < 0.6
    assert max(sizes[1:]) < 0.45


def test_translations_are_those_of_the_variant(tmp_path):
    tokenizer = fast_tokenizer(tmp_path)
    model = make_variant(
        marian(tokenizer, encoder_layers=1, decoder_layers=2), [methods.LayerSharing(stacks=["decoder"])]
    )
    source = save(tmp_path / "model", model, tokenizer)
    folder = export_model(source, "openvino")
    expected, found = (pipeline("translation", model=str(path)) for path in (source, folder))
    for settings in ({"batch_size": 3}, {"num_beams": 3}):
        assert found(TEXTS, **settings) == expected(TEXTS, **settings), settings
    (one,) = measure([folder], SOURCE, batches=(4,), new_tokens=3, exactly=True, rounds=1)
    assert (one.engine, one.sizes[4][0]) == ("openvino", (4, 12))
    assert opened(folder).task == "seq2seq-lm"


def test_continuations_are_those_of_the_variant(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_layer": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    config = GPT2Config(**ARCHITECTURES["gpt2"].tiny | sizes)
    source = save(tmp_path / "model", make_variant(config, [], task="causal-lm"), words(40))
    expected, found = (
        AutoModelForCausalLM.from_pretrained(path) for path in (source, export_model(source, "openvino"))
    )
    ids = torch.tensor([[0, 0, 5, 9], [7, 8, 3, 4]])
    settings = {"attention_mask": (ids > 0).long(), "max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    assert torch.equal(found.generate(ids, **settings), expected.generate(ids, **settings))


def test_what_fails_is_named(classifier, exported, tmp_path, monkeypatch):
    for name, content, message in (
        ("model.bin", None, "model.xml cannot be opened"),
        ("model.xml", b"<net", "model.xml has changed since the export"),
        ("model.names.json", b"{", r"model.xml cannot be opened \(JSONDecodeError\); export it again"),
    ):
        copy = shutil.copytree(exported, tmp_path / "damaged")
        (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            AutoModelForSequenceClassification.from_pretrained(copy)
        assert "\n" not in str(error.value)
        shutil.rmtree(copy)
    with pytest.raises(ValueError, match=r"openvino has no setting 'THREADS'; choose from .*INFERENCE_NUM_THREADS"):
        AutoModelForSequenceClassification.from_pretrained(exported, engine={"THREADS": 1})
    with pytest.raises(ValueError, match="unknown quantization 'int3' for openvino; choose from"):
        export_model(classifier, "openvino", quantization="int3")

    with monkeypatch.context() as patch:
        patch.setattr(openvino, "_quantize", lambda export, folder, package: (folder / "model.xml").write_text("<net"))
        with pytest.raises(ValueError, match=r"openvino cannot open .*Bert.* in int8; choose int8 or float16"):
            export_model(classifier, "openvino", quantization="int8", out=tmp_path / "none")

    class Core:
        def read_model(self, path):
            raise RuntimeError("pages\nof text")

    with monkeypatch.context() as patch:
        patch.setattr(openvino, "require", lambda *names: type("openvino", (), {"Core": Core}))
        with pytest.raises(
            ValueError, match=r"openvino cannot hold this model: it cannot read the model of .*Bert"
        ) as error:
            export_model(classifier, "openvino", out=tmp_path / "none")
        assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "openvino", None)
    missing = r'openvino needs openvino, which is missing; from a clone: pip install .* "\.\[openvino\]"'
    with pytest.raises(ValueError, match=missing):
        export_model(classifier, "openvino", out=tmp_path / "none")


def test_compress_keeps_a_budget_in_openvino(tmp_path):
    texts = [" ".join(f"w{(i * j + j) % 380}" for j in range(2, 9)) for i in range(60)]
    torch.manual_seed(0)
    config = BertConfig(
        **ARCHITECTURES["bert"].tiny | {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 1024}
    )
    save(tmp_path / "model", BertModel(config), words(400))
    budget = Budget(max_bytes="30%")
    result = hf_freeze.compress(
        tmp_path / "model", texts=texts, budget=budget, out=tmp_path / "out", engine="openvino", heal=0
    )
    served = result.after.folder
    assert (served / "model.xml").is_file()
    assert all_bytes_of(served) <= 0.3 * result.original_bytes
