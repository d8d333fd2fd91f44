"""The parameter table of the small translators (METHODS.md, 6), and the recipe that walks through it."""

import json
import shutil

import pytest
import torch
from support import ROOT
from support.processes import printed_by
from transformers import MarianConfig

from hf_freeze import make_variant
from hf_freeze.architectures.base import canonical_parameters
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.tasks.translation import load_data
from hf_freeze.methods import AdaptiveEmbedding, FactorizedEmbedding, LayerSharing
from hf_freeze.methods.registry import method_from_dict

RECIPES = ROOT / "recipes" / "small_translator"
BIG = {"vocab_size": 40000, "d_model": 1024, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "encoder_layers": 6,
       "decoder_layers": 6, "encoder_attention_heads": 16, "decoder_attention_heads": 16}  # fmt: skip
LS, E256 = LayerSharing(), FactorizedEmbedding(rank=256)
DEEP = LayerSharing(depth={"encoder": 12, "decoder": 3})
OF_LS = 2 * (40_000 * 256 + 256 * 1024)  # tables and projections at E = 256
# row -> millions of matrix parameters, methods, other settings
ROWS = {
    "Transformer-big": (258.08, [], {}),
    "shared layers, E = 128": (39.86, [LS, FactorizedEmbedding(rank=128)], {}),
    "shared layers, E = 256": (50.36, [LS, E256], {}),
    "one table": (40.12, [LS, FactorizedEmbedding(rank=256, share=True)], {}),
    "6,000 types": (32.96, [LS, E256], {"vocab_size": 6000}),
    "FFN 2048": (41.98, [LS, E256], {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}),
    "12 + 3 layers": (50.36, [DEEP, E256], {}),
    "tables of three widths": (52.59, [LS, AdaptiveEmbedding(cutoffs=[5000, 20000], output="dense")], {}),
    "12 + 6 layers of 768": (
        40.53,
        [LayerSharing(depth={"encoder": 12}), E256],
        {"d_model": 768, "encoder_attention_heads": 12, "decoder_attention_heads": 12},
    ),
}


def on_meta(chosen, settings):
    fields = BIG | settings
    config = MarianConfig(
        **fields, decoder_vocab_size=fields["vocab_size"], share_encoder_decoder_embeddings=False, pad_token_id=0
    )
    with torch.device("meta"):
        return make_variant(config, chosen, task="seq2seq-lm")


@pytest.mark.parametrize("row", ROWS)
def test_parameters_of_the_table(row):
    """The table counts matrices; biases and norms, which it leaves out, are all that has one dimension."""
    millions, chosen, settings = ROWS[row]
    model = on_meta(chosen, settings)
    counted = [p for name, p in canonical_parameters(model) if model._component(name) != "constant"]
    assert sum(p.numel() for p in counted if p.ndim == 2) / 1e6 == pytest.approx(millions, rel=1e-3)
    d, f = model.config.d_model, model.config.encoder_ffn_dim
    layers = 1 if chosen else model.config.encoder_layers  # of each stack
    of_attentions, of_ffns, of_norms = 3 * 4 * d, 2 * (f + d), 2 * d * (2 + 3)
    assert sum(p.numel() for p in counted if p.ndim != 2) == layers * (of_attentions + of_ffns + of_norms)


