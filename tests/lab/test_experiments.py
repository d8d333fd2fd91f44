"""Recipes, grids of tiny runs (finished, failing, killed), reports and the command line."""

import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from support import ROOT
from support.recipes import TINY, changed, cli, one_line_error, write_recipe
from support.small import not_understood
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

from hf_freeze import count_parameters, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.cli import app
from hf_freeze.lab.data import builtin_corpus
from hf_freeze.lab.metrics import load as load_metric
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.report.finished_runs import read_results
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.runs.claim import check_free, training_in
from hf_freeze.lab.runs.grid import FailedRuns, run_grid
from hf_freeze.lab.runs.text_training import training_arguments
from hf_freeze.lab.scored import score_folders
from hf_freeze.methods import Freeze, LowRank
from hf_freeze.methods.registry import METHODS
from hf_freeze.publish.export.convert import export_model
from hf_freeze.run_folder import commands_of

ABLATION = ROOT / "recipes" / "freeze_ablation"


@pytest.fixture
def recipe_file(tmp_path):
    return write_recipe(tmp_path / "recipe.yaml")


# -- recipes ---------------------------------------------------------------------------------------------------------------------


def test_a_preset_fills_what_the_recipe_leaves_open(tmp_path):
    path = write_recipe(tmp_path / "r.yaml", training={"epochs": 7})
    recipe = load_recipe(path)
    assert recipe.training.given() == TINY["presets"]["small"]["training"] | {"epochs": 7}
    assert recipe.backbone.given() == TINY["presets"]["small"]["backbone"]


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("rows:\n  '0': {label: a, methods: []}\n  '0': {label: b, methods: []}\n")
    with pytest.raises(ValueError, match=r"r\.yaml: not a YAML file: '0' is there twice in .*line 2"):
        load_recipe(path)
    path.write_text("training: &a {epochs: 1}\npresets: {p: {training: {<<: *a, epochs: 2}}}\nname: x\nname: y\n")
    with pytest.raises(ValueError, match="'name' is there twice"):
        load_recipe(path)


def test_settings_come_last(recipe_file):
    settings = ["training.epochs=3", "backbone.config.d_model=32", "seeds=[4, 5]", "only=['2.1']", "name=a=b"]
    recipe = load_recipe(recipe_file, settings)
    assert recipe.training.epochs == 3
    assert recipe.training.max_tokens == 400
    assert recipe.backbone.config["d_model"] == 32
    assert recipe.backbone.config["encoder_layers"] == 1
    assert recipe.seeds == [4, 5]
    assert recipe.name == "a=b"
    assert [run.row for run in expand(recipe)] == ["2.1", "2.1"]
    assert load_recipe(recipe_file, ["training.epochs=3", "training.epochs=4"]).training.epochs == 4


def test_smoke_is_applied_and_settings_win_over_it(recipe_file):
    recipe = load_recipe(recipe_file, smoke=True)
    assert recipe.training.epochs == 0.5
    assert recipe.data.given() == TINY["data"] | {"limit": 20}
    assert load_recipe(recipe_file, ["data.limit=5"], smoke=True).data.limit == 5
    assert load_recipe(recipe_file).data.limit == 60


def test_a_preset_may_be_chosen_by_smoke_or_a_setting(tmp_path):
    other = changed(TINY["presets"]["small"], {"tokenizer": {"vocab_size": 300}})
    path = write_recipe(tmp_path / "r.yaml", **{"presets/other": other, "smoke": {"preset": "other"}})
    assert load_recipe(path).tokenizer.vocab_size == 100
    assert load_recipe(path, smoke=True).tokenizer.vocab_size == 300
    assert load_recipe(path, ["preset=other"]).tokenizer.vocab_size == 300
    assert load_recipe(path, ["preset=small"], smoke=True).tokenizer.vocab_size == 100


def test_extends_starts_from_another_recipe(recipe_file, tmp_path):
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.yaml"
    child.write_text("extends: ../recipe.yaml\nname: child\ndata: {train: [a, b], dev: [c, d], test: [e, f]}\n")
    recipe = load_recipe(child)
    assert recipe.name == "child"
    assert recipe.given()["rows"] == TINY["rows"]
    # Another form of data replaces the old one; a change of one field does not.
    assert recipe.data.given() == {"train": ["a", "b"], "dev": ["c", "d"], "test": ["e", "f"]}
    grandchild = tmp_path / "grandchild.yaml"
    grandchild.write_text("extends: sub/child.yaml\ndata: {root: there}\n")
    assert load_recipe(grandchild).data.given() == recipe.data.given() | {"root": "there"}


