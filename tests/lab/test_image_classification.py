"""The perceptron that the methods of transformers work on, and grids of it: rows, resumed runs, reports, errors."""

import json
import re
import struct

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from support import ROOT

from hf_freeze import count_parameters, methods, stored_bytes
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.grid import FailedRuns, run_grid
from hf_freeze.lab.tasks.image_classification import classify, load_data
from hf_freeze.lab.tasks.perceptron import ARCHITECTURE, Perceptron, PerceptronConfig, make_perceptron

pytestmark = pytest.mark.usefixtures("one_core")

RECIPE = ROOT / "recipes" / "ffn_compression" / "mnist.yaml"
SIZES = [36, 16, 10]
FIRST = {"mlp": [0]}
TT = methods.TensorTrain(ranks=[1, 2, 2, 1], shape=[[3, 4, 3], [2, 4, 2]], layers=FIRST)
EACH = {
    "low rank": methods.LowRank(rank=3, layers=FIRST),
    "tensor train": TT,
    "Tucker": methods.Tucker(rank=2, shape=[[3, 4, 3], [2, 4, 2]], layers=FIRST),
    "pruning at once": methods.MagnitudePruning(sparsity=0.7),
    "pruning in steps": methods.MagnitudePruning(sparsity=0.7, begin=0.2, end=0.8),
    "variational dropout": methods.VariationalDropout(training_size=120, warmup=0.5, threshold=-4.0),
}
every_method = pytest.mark.parametrize("method", EACH.values(), ids=EACH)


def write_digits(folder, name, count, seed):
    """Images of 6 x 6 pixels of ten kinds, each its own pattern under noise, as idx files."""
    patterns = np.random.default_rng(0).random((10, 6, 6)) > 0.6
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, 10, count)
    images = np.clip(160 * patterns[classes] + rng.normal(40, 40, (count, 6, 6)), 0, 255)
    for kind, array in (("images", images), ("labels", classes)):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (folder / f"{name}-{kind}").write_bytes(header + array.astype(np.uint8).tobytes())


TINY = {
    "name": "tiny",
    "task": "image-classification",
    "data": {"train": ["train-images", "train-labels"], "test": ["test-images", "test-labels"]},
    "preset": "small",
    "presets": {
        "small": {"backbone": {"sizes": SIZES}, "training": {"epochs": 2, "batch_size": 16, "learning_rate": 0.01}}
    },
    "seeds": [1],
    "rows": {
        "0": {"label": "dense", "methods": []},
        "1": {
            "label": "low rank",
            "methods": [{"method": "low_rank", "rank": 3, "layers": FIRST}],
            "start": "0",
            "training": {"epochs": 0},
        },
        "2": {
            "label": "variational dropout",
            "methods": [{"method": "variational_dropout", "training_size": 120, "warmup": 0.5, "threshold": -4.0}],
            "training": {"epochs": 3, "lr_steps": {"gamma": 0.5, "at": [1]}},
        },
        "3": {"label": "its rest, trained", "methods": [], "start": "2"},
        "4": {
            "label": "pruning",
            "methods": [{"method": "magnitude_pruning", "sparsity": 0.6, "begin": 0, "end": 0.5}],
        },
    },
}


@pytest.fixture
def recipe_file(tmp_path):
    return write_recipe(tmp_path)


def write_recipe(folder, **changes):
    write_digits(folder, "train", 120, 1)
    write_digits(folder, "test", 50, 2)
    recipe = json.loads(json.dumps(TINY)) | changes
    recipe["data"] = {"root": str(folder)} | recipe["data"]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


# -- the perceptron ----------------------------------------------------------------------------------------------------------


def images(count=7):
    return torch.rand(count, SIZES[0])


def test_a_perceptron_is_linears_with_relu_between():
    model = make_perceptron(SIZES, [])
    first, last = model.layers[0].linear, model.layers[1].linear
    x = images()
    torch.testing.assert_close(model(x), last(torch.relu(first(x))))
    count = count_parameters(model)
    assert count.total == count.stored == 36 * 16 + 16 + 16 * 10 + 10
    assert stored_bytes(model) == 4 * count.total


