"""Variants in `pipeline()`: the same text as the native model that `merge()` makes, in a new process too."""

import json

import pytest
import torch
from support.processes import printed_by
from support.text import fast_tokenizer, marian_tokenizer
from test_pipelines import TEXTS, marian_model
from transformers import BertConfig, BertTokenizer, MarianTokenizer, pipeline

from hf_freeze import make_variant, methods

FREEZE = methods.Freeze(embeddings="random", ffn="random", seed=3)


@pytest.fixture(params=[marian_tokenizer, fast_tokenizer], ids=["MarianTokenizer", "fast"])
def translator(request, tmp_path):
    """(directory, the variant there, its tokenizer)."""
    tokenizer = request.param(tmp_path)
    native = marian_model(tokenizer)
    variant = make_variant(native, [FREEZE]).eval()
    variant.save_pretrained(tmp_path)
    return tmp_path, variant, tokenizer


@pytest.mark.parametrize("task", ["translation", "translation_de_to_en"])
def test_a_variant_translates_as_its_merged_model(translator, task):
    directory, variant, tokenizer = translator
    loaded = pipeline(task, model=str(directory))
    assert type(loaded.model) is type(variant)
    assert isinstance(loaded.tokenizer, MarianTokenizer) == isinstance(tokenizer, MarianTokenizer)
    texts = [result["translation_text"] for result in loaded(TEXTS, batch_size=2)]
    merged = pipeline(task, model=variant.merge().eval(), tokenizer=tokenizer)
    assert texts == [result["translation_text"] for result in merged(TEXTS)]
    assert len(set(texts)) > 1  # it depends on its input
    plain = pipeline(task, model=marian_model(tokenizer), tokenizer=tokenizer)
    assert texts != [result["translation_text"] for result in plain(TEXTS)]  # the random parts are in use


def test_a_new_process_translates_the_same(translator):
    directory, variant, tokenizer = translator
    here = pipeline("translation", model=variant, tokenizer=tokenizer)(TEXTS)
    program = (
        "import json, sys, torch; torch.manual_seed(99); import hf_freeze; from transformers import pipeline;"
        "print(json.dumps(pipeline('translation', model=sys.argv[1])(json.loads(sys.argv[2]))))"
    )
    assert json.loads(printed_by(program, directory, json.dumps(TEXTS)).splitlines()[-1]) == here


@pytest.fixture
def bert_tokenizer(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog", "cat", "sleeps", "runs", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path)
    return tokenizer


@pytest.mark.parametrize(
    ("name", "task", "text"),
    [
        ("fill-mask", "masked-lm", "the [MASK] sleeps ."),
        ("text-classification", "sequence-classification", "the dog runs ."),
        ("token-classification", "token-classification", "the cat sleeps ."),
        ("feature-extraction", "feature-extraction", "the cat ."),
    ],
)
def test_transformers_own_pipelines_take_variants(bert_tokenizer, tmp_path, caplog, name, task, text):
    config = BertConfig(
        vocab_size=len(bert_tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    torch.manual_seed(1)
    variant = make_variant(config, [FREEZE], task=task, init="marian").eval()
    variant.save_pretrained(tmp_path)
    loaded = pipeline(name, model=str(tmp_path))(text)
    assert loaded == pipeline(name, model=variant.merge().eval(), tokenizer=bert_tokenizer)(text)
    assert "not supported" not in caplog.text
