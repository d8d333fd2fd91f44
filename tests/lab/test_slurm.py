"""The script that `--on slurm` prints, run by bash with an `sbatch` that works off the jobs one after the other, here."""

import json
import os
import shlex
import stat
import subprocess
from itertools import pairwise

import pytest
from support.recipes import write_recipe
from typer.testing import CliRunner

from hf_freeze.cli import app

SBATCH = """#!/bin/bash
# Notes its words and the commands of the jobs; the jobs themselves are run by the test.
echo "sbatch $*" >> "$LOG"
array=$(printf '%s\\n' "$@" | sed -n 's/--array=0-//p')
if [ -n "$array" ]; then
  script=$(cat)
  for i in $(seq 0 "$array"); do SLURM_ARRAY_TASK_ID=$i bash -c "$script"; done
  echo 1$array
fi
"""
ROWS = {
    "0": {"label": "a", "methods": []},
    "1": {"label": "b", "methods": [], "start": "0"},
    "2": {"label": "c", "methods": [{"method": "freeze", "ffn": "random"}]},
    "3": {"label": "d", "methods": [], "start": "1"},
}


def program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def printed(recipe, out, *options, command="run"):
    done = CliRunner().invoke(app, [command, str(recipe), "--out", str(out), "--on", "slurm", *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def run_script(folder, script):
    """What was given to sbatch, and the words of the jobs in arrays."""
    program(folder, "sbatch", SBATCH)
    program(folder, "hf-freeze", '#!/bin/bash\nprintf "%q " run-job "$@" >> "$LOG"\necho >> "$LOG"\n')
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(folder / "log")}
    subprocess.run(["bash", "-c", script], check=True, env=environment)
    lines = (folder / "log").read_text().splitlines()
    jobs = [shlex.split(line)[1:] for line in lines if line.startswith("run-job")]
    return [line for line in lines if line.startswith("sbatch")], jobs


def test_the_jobs_of_a_grid_are_the_grid(tmp_path):
    """In an order in which each finds what it starts from; and the last one only reports."""
    recipe = write_recipe(tmp_path / "r.yaml", rows=ROWS, seeds=[1, 2])
    script = printed(
        *(recipe, tmp_path / "out", "--sbatch", "--gres=gpu:1", "--set", "training.epochs=0.5", "--reuse", "other")
    )
    assert not (tmp_path / "out").exists()
    submitted, jobs = run_script(tmp_path, script)
    assert [("dependency=afterok:1" in line, "gres=gpu:1" in line) for line in submitted] == [
        (False, True),
        (True, True),
        (True, True),
        (True, True),
    ]
    assert all(words[words.index("--reuse") + 1] == "other" for words in jobs)
    settings = [[value for word, value in pairwise(words) if word == "--set"] for words in jobs]
    only = [(row, seed) for _, row, seed in settings]
    assert only[:4] == [(f"only=['{row}']", f"seeds=[{seed}]") for seed in (1, 2) for row in ("0", "2")]
    assert only[4:6] == [(f"only=['{1}']", f"seeds=[{seed}]") for seed in (1, 2)]
    assert only[6:] == [(f"only=['{3}']", f"seeds=[{seed}]") for seed in (1, 2)]


def test_the_command_of_a_job_runs_that_job(tmp_path):
    recipe = write_recipe(tmp_path / "r.yaml", rows=ROWS)
    (first, *_) = [
        line for line in printed(recipe, tmp_path / "out").splitlines() if line.startswith("exec hf-freeze ")
    ]
    words = shlex.split(first.replace("$row", "2").replace("$seed", "1"))[2:]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (record,) = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert (record["row"], record["seed"]) == ("2", 1)


def test_the_jobs_of_a_search_are_workers_that_share_it_and_one_for_the_front(tmp_path):
    pytest.importorskip("optuna")
    recipe = write_recipe(tmp_path / "r.yaml", space={"backbone": {"config": {"d_model": {"choices": [8, 12]}}}})
    out, label = tmp_path / "the out", "rows.0.label='it''s dense'"
    options = ("--jobs", "3", "--trials", "9", "--sbatch", "--gres=gpu:1", "--set", label)
    script = printed(recipe, out, *options, command="search")
    assert not out.exists()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    submitted, jobs = run_script(tmp_path, script)
    assert out.is_dir(), "where the logs go"
    words = [
        "search",
        str(recipe),
        "--trials",
        "9",
        "--sampler",
        "tpe",
        "--seed",
        "0",
        "--set",
        label,
        "--out",
        str(out),
    ]
    assert jobs == [words] * 3
    array, last = submitted
    assert "--array=0-2 " in array
    assert "--requeue --open-mode=append --gres=gpu:1" in array
    assert "--dependency=afterany:12 " in last
    assert last.endswith(f"--gres=gpu:1 --wrap {shlex.join(['hf-freeze', *words])}")


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--on", "kubernetes"], "choose from ['local', 'ray', 'slurm']"), (["--sbatch", "--x"], "needs --on slurm")],
)
def test_what_cannot_be_is_one_line(options, message, tmp_path):
    done = CliRunner().invoke(app, ["run", str(write_recipe(tmp_path / "r.yaml")), *options])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