@pytest.mark.parametrize("sizes", [[5], [5, 0], [5, 2.5], "5", None])
def test_sizes_are_checked(sizes):
    with pytest.raises(
        ValueError, match=re.escape(f"sizes={sizes!r}: must be a list of positive numbers such as [784,")
    ):
        PerceptronConfig(sizes)


def test_methods_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match=r"method 'freeze' does not work on a perceptron; choose from \['low_rank', 'mag"
    ):
        make_perceptron(SIZES, [methods.Freeze(ffn="frozen")])
    with pytest.raises(ValueError, match=r"no layer 2 in stack 'mlp' of perceptron: it has layers 0\.\.1"):
        make_perceptron(SIZES, [methods.LowRank(rank=2, layers={"mlp": [2]})])
    with pytest.raises(ValueError, match="LowRankLinear already"):
        make_perceptron(SIZES, [methods.LowRank(rank=2), TT])


@every_method
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "fresh"])
def test_every_method_shrinks_it_and_comes_back_from_its_file(method, trained, tmp_path):
    dense = make_perceptron(SIZES, [])
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    model = make_perceptron(dense if trained else SIZES, [method])
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())
    model.finalize()
    x = images()
    expected = model.eval()(x)
    assert not torch.allclose(expected, dense(x))
    assert 0 < stored_bytes(model) < stored_bytes(dense)
    assert count_parameters(model).total < count_parameters(dense).total
    model.save(tmp_path)
    torch.manual_seed(5)
    again = Perceptron.load(tmp_path)
    assert torch.equal(again(x), expected)
    assert [m.facts.finalizable for m in again.methods] == [False]
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(t.numel() * t.element_size() for t in stored.values()) == stored_bytes(model) == stored_bytes(again)


def test_full_rank_keeps_a_trained_function():
    dense, x = make_perceptron(SIZES, []), images()
    tt = methods.TensorTrain(rank=24, shape=[[6, 6], [4, 4]], layers=FIRST)
    exact = methods.LowRank(rank={"layers.0.linear": 16, "layers.1.linear": 10})
    for method in (exact, tt, methods.Tucker(rank=6, shape=[[6, 6], [4, 4]], layers=FIRST)):
        torch.testing.assert_close(make_perceptron(dense, [method]).eval()(x), dense(x), rtol=1e-4, atol=1e-5)


def test_loading_leaves_the_random_state_alone(tmp_path):
    make_perceptron(SIZES, [TT]).save(tmp_path)
    state = torch.get_rng_state()
    model = Perceptron.load(tmp_path)
    make_perceptron(model, [methods.LowRank(rank=2, layers={"mlp": [1]})])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_parameters_of_the_published_rows():
    """METHODS: 203,530; rank 25; tensor trains of 748 + 256 + 2,570 and of 14,794 (203,530 / 13.76)."""
    assert ARCHITECTURE.model_type == "perceptron"
    shape = [[7, 4, 7, 4], [2, 8, 8, 2]]
    counts = {
        203530: [],
        25 * (784 + 256) + 256 + 2570: [methods.LowRank(rank=25, layers=FIRST)],
        3574: [methods.TensorTrain(ranks=[1, 2, 4, 2, 1], shape=shape, layers=FIRST)],
        14794: [methods.TensorTrain(rank=16, shape=[[7, 4, 7, 4], [4, 4, 4, 4]], layers=FIRST)],
    }
    for expected, applied in counts.items():
        model = make_perceptron([784, 256, 10], applied)
        assert count_parameters(model).total == expected
        assert stored_bytes(model) == 4 * expected
    assert round(203530 / 14794, 2) == 13.76


# -- data --------------------------------------------------------------------------------------------------------------------


def test_splits_are_read_held_out_and_cut(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))
    data = load_data(recipe.data, SIZES, torch.device("cpu"))
    assert {name: len(split.classes) for name, split in data.items()} == {"train": 120, "test": 50}
    held = load_data(recipe.data.changed(holdout=30), SIZES, torch.device("cpu"))
    assert {name: len(split.classes) for name, split in held.items()} == {"train": 90, "dev": 30, "test": 50}
    everything = torch.cat([held["train"].pixels, held["dev"].pixels])
    assert sorted(map(tuple, everything.tolist())) == sorted(map(tuple, data["train"].pixels.tolist()))
    cut = load_data(recipe.data.changed(holdout=30, limit=20), SIZES, torch.device("cpu"))
    assert {name: len(split.classes) for name, split in cut.items()} == {"train": 20, "dev": 20, "test": 20}
    assert torch.equal(cut["train"].pixels, held["train"].pixels[:20])
    pixels, classes = data["train"].batch(torch.tensor([3, 5]))
    assert pixels.dtype == torch.float32
    assert 0 <= pixels.min() <= pixels.max() <= 1
    assert torch.equal(classes, data["train"].classes[[3, 5]])


