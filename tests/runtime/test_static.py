"""Static vectors without PyTorch."""

from pathlib import Path

import numpy as np
import pytest
from publish.test_export_static import TEXTS, encoder, table_in  # noqa: F401 (a fixture)
from transformers import AutoTokenizer

from hf_freeze import runtime
from hf_freeze.publish.export import export_model
from hf_freeze.publish.latency import measure


@pytest.mark.parametrize("quantization", [None, "float16"])
def test_a_vector_is_the_mean_of_the_rows_of_its_tokens(
    encoder: Path,  # noqa: F811
    tmp_path: Path,
    quantization: str | None,
) -> None:
    folder = export_model(encoder, "static", out=tmp_path / "static", quantization=quantization)
    found = runtime.open(folder)(TEXTS[4:9])
    table, tokenizer = table_in(folder).astype(np.float32), AutoTokenizer.from_pretrained(encoder)
    rows = [table[tokenizer(text, add_special_tokens=False).input_ids].mean(0) for text in TEXTS[4:9]]
    np.testing.assert_allclose(found, [row / np.linalg.norm(row) for row in rows], atol=1e-5)
    assert runtime.open(folder)("").tolist() == [0] * table.shape[1]


def test_latency_measures_static_vectors(encoder: Path, tmp_path: Path) -> None:  # noqa: F811
    folder = export_model(encoder, "static", out=tmp_path / "static")
    (found,) = measure([folder], TEXTS[:2], batches=(1,), rounds=1)
    assert (found.engine, found.task) == ("static", "feature-extraction")
