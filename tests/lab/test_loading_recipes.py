"""Recipe files as they are loaded: presets, settings from the command line, smoke, other files, and what is refused."""

import json

import pytest
import yaml
from support import ROOT
from support.recipes import TINY, changed, write_recipe

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs.text_training import training_arguments

ABLATION = ROOT / "recipes" / "freeze_ablation"


def test_a_preset_fills_what_the_recipe_leaves_open(tmp_path):
    path = write_recipe(tmp_path / "r.yaml", training={"epochs": 7})
    recipe = load_recipe(path)
    assert recipe.training.given() == TINY["presets"]["small"]["training"] | {"epochs": 7}
    assert recipe.backbone.given() == TINY["presets"]["small"]["backbone"]


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("rows:\n  '0': {label: a, methods: []}\n  '0': {label: b, methods: []}\n")
    with pytest.raises(ValueError, match=r"r\.yaml: not a YAML file: '0' is there twice in .*line 2"):
        load_recipe(path)
    path.write_text("training: &a {epochs: 1}\npresets: {p: {training: {<<: *a, epochs: 2}}}\nname: x\nname: y\n")
    with pytest.raises(ValueError, match="'name' is there twice"):
        load_recipe(path)


def test_settings_come_last(recipe_file):
    settings = ["training.epochs=3", "backbone.config.d_model=32", "seeds=[4, 5]", "only=['2.1']", "name=a=b"]
    recipe = load_recipe(recipe_file, settings)
    assert recipe.training.epochs == 3
    assert recipe.training.max_tokens == 400
    assert recipe.backbone.config["d_model"] == 32
    assert recipe.backbone.config["encoder_layers"] == 1
    assert recipe.seeds == [4, 5]
    assert recipe.name == "a=b"
    assert [run.row for run in expand(recipe)] == ["2.1", "2.1"]
    assert load_recipe(recipe_file, ["training.epochs=3", "training.epochs=4"]).training.epochs == 4


def test_smoke_is_applied_and_settings_win_over_it(recipe_file):
    recipe = load_recipe(recipe_file, smoke=True)
    assert recipe.training.epochs == 0.5
    assert recipe.data.given() == TINY["data"] | {"limit": 20}
    assert load_recipe(recipe_file, ["data.limit=5"], smoke=True).data.limit == 5
    assert load_recipe(recipe_file).data.limit == 60


def test_a_preset_may_be_chosen_by_smoke_or_a_setting(tmp_path):
    other = changed(TINY["presets"]["small"], {"tokenizer": {"vocab_size": 300}})
    path = write_recipe(tmp_path / "r.yaml", **{"presets/other": other, "smoke": {"preset": "other"}})
    assert load_recipe(path).tokenizer.vocab_size == 100
    assert load_recipe(path, smoke=True).tokenizer.vocab_size == 300
    assert load_recipe(path, ["preset=other"]).tokenizer.vocab_size == 300
    assert load_recipe(path, ["preset=small"], smoke=True).tokenizer.vocab_size == 100


def test_extends_starts_from_another_recipe(recipe_file, tmp_path):
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.yaml"
    child.write_text("extends: ../recipe.yaml\nname: child\ndata: {train: [a, b], dev: [c, d], test: [e, f]}\n")
    recipe = load_recipe(child)
    assert recipe.name == "child"
    assert recipe.given()["rows"] == TINY["rows"]
    # Another form of data replaces the old one; a change of one field does not.
    assert recipe.data.given() == {"train": ["a", "b"], "dev": ["c", "d"], "test": ["e", "f"]}
    grandchild = tmp_path / "grandchild.yaml"
    grandchild.write_text("extends: sub/child.yaml\ndata: {root: there}\n")
    assert load_recipe(grandchild).data.given() == recipe.data.given() | {"root": "there"}


@pytest.mark.parametrize(
    ("epochs", "evaluations", "interval", "share"),
    [
        (4, 1, "epoch", None),
        (4, 2, "steps", 1 / 8),
        (0.5, 8, "steps", 1 / 4),
        (0.5, 2, "epoch", None),
        (0.5, 1, "epoch", None),
    ],
)
def test_evaluations_of_an_epoch_are_shares_of_all_steps(recipe_file, tmp_path, epochs, evaluations, interval, share):
    """The Trainer takes 1 or more as a number of steps, and would evaluate after each."""
    (run, *_) = expand(load_recipe(recipe_file, [f"training.epochs={epochs}", f"training.evaluations={evaluations}"]))
    arguments = training_arguments(run, tmp_path)
    assert (arguments.eval_strategy, arguments.save_strategy) == (interval, interval)
    if share is not None:
        assert arguments.eval_steps == arguments.save_steps == pytest.approx(share)


