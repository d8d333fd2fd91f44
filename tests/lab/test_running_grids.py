"""Grids of tiny runs, finished and failing: models, scores, records, and what is not run again."""

import json
import math
import multiprocessing
import os
import re

import pytest
import torch
from rich.console import Console
from support import ROOT
from support.recipes import TINY, cli, one_line_error, plain, write_recipe
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_freeze import count_parameters
from hf_freeze.lab.metrics import load as load_metric
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.report.finished_runs import read_results
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.runs.claim import check_free, training_in
from hf_freeze.lab.runs.grid import FailedRuns, run_grid
from hf_freeze.lab.scored import score_folders
from hf_freeze.publish.export.convert import export_model
from hf_freeze.run_folder import commands_of

ABLATION = ROOT / "recipes" / "freeze_ablation"
pytestmark = pytest.mark.usefixtures("one_core")


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
    assert "2 of 2 runs are finished already" in (said := console.export_text())
    assert "resume from a checkpoint" not in said
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
            "label": "more tokens than the data have, which their tokenizer shows",
            "methods": [{"method": "adaptive_embedding", "cutoffs": [4000]}],
        },
        "good": TINY["rows"]["0"],
    }
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows, **{"presets/small/tokenizer/vocab_size": 5000}))
    console = Console(record=True, width=300)
    with pytest.raises(FailedRuns, match=r"1 of 2 runs failed; see .*row-bad-seed-1/error\.log"):
        run_grid(recipe, tmp_path / "out", console=console)
    log = (tmp_path / "out" / "row-bad-seed-1" / "error.log").read_text()
    assert "Traceback" in log
    assert "the last must be below 979" in log.splitlines()[-1]
    assert "the last must be below 979" in console.export_text()
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
            given.append(args[2].threads)

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


# -- what commands tell of its runs ----------------------------------------------------------------------------------------------


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


# -- what a grid must not lose ---------------------------------------------------------------------------------------------------


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
