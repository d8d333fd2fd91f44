"""Exports to ExecuTorch compute what the variant computes, with a cache, at any length that they have memory for."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.cases import ALL, plain
from support.models import build
from support.text import fast_tokenizer
from test_export import TEXTS, marian, save, words
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, LlamaConfig, pipeline

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.install import how_to_install
from hf_freeze.publish.export import executorch, export_model
from hf_freeze.publish.export.runners import LoweredRunner


def lowered(source: Path) -> Path:
    pytest.importorskip("executorch", reason=f"executorch is not installed; {how_to_install('executorch')}")
    return export_model(source, "executorch")


slow = pytest.mark.skipif(not ALL, reason="lowers for a minute: only in make test-all")


def test_rows_run_in_batches_and_limits_are_named():
    """Of a method with memory for two rows of three tokens."""
    calls: list[int] = []

    def execute(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(len(inputs[0]))
        return [inputs[0] + inputs[1], inputs[0].sum(1)]

    described = SimpleNamespace(input_tensor_meta=lambda index: SimpleNamespace(sizes=lambda: (2, 3)))
    names = {"shapes": {"a": ["batch", "length"], "b": ["batch", "length"]}, "outputs": ["sums", "rows"]}
    run = LoweredRunner(SimpleNamespace(metadata=described, execute=execute), names, Path("model.pte"))
    ones = torch.ones(5, 2)
    found = run({"a": ones, "b": 2 * ones, "unread": ones})
    assert calls == [2, 2, 1]
    assert found["sums"].tolist() == (3 * ones).tolist()
    assert found["rows"].tolist() == [2] * 5
    too_long = r"model.pte has memory for b of the shape \(3,\) a row, not \(4,\); give it shorter texts, or fewer new"
    with pytest.raises(ValueError, match=too_long):
        run({"a": ones, "b": torch.ones(5, 4)})


def test_a_model_that_cannot_be_lowered_is_refused_in_one_line(tmp_path, monkeypatch):
    def fails(programs: dict) -> bytes:
        raise RuntimeError("a page\nof text")

    for name in ("executorch", "executorch.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(executorch, "_lowered", fails)
    monkeypatch.setattr(executorch, "traced", lambda part, limits: part)  # which takes seconds
    source = save(tmp_path / "model", build(plain(ARCHITECTURES["bert"], task="sequence-classification")))
    with pytest.raises(ValueError, match=r"^ExecuTorch cannot lower this model: RuntimeError$"):
        export_model(source, "executorch")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@slow
def test_a_translator(tmp_path):
    tokenizer = fast_tokenizer(tmp_path / "tokenizer")
    parts = [
        methods.LayerSharing(stacks=["decoder"]),
        methods.LowRank(rank=3, components=["attention"]),
        methods.Freeze(ffn="random"),
    ]
    source = save(tmp_path / "model", make_variant(marian(tokenizer, decoder_layers=2), parts), tokenizer)
    folder = lowered(source)
    expected, found = (pipeline("translation", model=str(path)) for path in (source, folder))
    for settings in ({}, {"num_beams": 5, "batch_size": 3, "num_return_sequences": 2, "max_new_tokens": 5}):
        assert found(TEXTS, **settings) == expected(TEXTS, **settings), settings
    with pytest.raises(ValueError, match=r"model.pte has memory for input_ids of the shape \(64,\) a row, not \(65,\)"):
        found.model.generate(torch.full((1, 65), 5))
    names = json.loads((folder / "model.names.json").read_text())
    assert list(names) == ["encoder", "decoder"]
    for name, content in (("model.pte", b"none"), ("model.names.json", b"{")):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"model.* has changed since the export: copy it again") as error:
            AutoModelForSeq2SeqLM.from_pretrained(folder)
        assert "\n" not in str(error.value)


@slow
def test_a_language_model(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**ARCHITECTURES["llama"].tiny | {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1})
    model = make_variant(config, [methods.HeadPruning(share=0.5, layers={"decoder": [0]})], task="causal-lm").eval()
    for parameter in model.parameters():
        parameter.data += 0.4 * torch.randn_like(parameter)
    source = save(tmp_path / "model", model, words(40))
    expected, found = (pipeline("text-generation", model=str(path)) for path in (source, lowered(source)))
    for settings in ({"batch_size": 3}, {"num_beams": 3}):
        options = {"max_new_tokens": 8, "do_sample": False} | settings
        prompts = ["w5 w9 w3", "w8 w4 w4 w7 w30", "w3"]
        assert found(prompts, **options) == expected(prompts, **options), settings


@slow
@torch.no_grad()
def test_a_classifier(tmp_path):
    case = plain(ARCHITECTURES["bert"], methods.MagnitudePruning(sparsity=0.75), task="sequence-classification")
    source = save(tmp_path / "model", build(case))
    one, other = (AutoModelForSequenceClassification.from_pretrained(path) for path in (source, lowered(source)))
    ids = torch.randint(3, 30, (6, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(other(input_ids=ids).logits, one(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
