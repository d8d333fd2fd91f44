"""Heads in grids: their scores, rows that start without some of them, pretrained backbones, words, and what the report shows."""

import json
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console
from support.recipes import CLASSIFICATION, MASKED, SHORT, write_recipe
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import hf_freeze
from hf_freeze import analysis
from hf_freeze.analysis import significance
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.rows import Heads
from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.report import Series
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.runs import measured_heads as heads
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.tasks.translation import encode, load_data
from hf_freeze.run_folder import HEAD_SCORES, HEAD_TESTS, read_head_scores, read_head_tests

ALL = {"label": "all", "methods": [], "head_scores": ["importance", "ablation", "one_head"]}


def cut(by, fraction, **more):
    return {
        "label": f"by {by}, {fraction:.0%}",
        "methods": [],
        "start": "0",
        "training": {"epochs": 0},
        "heads": {"by": by, "fraction": fraction} | more,
    }


ROWS = {
    "0": ALL,
    "importance": cut("importance", 0.5),
    "importance-less": cut("importance", 0.25),
    "ablation": cut("ablation", 0.5),
    "random": cut("random", 0.5),
    "random-more": cut("random", 0.75),
    "cross": cut("importance", 1.0, attentions=["decoder.cross"]),
    "tuned": cut("importance", 0.5) | {"training": {"epochs": 1}},
}
LEARNS = {  # something, so that heads differ
    "presets/small/backbone/config/encoder_layers": 2,
    "presets/small/training/epochs": 3,
    "data": {"builtin": {"seed": 0, "train": 200, "dev": 10, "test": 8}},
}


def quiet(recipe, out, **more):
    return run_grid(recipe, out, console=Console(quiet=True), **more)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    recipe = load_recipe(write_recipe(folder / "r.yaml", rows=ROWS, axis="heads.fraction", **LEARNS | SHORT))
    out = folder / "runs"
    quiet(recipe, out)
    return recipe, out


def removed(out, row):
    """Attention -> the heads that the model of this row has not."""
    config = json.loads((out / f"row-{row}-seed-1" / "model" / "config.json").read_text())
    return next((m["heads"] for m in config["methods"] if m["method"] == "head_pruning"), {})


def lowest(scores, count):
    ranked = sorted((value, name, head) for name, values in scores.items() for head, value in enumerate(values))
    return {(name, head) for _, name, head in ranked[:count]}


def as_set(found):
    return {(name, head) for name, numbers in found.items() for head in numbers}


# -- recipes ---------------------------------------------------------------------------------------------------------------------

BAD_ROWS = {
    "no start": ({"heads": {"by": "random", "fraction": 0.5}}, r"row '1' has 'heads' but no 'start'"),
    "no fraction": ({"start": "0", "heads": {"by": "random"}}, r"row '1': heads\.fraction is missing"),
    "field": (
        cut("random", 0.5, layers=[0]),
        r"row '1': unknown field heads\.layers; choose from \['attentions', 'by', 'fraction'\]",
    ),
    "order": (cut("size", 0.5), r"unknown heads.by='size'; choose from \['importance', 'ablation', 'random'\]"),
    "fraction": (cut("random", 1.5), r"heads\.fraction=1\.5 must be above 0 and at most 1"),
    "percent": (
        cut("random", 0.0) | {"heads": {"by": "random", "fraction": 50}},
        r"heads\.fraction=50 must be above 0 and at most 1",
    ),
    "attentions": (
        cut("random", 0.5, attentions="self"),
        r"heads\.attentions='self' is not a value that it takes: a list such as",
    ),
    "unmeasured": (cut("ablation", 0.5), r"heads.by='ablation' is not in the head_scores of row '0'"),
    "scores": ({"head_scores": ["size"]}, r"unknown head_scores\.0='size'; choose from \['importance', 'abl"),
    "scores type": ({"head_scores": "importance"}, r"head_scores must be a list, not 'importance'"),
    "pretrained": (
        {"backbone": {"pretrained": "x", "config": {}}},
        r"both 'backbone.pretrained' and 'backbone.config'",
    ),
    "continuations": (
        {"methods": [{"method": "fixed_attention", "patterns": [1], "unit": "word", "continuations": "words"}]},
        "continuations must be a list",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_refused(tmp_path, case):
    fields, message = BAD_ROWS[case]
    rows = {"0": ALL | {"head_scores": ["importance"]}, "1": {"label": "one", "methods": []} | fields}
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows))


