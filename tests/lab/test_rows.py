"""Rows that start from another row's model, or have a training or a backbone of their own; methods that end training."""

import json
import math
import multiprocessing
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from support.recipes import LM, TINY, figures, write_recipe
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_freeze import count_parameters, stored_bytes
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.settings import Training
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.grid import FailedRuns, run_grid
from hf_freeze.methods.base import Method
from hf_freeze.methods.registry import METHODS, register_method
from hf_freeze.model.build import VariantMixin

FREEZE = {"method": "freeze", "ffn": "frozen"}
ROWS = {
    "0": {"label": "all", "methods": []},
    "tuned": {
        "label": "tuned",
        "methods": [FREEZE],
        "start": "unchanged",
        "training": {"learning_rate": 1e-3, "evaluations": 2},
    },
    "unchanged": {"label": "unchanged", "methods": [], "start": "0", "training": {"epochs": 0}},
    "small": {
        "label": "small",
        "methods": [],
        "backbone": {"config": {"encoder_ffn_dim": 8}},
        "tokenizer": {"vocab_size": 90},
    },
}


def recipe_of(folder, rows=ROWS, **changes):
    return load_recipe(write_recipe(folder / "r.yaml", rows=rows, **changes))


# -- recipes ---------------------------------------------------------------------------------------------------------------------

BAD_ROWS = {
    "field": (
        {"x": 1},
        r"row '1': unknown field 'x'; choose from \['backbone', 'calibration', 'head_scores', 'heads', 'label', ",
    ),
    "no such row": ({"start": "9"}, r"row '1': start='9' is no row; choose from \['0', '1', '2'\]"),
    "unquoted": ({"start": 0}, r"row '1': start must be a str, not 0"),
    "itself": ({"start": "1"}, r"row '1': 'start' refers to itself: 1 <- 1"),
    "circle": ({"start": "2"}, r"row '1': 'start' refers to itself: 1 <- 2 <- 1"),
    "start and backbone": ({"start": "0", "backbone": {}}, r"row '1' has both 'start' and 'backbone': it takes the"),
    "start and tokenizer": ({"start": "0", "tokenizer": {}}, r"row '1' has both 'start' and 'tokenizer': it takes the"),
    "tokenizer field": ({"tokenizer": {"size": 3}}, r"row '1': unknown field tokenizer\.size; choose from"),
    "training": ({"training": 3}, r"row '1': training must be a dict, not 3"),
    "training field": ({"training": {"lr": 3}}, r"row '1': unknown field training\.lr; choose from"),
    "training value": ({"training": {"epochs": "x"}}, r"row '1': training\.epochs='x' is not a value that it takes"),
    "epochs": ({"training": {"epochs": -1}}, r"row '1': training\.epochs=-1 must be at least 0"),
    "component": (
        {"training": {"learning_rates": {"mlp": 1}}},
        r"row '1': unknown component training\.learning_rates\.mlp",
    ),
    "backbone": ({"backbone": []}, r"row '1': backbone must be a dict, not \[\]"),
    "from scratch": (
        {"start": "0", "methods": [{"method": "delight"}]},
        r"row '1': the blocks of method 'delight' train from scratch: it can have neither 'start' nor 'backbone\.pretrained'",
    ),
    "backbone field": ({"backbone": {"d_model": 8}}, r"row '1': unknown field backbone\.d_model; choose from"),
}


def test_perplexities_of_other_pieces_are_not_compared(tmp_path):
    rows = {"0": ROWS["0"], "1": ROWS["0"] | {"tokenizer": {"vocab_size": 90}}}
    with pytest.raises(ValueError, match="row '1': perplexity is per token, so all rows of task"):
        load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows, **LM))


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_refused(tmp_path, case):
    fields, message = BAD_ROWS[case]
    rows = {"0": ROWS["0"], "1": ROWS["0"] | fields, "2": ROWS["0"] | {"start": "1"}}
    with pytest.raises(ValueError, match=message):
        recipe_of(tmp_path, rows)


