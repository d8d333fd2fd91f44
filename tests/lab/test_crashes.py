"""Runs that are killed, that diverge, or that find the disk full; runs of several processes."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file
from support import TESTS
from support.cases import ALL
from support.processes import run_child, start_child, two_processes
from support.recipes import EACH, LONGER, SCHEDULED, SHORT, TINY, figures, write_recipe
from support.reports import make_runs
from transformers import GPT2Config
from typer.testing import CliRunner

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.cli import app
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs import execute as runs
from hf_freeze.lab.runs import text_training
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.grid import FailedRuns, run_grid
from hf_freeze.training.resume import last_whole_checkpoint

# -- killed --------------------------------------------------------------------------------------------------------------------


def whole_checkpoints(out):
    return {last_whole_checkpoint(folder) for folder in out.glob("row-*/checkpoints")} - {None}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("task", EACH if ALL else ["translation"])  # single runs of every task are killed below
def test_a_killed_grid_ends_as_an_undisturbed_one(task, tmp_path):
    """At random moments: the seed is printed where the test fails."""
    kills = 2 if ALL else 1
    seed = time.time_ns() % 1_000_000
    draw = random.Random(seed)
    print(f"seed {seed}")
    size = {
        "data": {"builtin": {"seed": 0, "train": 60 * kills, "dev": 10, "test": 8}},
        "presets/small/training/max_tokens": 60,
    }
    changes = EACH[task] | LONGER | SCHEDULED | size
    changes["rows/3"] = {"label": "from 0", "methods": [{"method": "freeze", "ffn": "frozen"}], "start": "0"}
    if not ALL:
        changes["only"] = ["0", "3"]  # the schedules of the other row are killed below
    recipe = write_recipe(tmp_path / "r.yaml", **changes)
    (tmp_path / "killed").mkdir()
    reached = []
    for _ in range(kills):
        command = ["run", recipe, "--out", tmp_path / "killed", "--jobs", 2]
        grid = start_child("command", *command, log=tmp_path / "log")
        # From the first checkpoint that a run can go on from: where a kill comes while it is written, none does.
        before = whole_checkpoints(tmp_path / "killed")
        deadline = time.monotonic() + 400
        while grid.is_alive() and not whole_checkpoints(tmp_path / "killed") - before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.2))
        grid.kill()
        grid.join()
        reached.append(sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("checkpoint-*")))
        time.sleep(1)  # the runs end with the grid
    print(reached)
    assert any(reached), "no kill came between a checkpoint and the end"
    loaded = load_recipe(recipe)
    console = Console(record=True)
    resumed, undisturbed = run_grid(loaded, tmp_path / "killed", console=console), run_grid(loaded, tmp_path / "whole")
    count = sum(bool(record["resumed"]) for record in resumed)
    assert count
    assert f"{count} of {len(resumed)} runs resume from a checkpoint" in console.export_text()
    assert list(map(figures, resumed)) == list(map(figures, undisturbed))
    for run in expand(loaded):
        folders = [run.folder(tmp_path / out) for out in ("killed", "whole")]
        one, other = (load_file(folder / "model" / "model.safetensors") for folder in folders)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        one, other = (
            [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] for folder in folders
        )
        curves = [[(e["step"], e["eval_loss"]) for e in log if "eval_loss" in e] for log in (one, other)]
        assert curves[0] == curves[1]
    lines = [(tmp_path / out / "results.jsonl").read_text().splitlines() for out in ("killed", "whole")]
    assert [figures(json.loads(line)) for line in lines[0]] == [figures(json.loads(line)) for line in lines[1]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_is_killed_at_any_moment_is_whole_or_not_there(tmp_path):
    """Training of every task, saving and reporting, in forks of one child."""
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    kills = {"training": 60, "saving": 14, "reporting": 6} if ALL else {"training": 4, "saving": 3, "reporting": 1}
    words = [f"{work}={number}" for work, number in kills.items()]
    seen = run_child("killed", tmp_path, seed, *words)
    assert {work: counts["kills"] for work, counts in seen.items()} == kills
    assert seen["training"]["equal"] == seen["training"]["runs"]
    assert seen["training"]["resumed"] > 0
    assert seen["saving"]["whole"] == kills["saving"]
    assert seen["reporting"]["there"] > 0


def test_a_checkpoint_of_other_code_is_refused(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", only=["0"]))
    (run,) = expand(recipe)
    folder = run.folder(tmp_path)
    (folder / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (folder / "checkpoints" / "checkpoint-1" / "trainer_state.json").write_text("{}")
    (folder / "environment.json").write_text(json.dumps({"torch": "1.0", "threads": 64}))
    message = r"checkpoint-1 was made with .*torch '1\.0', now .*threads 64, now 1.*add --resume-anyway"
    with pytest.raises(ValueError, match=message):
        execute(run, folder)
    assert json.loads((folder / "environment.json").read_text()) == {"torch": "1.0", "threads": 64}


# -- a loss that is no number --------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_stops_and_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", only=["0"], **LONGER))
    (run,) = expand(recipe)
    folder = tmp_path / "run"
    evaluations = []

    def spoil(module, _):
        if module.training and len(evaluations) == 2:
            next(p for p in module.parameters() if p.requires_grad).data.fill_(float("nan"))

    monkeypatch.setattr(text_training, "choose_attention", lambda model: model.register_forward_pre_hook(spoil))

    with pytest.raises(FloatingPointError, match=r"loss.* is nan at step \d+; the checkpoints before it are kept"):
        runs.execute(
            run, folder, lambda message: evaluations.extend(["eval_perplexity"] * ("eval_perplexity" in message))
        )
    kept = Path(last_whole_checkpoint(folder / "checkpoints"))
    assert json.loads((kept / "trainer_state.json").read_text())["global_step"] > 0
    assert all(value.isfinite().all() for value in load_file(kept / "model.safetensors").values())
    assert not (folder / "metrics.json").exists()


def test_a_learning_rate_out_of_reason_is_one_line(tmp_path):
    changes = {"presets/small/training/learning_rate": 1e30, "presets/small/training/max_grad_norm": 0.0}
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", only=["0"], **LONGER, **changes))
    with pytest.raises(FailedRuns):
        run_grid(recipe, tmp_path / "out")
    last = (tmp_path / "out" / "row-0-seed-1" / "error.log").read_text().splitlines()[-1]
    assert last.startswith("FloatingPointError: ")


# -- a full disk ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, and limits on the size of files")
def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path):
    recipe = write_recipe(tmp_path / "r.yaml", only=["0"], **LONGER | SHORT)
    loaded = load_recipe(recipe)
    limits = (1000, 30_000)  # bytes: too few for the weights; too few for the optimiser's state
    messages = run_child("full_disk", recipe, tmp_path, *limits)
    (undisturbed,) = run_grid(loaded, tmp_path / "whole")
    for limit in limits:
        assert re.match(
            r"OSError: the checkpoint of step \d+ could not be written \(is the disk full\?\)", messages[str(limit)]
        )
        checkpoints = expand(loaded)[0].folder(tmp_path / str(limit)) / "checkpoints"
        assert last_whole_checkpoint(checkpoints) is not None
        assert len(list(checkpoints.glob("checkpoint-*"))) > 1, "the disk was full before anything was written"
        (resumed,) = run_grid(loaded, tmp_path / str(limit))
        assert resumed["resumed"]
        assert figures(resumed) == figures(undisturbed)


@pytest.mark.parametrize("shard", ["50GB", "10KB"])
def test_a_failed_save_leaves_the_old_model(shard, tmp_path, monkeypatch):
    config = GPT2Config(**ARCHITECTURES["gpt2"].tiny)
    old, new = (make_variant(config, [methods.Freeze(ffn="random", seed=seed)], task="causal-lm") for seed in (1, 2))
    old.save_pretrained(tmp_path, max_shard_size=shard)

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    with pytest.raises(OSError, match="No space left"):
        new.save_pretrained(tmp_path, max_shard_size=shard)
    kept = type(old).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in old.state_dict().items())
    assert not list(tmp_path.glob(".*"))


@contextmanager
def nobody():
    """Without the rights of root, who may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
