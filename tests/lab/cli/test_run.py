"""`hf-freeze run` and `hf-freeze report`: a recipe, its folder, and wrong input in one line."""

import json
from pathlib import Path

import pytest
from support import ROOT
from support.recipes import cli, one_line_error, write_recipe
from support.small import not_understood
from transformers import BertConfig

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab.data import builtin_corpus
from hf_freeze.lab.report.finished_runs import read_results

ABLATION = ROOT / "recipes" / "freeze_ablation"
pytestmark = pytest.mark.usefixtures("one_core")


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


def test_a_failed_grid_has_exit_code_2(tmp_path):
    rows = {
        "0": {"label": "more tokens than the data", "methods": [{"method": "adaptive_embedding", "cutoffs": [4000]}]}
    }
    path = write_recipe(tmp_path / "r.yaml", rows=rows, **{"presets/small/tokenizer/vocab_size": 5000})
    assert "1 of 1 runs failed" in one_line_error("run", path, "--out", tmp_path / "out")


def test_missing_files_are_said_once_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = one_line_error("run", ABLATION / "multi30k.yaml", "--set", "data.root=nowhere")
    assert "nowhere/train.de.gz does not exist; say where the files are: --set data.root=DIRECTORY" in message
    assert not (tmp_path / "runs").exists()