def test_a_row_has_what_it_says_and_else_what_the_recipe_says(tmp_path):
    recipe = recipe_of(tmp_path, seeds=[1, 2])
    runs = {(run.row, run.seed): run for run in expand(recipe)}
    # Whatever a row starts from comes before it.
    assert list(runs) == [(row, seed) for seed in (1, 2) for row in ("0", "small", "unchanged", "tuned")]
    training = TINY["presets"]["small"]["training"]
    assert runs["0", 1].training.given() == runs["small", 1].training.given() == training
    assert runs["tuned", 1].training.given() == training | ROWS["tuned"]["training"]
    assert runs["unchanged", 1].training.given() == training | {"epochs": 0}
    sizes = {row: runs[row, 2].backbone.config["encoder_ffn_dim"] for row in ROWS}
    assert sizes == {"0": 16, "tuned": 16, "unchanged": 16, "small": 8}
    assert runs["small", 1].backbone.config | {"encoder_ffn_dim": 16} == runs["0", 1].backbone.config
    vocabulary = TINY["presets"]["small"]["tokenizer"]["vocab_size"]
    assert {row: runs[row, 1].tokenizer.vocab_size for row in ROWS} == dict.fromkeys(ROWS, vocabulary) | {"small": 90}
    assert runs["0", 1].start is None
    assert runs["tuned", 2].start.given() == {
        "row": "unchanged",
        "seed": 2,
        "training": runs["unchanged", 2].training.given(),
        "methods": [],
        "start": {"row": "0", "seed": 2, "training": training, "methods": []},
    }
    assert json.loads(json.dumps(runs["tuned", 2].given())) == runs["tuned", 2].given(), "plain data"
    only = [run.row for run in expand(recipe.changed(only=["small", "tuned"], seeds=[1]))]
    assert only == ["0", "small", "unchanged", "tuned"], "the first row is what the others are compared with"


def test_a_row_takes_the_backbone_of_its_start(tmp_path):
    rows = {"a": ROWS["small"], "b": {"label": "b", "methods": [], "start": "a"}}
    runs = expand(recipe_of(tmp_path, rows))
    assert runs[1].backbone == runs[0].backbone
    assert runs[1].backbone.config["encoder_ffn_dim"] == 8


# -- which run is started when ---------------------------------------------------------------------------------------------------


def pretend(monkeypatch, *, broken=(), slow=()):
    """Runs that only leave a record, or fail where `broken`; returns the events ("start", row) and ("end", row)."""
    events = []

    class Process:
        exitcode = 1

        def __init__(self, target, args):
            self.sentinel, other = multiprocessing.Pipe()
            other.close()  # so it is ready, as that of a process that has ended
            self.run, self.folder = args[:2]
            self.polls = 2 if self.run.row in slow else 0

        def start(self):
            events.append(("start", self.run.row))

        def is_alive(self):
            self.polls -= 1
            if self.polls == -1:
                events.append(("end", self.run.row))
                record = {key: getattr(self.run, key) for key in ("row", "seed", "label")}
                record |= {"metrics": {"dev_perplexity": 1.0}, "parameters": {"trainable_share": 1.0}}
                if self.run.row not in broken:
                    (self.folder / "metrics.json").write_text(json.dumps(record))
            return self.polls >= 0

    class Context:
        Pipe = staticmethod(multiprocessing.Pipe)

        def set_forkserver_preload(self, modules): ...

    Context.Process = Process
    monkeypatch.setattr("hf_freeze.lab.runs.processes.multiprocessing.get_context", lambda method: Context())
    return events


CHAIN = {
    "1": {"label": "1", "methods": [], "start": "0"},
    "2": {"label": "2", "methods": [], "start": "1"},
    "0": ROWS["0"],
    "x": {"label": "x", "methods": []},
    "y": {"label": "y", "methods": []},
}


def test_a_run_waits_for_its_start_and_the_others_go_on(tmp_path, monkeypatch):
    events = pretend(monkeypatch, slow=["0"])
    records = run_grid(recipe_of(tmp_path, CHAIN), tmp_path / "out", jobs=2)
    assert [record["row"] for record in records] == ["0", "1", "2", "x", "y"]
    assert events[:2] == [("start", "0"), ("start", "x")]
    assert events.index(("start", "y")) < events.index(("end", "0")) < events.index(("start", "1"))
    assert events.index(("end", "1")) < events.index(("start", "2"))


def test_what_starts_from_a_failed_run_fails_with_it(tmp_path, monkeypatch):
    events = pretend(monkeypatch, broken=["0"])
    recipe, console = recipe_of(tmp_path, CHAIN), Console(record=True, width=300)
    with pytest.raises(FailedRuns, match=r"3 of 5 runs failed; see .*row-0-seed-1/error\.log"):
        run_grid(recipe, tmp_path / "out", jobs=2, console=console)
    assert [row for kind, row in events if kind == "start"] == ["0", "x", "y"]
    reasons = [(tmp_path / "out" / f"row-{row}-seed-1" / "error.log").read_text().splitlines() for row in "12"]
    assert reasons == [[f"row {start} with seed 1 failed, from which it starts"] for start in "01"]
    printed = console.export_text()
    assert all(f"row-{row}-seed-1 failed: row {start} with seed 1" in printed for row, start in ("10", "21"))
    pretend(monkeypatch)
    assert len(run_grid(recipe, tmp_path / "out")) == 5