@pytest.mark.parametrize(
    ("epochs", "evaluations", "interval", "share"),
    [
        (4, 1, "epoch", None),
        (4, 2, "steps", 1 / 8),
        (0.5, 8, "steps", 1 / 4),
        (0.5, 2, "epoch", None),
        (0.5, 1, "epoch", None),
    ],
)
def test_evaluations_of_an_epoch_are_shares_of_all_steps(recipe_file, tmp_path, epochs, evaluations, interval, share):
    """The Trainer takes 1 or more as a number of steps, and would evaluate after each."""
    (run, *_) = expand(load_recipe(recipe_file, [f"training.epochs={epochs}", f"training.evaluations={evaluations}"]))
    arguments = training_arguments(run, tmp_path)
    assert (arguments.eval_strategy, arguments.save_strategy) == (interval, interval)
    if share is not None:
        assert arguments.eval_steps == arguments.save_steps == pytest.approx(share)


def test_the_shipped_recipes_load():
    for preset in ("demo", "tiny", "base", "big", "big-ffn1024"):
        recipe = load_recipe(ABLATION / "recipe.yaml", [f"preset={preset}"])
        controls = ["small-2", "small-3", "1-r1", "int8"] if preset == "tiny" else []
        expected = ["0", "1", "2", "2.1", "3", "3.1", "4", "5", "6", *controls]
        assert [run.row for run in expand(recipe)] == expected
    assert load_recipe(ABLATION / "recipe.yaml", smoke=True).data.limit == 200
    multi30k = load_recipe(ABLATION / "multi30k.yaml", ["data.root=/x"])
    assert multi30k.data.builtin is None
    assert multi30k.data.root == "/x"
    assert multi30k.preset == "tiny"
    for name in ("lm", "wikitext2"):
        for preset in ("lm-demo", "lm-tiny", "lm-paper"):
            recipe = load_recipe(ABLATION / f"{name}.yaml", [f"preset={preset}"])
            assert [run.row for run in expand(recipe)][:7] == ["0", "1", "2", "3", "4", "5", "6"]
            # A block is as long as the model has positions, and a batch holds whole blocks.
            block = recipe.training.block_size + 1
            assert block <= recipe.backbone.config["n_positions"]
            assert recipe.training.max_tokens % block == 0
    tatoeba = load_recipe(ABLATION / "tatoeba.yaml")
    assert tatoeba.data.dev is None
    assert tatoeba.data.holdout == 1000


BAD_RECIPES = {
    "axis of no method": ({"axis": "rank"}, r"axis='rank' names no method; choose from \['adaptive_embedding'"),
    "axis of no setting": (
        {"axis": "low_rank.E"},
        r"axis='low_rank\.E' is no setting; choose from \['components', .*'rank'",
    ),
    "unknown field": ({"optimiser": "sgd"}, "unknown field 'optimiser'; choose from .*'training'"),
    "unknown training field": (
        {"presets/small/training/lr": 1},
        r"unknown field training\.lr; choose from .*'learning_rate'",
    ),
    "unknown data field": ({"data/fraction": 1}, r"unknown field data\.fraction"),
    "unknown tokenizer field": ({"presets/small/tokenizer/size": 1}, r"unknown field tokenizer\.size"),
    "unknown backbone field": ({"presets/small/backbone/code": 1}, r"unknown field backbone\.code"),
    "unknown decoding field": ({"decoding": {"beams": 1}}, r"unknown field decoding\.beams"),
    "wrong type": ({"seeds": 3}, r"seeds=3 is not a value that it takes: integers, each in 0\.\.2\^32-1"),
    "wrong section type": ({"data": ["builtin"]}, "data must be a dict"),
    "unknown preset": ({"preset": "huge"}, r"unknown preset 'huge'; choose from \['small'\]"),
    "missing": ({"rows": ...}, "'rows' is missing"),
    "no name": ({"name": ...}, "'name' is missing"),
    "task": ({"task": "parsing"}, r"unknown task='parsing'; choose from \['translation', 'language-modelling', "),
    "no seeds": ({"seeds": []}, r"seeds=\[\] is not a value that it takes: integers"),
    "seed type": ({"seeds": [1, "2"]}, "seeds=.* is not a value that it takes: integers"),
    "unknown row": ({"only": ["7"]}, r"no row '7'; choose from \['0', '2.1'\]"),
    "row without label": ({"rows/0": {"methods": []}}, "row '0': 'label' is missing"),
    "row of another type": ({"rows/0": []}, r"row '0' must be a dict, not \[\]"),
    "unknown method": ({"rows/0/methods": [{"method": "magic"}]}, "unknown method 'magic'; choose from"),
    "unknown method field": (
        {"rows/0/methods": [{"method": "freeze", "x": 1}]},
        "unknown field 'x' of method 'freeze'",
    ),
    "method setting": ({"rows/0/methods": [{"method": "freeze", "ffn": "x"}]}, r"Freeze\(ffn='x'\): choose from"),
    "method type": ({"rows/0/methods": ["freeze"]}, "row '0': methods.0 must be a dict, not 'freeze'"),
    "method seed": ({"rows/0/methods": [{"method": "freeze", "seed": -1}]}, r"Freeze\(seed=-1\)"),
}