def test_images_that_do_not_fit_the_perceptron(tmp_path):
    settings = load_recipe(write_recipe(tmp_path)).data.given()
    with pytest.raises(
        ValueError, match=r"train-images: images of 36 pixels, but backbone.sizes=\[35, 10\] begins with 35"
    ):
        load_data(Data(**settings), [35, 10], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"train-labels: class 9, but backbone.sizes=\[36, 9\] ends with 9 classes"):
        load_data(Data(**settings), [36, 9], torch.device("cpu"))
    with pytest.raises(ValueError, match="holdout=120 leaves nothing to train on: the training split has 120 items"):
        load_data(Data(**settings | {"holdout": 120}), SIZES, torch.device("cpu"))


# -- grids -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """(recipe, folder, what was printed, records)"""
    folder = tmp_path_factory.mktemp("images")
    recipe = load_recipe(write_recipe(folder), ["data.holdout=20"])
    console = Console(width=300, record=True, quiet=False, file=(folder / "printed.txt").open("w"))
    records = run_grid(recipe, folder / "out", console=console)
    return recipe, folder / "out", console.export_text(), records


def test_a_grid_leaves_models_scores_and_records(grid):
    recipe, out, printed, records = grid
    assert [record["row"] for record in records] == list(TINY["rows"])
    data = load_data(recipe.data, SIZES, torch.device("cpu"))
    for run, record in zip(expand(recipe), records, strict=True):
        folder = run.folder(out)
        assert json.loads((folder / "metrics.json").read_text()) == record
        assert not (folder / "checkpoints").exists()
        model = Perceptron.load(folder / "model")
        items, loss = classify(model, data["test"])
        assert (np.load(folder / "items.npy") == items).all()
        assert record["metrics"]["test_accuracy"] == items[:, 0].mean()
        assert record["metrics"]["test_loss"] == pytest.approx(loss)
        assert (items[:, 1:] == np.stack([np.ones(50), data["test"].classes], 1)).all()
        assert record["parameters"]["total"] == sum(p.numel() for p in model.parameters())
        stored = load_file(folder / "model" / "model.safetensors")
        assert record["parameters"]["stored_bytes"] == sum(t.numel() * t.element_size() for t in stored.values())
        epochs = int(run.training.epochs)
        assert record["epochs_trained"] == epochs
        assert record["steps"] == epochs * 7  # 100 images in batches of 16
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [entry["epoch"] for entry in log] == list(range(1, epochs + 1))
        assert all(entry["eval_loss"] > 0 for entry in log)
        assert re.search(rf"row {record['row']} +seed 1 .*accuracy", printed)
    assert records[0]["metrics"]["test_accuracy"] > 0.5, "it learns"
    rates = [
        json.loads(line)["learning_rate"] for line in (out / "row-2-seed-1" / "log.jsonl").read_text().splitlines()
    ]
    assert rates == [0.01, 0.005, 0.005]


def test_rows_that_start_from_another_go_on_with_its_model(grid):
    _, out, _, _ = grid
    dense, converted = (Perceptron.load(out / f"row-{row}-seed-1" / "model") for row in "01")
    expected = make_perceptron(dense, [methods.LowRank(rank=3, layers=FIRST)])
    x = images()
    torch.testing.assert_close(converted(x), expected.eval()(x))
    sparse, tuned = (Perceptron.load(out / f"row-{row}-seed-1" / "model") for row in "23")
    assert tuned.config == sparse.config
    for layer, other in zip(sparse.layers, tuned.layers, strict=True):
        assert torch.equal(layer.linear.positions(), other.linear.positions())
        assert not torch.equal(layer.linear.values, other.linear.values)