@pytest.mark.parametrize("preset", ["demo", "tiny", "big"])
def test_every_row_of_the_recipe_can_be_made(preset):
    """Where the recipe has the sizes of the table, its rows have its numbers of parameters."""
    recipe = load_recipe(RECIPES / "recipe.yaml", [f"preset={preset}"])
    found = {}
    for run in expand(recipe.changed(seeds=[1])):
        vocabulary = run.tokenizer.vocab_size
        config = MarianConfig(
            **run.backbone.config, vocab_size=vocabulary, decoder_vocab_size=vocabulary, pad_token_id=0
        )
        with torch.device("meta"):
            model = make_variant(config, [method_from_dict(data) for data in run.methods], task="seq2seq-lm")
        counted = [p for name, p in canonical_parameters(model) if model._component(name) != "constant"]
        found[run.row] = sum(p.numel() for p in counted if p.ndim > 1) / 1e6
    assert found.pop("0") < found["two-tables"]
    assert all(found.pop(row) < found["two-tables"] for row in ("layers", "tables"))
    define = found.pop("define")
    assert define < found["two-tables"]
    assert all(found[row] < found["two-tables"] / 1.5 for row in found if row not in ("two-tables", "tt-random"))
    if preset == "big":
        expected = {
            "two-tables": 258.08,
            "ls-8": 39.86,
            "ls": 50.36,
            "ls-share": 40.12,
            "ls-vocabulary": 32.96,
            "ls-ffn": 41.98,
        }
        expected |= {"ls-adaptive": 52.59}
        assert {row: found[row] for row in expected} == pytest.approx(expected, rel=1e-3)
        assert found["ls-deep"] == pytest.approx(50.36, rel=1e-3)
        assert found["ls-narrow"] == pytest.approx(40.53, rel=1e-3)
        assert round(found["ls-hierarchical"]) == 30  # all that is printed of it
        of_groups = 128 * 256 // 4 + (128 + 256) * 384 // 2 + (128 + 384) * 512  # 4, 2 and 1 of them
        units = 2 * (of_groups + 512 * 1024)
        tables, projection = 2 * 40_000 * 128, 1024 * 128
        assert found["ls-define"] - found["ls"] == pytest.approx((tables + units + projection - OF_LS) / 1e6)
        of_layers = 12 * 1024**2 + 4 * 1024 * 4096  # of one encoder and one decoder layer
        assert define - found["ls-define"] == pytest.approx(5 * of_layers / 1e6)


@pytest.mark.parametrize("name", ["multi30k", "tatoeba"])
def test_the_recipes_of_real_text_have_the_same_rows(name):
    real = load_recipe(RECIPES / f"{name}.yaml", ["data.root=/x"])
    builtin = load_recipe(RECIPES / "recipe.yaml", ["preset=tiny"])
    assert real.rows == builtin.rows


def test_a_copied_directory_translates_in_a_new_process(tmp_path):
    """The model of a row holds its tokenizer and how to generate; nothing else of the run is needed."""
    changes = [
        "only=['two-tables', 'small-tt']",
        "data.limit=60",
        "training.epochs=1",
        "data.builtin.dev=10",
        "data.builtin.test=8",
    ]
    run_grid(load_recipe(RECIPES / "recipe.yaml", changes), tmp_path / "runs")
    folders = {row: tmp_path / "runs" / f"row-{row}-seed-1" for row in ("two-tables", "small-tt")}
    sizes = {row: (folder / "model" / "model.safetensors").stat().st_size for row, folder in folders.items()}
    assert sizes["small-tt"] < sizes["two-tables"] / 4.5
    shutil.copytree(folders["small-tt"] / "model", tmp_path / "copy")
    split = load_data(Data(**json.loads((folders["small-tt"] / "run.json").read_text(encoding="utf-8"))["data"]))[
        "test"
    ]
    sentences = split["source"][:3]
    program = (
        "import json, sys, hf_freeze; from transformers import pipeline;"
        "made = pipeline('translation', model=sys.argv[1])(json.loads(sys.argv[2]), max_new_tokens=5);"
        "print(json.dumps([one['translation_text'] for one in made]))"
    )
    printed = printed_by(program, tmp_path / "copy", json.dumps(sentences), folder=tmp_path)
    recorded = (folders["small-tt"] / "translations.txt").read_text(encoding="utf-8").splitlines()
    for text, full in zip(json.loads(printed.splitlines()[-1]), recorded, strict=False):
        assert text
        assert full.startswith(text)