PRETRAINED = {"presets/small/backbone": {"pretrained": "x"}}
BAD_PRETRAINED = {
    "tokenizer": ({}, "has both 'backbone.pretrained' and 'tokenizer'"),
    "config": ({"presets/small/tokenizer": ..., "presets/small/backbone/config": {}}, "and 'backbone.config'"),
    "type": (
        {"presets/small/tokenizer": ..., "presets/small/backbone/pretrained": 3},
        "backbone.pretrained must be a str, not 3",
    ),
    "nothing": (
        {"presets/small/tokenizer": ..., "presets/small/backbone": ...},
        r"'backbone' is missing; name a model with --set backbone\.pretrained=FOLDER\Z",
    ),
}


@pytest.mark.parametrize("case", BAD_PRETRAINED)
def test_bad_pretrained_backbones_are_refused(tmp_path, case):
    changes, message = BAD_PRETRAINED[case]
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path / "r.yaml", **PRETRAINED | changes))


def test_masking_is_of_masked_language_models(tmp_path):
    with pytest.raises(ValueError, match=r"training\.masking is for task 'masked-lm', not for 'translation'"):
        load_recipe(write_recipe(tmp_path / "r.yaml", **{"presets/small/training/masking": 0.4}))
    with pytest.raises(ValueError, match=r"training.masking=1\.5 must be above 0 and at most 1"):
        load_recipe(write_recipe(tmp_path / "r.yaml", **MASKED | {"presets/small/training/masking": 1.5}))


def test_unmeasured_scores_of_another_grid_are_refused(grid, tmp_path):
    """They are known only when they are read."""
    _, out = grid
    shutil.copytree(out / "row-0-seed-1", tmp_path / "row-0-seed-1")
    (tmp_path / "row-0-seed-1" / HEAD_SCORES).write_text('{"importance": {"encoder.0.self": [1, 2]}}')
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "row-0-seed-1" / "model")
    with pytest.raises(ValueError, match=r"heads.by='ablation': .* has no such scores, only \['importance'\]"):
        heads.pruning(Heads(by="ablation", fraction=0.5), tmp_path / "row-0-seed-1", model, 1)
    settings = {"by": "importance", "fraction": 0.5, "attentions": ["decoder.self"]}
    with pytest.raises(ValueError, match=r"heads.attentions names 'decoder.self'; choose from \['encoder.self'\]"):
        heads.pruning(Heads(**settings), tmp_path / "row-0-seed-1", model, 1)


# -- scores ----------------------------------------------------------------------------------------------------------------------


def test_importance_is_that_of_the_training_set(grid):
    recipe, out = grid
    folder = out / "row-0-seed-1"
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    encoded = encode(load_data(recipe.data)["train"], tokenizer)
    loader = torch.utils.data.DataLoader(
        encoded.with_format(None), batch_size=7, collate_fn=DataCollatorForSeq2Seq(tokenizer, model=model)
    )
    found = read_head_scores(folder)["importance"]
    for name, values in analysis.head_importance(model, loader).items():
        assert torch.tensor(found[name]) == pytest.approx(values, abs=1e-4)


def test_ablations_are_losses_of_the_score_on_dev(tmp_path):
    """Against a row whose head is really removed; of two heads, one alone is the other removed."""
    gone = {"methods": [{"method": "head_pruning", "heads": {"encoder.0.self": [1]}}], "training": {"epochs": 0}}
    rows = {"0": ALL, "without": {"label": "without", "start": "0"} | gone}
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", **MASKED | {"rows": rows}))
    whole, without = (record["metrics"]["dev_perplexity"] for record in quiet(recipe, tmp_path / "runs"))
    scores = read_head_scores(tmp_path / "runs" / "row-0-seed-1")
    assert abs(without - whole) > 1e-3, "nothing to measure"
    assert scores["ablation"]["encoder.0.self"][1] == pytest.approx(without - whole, rel=1e-3)
    assert scores["one_head"]["encoder.0.self"][0] == pytest.approx(without - whole, rel=1e-3)


def test_scores_of_a_classifier_and_of_a_masked_language_model(tmp_path):
    for name, task in (("classifier", CLASSIFICATION), ("masked", MASKED)):
        out, rows = tmp_path / name, {"0": ALL, "one": cut("ablation", 0.5)}
        quiet(load_recipe(write_recipe(tmp_path / f"{name}.yaml", rows=rows, **task)), out)
        scores = read_head_scores(out / "row-0-seed-1")
        assert list(scores) == ALL["head_scores"]
        assert as_set(removed(out, "one")) == lowest(scores["ablation"], 1)
        assert make_report([out], lambda _: None).measured.head_scores == scores


# -- rows without heads ----------------------------------------------------------------------------------------------------------