def test_a_finished_start_is_used(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, CHAIN)
    pretend(monkeypatch)
    run_grid(recipe.changed(only=["0"]), tmp_path / "out")
    events = pretend(monkeypatch)
    run_grid(recipe.changed(only=["2"]), tmp_path / "out")
    assert [row for kind, row in events if kind == "start"] == ["1", "2"]


# -- what such runs leave --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """(recipe, folder, {row: record}) of `ROWS`, run once for all tests."""
    folder = tmp_path_factory.mktemp("grid")
    recipe = recipe_of(folder)
    records = run_grid(recipe, folder / "out", jobs=2)
    return recipe, folder / "out", {record["row"]: record for record in records}


def weights(folder, row):
    return load_file(folder / f"row-{row}-seed-1" / "model" / "model.safetensors")


def test_a_start_is_the_model_of_that_row(grid):
    _, out, records = grid
    copy, first = records["unchanged"], records["0"]
    assert copy["metrics"] == first["metrics"]
    assert (copy["steps"], copy["epochs_trained"], copy["epochs_to_convergence"]) == (0, 0, 0)
    assert copy["parameters"] == first["parameters"]
    assert (copy["start"], records["tuned"]["start"]) == ("0", "unchanged")
    assert "start" not in first
    for name in ("translations.txt", "items.npy", "model/tokenizer.json"):
        one, other = ((out / f"row-{row}-seed-1" / name).read_bytes() for row in ("0", "unchanged"))
        assert one == other, name
    old, same, new = (weights(out, row) for row in ("0", "unchanged", "tuned"))
    assert all(torch.equal(old[name], same[name]) for name in old)
    unchanged = {name for name in old if torch.equal(old[name], new[name])}
    assert {name for name in old if ".fc" in name} <= unchanged
    assert not {name for name in old if "q_proj.weight" in name or "shared" in name} & unchanged


def test_a_row_may_be_trained_otherwise_or_be_smaller(grid):
    _, out, records = grid
    log = [json.loads(line) for line in (out / "row-tuned-seed-1" / "log.jsonl").read_text().splitlines()]
    assert max(entry.get("learning_rate", 0) for entry in log) <= 1e-3
    assert sum("eval_loss" in entry for entry in log) == 3, "two in the epoch, one of the best"
    smaller = records["0"]["parameters"]["total"] - records["small"]["parameters"]["total"]
    of_ffn, of_a_token = 8 * 16 + 8 + 16 * 8, 16 + 1  # its row of the table and its bias
    assert smaller == of_ffn + 10 * of_a_token


def test_the_report_says_what_a_row_starts_from_and_how_large_it_is(grid):
    _, out, records = grid
    report = write_report(out, say=lambda text: None)
    headings, cells = table_cells(report)
    assert headings[headings.index("total k") :][:3] == ["total k", "macs k", "stored MB"]
    found = {line[0]: dict(zip(headings, line, strict=True)) for line in cells}
    assert [line["trained"] for line in found.values()] == [
        "all",
        "small",
        "unchanged, from 0",
        "tuned, from unchanged",
    ]
    assert found["unchanged"]["best epoch"] == "0.0"
    for row, record in records.items():
        assert found[row]["total k"] == f"{record['parameters']['total'] / 1000:,.0f}"
        assert found[row]["macs k"] == f"{record['multiply_adds'] / 1000:,.0f}"
    for name in ("report.md", "report.html"):
        text = (out / name).read_text(encoding="utf-8")
        assert "total k: all parameters, in thousands; macs k: thousands of multiply-adds" in text
        assert "tuned, from unchanged" in text


def test_a_report_of_rows_that_were_not_trained(grid, tmp_path):
    _, out, records = grid
    shutil.copytree(out / "row-unchanged-seed-1", tmp_path / "row-unchanged-seed-1")
    (tmp_path / "row-unchanged-seed-1" / "log.jsonl").write_text("")
    (tmp_path / "results.jsonl").write_text(json.dumps(records["unchanged"]) + "\n")
    assert len(write_report(tmp_path, say=lambda text: None).rows) == 1


def test_other_settings_of_a_start_are_others_of_what_starts_from_it(grid, tmp_path, monkeypatch):
    recipe, out, _ = grid
    monkeypatch.setattr("hf_freeze.lab.runs.grid._execute_all", lambda *args: pytest.fail("something was run"))
    other = recipe.model_copy(deep=True)
    other.rows["0"].training = Training(learning_rate=0.5)
    shutil.copytree(out, tmp_path / "out")
    with pytest.raises(ValueError, match=r"row-0-seed-1 holds .* other settings \(training\.learning_rate was 0\.005"):
        run_grid(other, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "row-0-seed-1")
    message = r"row-unchanged-seed-1 holds .* \(start\.training\.learning_rate was 0\.005, now 0\.5\)"
    with pytest.raises(ValueError, match=message):
        run_grid(other, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "row-unchanged-seed-1")
    message = r"row-tuned-seed-1 holds .* \(start\.start\.training\.learning_rate was 0\.005, now 0\.5\)"
    with pytest.raises(ValueError, match=message):
        run_grid(other, tmp_path / "out")