def test_the_report_counts_how_often_smaller_each_row_is(grid, pictures):
    _, out, _, records = grid
    report = write_report(out, say=lambda _: None)
    lines = (out / "report.md").read_text().splitlines()
    table = lines[next(number for number, line in enumerate(lines) if line.startswith("| row |")) :]
    headings = [cell.strip() for cell in table[0].strip("|").split("|")]
    cells = {
        line.split("|")[1].strip(): dict(
            zip(headings, [cell.strip() for cell in line.strip("|").split("|")], strict=True)
        )
        for line in table[2:7]
    }
    for row, record in zip(cells.values(), records, strict=True):
        assert row["accuracy %"] == f"{100 * record['metrics']['test_accuracy']:.2f}"
        for heading, key in (("times fewer", "total"), ("times smaller", "stored_bytes")):
            ratio = records[0]["parameters"][key] / record["parameters"][key]
            assert row[heading] == f"{ratio:.2f}"
    assert report.items == 50
    assert len(report.differences) == 10
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "report.png").stat().st_size > 10_000


@pytest.mark.parametrize("row", ["2", "3", "4"])
def test_a_killed_run_goes_on_as_an_undisturbed_one(grid, row, tmp_path, monkeypatch):
    """Killed after each epoch in turn: the noise of variational dropout and the mask of pruning go on where they were."""
    recipe, out, _, records = grid
    run = next(run for run in expand(recipe) if run.row == row)
    folder = run.folder(tmp_path)
    if run.start is not None:
        run.start.folder(tmp_path).symlink_to(run.start.folder(out))

    def kill(message):
        if "eval_loss" in message:
            raise KeyboardInterrupt

    for _ in range(int(run.training.epochs) - 1):
        with pytest.raises(KeyboardInterrupt):
            execute(run, folder, kill)
        torch.manual_seed(77)
    assert len(list((folder / "checkpoints").glob("checkpoint-*"))) == 1
    resumed = execute(run, folder)
    assert resumed["resumed"]
    undisturbed = next(record for record in records if record["row"] == row)
    assert resumed["metrics"] == undisturbed["metrics"]
    one, other = (load_file(path / "model" / "model.safetensors") for path in (folder, run.folder(out)))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (folder / "log.jsonl").read_text() == (run.folder(out) / "log.jsonl").read_text()


def test_a_half_written_checkpoint_is_passed_over(grid, tmp_path, monkeypatch):
    recipe, _, _, records = grid
    run = expand(recipe)[0]
    folder = run.folder(tmp_path)
    saved = []

    def spoil(state, path):
        torch_save(state, path)
        saved.append(path)
        if len(saved) == 2:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError("no space left")

    torch_save = torch.save
    monkeypatch.setattr(torch, "save", spoil)
    with pytest.raises(OSError, match=r"checkpoint of epoch 2 could not be written \(is the disk full\?\): no space"):
        execute(run, folder)
    monkeypatch.undo()
    resumed = execute(run, folder)
    assert resumed["resumed"]
    assert resumed["metrics"] == records[0]["metrics"]


def test_a_run_that_diverges_stops_and_keeps_the_checkpoint_before(grid, tmp_path, monkeypatch):
    recipe, _, _, _ = grid
    run = expand(recipe)[0]

    def spoil(message):
        if message.get("step") == 7:
            monkeypatch.setattr(
                Perceptron, "forward", lambda self, x: x[:, :10] * self.layers[0].linear.weight[0, 0] * torch.nan
            )

    with pytest.raises(
        FloatingPointError, match=r"training loss is nan, the auxiliary one 0\.0 in epoch 2; the checkpoint before"
    ):
        execute(run, tmp_path / "run", spoil)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-7"]


def test_several_processes_are_refused(grid, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="image-classification runs in one process: leave the launcher out"):
        execute(expand(grid[0])[0], tmp_path / "run")


def test_a_row_that_fails_is_said_in_one_line(tmp_path):
    rows = {"0": {"label": "x", "methods": [{"method": "freeze", "ffn": "random"}]}}
    recipe = load_recipe(write_recipe(tmp_path, rows=rows))
    with pytest.raises(FailedRuns, match="1 of 1 runs failed"):
        run_grid(recipe, tmp_path / "out", console=Console(quiet=True))
    log = (tmp_path / "out" / "row-0-seed-1" / "error.log").read_text()
    assert "method 'freeze' does not work on a perceptron" in log.splitlines()[-1]