def test_the_shipped_recipes_load():
    for preset in ("demo", "tiny", "base", "big", "big-ffn1024"):
        recipe = load_recipe(ABLATION / "recipe.yaml", [f"preset={preset}"])
        controls = ["small-2", "small-3", "1-r1", "int8"] if preset == "tiny" else []
        expected = ["0", "1", "2", "2.1", "3", "3.1", "4", "5", "6", *controls]
        assert [run.row for run in expand(recipe)] == expected
    assert load_recipe(ABLATION / "recipe.yaml", smoke=True).data.limit == 200
    multi30k = load_recipe(ABLATION / "multi30k.yaml", ["data.root=/x"])
    assert multi30k.data.builtin is None
    assert multi30k.data.root == "/x"
    assert multi30k.preset == "tiny"
    for name in ("lm", "wikitext2"):
        for preset in ("lm-demo", "lm-tiny", "lm-paper"):
            recipe = load_recipe(ABLATION / f"{name}.yaml", [f"preset={preset}"])
            assert [run.row for run in expand(recipe)][:7] == ["0", "1", "2", "3", "4", "5", "6"]
            # A block is as long as the model has positions, and a batch holds whole blocks.
            block = recipe.training.block_size + 1
            assert block <= recipe.backbone.config["n_positions"]
            assert recipe.training.max_tokens % block == 0
    tatoeba = load_recipe(ABLATION / "tatoeba.yaml")
    assert tatoeba.data.dev is None
    assert tatoeba.data.holdout == 1000


BAD_RECIPES = {
    "axis of no method": ({"axis": "rank"}, r"axis='rank' names no method; choose from \['adaptive_embedding'"),
    "axis of no setting": (
        {"axis": "low_rank.E"},
        r"axis='low_rank\.E' is no setting; choose from \['components', .*'rank'",
    ),
    "unknown field": ({"optimiser": "sgd"}, "unknown field 'optimiser'; choose from .*'training'"),
    "unknown training field": (
        {"presets/small/training/lr": 1},
        r"unknown field training\.lr; choose from .*'learning_rate'",
    ),
    "unknown data field": ({"data/fraction": 1}, r"unknown field data\.fraction"),
    "unknown tokenizer field": ({"presets/small/tokenizer/size": 1}, r"unknown field tokenizer\.size"),
    "unknown backbone field": ({"presets/small/backbone/code": 1}, r"unknown field backbone\.code"),
    "unknown decoding field": ({"decoding": {"beams": 1}}, r"unknown field decoding\.beams"),
    "wrong type": ({"seeds": 3}, r"seeds=3 is not a value that it takes: integers, each in 0\.\.2\^32-1"),
    "wrong section type": ({"data": ["builtin"]}, "data must be a dict"),
    "unknown preset": ({"preset": "huge"}, r"unknown preset 'huge'; choose from \['small'\]"),
    "missing": ({"rows": ...}, "'rows' is missing"),
    "no name": ({"name": ...}, "'name' is missing"),
    "task": ({"task": "parsing"}, r"unknown task='parsing'; choose from \['translation', 'language-modelling', "),
    "no seeds": ({"seeds": []}, r"seeds=\[\] is not a value that it takes: integers"),
    "seed type": ({"seeds": [1, "2"]}, "seeds=.* is not a value that it takes: integers"),
    "unknown row": ({"only": ["7"]}, r"no row '7'; choose from \['0', '2.1'\]"),
    "row without label": ({"rows/0": {"methods": []}}, "row '0': 'label' is missing"),
    "row of another type": ({"rows/0": []}, r"row '0' must be a dict, not \[\]"),
    "unknown method": ({"rows/0/methods": [{"method": "magic"}]}, "unknown method 'magic'; choose from"),
    "unknown method field": (
        {"rows/0/methods": [{"method": "freeze", "x": 1}]},
        "unknown field 'x' of method 'freeze'",
    ),
    "method setting": ({"rows/0/methods": [{"method": "freeze", "ffn": "x"}]}, r"Freeze\(ffn='x'\): choose from"),
    "method type": ({"rows/0/methods": ["freeze"]}, "row '0': methods.0 must be a dict, not 'freeze'"),
    "method seed": ({"rows/0/methods": [{"method": "freeze", "seed": -1}]}, r"Freeze\(seed=-1\)"),
}


@pytest.mark.parametrize("case", BAD_RECIPES)
def test_bad_recipes_are_refused(tmp_path, case):
    changes, message = BAD_RECIPES[case]
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path / "r.yaml", **changes))


def test_row_names_must_be_quoted(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        yaml.safe_dump(changed(TINY, {"rows": {}})).replace("rows: {}", "rows: {2.10: {label: a, methods: []}}")
    )
    with pytest.raises(ValueError, match=r"row 2\.1 must be a quoted name"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "not a YAML file"),
        (b"\xff\xfe\x00", "not a YAML file"),
        (b"- a\n", "a recipe is a mapping, not list"),
        (b"", "a recipe is a mapping, not NoneType"),
        (b"x: !!python/object/apply:os.getcwd []\n", "not a YAML file"),
        (b"extends: r.yaml\n", "'extends' refers to itself"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, content, message):
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("setting", ["training.epochs", "=3", ""])
def test_settings_without_key_or_value_are_refused(recipe_file, setting):
    with pytest.raises(ValueError, match=f"--set '{setting}': write KEY=VALUE"):
        load_recipe(recipe_file, [setting])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.lr=1", r"unknown field training\.lr"),
        ("training=3", "training must be a dict, not 3"),
        ("training.epochs=[1", r"--set 'training\.epochs=\[1'"),
        ("rows.9.label=x", "row '9': 'methods' is missing"),
    ],
)
def test_settings_are_checked_like_the_file(recipe_file, setting, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe_file, [setting])


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_recipe(tmp_path / "nothing.yaml")
    (tmp_path / "r.yaml").write_text("extends: nothing.yaml\n")
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_recipe(tmp_path / "r.yaml")


