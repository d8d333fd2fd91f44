"""llama.cpp as an engine: `latency`, `score` and `compress` with GGUF files."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from publish.test_export_gguf import TEXTS, exported, random_model, tokenizer_for
from support.llama_cpp import use_llama_cpp

import hf_freeze
from hf_freeze.compression.budget import Budget
from hf_freeze.compression.engine import engine_for
from hf_freeze.io import bytes_of
from hf_freeze.lab.scored import items_of, translator_of
from hf_freeze.lab.training.decoding import most_new_tokens
from hf_freeze.publish.latency import measure


@pytest.fixture(autouse=True)
def _llama_cpp(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, and in the processes that this one starts."""
    use_llama_cpp()
    if not hasattr(sys.modules["llama_cpp"], "__file__"):
        folder = tmp_path_factory.mktemp("python")
        (folder / "llama_cpp.py").write_text(
            "import sys\nfrom support.llama_cpp import library\nsys.modules[__name__] = library()\n"
        )
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[1]}:{':'.join(sys.path)}")


@pytest.mark.parametrize(
    ("kind", "task"), [("llama", "causal-lm"), ("t5", "seq2seq-lm"), ("bert", "feature-extraction")]
)
def test_latency_measures_gguf_folders(kind: str, task: str, tmp_path: Path) -> None:
    path = exported(random_model(kind, task), tokenizer_for(kind), tmp_path, quantization="q8_0")
    (found,) = measure([path.parent], TEXTS[:2], batches=(1,), new_tokens=4, exactly=True, rounds=1)
    assert (found.engine, found.task) == ("gguf-q8_0", task)
    assert found.sizes[1] == [(1, 0 if kind == "bert" else 4)] * 2
    assert found.megabytes == pytest.approx(path.stat().st_size / 1e6)


def test_a_classifier_in_gguf_scores_like_the_model(tmp_path: Path) -> None:
    import datasets

    model = random_model("bert", "sequence-classification")
    path = exported(model, tokenizer_for("bert"), tmp_path)
    split = datasets.Dataset.from_dict({"sentence": TEXTS[:6], "label": [0, 1, 2, 0, 1, 2]})
    split = split.cast_column("label", datasets.ClassLabel(names=["LABEL_0", "LABEL_1", "LABEL_2"]))
    expected, found = (
        items_of(folder, "sequence-classification", split, {}) for folder in (tmp_path / "model", path.parent)
    )
    assert found.tolist() == expected.tolist()
    assert set(expected[:, 0]) == {0, 1}, "some are right, some wrong"


def test_a_translator_in_gguf_writes_what_the_model_writes(tmp_path: Path) -> None:
    model, tokenizer = random_model("t5", "seq2seq-lm"), tokenizer_for("t5")
    path = exported(model, tokenizer, tmp_path)
    written = []
    for text in TEXTS[:3]:
        ids = tokenizer(text, return_tensors="pt").input_ids
        most = most_new_tokens(max(len(tokenizer(other).input_ids) for other in TEXTS[:3]))
        new = model.generate(ids, max_new_tokens=most, do_sample=False)[0, 1:]
        written.append(tokenizer.decode(new, skip_special_tokens=True))
    assert translator_of(path.parent, {})(TEXTS[:3]) == written


def test_compress_keeps_a_budget_in_llama_cpp(tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256}
    model, tokenizer = random_model("llama", **changes), tokenizer_for("llama")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    words = " ".join(TEXTS[:3]).split()
    texts = [" ".join(words[i] for i in torch.randint(len(words), (9,), generator=generator)) for _ in range(60)]
    budget, out = Budget(max_bytes="25%"), tmp_path / "out"
    result = hf_freeze.compress(tmp_path / "model", texts=texts, budget=budget, out=out, engine="gguf", heal=0)
    served = result.after.folder
    assert (served / "model.gguf").is_file()
    assert bytes_of(served) <= 0.25 * result.original_bytes
    assert result.after.fidelity.score > 0


def test_compress_refuses_a_family_that_llama_cpp_lacks() -> None:
    with pytest.raises(ValueError, match=r"gguf does not support marian \(seq2seq-lm\); choose from llama, mistral"):
        engine_for("gguf", "seq2seq-lm", "marian")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ValueError, match=r"llama-cpp needs llama_cpp, which is missing; .*llama-cpp"):
        engine_for("gguf", "causal-lm", "llama")