# -- recipes -----------------------------------------------------------------------------------------------------------------


def test_the_shipped_recipe_loads():
    recipe = load_recipe(RECIPE, ["data.root=/x"])
    assert recipe.backbone.given() == {"sizes": [784, 256, 10]}
    assert recipe.tokenizer is None
    assert len(expand(recipe)) == 3 * len(recipe.rows)
    assert load_recipe(RECIPE, smoke=True).data.limit == 600


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "training.max_tokens=5",
            r"training\.max_tokens is for the tasks \['translation', .*, not for .*; choose from \['batch_size'",
        ),
        ("training.epochs=1.5", r"training\.epochs=1\.5 is not a value that it takes"),
        ("training.epochs=-1", r"training\.epochs=-1 must be at least 0"),
        ("training.batch_size=0", r"training\.batch_size=0 must be at least 1"),
        ("training.batch_size=x", r"training\.batch_size='x' is not a value"),
        ("training.lr_steps=3", r"training\.lr_steps=3 is not a value"),
        ("training.lr_steps={gamma: 0.1}", r"training\.lr_steps={'gamma': 0\.1} is not a value"),
        ("training.lr_steps={gamma: 0.1, at: 3}", r"training\.lr_steps=.* is not a value"),
        ("training.lr_steps={gamma: 0.1, at: [3], x: 1}", r"training\.lr_steps=.* is not a value"),
        ("backbone.model_type=bert", r"backbone\.model_type is for the tasks .*; choose from \['sizes'\]"),
        (
            "backbone.sizes=[3]",
            r"backbone\.sizes=\[3\] is not a value that it takes: a list of positive numbers such as \[784,",
        ),
        ("tokenizer={kind: bpe}", "tokenizer is for the tasks .*, not for 'image-classification'"),
        (
            "decoding={num_beams: 2}",
            r"decoding is for the tasks \['translation', 'language-modelling'\], not for 'image-classification'",
        ),
        (
            "data.unit=lines",
            r"data\.unit is for the tasks .*; choose from \['dev', 'holdout', 'limit', 'root', 'test', 'train'\]",
        ),
        ("data.train=[a]", r"data\.train must be two files, \[images, labels\], not \['a'\]"),
        ("data.holdout=0", r"data\.holdout=0 must be at least 1"),
        ("rows.0.training={max_tokens: 3}", r"row '0': training\.max_tokens is for the tasks"),
        ("rows.0.training={batch_size: 0}", r"row '0': training\.batch_size=0 must be at least 1"),
        ("rows.0.backbone={sizes: [0]}", r"row '0': .*sizes=\[0\]"),
    ],
)
def test_settings_are_checked(recipe_file, setting, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe_file, [setting])


def test_text_takes_nothing_of_images():
    ablation = RECIPE.parents[1] / "freeze_ablation" / "recipe.yaml"
    for setting in ("training.batch_size=3", "training.lr_steps={gamma: 1, at: []}", "backbone.sizes=[1, 2]"):
        with pytest.raises(
            ValueError, match=f"{setting.partition('=')[0]} is for task 'image-classification', not for 'translation'"
        ):
            load_recipe(ablation, [setting])


def test_dev_files_and_missing_sections(tmp_path, recipe_file):
    recipe = load_recipe(recipe_file, ["data.dev=[test-images, test-labels]"])
    data = load_data(recipe.data, SIZES, torch.device("cpu"))
    assert len(data["dev"].classes) == 50
    whole = yaml.safe_load(recipe_file.read_text())
    del whole["data"]["test"]
    recipe_file.write_text(yaml.safe_dump(whole))
    with pytest.raises(ValueError, match=r"data\.test is missing"):
        load_recipe(recipe_file)
    del whole["presets"]["small"]["backbone"]
    recipe_file.write_text(yaml.safe_dump(whole))
    with pytest.raises(ValueError, match=r"'backbone' is missing\Z"):  # no pretrained one is taken
        load_recipe(recipe_file)
