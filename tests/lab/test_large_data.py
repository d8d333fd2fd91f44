"""Grids on data that stay on the disk: folders of Parquet, JSONL, and data that change."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import ROOT
from support.recipes import LM, LONGER, MASKED, SHORT, figures, one_line_error, write_recipe

from hf_freeze.lab.data import builtin_corpus
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.grid import FailedRuns, run_grid

SIZES = {"seed": 0, "train": 60, "dev": 10, "test": 8}
ONE_ROW = {"rows/2.1": ..., "data": {"builtin": SIZES}}


def parquet_folder(folder):
    """The built-in corpus in shards, as a data set of the Hub has them."""
    folder.mkdir()
    for name, split in builtin_corpus(**SIZES).items():
        rows = [row | {"text": row["target"]} for row in split.to_list()]
        half = len(rows) // 2
        for i, part in enumerate((rows[:half], rows[half:])):
            pq.write_table(pa.Table.from_pylist(part), folder / f"{name}-0000{i}-of-00002.parquet")
    return folder


def settings(**data):
    return [f"data={json.dumps(data)}"]


@pytest.mark.parametrize("task", [LM, MASKED, SHORT], ids=["language-modelling", "masked-lm", "translation"])
def test_a_folder_of_parquet_gives_the_scores_of_the_builtin_corpus(task, tmp_path):
    recipe = write_recipe(tmp_path / "r.yaml", **task | ONE_ROW)
    folder = parquet_folder(tmp_path / "data")
    columns = {"source": "source", "target": "target"} if task is SHORT else {}
    hub = settings(hub=str(folder), train="train", dev="validation", test="test", **columns)
    names = {name: sorted(map(str, folder.glob(f"{name}-*"))) for name in ("train", "test")}
    files = settings(**names, dev=sorted(map(str, folder.glob("dev*"))), **columns)
    ways = [[], hub] if task is MASKED else [[], hub, files]  # the two kinds of language models read data alike
    expected, *others = (run_grid(load_recipe(recipe, data), tmp_path / f"out-{i}") for i, data in enumerate(ways))
    different = ("data", "commit")
    for found in others:
        one, other = (
            {key: value for key, value in figures(records[0]).items() if key not in different}
            for records in (expected, found)
        )
        assert one == other


def test_the_shipped_recipe_runs_on_a_folder_of_parquet(tmp_path):
    folder = parquet_folder(tmp_path / "data")
    smaller = [
        "only=['0']", "tokenizer.vocab_size=100", "backbone.config.n_embd=16", "backbone.config.n_layer=1",
        "training.epochs=1", "training.evaluations=1",
    ]  # fmt: skip
    hub = settings(hub=str(folder), train="train", dev="validation", test="test")
    recipe = load_recipe(ROOT / "recipes" / "freeze_ablation" / "lm.yaml", [*hub, *smaller])
    (record,) = run_grid(recipe, tmp_path / "out")
    assert record["metrics"]["test_perplexity"] < 1000
    assert record["data"]["hub"] == str(folder)
    assert (tmp_path / "out" / "row-0-seed-1" / "data.json").exists()


def test_what_is_wrong_with_the_data_is_one_line(tmp_path):
    lm, parallel = write_recipe(tmp_path / "lm.yaml", **LM | ONE_ROW), write_recipe(tmp_path / "mt.yaml", **ONE_ROW)
    lines = [json.dumps({"text": text}) for text in builtin_corpus(**SIZES)["train"]["target"]]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": 3}', *lines]))
    names = {split: [str(tmp_path / "a.jsonl")] for split in ("train", "dev", "test")}
    with pytest.raises(FailedRuns):
        run_grid(load_recipe(lm, settings(**names)), tmp_path / "out")
    error = (tmp_path / "out" / "row-0-seed-1" / "error.log").read_text().splitlines()[-1]
    assert error == f"ValueError: {tmp_path}/a.jsonl, line 61: text must be text, not 3"
    names = {split: ["a.jsonl", "b.parquet", "c.txt"] for split in ("train", "dev", "test")}
    with pytest.raises(
        ValueError, match=r"two files, \[source, target\], not .*; files that end in \.csv, .* hold both"
    ):
        load_recipe(parallel, settings(**names))
    names = {split: ["a.jsonl", "b.parquet"] for split in ("train", "dev", "test")}
    assert load_recipe(parallel, settings(**names)).data.given() == names
    missing = one_line_error("run", parallel, "--set", *settings(**names, root=str(tmp_path)), "--out", tmp_path / "o")
    assert "b.parquet does not exist" in missing


def test_a_run_is_not_resumed_on_other_data(tmp_path):
    folder = parquet_folder(tmp_path / "data")
    recipe = load_recipe(
        write_recipe(tmp_path / "r.yaml", **LM | ONE_ROW | LONGER),
        settings(hub=str(folder), train="train", dev="validation", test="test"),
    )
    (run,) = expand(recipe)

    class Killed(Exception):
        pass

    def stop_after_a_checkpoint(message):
        if list((tmp_path / "out").glob("checkpoints/*/trainer_state.json")):
            raise Killed

    with pytest.raises(Killed):
        execute(run, tmp_path / "out", stop_after_a_checkpoint)
    shard = next(folder.glob("train-00000*"))
    whole = shard.read_bytes()
    pq.write_table(pq.read_table(shard).slice(1), shard)
    with pytest.raises(ValueError, match=r"checkpoint-\d+ was made with other data: the train split has changed since"):
        execute(run, tmp_path / "out")
    shard.write_bytes(whole)  # of another time, but the same
    assert execute(run, tmp_path / "out")["resumed"]
    shutil.rmtree(tmp_path / "out")
