"""Static vectors of a sentence encoder: the table against what it is defined by, the fit against dense algebra, and the folder in
sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.tokenizers_of_each_kind import wordpiece
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel

from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.served import served_fidelity
from hf_freeze.publish.export.static_table import fitted

WORDS = [
    "a",
    "man",
    "is",
    "riding",
    "red",
    "bicycle",
    "near",
    "the",
    "river",
    "two",
    "dogs",
    "play",
    "in",
    "snow",
    "cats",
]
TEXTS = [" ".join(WORDS[(i * j + j) % len(WORDS)] for j in range(2, 3 + i % 9)) for i in range(120)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = wordpiece(TEXTS)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=40, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def table_in(folder: Path) -> np.ndarray:
    return load_file(folder / "model.safetensors")["embedding.weight"]


def test_without_texts_a_row_is_the_vector_of_the_token_times_its_weight(encoder: Path, tmp_path: Path) -> None:
    table = table_in(export_model(encoder, "static", out=tmp_path / "static"))
    model, tokenizer = AutoModel.from_pretrained(encoder).eval(), AutoTokenizer.from_pretrained(encoder)
    size = len(tokenizer)
    shares = 1 / np.arange(1, size + 1)
    shares /= shares.sum()
    for token in [token for token in range(size) if token not in tokenizer.all_special_ids][::9]:
        ids = torch.tensor([[tokenizer.cls_token_id, token, tokenizer.sep_token_id]])
        with torch.no_grad():
            vector = model(ids).last_hidden_state[0].mean(0).numpy()
        expected = vector / np.linalg.norm(vector) * 1e-3 / (1e-3 + shares[token])
        np.testing.assert_allclose(table[token], expected, atol=1e-6)
    assert not table[tokenizer.all_special_ids].any()


def test_the_fit_is_the_minimum_of_ridge_regression() -> None:
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 9, size=length).tolist() for length in (3, 5, 2, 7, 4, 1, 6)]
    table, vectors = generator.normal(size=(12, 4)), generator.normal(size=(7, 4))
    found = fitted(torch.from_numpy(table).float(), ids, torch.from_numpy(vectors).float()).numpy()
    means = np.array([np.bincount(row, minlength=12) / len(row) for row in ids])
    first = means @ table
    start = table * (first * vectors).sum() / (first**2).sum()
    stacked = np.vstack([means, 0.1 * np.eye(12)])  # 0.1² is the ridge
    expected = np.linalg.lstsq(stacked, np.vstack([vectors, 0.1 * start]), rcond=None)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found[9:], start[9:], atol=1e-6)  # tokens that no text has


def test_texts_bring_the_vectors_nearer_to_those_of_the_encoder(encoder: Path, tmp_path: Path) -> None:
    blind = export_model(encoder, "static", out=tmp_path / "blind")
    learnt = export_model(encoder, "static", out=tmp_path / "learnt", texts=TEXTS[:80])
    scores = [served_fidelity(encoder, folder, TEXTS[80:]).score for folder in (blind, learnt)]
    assert scores[1] > scores[0] + 0.05


def test_the_folder_opens_in_sentence_transformers(encoder: Path, tmp_path: Path) -> None:
    tools = pytest.importorskip("sentence_transformers", reason="sentence-transformers is installed by hand")
    folder = export_model(encoder, "static", out=tmp_path / "static", texts=TEXTS, quantization="float16")
    found = tools.SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:5])
    table, tokenizer = table_in(folder).astype(np.float32), AutoTokenizer.from_pretrained(encoder)
    rows = [table[tokenizer(text, add_special_tokens=False).input_ids].mean(0) for text in TEXTS[:5]]
    expected = np.stack([row / np.linalg.norm(row) for row in rows])
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_texts_that_are_compared_are_not_learnt_from(encoder: Path, tmp_path: Path) -> None:
    kept = [text for i, text in enumerate(TEXTS) if i % 10]
    alone = table_in(export_model(encoder, "static", out=tmp_path / "alone", texts=kept))
    checked = table_in(export_model(encoder, "static", out=tmp_path / "checked", texts=TEXTS, min_fidelity=0.1))
    np.testing.assert_array_equal(checked, alone)
    with pytest.raises(ValueError, match=r"fidelity 0\.\d+ .* below min_fidelity=1"):
        export_model(encoder, "static", out=tmp_path / "refused", texts=TEXTS, min_fidelity=1)


def test_the_folder_is_marked_and_holds_no_config_of_the_encoder(encoder: Path, tmp_path: Path) -> None:
    folder = export_model(encoder, "static", out=tmp_path / "static")
    mark = json.loads((folder / "hf_freeze_export.json").read_text())
    assert (mark["format"], list(mark["files"])) == ("static", ["model.safetensors"])
    assert not (folder / "config.json").exists()


def test_a_classifier_has_no_static_vectors(encoder: Path, tmp_path: Path) -> None:
    model = BertForSequenceClassification.from_pretrained(encoder)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"static is for sentence encoders .* not BertForSequenceClassification"):
        export_model(tmp_path / "model", "static")