@pytest.mark.parametrize("case", BAD_RECIPES)
def test_bad_recipes_are_refused(tmp_path, case):
    changes, message = BAD_RECIPES[case]
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path / "r.yaml", **changes))


def test_row_names_must_be_quoted(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        yaml.safe_dump(changed(TINY, {"rows": {}})).replace("rows: {}", "rows: {2.10: {label: a, methods: []}}")
    )
    with pytest.raises(ValueError, match=r"row 2\.1 must be a quoted name"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "not a YAML file"),
        (b"\xff\xfe\x00", "not a YAML file"),
        (b"- a\n", "a recipe is a mapping, not list"),
        (b"", "a recipe is a mapping, not NoneType"),
        (b"x: !!python/object/apply:os.getcwd []\n", "not a YAML file"),
        (b"extends: r.yaml\n", "'extends' refers to itself"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, content, message):
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("setting", ["training.epochs", "=3", ""])
def test_settings_without_key_or_value_are_refused(recipe_file, setting):
    with pytest.raises(ValueError, match=f"--set '{setting}': write KEY=VALUE"):
        load_recipe(recipe_file, [setting])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.lr=1", r"unknown field training\.lr"),
        ("training=3", "training must be a dict, not 3"),
        ("training.epochs=[1", r"--set 'training\.epochs=\[1'"),
        ("rows.9.label=x", "row '9': 'methods' is missing"),
    ],
)
def test_settings_are_checked_like_the_file(recipe_file, setting, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe_file, [setting])


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_recipe(tmp_path / "nothing.yaml")
    (tmp_path / "r.yaml").write_text("extends: nothing.yaml\n")
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_recipe(tmp_path / "r.yaml")


def test_expand_goes_seed_by_seed_and_seeds_the_methods(tmp_path):
    rows = {
        "a": {"label": "run's seed", "methods": [{"method": "freeze", "ffn": "random"}]},
        "b": {"label": "its own", "methods": [{"method": "freeze", "ffn": "random", "seed": 99}, {"method": "freeze"}]},
    }
    runs = expand(load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows, seeds=[7, 8])))
    assert [(run.seed, run.row) for run in runs] == [(7, "a"), (7, "b"), (8, "a"), (8, "b")]
    assert [[m["seed"] for m in run.methods] for run in runs] == [[7], [99, 7], [8], [99, 8]]
    assert all(run.label == rows[run.row]["label"] for run in runs)
    plain = [run.given() for run in runs]
    assert json.loads(json.dumps(plain)) == plain, "plain data"
    runs[0].training.epochs = 1000
    assert runs[1].training.epochs == 1, "runs share nothing"


# -- grids -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _one_core():
    """Runs get a thread for each core; beside another job more than one makes a step many times slower."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        yield


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two rows, run once for all tests; (recipe, folder, what was printed, records)."""
    folder = tmp_path_factory.mktemp("grid")
    recipe = load_recipe(write_recipe(folder / "recipe.yaml"))
    console = Console(width=300, file=(folder / "printed.txt").open("w"), force_terminal=False)
    records = run_grid(recipe, folder / "out", console=console)
    console.file.close()
    return recipe, folder / "out", (folder / "printed.txt").read_text(), records


