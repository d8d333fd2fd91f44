"""Rows that stand for published ones have their sizes: shares of trained parameters, and millions of parameters, as printed."""

import pytest
import torch
from support import ROOT
from transformers import AutoConfig

from hf_freeze import count_parameters, make_variant
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.methods.registry import method_from_dict

RECIPES = ROOT / "recipes"


def runs_of(name, *settings):
    return {run.row: run for run in expand(load_recipe(RECIPES / name, list(settings)))}


def count(run, task="seq2seq-lm"):
    vocabulary = run.tokenizer.vocab_size
    ids = {"vocab_size": vocabulary, "pad_token_id": 0, "eos_token_id": 1}
    if task == "seq2seq-lm":
        ids["decoder_vocab_size"] = vocabulary
    config = AutoConfig.for_model(run.backbone.model_type, **ids, **run.backbone.config)
    with torch.device("meta"):
        return count_parameters(make_variant(config, [method_from_dict(data) for data in run.methods], task=task))


# Bogoychev (2021): shares of the big model, truncated to two digits; of the one with FFNs of 1,024, rounded. The shares of the
# narrow rows 2 and 4 are printed the wrong way round (.55 and .45): attention alone is more than embeddings and FFNs.
NARROW = {"3": 0.528, "n0": 1.0, "n1": 0.73, "n2": 0.45, "n3": 0.82, "n4": 0.55, "n5": 0.18, "few-heads-4": 0.06}


def test_narrow_rows_train_the_shares_that_the_paper_prints():
    counts = {row: count(run) for row, run in runs_of("freeze_ablation/narrow.yaml", "preset=big").items()}
    assert counts["n0"].total / 1e6 == pytest.approx(137.7, abs=0.05)
    shares = {row: counts[row].trainable / counts[row].total for row in NARROW}
    assert shares == pytest.approx(NARROW, abs=0.006)


@pytest.mark.parametrize("preset", ["demo", "tiny", "base", "big"])
def test_narrow_rows_have_ffns_of_a_quarter(preset):
    runs = runs_of("freeze_ablation/narrow.yaml", f"preset={preset}")
    widths = {row: run.backbone.config["encoder_ffn_dim"] for row, run in runs.items()}
    wide = widths.pop("0")
    assert {width for row, width in widths.items() if row.startswith("n")} == {wide // 4}
    assert {width for row, width in widths.items() if not row.startswith("n")} == {wide}
    for row in "12345":
        assert runs[f"n{row}"].methods == runs_of("freeze_ablation/recipe.yaml", f"preset={preset}")[row].methods


def test_small_frozen_parts_of_multi30k_are_a_quarter():
    counts = {row: count(run) for row, run in runs_of("freeze_ablation/small_parts_multi30k.yaml").items()}
    for part, component in (("ffn", "ffn"), ("att", "attention")):
        small, whole = (counts[row].by_component[component].total for row in (f"{part}-small", part))
        assert small / whole == pytest.approx(0.25, abs=0.01), part
    table, small_table = 4000 * 128, 4000 * 32 + 32 * 128
    assert counts["emb"].total - counts["emb-small"].total == table - small_table


# Lan et al. (2020), table 1, as the numbers add up: without a pooler, and without the head that this model has
ALBERT = {"full": 108.49, "e256": 93.06, "e128": 89.06, "e64": 87.06}
ALBERT |= {"full-shared": 30.52, "e256-shared": 15.10, "e128-shared": 11.09, "e64-shared": 9.09}


def test_the_rows_of_albert_have_its_sizes():
    runs = runs_of("factorized_embeddings/albert.yaml")
    assert list(runs) == list(ALBERT)
    for row, run in runs.items():
        pooler = 768**2 + 768
        assert (count(run, "feature-extraction").total - pooler) / 1e6 == pytest.approx(ALBERT[row], abs=0.006), row


@pytest.mark.parametrize("name", ["squad", "mnli", "race"])
def test_the_tasks_of_albert_start_from_its_rows(name):
    for smoke in (False, True):
        before = load_recipe(RECIPES / "factorized_embeddings/albert.yaml", smoke=smoke)
        after = load_recipe(RECIPES / f"factorized_embeddings/{name}.yaml", smoke=smoke)
        assert after.start == f"runs/{before.name}" + "-smoke" * smoke
        assert list(after.rows) == list(before.rows)
        assert not any(row.methods for row in after.rows.values())


def test_ffn_rows_of_iwslt_have_the_shape_of_the_paper():
    """Khakhulin et al.: an FFN of 2,099,712 parameters becomes 832 as a tensor train of rank 2, 2,224 in Tucker's form."""
    counts = {row: count(run).total for row, run in runs_of("ffn_compression/iwslt14.yaml").items()}
    biases = 2048 + 512  # which the paper's factors do not have
    for row, layers in {"tt": 12, "tt-5of6": 10, "tt-3of6": 6, "tt-1of6": 2}.items():
        assert counts["0"] - counts[row] == layers * (2_099_712 - 832 - biases), row
    assert counts["0"] - counts["tucker"] == 12 * (2_099_712 - 2224 - biases)


def test_stages_of_training_add_up_to_the_epochs_that_they_name():
    runs = runs_of("head_pruning/epochs.yaml")
    epochs = {row: run.training.epochs for row, run in runs.items()}
    total = 0
    for row in ("e1", "e2", "e4", "e8", "e12"):
        total += epochs[row]
        assert row == f"e{total:g}"
        assert runs[row].head_scores == ["importance"]
        for share in (20, 50):
            cut = runs[f"{row}-{share}"]
            assert (cut.start.row, cut.training.epochs, cut.heads.fraction) == (row, 0, share / 100)