def test_the_lowest_heads_are_removed(grid):
    _, out = grid
    scores = read_head_scores(out / "row-0-seed-1")
    assert sum(map(len, scores["importance"].values())) == 8  # 2 + 1 + 1 attentions of two
    for row, by, count in (
        ("importance", "importance", 4),
        ("importance-less", "importance", 2),
        ("ablation", "ablation", 4),
    ):
        assert as_set(removed(out, row)) == lowest(scores[by], count)
    assert removed(out, "cross") == {"decoder.0.cross": [0, 1]}
    assert as_set(removed(out, "random")) < as_set(removed(out, "random-more"))
    assert removed(out, "tuned") == removed(out, "importance")


def test_a_row_of_no_epochs_is_the_model_without_the_heads(grid):
    _, out = grid
    model = AutoModelForSeq2SeqLM.from_pretrained(out / "row-0-seed-1" / "model")
    pruned = hf_freeze.make_variant(model, [hf_freeze.methods.HeadPruning(heads=removed(out, "importance"))])
    found = AutoModelForSeq2SeqLM.from_pretrained(out / "row-importance-seed-1" / "model").state_dict()
    assert found.keys() == pruned.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in pruned.state_dict().items())
    tuned = AutoModelForSeq2SeqLM.from_pretrained(out / "row-tuned-seed-1" / "model").state_dict()
    assert any(not torch.equal(found[name], value) for name, value in tuned.items())


def test_random_heads_differ_by_seed(grid):
    _, out = grid
    model = AutoModelForSeq2SeqLM.from_pretrained(out / "row-0-seed-1" / "model")
    draws = [heads.pruning(Heads(by="random", fraction=0.5), out, model, seed).heads for seed in range(6)]
    assert len({json.dumps(draw) for draw in draws}) > 1
    assert heads.pruning(Heads(by="random", fraction=0.5), out, model, 0).heads == draws[0]


def test_a_killed_measurement_goes_on(grid, tmp_path, monkeypatch):
    recipe, out = grid
    run = expand(recipe)[0]
    folder = run.folder(tmp_path)
    calls = []
    original = analysis.head_ablation

    def killed(model, *, evaluate, **more):
        def counted(each):
            calls.append(1)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return evaluate(each)

        return original(model, evaluate=counted, **more)

    monkeypatch.setattr(analysis, "head_ablation", killed)
    with pytest.raises(KeyboardInterrupt):
        execute(run, folder)
    assert not (folder / "metrics.json").exists()
    execute(run, folder)
    assert len(calls) == 5 + (9 - 4) + 9  # of the two ablations, eight heads and the whole model each
    expected = read_head_scores(out / "row-0-seed-1")
    for score, attentions in read_head_scores(folder).items():
        for name, values in attentions.items():
            assert values == pytest.approx(expected[score][name], abs=1e-3), score


# -- pretrained backbones, words -------------------------------------------------------------------------------------------------


def test_a_pretrained_backbone_comes_with_its_tokenizer(tmp_path):
    """Of another task: with a new head, from the seed; its body is as it was."""
    masked = load_recipe(write_recipe(tmp_path / "m.yaml", rows={"0": {"label": "all", "methods": []}}, **MASKED))
    quiet(masked, tmp_path / "masked")
    weights = tmp_path / "masked" / "row-0-seed-1" / "model"
    rows = {"0": {"label": "all", "methods": [], "training": {"epochs": 0}}, "half": cut("random", 0.5)}
    changes = {"presets/small/tokenizer": ..., "presets/small/backbone": {"pretrained": str(weights)}}
    recipe = load_recipe(write_recipe(tmp_path / "c.yaml", **{**CLASSIFICATION, "rows": rows} | changes))
    quiet(recipe, tmp_path / "runs")
    found = hf_freeze.architectures.tasks.AUTO_CLASSES["sequence-classification"].from_pretrained(
        tmp_path / "runs/row-0-seed-1/model"
    )
    body = AutoModelForMaskedLM.from_pretrained(weights).base_model.state_dict()
    shared = body.keys() & found.base_model.state_dict().keys()
    assert len(shared) > 10
    assert all(torch.equal(found.base_model.state_dict()[name], body[name]) for name in shared)
    made = AutoTokenizer.from_pretrained(tmp_path / "runs/row-half-seed-1/model")
    assert made.get_vocab() == AutoTokenizer.from_pretrained(weights).get_vocab()


def test_words_of_the_tokenizer(tmp_path):
    method = {"method": "fixed_attention", "patterns": [2], "unit": "word", "continuations": "tokenizer"}
    rows = {"0": {"label": "words", "methods": [method], "training": {"epochs": 0}}}
    quiet(load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows)), tmp_path / "runs")
    folder = tmp_path / "runs" / "row-0-seed-1" / "model"
    continuations = json.loads((folder / "config.json").read_text())["methods"][0]["continuations"]
    assert continuations == analysis.word_continuations(AutoTokenizer.from_pretrained(folder))
    assert len(continuations) > 10