def test_a_grid_leaves_models_scores_and_records(grid):
    recipe, out, printed, records = grid
    assert [(r["row"], r["seed"]) for r in records] == [("0", 1), ("2.1", 1)]
    assert [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()] == records
    for run, record in zip(expand(recipe), records, strict=True):
        folder = run.folder(out)
        assert json.loads((folder / "run.json").read_text()) == run.given()
        assert json.loads((folder / "metrics.json").read_text()) == record
        assert not (folder / "checkpoints").exists()
        assert not (folder / "error.log").exists()
        assert (folder / "lock").exists(), "held while it was trained"
        translations = (folder / "translations.txt").read_text().splitlines()
        assert len(translations) == 8
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert any("eval_perplexity" in entry for entry in log)
        # The saved model is the trained one, ready for use.
        model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        assert model.config.use_cache is True
        assert len(tokenizer) == model.config.vocab_size
        count = count_parameters(model)
        assert record["parameters"]["total"] == count.total
        assert record["parameters"]["trainable_share"] == count.trainable / count.total
        assert record["parameters"]["stored"] == count.stored
        assert record["steps"] > 2
        assert record["resumed"] is False
        assert record["metrics"]["dev_perplexity"] == pytest.approx(math.exp(record["metrics"]["dev_loss"]))
        assert record["environment"]["torch"] == torch.__version__
    assert records[0]["parameters"]["trainable_share"] == 1
    assert 0 < records[1]["parameters"]["trainable_share"] < 0.9
    assert records[1]["parameters"]["stored_bytes"] < records[0]["parameters"]["stored_bytes"]
    assert re.search(r"row 0 +seed 1 .*BLEU", printed)
    assert re.search(r"row 2\.1 +seed 1 .*BLEU", printed)


def test_the_scores_are_those_of_the_translations(grid):
    from hf_freeze.lab.tasks.translation import load_data

    recipe, out, _, records = grid
    references = list(load_data(recipe.data)["test"]["target"])
    translations = (out / "row-0-seed-1" / "translations.txt").read_text().splitlines()
    score = load_metric("sacrebleu").compute(predictions=translations, references=references)["score"]
    assert records[0]["metrics"]["test_bleu"] == score


def test_finished_runs_are_skipped(grid, monkeypatch):
    recipe, out, _, records = grid
    monkeypatch.setattr("hf_freeze.lab.runs.grid._execute_all", lambda *args: pytest.fail("something was run again"))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if "results" not in path.name and path != out}
    console = Console(record=True, width=200)
    (out / "results.jsonl").unlink()
    assert run_grid(recipe, out, console=console) == records
    assert "2 of 2 runs are finished already" in console.export_text()
    assert (out / "results.jsonl").exists()
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*") if "results" not in p.name and p != out}


def test_a_row_that_another_grid_has_finished_is_not_trained_again(grid, tmp_path, monkeypatch):
    _, out, _, records = grid
    path = write_recipe(tmp_path / "r.yaml", name="another", rows={"dense": {"label": "dense", "methods": []}})
    another = load_recipe(path)
    trained = []
    monkeypatch.setattr("hf_freeze.lab.runs.grid._execute_all", lambda waiting, *args: trained.extend(waiting) or [])
    console = Console(record=True, width=300)
    (record,) = run_grid(another, tmp_path / "out", console=console, reuse=[out])
    assert trained == []
    assert f"row dense seed 1: finished in {out / 'row-0-seed-1'}" in console.export_text()
    assert record == records[0] | {"recipe": "another", "row": "dense", "label": "dense"}
    reused = tmp_path / "out" / "row-dense-seed-1"
    assert json.loads((reused / "run.json").read_text()) == expand(another)[0].given(), "its own settings"
    model = "model/model.safetensors"
    assert (reused / model).read_bytes() == (out / "row-0-seed-1" / model).read_bytes()

    path = write_recipe(tmp_path / "longer.yaml", training={"epochs": 2})
    run_grid(load_recipe(path), tmp_path / "longer", console=console, reuse=[out])
    assert [run.row for run in trained] == ["0", "2.1"], "other settings are trained"
    with pytest.raises(ValueError, match="nothing holds no finished runs to reuse"):
        run_grid(another, tmp_path / "other", console=console, reuse=[tmp_path / "nothing"])


