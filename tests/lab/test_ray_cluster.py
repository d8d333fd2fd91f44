"""`hf-freeze run --on ray`: grids on a cluster that is started here, whose nodes are killed.

`make test-full` runs this file in a process of its own: where a cluster was, Ray goes on looking for it, and may end the process
without a word after a minute.
"""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from support.cases import ALL
from support.recipes import LONGER, cli, figures, write_recipe

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs import on_ray
from hf_freeze.lab.runs.grid import FailedRuns, run_grid
from hf_freeze.lab.runs.on_ray import RayOptions, RayTasks

ray = pytest.importorskip("ray")
SPACE = {
    "backbone": {"config": {"d_model": {"choices": [8, 12, 16]}, "encoder_ffn_dim": {"int": [8, 64], "log": True}}}
}
NODE = {"object_store_memory": 80 * 2**20, "num_cpus": 1}


@pytest.fixture(scope="module")
def cluster():
    """The first node, of one CPU; `add_node` makes more, on this machine, as `ray start` does on another."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in on_ray._QUIET.items():
            patch.setenv(name, value)
        # How often Ray looks whether a node is there: 3 s, without. And no workers that no run takes.
        quick = {"health_check_period_ms": 300, "prestart_worker_first_driver": False}
        made = Cluster(
            initialize_head=True, head_node_args={"include_dashboard": False, "_system_config": quick, **NODE}
        )
        yield made
        made.shutdown()


def lose(cluster, node):
    cluster.remove_node(node, allow_graceful=False)
    cluster.wait_for_nodes(timeout=100)  # until Ray no longer counts it: the next test counts nodes


def wait_for(condition):
    deadline = time.monotonic() + 200
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


# -- a node that is lost -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not ALL, reason="takes a minute: only in make test-all")
def test_a_grid_that_loses_a_node_is_the_local_grid(cluster, tmp_path):
    size = {
        "data": {"builtin": {"seed": 0, "train": 60, "dev": 10, "test": 8}},
        "presets/small/training/max_tokens": 60,
    }
    recipe = write_recipe(tmp_path / "r.yaml", **LONGER, **size)
    second, killed = cluster.add_node(**NODE), []

    def in_training():
        for attempt in (tmp_path / "ray").glob("row-*/checkpoints/attempt"):
            checkpoints = attempt.parent.glob("checkpoint-*/trainer_state.json")
            if attempt.read_text().startswith(second.node_id) and any(checkpoints):
                return attempt.parent.parent.name
        return None

    def kill():
        killed.append(wait_for(in_training))
        lose(cluster, second)

    killer = threading.Thread(target=kill)
    killer.start()
    printed = cli("run", recipe, "--out", tmp_path / "ray", "--on", "ray", "--address", cluster.address).output
    killer.join()
    loaded = load_recipe(recipe)
    alone = run_grid(loaded, tmp_path / "alone")
    lines = (tmp_path / "ray" / "results.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert list(map(figures, records)) == list(map(figures, alone))
    assert [f"row-{record['row']}-seed-{record['seed']}" for record in records if record["resumed"]] == killed
    assert f"{killed[0]}: Task failed because the node it was running on is dead" in printed
    assert "again, 1 of 3" in printed
    for run in expand(loaded):
        one, other = (run.folder(tmp_path / out) for out in ("ray", "alone"))
        assert {p.relative_to(one) for p in one.rglob("*")} == {p.relative_to(other) for p in other.rglob("*")}
        weights = [load_file(folder / "model" / "model.safetensors") for folder in (one, other)]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert (one / "translations.txt").read_text() == (other / "translations.txt").read_text()
        assert (one / "items.npy").read_bytes() == (other / "items.npy").read_bytes()
    assert (tmp_path / "ray" / "report.md").exists()
    command = (tmp_path / "ray" / "command.txt").read_text()
    assert command.endswith("--on ray\n"), "and where the nodes are is nobody's business"


def pretend(monkeypatch):
    """Runs that only leave a record, or fail, or are killed, or go on for ever, as their label says."""

    def work(run, cwd, name, gpus, options, messages):  # within a function, so that Ray sends it
        folder = Path(cwd, name)
        until = options.until
        with (folder / "tries").open("a") as file:
            file.write(f"{os.environ['CUDA_VISIBLE_DEVICES']}\n" if gpus else "\n")
        if until is not None:  # a run of a search, which pauses at a checkpoint
            checkpoint = folder / "checkpoints" / "checkpoint-1"
            checkpoint.mkdir(parents=True)
            state = {"log_history": [{"epoch": until, "eval_loss": 3.0 + run.backbone.config["d_model"]}]}
            (checkpoint / "trainer_state.json").write_text(json.dumps(state))
            return "checkpoints/checkpoint-1/trainer_state.json"
        if run.label == "fails":
            raise ValueError("so it does")
        if run.label == "is killed":
            os._exit(1)
        if run.label == "loses its node":
            node = ray.get_runtime_context().get_node_id()
            with (folder / "nodes").open("a") as file:
                file.write(f"{node}\n")
            while len((folder / "nodes").read_text().split()) == 1:
                time.sleep(0.1)
        while run.label == "goes on":
            time.sleep(1)
        record = {key: getattr(run, key) for key in ("row", "seed", "label")}
        record |= {"metrics": {"dev_perplexity": 1.0, "dev_loss": 2.0}, "multiply_adds": 1}
        record |= {"parameters": {"trainable_share": 1.0, "total": 1, "stored_bytes": 1}}
        (folder / "metrics.json").write_text(json.dumps(record))
        return "metrics.json"

    monkeypatch.setattr(on_ray, "_work", work)


def rows(*labels, **starts):
    made = {str(row): {"label": label, "methods": []} for row, label in enumerate(labels)}
    for row, start in starts.items():
        made[row.removeprefix("row_")]["start"] = start
    return made


def test_what_fails_is_not_tried_again_and_what_is_killed_is(cluster, tmp_path, monkeypatch):
    pretend(monkeypatch)
    labels = rows("is well", "fails", "is killed", "is well too", "was to start", row_3="0", row_4="1")
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", rows=labels))
    console = Console(record=True, width=300)
    with pytest.raises(FailedRuns, match="3 of 5 runs failed"):
        run_grid(recipe, tmp_path / "o", console=console, ray=RayOptions(address=cluster.address, retries=1))
    printed = console.export_text()
    assert [json.loads(line)["row"] for line in (tmp_path / "o" / "results.jsonl").read_text().splitlines()] == [
        "0",
        "3",
    ]
    tries = {path.parent.name: len(path.read_text().splitlines()) for path in (tmp_path / "o").glob("*/tries")}
    assert tries == {"row-0-seed-1": 1, "row-1-seed-1": 1, "row-2-seed-1": 2, "row-3-seed-1": 1}
    logs = {path.parent.name[4]: path.read_text().strip() for path in (tmp_path / "o").glob("*/error.log")}
    assert logs.keys() == {"1", "2", "4"}
    assert logs["1"].endswith("ValueError: so it does")
    assert logs["2"].endswith("; tried 2 times")
    assert logs["4"] == "row 1 with seed 1 failed, from which it starts"
    assert "row-2-seed-1: " in printed
    assert "again, 1 of 1" in printed
    assert not ray.is_initialized()


def test_a_run_that_loses_its_node_is_done_on_another(cluster, tmp_path, monkeypatch):
    """What it computes then, `test_a_grid_that_loses_a_node_is_the_local_grid` compares."""
    pretend(monkeypatch)
    second = cluster.add_node(**NODE)
    nodes, lost = [tmp_path / "o" / f"row-{row}-seed-1" / "nodes" for row in "01"], []

    def kill():
        wait_for(lambda: all(path.exists() and path.read_text() for path in nodes))
        lost.extend(path for path in nodes if path.read_text().split() == [second.node_id])
        lose(cluster, second)
        for path in set(nodes) - set(lost):  # may go on, as if it had trained
            with path.open("a") as file:
                file.write("again\n")

    killer = threading.Thread(target=kill)
    killer.start()
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows("loses its node", "loses its node")))
    console = Console(record=True, width=300)
    records = run_grid(recipe, tmp_path / "o", console=console, ray=RayOptions(address=cluster.address))
    killer.join()
    assert [record["row"] for record in records] == ["0", "1"]
    (path,) = lost
    first, again = path.read_text().split()
    assert first == second.node_id != again
    printed = console.export_text()
    assert f"{path.parent.name}: Task failed because the node it was running on is dead" in printed
    assert "again, 1 of 3" in printed


def test_a_search_has_no_more_trials_than_ray_has_room_for_and_continues_them_after_a_rung(
    cluster, tmp_path, monkeypatch
):
    """What trials compute then, `test_a_search_on_ray_is_the_local_search` compares."""
    pytest.importorskip("optuna")
    from hf_freeze.lab.search.search import Search

    pretend(monkeypatch)
    running, submit = [], RayTasks._submit
    monkeypatch.setattr(
        RayTasks,
        "_submit",
        lambda self, task: (submit(self, task), running.append((len(self._running), self._nodes()))),
    )
    recipe = write_recipe(tmp_path / "r.yaml", rows=..., space=SPACE, search={"rungs": [0.5]})
    console = Console(record=True, width=300)
    search = Search(load_recipe(recipe), tmp_path / "o", console=console, ray=RayOptions(address=cluster.address))
    found = search.run(2)
    assert found.counts == {"finished": 2}
    assert len(running) == 4, "both trials have paused and gone on"
    assert all(number <= len(nodes) for number, nodes in running), f"a node has one CPU: {running}"
    tries = {path.parent.name: path.read_text().count("\n") for path in (tmp_path / "o").rglob("tries")}
    assert tries == {"row-t0-seed-1": 2, "row-t1-seed-1": 2}
    assert not ray.is_initialized()
    monkeypatch.setattr(Search, "_workers", lambda self: pytest.fail("nothing is left to train"))
    assert search.run(2).front == found.front


@pytest.mark.skipif(not ALL, reason="takes a minute: only in make test-all")
def test_a_search_on_ray_is_the_local_search(cluster, tmp_path):
    pytest.importorskip("optuna")
    changes = {"presets/small/training/epochs": 2, "rows": ..., "space": SPACE, "search": {"rungs": [1]}}
    recipe = write_recipe(tmp_path / "r.yaml", **changes)
    arguments = ("search", recipe, "--trials", 3, "--seed", 4, "--out")
    cli(*arguments, tmp_path / "ray", "--on", "ray", "--address", cluster.address)
    cli(*arguments, tmp_path / "alone")
    for file in ("trials/results.jsonl", "front/results.jsonl"):
        one, other = (
            [figures(json.loads(line)) for line in (tmp_path / out / file).read_text().splitlines()]
            for out in ("ray", "alone")
        )
        assert one == other
    one, other = ((tmp_path / out / "trials.jsonl").read_text() for out in ("ray", "alone"))
    assert one == other
    assert '"stopped"' in one
    assert (tmp_path / "ray" / "trials" / "command.txt").read_text().endswith("--seed 4 --on ray\n")


def test_a_grid_whose_nodes_are_all_lost_ends(cluster, tmp_path, monkeypatch):
    """After a while; and a run takes a GPU where there are any."""
    pretend(monkeypatch)
    monkeypatch.setattr(on_ray, "_PATIENCE", 1)
    node = cluster.add_node(**NODE, num_gpus=1)
    tries = tmp_path / "o" / "row-0-seed-1" / "tries"

    def kill():
        wait_for(tries.exists)
        lose(cluster, node)

    killer = threading.Thread(target=kill)
    killer.start()
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows("goes on")))
    with pytest.raises(
        ConnectionError, match=r"no node with 1 CPU and 1 GPU is left, for 1 s: the same command resumes"
    ):
        run_grid(recipe, tmp_path / "o", ray=RayOptions(address=cluster.address))
    killer.join()
    assert tries.read_text() == "0\n", "the number of its GPU, once"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus": 64}, "no node of Ray has 64 CPUs and 0 GPUs; the most that any of 1 has: 1 CPU and 0 GPUs"),
        ({"gpus": 0.5}, r"no node of Ray has 1 CPU and 0\.5 GPUs; the most"),
    ],
)
def test_what_no_node_has_is_said_at_once(cluster, options, message, tmp_path):
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml"))
    with pytest.raises(ValueError, match=message):
        run_grid(recipe, tmp_path / "o", ray=RayOptions(address=cluster.address, **options))
    assert not ray.is_initialized()