# -- reports ---------------------------------------------------------------------------------------------------------------------


def test_rows_without_heads_are_drawn_against_their_fraction(grid, pictures):
    _, out = grid
    report = write_report(out, say=lambda _: None)
    lines = [[(value, row["row"]) for value, row in series.points] for series in report.series()]
    assert sorted(line for line in lines if line) == sorted(
        [
            [(0.25, "importance-less"), (0.5, "importance")],
            [(0.5, "ablation")],
            [(0.5, "random"), (0.75, "random-more")],
            [(1.0, "cross")],
            [(0.5, "tuned")],
        ]
    )
    assert [[row["row"] for row in series.without] for series in report.series() if series.without] == [["0"]]
    page, text = (out / "report.html").read_text("utf-8"), (out / "report.md").read_text("utf-8")
    assert "What the heads are worth" in page
    assert "heads.png" in text
    assert (out / "heads.png").stat().st_size > 5000
    best = read_head_scores(out / "row-0-seed-1")["one_head"]["decoder.0.cross"]
    assert "−0 " not in text
    assert f"| decoder.0.cross | {int(np.argmin(best))} | " in text


def test_numbers_of_the_heat_maps(grid):
    from hf_freeze.lab.report.plots.heat_maps import _short, heads_figure

    _, out = grid
    figure = heads_figure(make_report([out], lambda _: None))
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
        "{} {}, {}".format(*name.split(".")) for name in read_head_scores(out / "row-0-seed-1")["importance"]
    ]
    for axes, scores in zip(figure.axes, read_head_scores(out / "row-0-seed-1").values(), strict=True):
        assert [text.get_text() for text in axes.texts] == [_short(v) for values in scores.values() for v in values]


def test_significant_heads_are_underlined(grid, tmp_path):
    from hf_freeze.lab.report.pictures import head_scores
    from hf_freeze.lab.report.plots.heat_maps import heads_figure

    _, out = grid
    scores, tests = (read(out / "row-0-seed-1") for read in (read_head_scores, read_head_tests))
    assert list(tests) == ["ablation", "one_head"]
    assert {name: len(values) for name, values in tests["ablation"].items()} == dict.fromkeys(scores["ablation"], 2)
    shutil.copytree(out, tmp_path / "runs")
    marked = {"ablation": {name: [0.009, 0.011] for name in scores["ablation"]}}
    (tmp_path / "runs" / "row-0-seed-1" / HEAD_TESTS).write_text(json.dumps(marked))
    report = make_report([tmp_path / "runs"], lambda _: None)
    plots = heads_figure(report).axes
    assert [len(axes.lines) for axes in plots] == [0, len(scores["ablation"]), 0]
    assert {round(float(line.get_xdata().mean()), 6) for line in plots[1].lines} == {0.0}
    assert head_scores(report).endswith(" Underlined: significant, p < 0.01 after Holm's correction over all heads.")


def test_many_rows_are_compared_with_the_first_alone(monkeypatch, grid):
    _, out = grid
    few = make_report([out], lambda _: None)
    assert few.all_pairs
    assert len(few.differences) == 8 * 7 // 2
    assert len(set(few.signs().values())) == len(few.rows) == 8
    monkeypatch.setattr(significance, "MANY", 8)
    for user in ("report", "build", "findings"):
        monkeypatch.setattr(f"hf_freeze.lab.report.{user}.MANY", 7 if user == "findings" else 8)
    many = write_report(out, say=lambda _: None)
    assert not many.all_pairs
    assert [d.base for d in many.differences] == ["0"] * 7
    text = (out / "report.md").read_text("utf-8")
    assert "Differences between all rows" not in text
    assert "over all pairs" not in text
    unclear = [line for line in text.splitlines() if line.startswith("- Too few seeds to test")]
    assert unclear[0].startswith("- Too few seeds to test against row 0: 7 rows; see the table.")
    assert '<table class="matrix">' not in (out / "report.html").read_text("utf-8")
    # Of many rows, seven have a sign: the first, those at the ends of the front, and the best.
    signs, front = many.signs(7), many.front("stored")
    assert len(signs) == 7
    assert {"0", front[0]["row"], front[-1]["row"]} <= set(signs)
    assert list(signs.values()) == list(range(7))


def test_a_series_is_named_by_what_its_labels_share():
    def name(*labels):
        return Series(points=[(number, {"label": label}) for number, label in enumerate(labels)]).name

    assert name("by importance, 10 %", "by importance, 20 %") == "by importance"
    assert name("by importance, 30 %, tuned", "by importance, 50 %, tuned") == "by importance, tuned"
    assert name("E = 8", "E = 16") == "E = 8 …"
    assert name("E = 8, shared") == "E = 8, shared"
