"""The recipe of light blocks compares rows of the sizes that it says."""

import pytest
import torch
from support import ROOT
from support.cases import ALL
from transformers import AutoConfig

from hf_freeze import count_parameters, make_variant, multiply_adds
from hf_freeze.experiments.recipes.expand import expand
from hf_freeze.experiments.recipes.load import load_recipe
from hf_freeze.methods.registry import method_from_dict

FOLDER = ROOT / "recipes" / "light_blocks"


def model(run):
    vocabulary, backbone = run["tokenizer"]["vocab_size"], run["backbone"]
    ids = {"vocab_size": vocabulary, "pad_token_id": 0, "eos_token_id": 1}
    task = "causal-lm"
    if backbone["model_type"] == "marian":
        task = "seq2seq-lm"
        ids |= {"decoder_vocab_size": vocabulary, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
    config = AutoConfig.for_model(backbone["model_type"], **ids, **backbone["config"])
    with torch.device("meta"):
        return make_variant(config, list(map(method_from_dict, run["methods"])), task=task, init="marian")


@pytest.mark.parametrize("preset", ["demo", "tiny", "base"])
def test_rows_of_translators_have_the_size_of_the_plain_one(preset):
    models = {run["row"]: model(run) for run in expand(load_recipe(FOLDER / "recipe.yaml", [f"preset={preset}"]))}
    sizes = {row: count_parameters(made).total for row, made in models.items()}
    assert list(sizes) == [
        *("0", "lite", "lite-fixed", "flat", "conv", "delight", "delight-uniform"),
        *("half", "half-lite", "half-delight"),
    ]
    assert 0.45 < sizes["half"] / sizes["0"] < 0.55
    for row, size in sizes.items():
        assert abs(size / sizes["half" if row.startswith("half") else "0"] - 1) < 0.12, row
        if preset == "demo" or (
            ALL and preset == "tiny"
        ):  # as many multiply-adds; where a table is small, the tokens' positions in the scores show
            assert 1 < multiply_adds(models[row], length=32).forward / size < 1.1, row


@pytest.mark.parametrize("preset", ["lm-demo", "lm-tiny"])
def test_rows_of_language_models_have_the_size_of_the_plain_one(preset):
    sizes = {
        run["row"]: count_parameters(model(run)).total
        for run in expand(load_recipe(FOLDER / "lm.yaml", [f"preset={preset}"]))
    }
    assert list(sizes) == ["0", "lite", "delight", "r1", "r2", "r4", "r5", "r16"]
    for row in ("lite", "delight"):
        assert abs(sizes[row] / sizes["0"] - 1) < 0.06, row
    assert sizes["r1"] < sizes["r4"] < sizes["r2"] < sizes["r5"] == sizes["r16"]
