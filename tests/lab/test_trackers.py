"""`--report-to`: each run of a grid is one run of a tracker."""

import importlib.util
import json
import sqlite3

import pytest
from support.recipes import LONGER, TINY, changed, cli, one_line_error, write_recipe
from support.tensorboard import scalars

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs import text_training, tracking
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.text_training import Paused

ONE_ROW = {"rows": {"0": TINY["rows"]["0"]}}


def runs_of(tmp_path, tracker, **changes):
    recipe = write_recipe(tmp_path / "recipe.yaml", changed(TINY | ONE_ROW, changes))
    return expand(load_recipe(recipe, [f"report_to={tracker}"] if tracker else []))


def executed(tmp_path, run, **options):
    folder = run.folder(tmp_path)
    execute(run, folder, **options)
    return folder


def logged(folder, name):
    """step -> value, in what the Trainer noted itself."""
    entries = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {entry["step"]: entry[name] for entry in entries if name in entry}


def test_tensorboard_has_the_curves_and_the_test_scores_of_each_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "elsewhere"))  # all runs would be one there
    (run,) = runs_of(tmp_path, "tensorboard", **LONGER)
    folder = executed(tmp_path / "grid", run)
    curves, record = scalars(folder), json.loads((folder / "metrics.json").read_text())
    on_dev = logged(folder, "eval_loss")
    del on_dev[max(on_dev)]  # of the best checkpoint, noted at the last step
    assert len(on_dev) > 1
    assert {step: curves["eval/loss"][step] for step in on_dev} == pytest.approx(on_dev)
    assert curves["test/bleu"] == pytest.approx({record["steps"]: record["metrics"]["test_bleu"]})
    assert not (tmp_path / "elsewhere").exists()
    assert "report_to" not in record


def test_a_row_that_trains_nothing_has_its_scores_there(tmp_path):
    pytest.importorskip("tensorboardX")
    (run,) = runs_of(tmp_path, "tensorboard", **{"presets/small/training/epochs": 0})
    assert set(scalars(executed(tmp_path, run))) == {"test/bleu", "test/chrf"}


def test_a_tracker_is_no_setting_of_a_run(tmp_path):
    """A grid goes on with another one, or none, and its report does not tell."""
    from hf_freeze.lab.runs.claim import check_folder, claim_all

    (run,), (plain,) = runs_of(tmp_path, "tensorboard"), runs_of(tmp_path, None)
    claim_all([run], tmp_path, None)
    folder = run.folder(tmp_path)
    assert json.loads((folder / "run.json").read_text()) == plain.given()
    check_folder(folder, plain)
    check_folder(folder, run)


@pytest.mark.parametrize("command", ["run", "search"])
def test_an_unknown_tracker_is_one_line_with_the_choices(command, tmp_path):
    error = one_line_error(command, write_recipe(tmp_path / "recipe.yaml"), "--report-to", "mlflow")
    assert "unknown report_to='mlflow'; choose from ['tensorboard', 'trackio', 'wandb']" in error
    error = one_line_error("run", "ffn_compression/mnist", "--report-to", "wandb")
    assert "report_to is for the tasks [" in error
    assert "not for 'image-classification'" in error


@pytest.mark.parametrize("name", tracking._PACKAGES)
def test_a_missing_package_is_named_before_anything_runs(name, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    hidden = tracking._PACKAGES[name]
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package in hidden else found(package))
    out = tmp_path / "out"
    error = one_line_error("run", write_recipe(tmp_path / "recipe.yaml"), "--report-to", name, "--out", out)
    assert error == f"Error: --report-to {name} needs the package {name}: pip install {name}"
    assert not out.exists()


def test_slurm_jobs_report_to_it_too(tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml")
    assert "--set report_to=wandb" in cli("run", recipe, "--on", "slurm", "--report-to", "wandb").output


def test_wandb_offline_has_one_run_for_each(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    (run,) = runs_of(tmp_path, "wandb", **LONGER)
    with pytest.raises(Paused):  # as a kill would stop it
        executed(tmp_path, run, until=0.5)
    folder = executed(tmp_path, run)
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1  # the same run, continued
    content = b"".join(path.read_bytes() for path in files)
    for word in (folder.name, run.name, "test/bleu", "eval/loss"):
        assert word.encode() in content


def test_trackio_has_one_run_for_each(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # it looks when it is imported
    pytest.importorskip("trackio")
    (run,) = runs_of(tmp_path, "trackio")
    folder = executed(tmp_path, run)
    (database,) = (tmp_path / "trackio").glob(f"{run['name']}*.db")
    rows = sqlite3.connect(database).execute("select run_name, metrics from metrics").fetchall()
    assert {name for name, _ in rows} == {folder.name}
    assert any("test/bleu" in str(metrics) for _, metrics in rows)


def test_the_trainer_knows_the_names(tmp_path):
    """Which trackio takes from its arguments."""
    (run,) = runs_of(tmp_path, None)
    arguments = text_training.training_arguments(run, run.folder(tmp_path))
    assert (arguments.run_name, arguments.project, arguments.report_to) == ("row-0-seed-1", "tiny", [])