def test_expand_goes_seed_by_seed_and_seeds_the_methods(tmp_path):
    rows = {
        "a": {"label": "run's seed", "methods": [{"method": "freeze", "ffn": "random"}]},
        "b": {"label": "its own", "methods": [{"method": "freeze", "ffn": "random", "seed": 99}, {"method": "freeze"}]},
    }
    runs = expand(load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows, seeds=[7, 8])))
    assert [(run.seed, run.row) for run in runs] == [(7, "a"), (7, "b"), (8, "a"), (8, "b")]
    assert [[m["seed"] for m in run.methods] for run in runs] == [[7], [99, 7], [8], [99, 8]]
    assert all(run.label == rows[run.row]["label"] for run in runs)
    plain = [run.given() for run in runs]
    assert json.loads(json.dumps(plain)) == plain, "plain data"
    runs[0].training.epochs = 1000
    assert runs[1].training.epochs == 1, "runs share nothing"


# -- data, and what would spoil a grid ------------------------------------------------------------------------------------------


def test_settings_of_one_form_of_data_are_merged(recipe_file):
    both = load_recipe(recipe_file, ["data.builtin.seed=3", "data.builtin.train=80"]).data.builtin
    assert (both.seed, both.train) == (3, 80)
    files = ["data.root=/d", "data.train=[a, b]", "data.dev=[a, b]", "data.test=[a, b]"]
    assert load_recipe(recipe_file, files).data.given() == {
        "root": "/d",
        **{name: ["a", "b"] for name in ("train", "dev", "test")},
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.root=/x", r"data.root says where files are, but the data is of the form 'builtin'"),
        ("data.train=[a, b]", r"data.dev is missing"),
        ("seeds=[1, 1]", r"seeds names one twice: \[1, 1\]"),
        ("seeds=[-1]", r"seeds=\[-1\] is not a value that it takes: integers, each in 0..2\^32-1"),
        ("only=['0', '0']", r"only names one twice"),
        ("training.epochs=abc", r"training.epochs='abc' is not a value that it takes: a number"),
        ("training.patience=1.5", r"training\.patience=1\.5 is not a value that it takes: an integer"),
        ("training.patience=.inf", r"training\.patience=inf is not a value that it takes: an integer"),
        ("training.adam_betas=3", r"training\.adam_betas=3 is not a value that it takes: two numbers"),
        ("rows={'a/b': {label: x, methods: []}}", r"row 'a/b' names a folder"),
        ("rows={'a': {label: x, methods: }}", r"row 'a': methods must be a list, not None"),
        ("preset=[a]", r"preset must be a str, not \['a'\]"),
        ("seeds=[1.5]", r"seeds=\[1\.5\] is not a value that it takes: integers"),
        ("seeds=[true]", r"seeds=\[True\] is not a value that it takes: integers"),
        ("data={train: [a, b], test: [a, b]}", r"data\.dev is missing"),
        ("data={train: a, dev: [a, b], test: [a, b]}", r"data\.train must be two files, \[source, target\], not 'a'"),
        ("data={train: [a], dev: [a, b], test: [a, b]}", r"data\.train must be two files, .* not \['a'\]"),
        (
            "data={train: [a, b], dev: [a, b], test: [a, b], holdout: 9}",
            r"data\.holdout=9 is drawn from train: it replaces data\.dev",
        ),
        ("data={train: [a, b], test: [a, b], holdout: 0}", r"data\.holdout=0 must be at least 1"),
        ("data.unit=words", r"unknown data\.unit='words'; choose from \['lines', 'documents'\]"),
        (
            "training.learning_rates={ffn: fast}",
            r"training\.learning_rates={'ffn': 'fast'} is not a value that it takes",
        ),
        ("training.learning_rates=3", r"training\.learning_rates=3 is not a value that it takes"),
        (
            "training.learning_rates={mlp: 1}",
            r"unknown component training\.learning_rates\.mlp; choose from \['embeddings'",
        ),
        ("training.evaluations=0", r"training\.evaluations=0 must be at least 1"),
        ("training.block_size=-1", r"training\.block_size=-1 must be at least 1"),
    ],
)
def test_settings_that_would_spoil_a_grid_are_refused(recipe_file, setting, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe_file, [setting])


def test_numbers_that_yaml_reads_as_text_are_numbers(recipe_file):
    assert load_recipe(recipe_file, ["training.learning_rate=1e-3"]).training.learning_rate == 0.001