def test_a_run_without_its_start_is_refused(tmp_path):
    run = expand(recipe_of(tmp_path, only=["unchanged"]))[1]
    with pytest.raises(
        ValueError, match=r"row-unchanged-seed-1 starts from .*row-0-seed-1, which is not finished: run row 0"
    ):
        execute(run, run.folder(tmp_path))


def test_a_stopped_run_goes_on_from_its_own_checkpoint(grid, tmp_path):
    """And not from a start whose weights are others by now."""
    recipe, out, records = grid
    run = next(run for run in expand(recipe) if run.row == "tuned")
    shutil.copytree(out / "row-unchanged-seed-1", tmp_path / "row-unchanged-seed-1")
    folder = run.folder(tmp_path)

    def stop(message):
        if "eval_perplexity" in message and message["epoch"] == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        execute(run, folder, stop)
    assert [path.name for path in (folder / "checkpoints").iterdir()]
    model = tmp_path / "row-unchanged-seed-1" / "model" / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:-4] + b"\0\0\0\1")
    with pytest.raises(ValueError, match=r"was made with start '\w{64}', now '\w{64}': going on would not give"):
        execute(run, folder)
    model.write_bytes(whole)
    resumed = execute(run, folder)
    assert resumed["resumed"] is True
    expected = figures(records["tuned"])
    for name in ("environment", "processes"):  # the threads of this process
        del expected[name]
    assert {name: figures(resumed)[name] for name in expected} == expected
    one, other = (weights(path, "tuned") for path in (out, tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_language_models_start_from_each_other_too(tmp_path):
    runs = expand(recipe_of(tmp_path, {row: ROWS[row] for row in ("0", "unchanged")}, **LM))
    first, copy = (execute(run, run.folder(tmp_path)) for run in runs)
    assert copy["metrics"] == first["metrics"]
    assert first["steps"] > copy["steps"] == 0


# -- methods that end training ---------------------------------------------------------------------------------------------------


@pytest.fixture
def halving(monkeypatch):
    """A method that drops half of every FFN at the end of training; what was called."""
    before, calls = dict(METHODS), []

    @register_method("toy_halving", example={})
    @dataclass(frozen=True, kw_only=True)
    class ToyHalving(Method):
        pass

    def finalize(model):
        calls.append("finalize")
        assert not hasattr(model, "halved")
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            fc1, fc2 = layer.fc1, layer.fc2
            layer.fc1, layer.fc2 = nn.Linear(16, 8), nn.Linear(8, 16)
            layer.fc1.load_state_dict({name: value[:8] for name, value in fc1.state_dict().items()})
            layer.fc2.load_state_dict({"weight": fc2.weight[:, :8], "bias": fc2.bias})
        model.halved, model.methods, model.config.methods = True, [], []
        model.config.encoder_ffn_dim = model.config.decoder_ffn_dim = 8

    finalizable = property(lambda model: any(isinstance(method, ToyHalving) for method in model.methods))
    monkeypatch.setattr(VariantMixin, "finalizable", finalizable, raising=False)
    monkeypatch.setattr(VariantMixin, "finalize", finalize, raising=False)
    yield calls
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.parametrize("epochs", [0, 1])
def test_the_record_is_of_the_finalized_model(halving, tmp_path, epochs):
    rows = {
        "0": {"label": "0", "methods": [{"method": "toy_halving"}], "training": {"epochs": epochs}},
        "same": {"label": "same", "methods": [], "start": "0", "training": {"epochs": 0}},
    }
    first, same = expand(recipe_of(tmp_path, rows))
    record = execute(first, first.folder(tmp_path))
    assert halving == ["finalize"]
    assert (record["steps"] > 0) is (epochs > 0)
    folder = first.folder(tmp_path) / "model"
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert model.model.encoder.layers[0].fc1.out_features == 8
    assert record["parameters"]["total"] == count_parameters(model).total
    assert record["parameters"]["stored_bytes"] == stored_bytes(model)
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    again = execute(same, same.folder(tmp_path))
    assert again["metrics"] == record["metrics"], "all scores are of the finalized model"
    items = [np.load(run.folder(tmp_path) / "items.npy") for run in (first, same)]
    assert np.array_equal(*items)
    assert math.isfinite(record["metrics"]["dev_loss"])
    assert halving == ["finalize"]