def test_a_run_that_another_process_trains_is_refused(tmp_path):
    recipe, out = load_recipe(write_recipe(tmp_path / "r.yaml")), tmp_path / "out"
    folder = expand(recipe)[1].folder(out)
    folder.mkdir(parents=True)
    with training_in(folder):
        with pytest.raises(
            ValueError, match=r"another process is training in .*row-2\.1-seed-1: wait until it has ended"
        ):
            run_grid(recipe, out, console=Console(quiet=True))
        assert not (out / "row-0-seed-1" / "metrics.json").exists(), "nothing was trained"
    check_free([folder])  # it has ended


def test_a_folder_of_another_recipe_is_refused(grid):
    recipe, out, _, _ = grid
    other = recipe.changed(training=recipe.training.changed(learning_rate=0.1))
    message = (
        r"row-0-seed-1 holds a run of other settings \(training\.learning_rate was 0\.005, now 0\.1\); choose another"
    )
    with pytest.raises(ValueError, match=message):
        run_grid(other, out)
    assert json.loads((out / "row-0-seed-1" / "run.json").read_text())["training"]["learning_rate"] == 0.005


def test_a_failing_run_is_reported_and_the_others_go_on(tmp_path):
    rows = {
        "bad": {
            "label": "no such layer",
            "methods": [{"method": "freeze", "ffn": "random", "layers": {"encoder": [9]}}],
        },
        "good": TINY["rows"]["0"],
    }
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows))
    console = Console(record=True, width=300)
    with pytest.raises(FailedRuns, match=r"1 of 2 runs failed; see .*row-bad-seed-1/error\.log"):
        run_grid(recipe, tmp_path / "out", console=console)
    log = (tmp_path / "out" / "row-bad-seed-1" / "error.log").read_text()
    assert "Traceback" in log
    assert "no layer 9 in stack 'encoder'" in log.splitlines()[-1]
    assert "no layer 9 in stack 'encoder'" in console.export_text()
    assert [record["row"] for record in read_results(tmp_path / "out")] == ["good"]
    assert [row["row"] for row in write_report(tmp_path / "out").rows] == ["good"]


@pytest.mark.parametrize(("wanted", "jobs", "threads"), [(None, 1, 8), (None, 3, 2), ("1", 1, 1), ("3", 2, 3)])
def test_runs_share_the_cores_unless_the_environment_says_otherwise(tmp_path, monkeypatch, wanted, jobs, threads):
    given = []

    class Process:
        exitcode = 1

        def __init__(self, target, args):
            self.sentinel, other = multiprocessing.Pipe()
            other.close()  # so it is ready, as that of a process that has ended
            given.append(args[2])

        def start(self): ...

        def is_alive(self):
            return False

    class Context:
        Pipe = staticmethod(multiprocessing.Pipe)

        def set_forkserver_preload(self, modules): ...

    Context.Process = Process
    monkeypatch.setattr("hf_freeze.lab.runs.processes.multiprocessing.get_context", lambda method: Context())
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", wanted or "")
    if wanted is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    with pytest.raises(FailedRuns, match="2 of 2 runs failed"):
        run_grid(load_recipe(write_recipe(tmp_path / "r.yaml")), tmp_path / "out", jobs=jobs)
    assert given == [threads, threads]


# -- the command line ------------------------------------------------------------------------------------------------------------


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_run_and_report(recipe_file, tmp_path, monkeypatch, pictures):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").mkdir()
    files = []
    for name, split in builtin_corpus(train=60, dev=5, test=5).items():
        for side in ("source", "target"):
            (tmp_path / "secret" / f"{name}.{side}").write_text("\n".join(split[side]) + "\n", encoding="utf-8")
        files += ["--set", f"data.{name}=[{name}.source, {name}.target]"]
    root = f"data.root={tmp_path / 'secret'}"
    result = cli("run", recipe_file, "--smoke", "--set", "only=['2.1']", *files, "--set", root, "--out", "here")
    assert "tiny: preset small, runs in here" in result.output
    assert "BLEU" in result.output
    (record,) = read_results(tmp_path / "here")
    assert record["row"] == "2.1"
    assert 0.5 <= record["epochs_trained"] < 1
    command = (tmp_path / "here" / "command.txt").read_text()
    assert "--smoke" in command
    assert "only=" in command
    assert "secret" not in command, "where the data lies is nobody's business"
    assert (tmp_path / "here" / "report.png").stat().st_size > 10_000
    assert "secret" not in (tmp_path / "here" / "report.html").read_text()
    (tmp_path / "here" / "report.md").unlink()
    result = cli("report", "here")
    assert "✓✗✓" in result.output
    assert "hf-freeze run" in (tmp_path / "here" / "report.md").read_text()


