"""Every code block of every page works: Python runs, commands are what the program takes, YAML is a recipe."""

import re
import shutil

import huggingface_hub.constants
import pytest
from support import ROOT
from support.pages import blocks_of, check_page
from support.recipes import TINY, write_recipe
from transformers import BertConfig, BertForSequenceClassification, MarianConfig, MarianMTModel

from hf_freeze import data
from hf_freeze.experiments.recipes.expand import expand
from hf_freeze.experiments.recipes.load import load_recipe
from hf_freeze.experiments.runs.execute import execute

PAGES = {
    str(page.relative_to(ROOT)): page
    for pattern in ("*.md", "docs/**/*.md", "recipes/**/*.md", "model_cards/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    if "```" in page.read_text(encoding="utf-8")
}
TRANSLATOR = re.compile(r"Helsinki-NLP/[\w-]+")
CLASSIFIER = re.compile(r"bert-base-uncased")
RUN = re.compile(r"runs/(?:[\w-]+/)row-[\w.-]+-seed-\d+")  # a folder that a grid wrote
PUBLISHED = re.compile(r"(?<=model=\")me/[\w-]+")  # its model, on the Hub


def tokenizer_of(kind):
    corpus = data.builtin_corpus(train=200, dev=1, test=1)["train"]
    return data.train_tokenizer([*corpus["source"], *corpus["target"]], 600, kind=kind)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """In the place of a Marian model of the Hub: its layers, and sizes that the README's settings fit."""
    folder = tmp_path_factory.mktemp("translator")
    tokenizer = tokenizer_of("bpe")
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=144,
        encoder_ffn_dim=544,
        decoder_ffn_dim=544,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=4,
        max_position_embeddings=64,
        max_length=20,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    MarianMTModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = tokenizer_of("wordpiece")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("grid")
    rows = {"3": {"label": "FFN random", "methods": [{"method": "freeze", "ffn": "random"}]}}
    recipe = load_recipe(write_recipe(folder / "recipe.yaml", TINY | {"rows": rows}))
    execute(expand(recipe)[0], folder / "row-3-seed-1")
    return folder / "row-3-seed-1"


@pytest.fixture
def place(request, tmp_path, monkeypatch):
    """place(text) puts into the working directory what the text names: folders of the repository, and small models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_OFFLINE", True
    )  # what is not put here must not be looked for
    for name in ("recipes", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)

    def put(text):
        for pattern, fixture, inside in (
            (TRANSLATOR, "translator", ""),
            (CLASSIFIER, "classifier", ""),
            (RUN, "run", ""),
            (PUBLISHED, "run", "model"),
        ):
            for name in sorted(set(pattern.findall(text))):
                shutil.copytree(request.getfixturevalue(fixture) / inside, tmp_path / name)
        return tmp_path

    return put


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_work(name, place):
    blocks = blocks_of(PAGES[name])
    check_page(blocks, place("".join(block.code for block in blocks)))
