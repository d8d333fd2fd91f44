"""The recipe of light blocks compares rows of the sizes that it says."""

import pytest
import torch
from support import ROOT
from support.cases import ALL
from transformers import AutoConfig

from hf_freeze import count_parameters, make_variant, multiply_adds
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.methods.registry import method_from_dict

FOLDER = ROOT / "recipes" / "light_blocks"


def model(run):
    vocabulary, backbone = run.tokenizer.vocab_size, run.backbone
    ids = {"vocab_size": vocabulary, "pad_token_id": 0, "eos_token_id": 1}
    task = "causal-lm"
    if backbone.model_type == "marian":
        task = "seq2seq-lm"
        ids |= {"decoder_vocab_size": vocabulary, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
    config = AutoConfig.for_model(backbone.model_type, **ids, **backbone.config)
    with torch.device("meta"):
        return make_variant(config, list(map(method_from_dict, run.methods)), task=task, init="marian")


@pytest.mark.parametrize("preset", ["demo", "tiny", "base"] if ALL else ["tiny"])
def test_rows_of_translators_have_the_size_of_the_plain_one(preset):
    models = {run.row: model(run) for run in expand(load_recipe(FOLDER / "recipe.yaml", [f"preset={preset}"]))}
    sizes = {row: count_parameters(made).total for row, made in models.items()}
    assert list(sizes) == [
        *("0", "lite", "lite-fixed", "flat", "conv", "delight", "delight-uniform"),
        *("half", "half-lite", "half-delight", "int8", "int4"),
    ]
    assert 0.45 < sizes["half"] / sizes["0"] < 0.55
    for row, size in sizes.items():
        assert abs(size / sizes["half" if row.startswith("half") else "0"] - 1) < 0.12, row
        if (
            ALL and preset != "base"
        ):  # as many multiply-adds; where a table is small, the tokens' positions in the scores show
            assert 1 < multiply_adds(models[row], length=32).forward / size < 1.1, row


@pytest.mark.parametrize("preset", ["lm-demo", "lm-tiny"])
def test_rows_of_language_models_have_the_size_of_the_plain_one(preset):
    sizes = {
        run.row: count_parameters(model(run)).total
        for run in expand(load_recipe(FOLDER / "lm.yaml", [f"preset={preset}"]))
    }
    assert list(sizes) == ["0", "lite", "delight", "r1", "r2", "r4", "r5", "r16", "int8", "int4"]
    for row in ("lite", "delight"):
        assert abs(sizes[row] / sizes["0"] - 1) < 0.06, row
    assert sizes["r1"] < sizes["r4"] < sizes["r2"] < sizes["r5"] == sizes["r16"]


# Millions of parameters of the released code without positions, with adaptive embeddings of 11.80M (cut-offs 20k and 60k of
# 267,744 words, 128 columns, factor 2) instead of the table, and group layers and dense layers on the way of a token.
PREPRINT = {
    "r1": (13.4, 43),
    "r2": (15.2, 115),
    "r3": (18.3, 115),
    "r4": (15.4, 92),
    "r5": (18.8, 158),
    "r7": (15.1, 102),
    "r9": (17.8, 172),
    "r11": (21.2, 158),
    "r12": (24.2, 158),
    "r14": (25.0, 158),
    "r15": (35.1, 158),
    "r16": (18.8, None),  # printed: the size of R5, whose blocks it has in the opposite order
}


def test_rows_of_the_preprint_have_its_sizes_and_depths():
    runs = expand(load_recipe(FOLDER / "preprint.yaml", ["preset=lm-wikitext103"]))
    assert [run.row for run in runs] == list(PREPRINT)
    for run in runs if ALL else [run for run in runs if run.row in ("r3", "r7", "r9", "r14", "r16")]:
        millions, depth = PREPRINT[run.row]
        made, hidden = model(run), run.backbone.config["n_embd"]
        size = count_parameters(made).total - 32000 * 128 - 513 * hidden
        assert size / 1e6 + 11.80 == pytest.approx(millions, abs=0.06), run.row
        (method,) = made.methods
        blocks = [layers for layers, _ in method.blocks()]
        if depth is not None:
            assert sum(blocks) + 5 * len(blocks) + method.n_min + 3 == depth, run.row


@pytest.mark.parametrize("preset", ["lm-demo", "lm-tiny"])
def test_rows_of_the_preprint_scaled_down(preset):
    runs = expand(load_recipe(FOLDER / "preprint.yaml", [f"preset={preset}"]))
    assert [run.row for run in runs] == list(PREPRINT)
    chosen = [run for run in runs if run.row in ("r1", "r4", "r5", "r14", "r15", "r16")]
    *ascending, reverse = [count_parameters(model(run)).total for run in chosen]
    assert ascending == sorted(ascending)
    assert reverse == ascending[2]


def test_rows_of_the_preprint_scaled_down_are_those_of_the_recipe_of_language_models():
    ours, theirs = (
        {run.row: (run.methods, run.backbone) for run in expand(load_recipe(FOLDER / f"{name}.yaml"))}
        for name in ("preprint_wikitext2", "wikitext2")
    )
    for row in ("r1", "r2", "r4", "r5", "r16"):
        assert ours[row] == theirs[row], row
