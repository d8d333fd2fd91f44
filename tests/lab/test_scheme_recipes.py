"""Recipes of random schemes, embeddings, Theseus' modules, DeFINE's sweep and shallow decoders: their rows are the models that
they name, and what they compare is equal otherwise."""

import itertools

import pytest
import torch
from support import ROOT
from transformers import AutoConfig

from hf_freeze import count_parameters, make_variant
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.methods.registry import method_from_dict

RECIPES = ROOT / "recipes"
TRANSLATORS = ("demo", "tiny", "base")


def runs_of(name, preset):
    return {run.row: run for run in expand(load_recipe(RECIPES / name, [f"preset={preset}"]))}


def count(run):
    vocabulary = run.tokenizer.vocab_size
    ids = {"vocab_size": vocabulary, "decoder_vocab_size": vocabulary, "pad_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model("marian", **ids, **run.backbone.config)
    chosen = [method_from_dict(data) for data in run.methods]
    with torch.device("meta"):
        return count_parameters(make_variant(config, chosen, task="seq2seq-lm", init="marian"))


@pytest.mark.parametrize("preset", TRANSLATORS)
def test_schemes_differ_in_nothing_else_and_small_parts_in_their_size(preset):
    counts = {row: count(run) for row, run in runs_of("freeze_ablation/schemes.yaml", preset).items()}
    for part in ("ffn", "att", "emb"):
        alike = {row: found for row, found in counts.items() if row.split("-")[0] == part and not row.endswith("small")}
        assert len({(found.total, found.trainable, found.stored) for found in alike.values()}) == 1, part
        small = counts[f"{part}-small"]
        assert small.trainable == counts[part].trainable
        assert small.total < counts[part].total
    assert len({*counts}) == 21


def test_values_of_few_bits_differ_in_nothing_else():
    runs = runs_of("freeze_ablation/few_bits.yaml", "demo")
    assert runs.keys() == {"0"} | {f"{row}{scheme}" for row in "123456" for scheme in ("", "-int8", "-sign")}
    for name, run in runs.items():
        row, _, scheme = name.partition("-")
        assert [method.pop("scheme", "") for method in run.methods] == [scheme] * (row != "0"), name
        assert run.methods == runs[row].methods, name


def test_embeddings_differ_where_the_rows_say():
    runs = runs_of("freeze_ablation/embeddings.yaml", "demo")
    settings = {row: run.methods[0] for row, run in runs.items() if row != "0"}
    assert {row: one.pop("embeddings", "trainable") for row, one in settings.items()} == {
        "pretrained-frozen": "frozen",
        "pretrained-trained": "trainable",
        "random-frozen": "random",
        "random-trained": "redrawn",
    }
    assert len({str(sorted(one.items())) for one in settings.values()}) == 1
    assert all(runs[row].start.row == "0" for row in settings)


def test_modules_are_the_same_at_once_and_one_by_one():
    runs = runs_of("theseus/modules.yaml", "demo")
    for kind in ("low-rank", "fixed", "lite"):
        first, *rest = runs[f"{kind}-theseus"].methods
        assert first["method"] == "theseus"
        assert rest == runs[kind].methods


@pytest.mark.parametrize("preset", TRANSLATORS)
def test_the_sweep_of_define_has_the_sizes_that_its_rows_name(preset):
    runs = runs_of("light_blocks/define.yaml", preset)
    sizes = {row: count(run).total for row, run in runs.items()}
    for row, run in runs.items():
        if row.startswith("N"):
            (method,) = run.methods
            assert row == f"N{method['depth']}-n{method['map_dim']}-k{method['width']}"
            assert run.label == row.replace("N", "N = ").replace("-n", ", n = ").replace("-k", ", k = ")
    (dextra,) = runs["dextra"].methods
    assert runs["dextra"].label.endswith(f"N = {dextra['depth']}, n = {dextra['map_dim']}, k = {2 * dextra['map_dim']}")
    assert dextra["width"] == 2 * dextra["map_dim"]
    settings = {row: run.methods[0] for row, run in runs.items() if row.startswith("N")}
    for row, other in itertools.permutations(settings, 2):
        differing = [key for key, value in settings[row].items() if settings[other][key] != value]
        if len(differing) == 1 and settings[row][differing[0]] < settings[other][differing[0]]:
            assert sizes[row] < sizes[other], (row, other)


@pytest.mark.parametrize("preset", ["demo", "tiny"])
def test_one_decoder_layer_behind_one_to_six_encoder_layers_and_as_many_as_encoder_layers(preset):
    runs = runs_of("fixed_attention/layers.yaml", preset)
    depths, kinds = [*"123456", *(f"{n}-{n}" for n in "23456")], ["8L", "7F", "7F-word", "8F", "1L"]
    assert list(runs) == [f"{depth}-{kind}" for depth in depths for kind in kinds]
    for row, run in runs.items():
        depth, kind = row.rsplit("-", 2 if row.endswith("word") else 1)[0], row.split("-")[-1]
        assert run.backbone.config["encoder_layers"] == int(row[0])
        decoder = depth.split("-")[1] if "-" in depth else "1"
        assert run.backbone.config["decoder_layers"] == int(decoder)
        assert run.label.startswith(f"{row[0]} + {decoder} layers, ")
        if kind == "1L":
            assert run.methods[0]["layers"] == {"encoder": list(range(int(row[0])))}
    assert count(runs["3-8F"]).total < count(runs["3-7F"]).total < count(runs["3-8L"]).total < count(runs["4-8F"]).total
    assert count(runs["3-1L"]).total < count(runs["3-8F"]).total
