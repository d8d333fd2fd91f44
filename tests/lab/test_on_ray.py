"""`hf-freeze run --on ray` without a cluster: what a node does, and what cannot be."""

import json
import os
import socket
import sys
import time

import pytest
from support.recipes import one_line_error, write_recipe

from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs import on_ray
from hf_freeze.lab.runs.environment import environment
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.runs.on_ray import RayOptions
from hf_freeze.lab.runs.resume import forget_other_machines

pytest.importorskip("ray")


def test_a_run_on_another_machine_begins_again(tmp_path):
    """Going on would not give the figures of one undisturbed run, and who retries chooses no machine."""
    checkpoint = tmp_path / "checkpoints" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    for found, kept in ({}, True), ({"device": "another"}, False):
        (tmp_path / "environment.json").write_text(json.dumps(environment() | {"processes": 1} | found))
        forget_other_machines(tmp_path)
        assert checkpoint.exists() == kept


def test_a_run_that_another_node_goes_on_with_ends_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    first = on_ray._Attempt(tmp_path, "node")
    first.check()
    second = on_ray._Attempt(tmp_path, "node")
    second.check()
    with pytest.raises(SystemExit, match="1"):
        first.check()


def test_a_folder_that_a_node_does_not_see(tmp_path):
    message = r"nowhere/row-0-seed-1 is not there on node .*: --out must be on storage that all nodes see"
    options = on_ray.WorkOptions(threads=1, resume_anyway=False)
    with pytest.raises(FileNotFoundError, match=message):
        on_ray._work(None, str(tmp_path), "nowhere/row-0-seed-1", 1, options, None)
    assert not (tmp_path / "nowhere").exists()


# -- what cannot be ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "auto"], "--address auto needs --on ray, not --on local"),
        (["--cpus", "2", "--on", "slurm"], "--cpus 2.0 needs --on ray, not --on slurm"),
        (["--on", "ray", "--address", "ray://a:1"], "--address 'ray://a:1': write HOST:PORT"),
        (["--on", "ray", "--address", "here"], "--address 'here': write HOST:PORT"),
        (["--on", "ray", "--address", "a:99999"], "--address 'a:99999': write HOST:PORT"),
        (["--on", "ray", "--cpus", "0"], "--cpus 0.0: a run takes more than 0"),
        (["--on", "ray", "--gpus", "2"], "--gpus 2.0: a run is one process on 0 to 1 GPUs"),
        (["--on", "ray", "--retries", "-1"], "--retries -1: must be 0 or more"),
        (["--on", "ray", "--jobs", "2"], "jobs=2: Ray has as many runs at a time as it has room for"),
    ],
)
def test_options_that_cannot_be_are_one_line(options, message, tmp_path):
    recipe = write_recipe(tmp_path / "r.yaml")
    assert message in one_line_error("run", recipe, "--out", tmp_path / "o", *options)
    assert not (tmp_path / "o").exists()


def test_an_address_where_nothing_answers(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        recipe, began = write_recipe(tmp_path / "r.yaml"), time.monotonic()
        error = one_line_error("run", recipe, "--out", tmp_path / "o", "--on", "ray", "--address", address)
    assert f"no Ray answers at '{address}'" in error
    assert time.monotonic() - began < 15


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    recipe = write_recipe(tmp_path / "r.yaml")
    error = one_line_error("run", recipe, "--out", tmp_path / "o", "--on", "ray")
    assert "--on ray needs the package ray" in error
    assert 'pip install -c constraints.txt -e ".[ray]"' in error


def test_a_launcher_and_ray_are_not_for_the_same_grid(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"under a launcher .* leave --on ray out"):
        run_grid(load_recipe(write_recipe(tmp_path / "r.yaml")), tmp_path / "o", ray=RayOptions())
