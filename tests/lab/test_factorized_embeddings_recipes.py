"""The recipes of recipes/factorized_embeddings: rows of every preset, and that those of two tasks fit each other."""

import pytest
import torch
from support import ROOT
from transformers import AutoConfig

from hf_freeze import count_parameters, make_variant
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.tasks.registry import task_of
from hf_freeze.methods.registry import method_from_dict

RECIPES = ROOT / "recipes" / "factorized_embeddings"
PRESETS = {"bert": ("demo", "small"), "marian": ("demo", "tiny", "base")}
CONTROLS = {"int8", "int4"}  # of translation: the full table, rounded


def test_every_recipe_loads_and_its_quick_version_too():
    found = sorted(RECIPES.glob("*.yaml"))
    of_albert = {"albert", "squad", "mnli", "race"}
    assert {path.stem for path in found} == {"bert", "wikitext2", "tenses", "sst2", "marian", "multi30k"} | of_albert
    for path in found:
        quick = load_recipe(path, smoke=True)
        assert quick.data.limit == 200
        assert quick.training.epochs == 1
        assert next(iter(quick.rows)) == "full"
        assert len(expand(quick)) == 10 + len(CONTROLS) * (quick.task == "translation")


@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name in PRESETS for preset in PRESETS[name]])
def test_rows_are_named_after_their_width(name, preset):
    """E is the hidden size, a half, a fourth and an eighth of it; a smaller E has fewer parameters, shared layers too."""
    total, widths = {}, {}
    for run in expand(load_recipe(RECIPES / f"{name}.yaml", [f"preset={preset}"])):
        if run.row in CONTROLS:
            continue
        fields, vocabulary = run.backbone.config, run.tokenizer.vocab_size
        more = {"decoder_vocab_size": vocabulary, "pad_token_id": 0} if name == "marian" else {}
        config = AutoConfig.for_model(run.backbone.model_type, vocab_size=vocabulary, **more, **fields)
        chosen = [method_from_dict(data) for data in run.methods]
        with torch.device("meta"):
            model = make_variant(config, chosen, task=task_of(run.task).head)
        rank = [method.rank for method in chosen if method.name == "factorized_embedding"]
        width, shared = run.row.removesuffix("-shared"), run.row.endswith("-shared")
        assert (width == "full" and not rank) or [width] == [f"e{rank[0]}"]
        assert shared == any(method.name == "layer_sharing" for method in chosen)
        assert run.label == ("full table" if not rank else f"E = {rank[0]}") + ", layers shared" * shared
        total[run.row] = count_parameters(model).total
        if not shared:
            widths[run.row] = rank[0] if rank else config.hidden_size
        if name == "bert":
            assert run.training.block_size <= config.max_position_embeddings
            assert run.training.max_tokens % run.training.block_size == 0
    full, *ranks = widths.values()
    assert ranks == [full, full // 2, full // 4, full // 8]
    for tail in ("", "-shared"):
        sizes = [total[row + tail] for row in list(widths)[1:]]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[1] < total["full" + tail]
    assert all(total[row + "-shared"] < total[row] for row in widths)


@pytest.mark.parametrize(("start", "then"), [("bert", "tenses"), ("wikitext2", "sst2")])
@pytest.mark.parametrize("smoke", [False, True])
def test_classification_starts_from_rows_that_are_there(start, then, smoke):
    """By default, in the folder that `hf-freeze run` gives the other recipe."""
    one, other = (load_recipe(RECIPES / f"{name}.yaml", smoke=smoke) for name in (start, then))
    assert other.start == f"runs/{one.name}" + "-smoke" * smoke
    assert [(run.row, run.label) for run in expand(one)] == [(run.row, run.label) for run in expand(other)]
    assert not any(run.methods for run in expand(other)), "the model that a row starts from has them"


@pytest.mark.parametrize(
    ("real", "builtin", "preset"), [("wikitext2", "bert", "small"), ("multi30k", "marian", "tiny")]
)
def test_the_recipes_of_real_text_have_the_same_rows(real, builtin, preset):
    found = load_recipe(RECIPES / f"{real}.yaml", ["data.root=/x"])
    expected = load_recipe(RECIPES / f"{builtin}.yaml", [f"preset={preset}"])
    for section in ("rows", "backbone", "training", "tokenizer"):
        assert getattr(found, section) == getattr(expected, section)
    assert found.data.builtin is None