def test_run_seeds(recipe_file, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "hf_freeze.lab.runs.grid.run_grid", lambda recipe, out, **k: seen.update(recipe=recipe, out=out, **k)
    )
    monkeypatch.setattr("hf_freeze.lab.cli.run.report", lambda folders: seen.update(reported=folders))
    monkeypatch.chdir(tmp_path)
    cli("run", recipe_file, "--seeds", "3", "--jobs", "2", "--smoke")
    assert seen["recipe"].seeds == [1, 2, 3]
    assert seen["jobs"] == 2
    assert [seen["out"]] == seen["reported"] == [Path("runs/tiny-smoke")]


@pytest.mark.parametrize("kind", ["variant", "native"])
def test_inspect(tmp_path, kind):
    config = BertConfig(**ARCHITECTURES["bert"].tiny)
    model = (
        make_variant(config, [Freeze(ffn="random", seed=5)], task="masked-lm")
        if kind == "variant"
        else BertForMaskedLM(config)
    )
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # no weight is read
    output = plain(cli("inspect", tmp_path, "--length", "16").output)
    count = count_parameters(model)
    name = type(model).__name__
    assert name in output
    row = next(line for line in output.splitlines() if re.match(r"\W*all\b", line))
    assert [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", row)[:3]] == [
        count.total,
        count.trainable,
        count.stored,
    ]
    row = next(line for line in output.splitlines() if re.match(r"\W*ffn\b", line))
    trained = 0 if kind == "variant" else count.by_component["ffn"].total
    forward = 2 * 2 * 16 * 24
    numbers = [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", row)]
    assert numbers == [
        count.by_component["ffn"].total,
        trained,
        trained,
        forward,
        forward * (1 if kind == "variant" else 2),
    ]
    assert ('ffn="random"' in output) is (kind == "variant")
    assert "at length 16" in output


def test_inspect_a_trained_run(grid):
    _, out, _, records = grid
    output = plain(cli("inspect", out / "row-2.1-seed-1" / "model").output)
    assert f"{records[1]['parameters']['stored_bytes']:,} bytes" in output


def test_score_repeats_the_scores_of_the_runs(grid, tmp_path):
    recipe, out, _, records = grid
    path = write_recipe(tmp_path / "r.yaml")
    folders = [run.folder(out) / "model" for run in expand(recipe)]
    name, count, results = score_folders(folders, load_recipe(path))
    assert (name, count) == ("BLEU", 8)
    assert [one.score for one in results] == [record["metrics"]["test_bleu"] for record in records]
    assert results[0].to_first is None
    difference, low, high = results[1].to_first
    assert difference == pytest.approx(results[1].score - results[0].score)
    assert low <= difference <= high
    assert score_folders([folders[0]] * 2, load_recipe(path), split="dev")[2][1].to_first == (0, 0, 0)
    printed = cli("score", *folders, "--data", path).output
    assert "On the 8 texts of the test split" in printed
    assert one_line_error("score", folders[0], "--data", path, "--split", "train") == (
        "Error: split 'train': choose from ['test', 'dev']"
    )
    assert "nothing" in one_line_error("score", tmp_path / "nothing", "--data", path)
    with pytest.raises(ValueError, match=r"task 'language-modelling': hf-freeze score is for \['translation',"):
        score_folders(folders, load_recipe(ABLATION / "lm.yaml"))


def test_score_runs_an_exported_folder_in_its_engine(grid, tmp_path):
    pytest.importorskip("ctranslate2")
    _, out, _, records = grid
    exported = export_model(out / "row-0-seed-1" / "model", "ctranslate2", quantization=None, out=tmp_path / "exported")
    (scored,) = score_folders([exported], load_recipe(write_recipe(tmp_path / "r.yaml")))[2]
    assert scored.score == pytest.approx(records[0]["metrics"]["test_bleu"], abs=1)


def test_inspect_measures_the_linears(tmp_path):
    config = BertConfig(**ARCHITECTURES["bert"].tiny)
    model = make_variant(config, [LowRank(rank=3)], task="masked-lm")
    model.save_pretrained(tmp_path)
    table = plain(cli("inspect", tmp_path, "--latency", "--tokens", "2", "5").output).split("Linears of attention")[1]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    assert [(row[2], row[3]) for row in rows if row[2]] == [("2", "dense"), ("5", "dense")] * 2 + [
        ("2", "plain"),
        ("5", "plain"),
    ]
    first = " ".join(row[0] for row in rows)
    assert "LowRankLinear 16 to 24" in first
    assert "rank=3" in first
    for row in rows:
        if row[2] and row[3] != "plain":
            ms, plain_ms, ratio = map(float, row[4:])
            assert min(ms, plain_ms, ratio) >= 0
    assert "tokens=0: must be an integer of at least 1" in one_line_error(
        "inspect", tmp_path, "--latency", "--tokens", "0", "5"
    )
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors" in one_line_error("inspect", tmp_path, "--latency")
    assert "Linears of" not in cli("inspect", tmp_path).output


def test_methods_and_architectures_are_listed():
    listed, table = cli("methods").output, cli("methods", "--markdown").output
    for name, method in METHODS.items():
        assert name in listed
        assert f"`methods.{method.__name__}`" in table
    listed = cli("architectures").output
    for name, architecture in ARCHITECTURES.items():
        assert name in listed
        assert name in table
        assert all(task in listed for task in architecture.tasks)


@pytest.mark.parametrize("command", [command.name or command.callback.__name__ for command in app.registered_commands])
def test_every_help_has_an_example(command):
    assert f"Example: hf-freeze {command}" in plain(cli(command, "--help").output)


def test_wrong_input_is_one_line(recipe_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nothing.yaml" in one_line_error("run", "nothing.yaml")
    assert "unknown preset 'huge'" in one_line_error("run", recipe_file, "--set", "preset=huge")
    assert "write KEY=VALUE" in one_line_error("run", recipe_file, "--set", "epochs")
    assert "results.jsonl does not exist" in one_line_error("report", tmp_path)
    assert not (tmp_path / "runs").exists(), "nothing was begun"
    not_understood().save_pretrained(tmp_path / "gpt")
    assert "squeezebert: no list of layers with linears" in one_line_error("inspect", tmp_path / "gpt")
    config = BertConfig(**ARCHITECTURES["bert"].tiny)
    config.save_pretrained(tmp_path / "bert")
    assert "length=33 is outside 1..32" in one_line_error("inspect", tmp_path / "bert", "--length", "33")
    data = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(
        json.dumps(data | {"model_type": "hf_freeze_bert", "methods": [{"method": "evaluate"}]})
    )
    assert "unknown method 'evaluate'" in one_line_error("inspect", tmp_path / "bert")


def test_a_field_of_a_wrong_type_is_one_line(tmp_path):
    config = BertConfig(**ARCHITECTURES["bert"].tiny).to_dict() | {"hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "hidden_size" in one_line_error("inspect", tmp_path)


def test_a_model_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = cli("inspect", tmp_path / "nowhere", code=2)
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.output


def test_a_failed_grid_has_exit_code_2(tmp_path):
    rows = {"0": {"label": "x", "methods": [{"method": "freeze", "layers": {"encoder": [9]}}]}}
    path = write_recipe(tmp_path / "r.yaml", rows=rows)
    assert "1 of 1 runs failed" in one_line_error("run", path, "--out", tmp_path / "out")


def test_the_program_is_installed():
    program = Path(sys.executable).parent / "hf-freeze"
    if not program.exists():
        pytest.skip("hf-freeze is not installed beside this Python")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "inspect" in done.stdout


# -- what a grid must not lose ---------------------------------------------------------------------------------------------------


def test_settings_of_one_form_of_data_are_merged(recipe_file):
    both = load_recipe(recipe_file, ["data.builtin.seed=3", "data.builtin.train=80"]).data.builtin
    assert (both.seed, both.train) == (3, 80)
    files = ["data.root=/d", "data.train=[a, b]", "data.dev=[a, b]", "data.test=[a, b]"]
    assert load_recipe(recipe_file, files).data.given() == {
        "root": "/d",
        **{name: ["a", "b"] for name in ("train", "dev", "test")},
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.root=/x", r"data.root says where files are, but the data is of the form 'builtin'"),
        ("data.train=[a, b]", r"data.dev is missing"),
        ("seeds=[1, 1]", r"seeds names one twice: \[1, 1\]"),
        ("seeds=[-1]", r"seeds=\[-1\] is not a value that it takes: integers, each in 0..2\^32-1"),
        ("only=['0', '0']", r"only names one twice"),
        ("training.epochs=abc", r"training.epochs='abc' is not a value that it takes: a number"),
        ("training.patience=1.5", r"training\.patience=1\.5 is not a value that it takes: an integer"),
        ("training.patience=.inf", r"training\.patience=inf is not a value that it takes: an integer"),
        ("training.adam_betas=3", r"training\.adam_betas=3 is not a value that it takes: two numbers"),
        ("rows={'a/b': {label: x, methods: []}}", r"row 'a/b' names a folder"),
        ("rows={'a': {label: x, methods: }}", r"row 'a': methods must be a list, not None"),
        ("preset=[a]", r"preset must be a str, not \['a'\]"),
        ("seeds=[1.5]", r"seeds=\[1\.5\] is not a value that it takes: integers"),
        ("seeds=[true]", r"seeds=\[True\] is not a value that it takes: integers"),
        ("data={train: [a, b], test: [a, b]}", r"data\.dev is missing"),
        ("data={train: a, dev: [a, b], test: [a, b]}", r"data\.train must be two files, \[source, target\], not 'a'"),
        ("data={train: [a], dev: [a, b], test: [a, b]}", r"data\.train must be two files, .* not \['a'\]"),
        (
            "data={train: [a, b], dev: [a, b], test: [a, b], holdout: 9}",
            r"data\.holdout=9 is drawn from train: it replaces data\.dev",
        ),
        ("data={train: [a, b], test: [a, b], holdout: 0}", r"data\.holdout=0 must be at least 1"),
        ("data.unit=words", r"unknown data\.unit='words'; choose from \['lines', 'documents'\]"),
        (
            "training.learning_rates={ffn: fast}",
            r"training\.learning_rates={'ffn': 'fast'} is not a value that it takes",
        ),
        ("training.learning_rates=3", r"training\.learning_rates=3 is not a value that it takes"),
        (
            "training.learning_rates={mlp: 1}",
            r"unknown component training\.learning_rates\.mlp; choose from \['embeddings'",
        ),
        ("training.evaluations=0", r"training\.evaluations=0 must be at least 1"),
        ("training.block_size=-1", r"training\.block_size=-1 must be at least 1"),
    ],
)
def test_settings_that_would_spoil_a_grid_are_refused(recipe_file, setting, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe_file, [setting])


def test_numbers_that_yaml_reads_as_text_are_numbers(recipe_file):
    assert load_recipe(recipe_file, ["training.learning_rate=1e-3"]).training.learning_rate == 0.001


def test_a_subset_of_a_grid_keeps_the_other_results_and_their_order(grid):
    """A report compares with the first of them."""
    recipe, out, _, records = grid
    one = recipe.changed(only=[records[1]["row"]])
    assert [record["row"] for record in run_grid(one, out)] == [record["row"] for record in records]
    run_grid(recipe, out)


def test_a_grid_keeps_the_commands_that_its_runs_were_made_by(grid):
    recipe, out, _, records = grid
    one = recipe.changed(only=[records[1]["row"]])
    for command, used, kept in [
        ("all", recipe, ["all"]),
        ("one", one, ["all", "one"]),
        ("a\nnother", one, ["all", "one", "a nother"]),
        ("one", one, ["all", "a nother", "one"]),
        ("again", recipe, ["again"]),  # it alone makes all of them
    ]:
        run_grid(used, out, command=command)
        assert commands_of(out) == kept
    (out / "command.txt").unlink()


def test_a_refused_grid_changes_nothing(grid):
    recipe, out, _, _ = grid
    before = {path: path.read_bytes() for path in out.rglob("*.json*")}
    training = recipe.training.changed(learning_rate=0.5)
    other = recipe.changed(training=training, seeds=[*recipe.seeds, 77])
    with pytest.raises(ValueError, match=r"training\.learning_rate was"):
        run_grid(other, out, command="something else")
    assert before == {path: path.read_bytes() for path in out.rglob("*.json*")}
    assert not (out / "command.txt").exists()


def test_missing_files_are_said_once_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = one_line_error("run", ABLATION / "multi30k.yaml", "--set", "data.root=nowhere")
    assert "nowhere/train.de.gz does not exist; say where the files are: --set data.root=DIRECTORY" in message
    assert not (tmp_path / "runs").exists()
