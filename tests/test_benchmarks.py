"""Every benchmark says what it claims, and runs at its smallest setting. What it times is not judged here; sizes are."""

import importlib
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if not file.name.startswith("_"))
assert NAMES


@pytest.fixture
def run(monkeypatch, capsys):
    """run(name, *arguments) -> what the benchmark prints."""
    monkeypatch.syspath_prepend(FOLDER)

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", NAMES)
def test_help_states_the_claim_and_the_command(name, run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(name, "--help")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert re.search(r"^Claims?: ", printed, re.MULTILINE)
    assert f"python benchmarks/{name}.py" in printed


def test_rng_speed(run):
    assert re.search(r"ratio [\d.]+ \(claim: at least 0.5\)", run("rng_speed", "--rounds", "1"))


def test_freeze_step(run, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("freeze_step")
    monkeypatch.setattr(module, "in_new_process", module.memory)  # the peak, which needs a process, is not looked at
    out = tmp_path / "table.md"
    arguments = ["--preset", "demo", "--vocab", "96", "--tokens", "64", "--rows", "0", "5", "--rounds", "1"]
    printed = run("freeze_step", *arguments, "--out", str(out))
    # By hand the losses, the state and what autograd keeps are the same, or it would have stopped.
    assert re.search(r"step: at most [\d.]+ of the same done by hand", printed)
    assert float(re.findall(r"state and kept as by hand and at most ([\d.]+) of row 0", printed)[0]) < 1
    state = {
        label: float(cells.split(" | ")[5])
        for label, cells in re.findall(r"^\| (✓✓✓|✗✗✓).*?\| (.*) \|$", printed, re.M)
    }
    d, f, layers, blocks, vocabulary = 96, 384, 4, 6, 96
    ffn, norms = layers * (2 * d * f + f + d), 2 * d * (2 * 2 + 2 * 3)
    frozen = vocabulary * d + blocks * 4 * (d * d + d) + 2 * 256 * d  # two tables of sinusoids, never trained
    assert state["✗✗✓"] == pytest.approx((16 * (ffn + norms + vocabulary) + 4 * frozen) / 1e6, abs=0.051)
    assert state["✗✗✓"] < state["✓✓✓"]
    assert out.read_text(encoding="utf-8").startswith("`python benchmarks/freeze_step.py --preset demo")


def test_checkpoint_size(run):
    printed = run("checkpoint_size", "--preset", "demo", "--vocab", "96", "--rounds", "1")
    d, blocks, norms, vocabulary = 96, 6, 10, 96
    attention_alone = 4 * (blocks * 4 * (d * d + d) + norms * 2 * d + vocabulary)  # row 4, in fp32
    everything = attention_alone + 4 * (vocabulary * d + 4 * (8 * d * d + 5 * d))
    for size in (attention_alone, everything):
        assert f" | {size:,} | 0 | " in printed  # nothing above what must be stored
    assert re.search(r"save ratio [\d.]+ \(.*load ratio [\d.]+ \(", printed)


def test_training_throughput(run):
    printed = run("training_throughput", "--preset", "demo", "--steps", "2", "--rounds", "1")
    assert re.search(r"ours to the plain loop: ratio [\d.]+ \(claim", printed)
    padding = {name: float(share) for name, share in re.findall(r"^\| ([\w' ,]+?) \|.*\| ([\d.]+) % \|", printed, re.M)}
    assert padding["ours"] == padding["plain loop"] < padding["Trainer's defaults"]