def test_a_folder_that_is_only_read_is_one_line():
    with tempfile.TemporaryDirectory() as made:  # of pytest's own, the user's alone
        root = Path(made)
        recipe, locked = write_recipe(root / "r.yaml", only=["0"]), root / "locked"
        make_runs(root / "runs")
        model = make_variant(GPT2Config(**ARCHITECTURES["gpt2"].tiny), [], task="causal-lm")
        model.save_pretrained(root / "model")
        # Commands import late, and nobody may not read what lies in a user's folders.
        assert CliRunner().invoke(app, ["report", str(root / "runs"), "--out", str(root / "report")]).exit_code == 0
        locked.mkdir()
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        commands = {
            "run": [recipe, "--out", locked],
            "report": [root / "runs", "--out", locked],
            "export": [root / "model", "--format", "dense", "--out", locked / "dense"],
            "card": [root / "model"],
        }
        with nobody():
            found = {name: CliRunner().invoke(app, [name, *map(str, words)]) for name, words in commands.items()}
        for name, result in found.items():
            assert result.exit_code == 2, (name, result.output)
            assert re.search(r"Error: .*permission denied", result.output), (name, result.output)
        assert not list(locked.iterdir())
        for path in (root, *root.rglob("*")):
            path.chmod(0o700)


def test_the_last_whole_checkpoint_is_found_by_number(tmp_path):
    assert last_whole_checkpoint(tmp_path / "none") is None
    for number in (9, 10, 11, 100):
        (tmp_path / f"checkpoint-{number}").mkdir()
    assert last_whole_checkpoint(tmp_path) is None
    for number in (9, 10):
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-11" / "trainer_state.json").write_text('{"best_m')  # cut off
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


# -- several processes ---------------------------------------------------------------------------------------------------------


def test_grids_under_torchrun(tmp_path):
    """One group of two processes runs a grid of one task (in make test-all, of all), and the first again.

    By default they have the variables that torchrun sets: its own processes would import for longer than all of this takes.
    """
    tasks = list(EACH) if ALL else ["translation"]
    recipes = {task: write_recipe(tmp_path / f"{task}.yaml", **EACH[task], **LONGER) for task in tasks}
    (tmp_path / "grids.json").write_text(json.dumps([*tasks, "translation"]))
    if ALL:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
        launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "-m", "support.children.launched"]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, str(tmp_path / "result")]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False, cwd=TESTS
        )
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert two_processes("launched", tmp_path) == [[], []]
    for task, recipe in recipes.items():
        out = tmp_path / task
        records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        assert [record["row"] for record in records] == list(TINY["rows"])  # those of the second time were skipped
        alone = run_grid(load_recipe(recipe), tmp_path / f"{task}-alone")
        for record, single in zip(records, alone, strict=True):
            assert record["processes"] == 2
            assert record["parameters"] == single["parameters"]
            assert record["steps"] < single["steps"]  # a step sees the batches of both
            assert record["metrics"]["dev_loss"] == pytest.approx(single["metrics"]["dev_loss"], rel=0.05)
        assert (out / "report.md").exists()
