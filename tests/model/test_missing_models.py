"""A model that is not where it was said to be: one clear line, before anything is asked of the Hub."""

import re

import pytest
from rich.console import Console
from support.recipes import TINY, write_recipe
from typer.testing import CliRunner

from hf_freeze import make_variant, methods
from hf_freeze.cli import app
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.model import loading

MISSING = ["./nowhere", "../nowhere/model", "/nowhere", "runs/nowhere/model"]
COMMANDS = {
    "inspect": ["inspect", "{}"],
    "latency": ["inspect", "{}", "--latency"],
    "diff": ["diff", "{}", "{}"],
    "export": ["export", "{}", "--format", "dense"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", MISSING)
def test_commands_name_the_missing_folder(command, name):
    done = CliRunner().invoke(app, [word.format(name) for word in COMMANDS[command]])
    assert done.exit_code == 2
    assert re.search(rf"Error: {re.escape(name)!s} does not exist: neither a folder here nor a Hub id", done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_name_that_the_hub_does_not_give_is_said_first(monkeypatch):
    def unknown(name):
        raise OSError("no connection")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", unknown)
    with pytest.raises(
        FileNotFoundError, match="nosuch is no folder here, and the Hub gave no such model: no connection"
    ):
        loading.load_model("nosuch")


def test_a_damaged_folder_is_not_said_to_be_missing(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"config\.json") as damaged:
        loading.load_model(tmp_path)
    assert "is no folder here" not in str(damaged.value)


@pytest.mark.parametrize("name", MISSING)
def test_make_variant_names_the_missing_folder(name):
    with pytest.raises(
        FileNotFoundError, match=rf"{re.escape(name)} does not exist: neither a folder here nor a Hub id"
    ):
        make_variant(name, [methods.Freeze(ffn="frozen")], task="seq2seq-lm")


def test_the_folder_of_a_run_is_answered_with_that_of_its_model(tmp_path):
    (model := tmp_path / "row-0-seed-1" / "model").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    with pytest.raises(
        FileNotFoundError, match=rf"row-0-seed-1 has no config.json; name the folder .* such as {model}"
    ):
        loading.load_model(model.parent)


def test_a_grid_names_the_missing_folder_before_it_runs(tmp_path):
    rows = {"0": TINY["rows"]["0"] | {"backbone": {"pretrained": "./nowhere"}}}
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows))
    with pytest.raises(FileNotFoundError, match=r"\./nowhere does not exist: neither a folder here nor a Hub id"):
        run_grid(recipe, tmp_path / "runs", console=Console(quiet=True))
    assert not (tmp_path / "runs").exists()


def test_what_may_be_a_hub_id_is_asked_of_the_hub(monkeypatch):
    """A name of one or two parts is no folder here, but may be on the Hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = CliRunner().invoke(app, ["inspect", "nowhere/model"])
    assert done.exit_code == 2
    assert "neither a folder" not in done.stderr
