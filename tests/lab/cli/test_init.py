"""`hf-freeze init`: a recipe that `hf-freeze run` takes, for each task and goal."""

import json
import re
import shlex

import pytest
import yaml
from support.cases import ALL
from support.recipes import cli, one_line_error
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
)

from hf_freeze import data as hf_data
from hf_freeze import make_variant, methods
from hf_freeze.lab.cli import init as init_command
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.tasks.registry import task_of

CELLS = [(task, goal) for task in init_command._TASKS for goal in ("study", "shrink")]
CELLS += [("translation", "budget"), ("classification", "budget")]
SOME = [("translation", "budget"), ("classification", "shrink"), ("lm", "study"), ("masked-lm", "shrink")]
each_cell = pytest.mark.parametrize(("task", "goal"), CELLS)
some_cells = pytest.mark.parametrize(("task", "goal"), CELLS if ALL else SOME)
ROWS = {
    "study": [*"0123456"],
    "shrink": ["0", "heads", "ffn", "low-rank", "table", "layers", "shared"],
    "budget": ["0"],
}
TEXTS = [
    f"{subject} {verb} {thing}."
    for subject in ("A man", "The dog")
    for verb in ("sees", "eats", "finds")
    for thing in "abcdefg"
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(task, goal, model="new", data="builtin", *options):
    return cli("init", "--task", task, "--model", model, "--data", data, "--goal", goal, *options).output


def write_lines(path, texts):
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")


def write_examples(path, examples):
    write_lines(path, map(json.dumps, examples))


def saved(model, kind, folder):
    hf_data.train_tokenizer(TEXTS, 90, kind=kind).save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def tiny(task, folder):
    """A saved model of the task, of one or two layers."""
    bert = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 90,
    }
    if task == "translation":
        ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
        sizes = {f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 24, "d_model": 16, "max_position_embeddings": 64}
        return saved(MarianMTModel(MarianConfig(vocab_size=90, **sizes, **ids)), "bpe", folder)
    if task == "lm":
        return saved(
            GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=16, n_layer=2, n_head=2, n_positions=10)), "bpe", folder
        )
    return saved(BertForSequenceClassification(BertConfig(**bert)), "wordpiece", folder)


def write_data(task, folder):
    """Training data alone, in one file, or two of a translation; returns what --data takes."""
    if task == "classification":
        write_examples(folder / "train.jsonl", [{"text": text, "label": "ab"["dog" in text]} for text in TEXTS])
        return "train.jsonl"
    write_lines(folder / "train.de", [text.upper() for text in TEXTS])
    write_lines(folder / "train.en", TEXTS)
    return "train.de,train.en" if task == "translation" else "train.en"


# -- what it writes ------------------------------------------------------------------------------------------------------------


@some_cells
def test_a_fresh_model_on_the_built_in_data(task, goal, place):
    printed = init(task, goal)
    recipe = load_recipe("recipe.yaml")
    assert list(recipe.rows) == ROWS[goal]
    assert recipe.task == init_command._TASKS[task]
    assert len(expand(recipe)) == len(ROWS[goal])
    assert load_recipe("recipe.yaml", smoke=True).training.epochs == 1
    text = (place / "recipe.yaml").read_text()
    assert f"hf-freeze init --task {task} --model new --data builtin --goal {goal} --out recipe.yaml\n" in text
    assert "epochs: " in text
    assert "# Passes over train; the best on the dev split is kept." in text
    commands = [shlex.split(line, comments=True) for line in printed.splitlines()[1:]]
    third = {"study": "run", "shrink": "export", "budget": "compress"}[goal]
    assert [command[:2] for command in commands] == [["hf-freeze", "run"]] * 2 + [["hf-freeze", third]]
    if third == "compress":
        assert "runs/recipe/row-0-seed-1/model" in commands[2]
        assert commands[2][commands[2].index("--engine") + 1] == ("ctranslate2" if task == "translation" else "onnx")


@some_cells
def test_a_trained_model_on_files(task, goal, place):
    model, files = tiny(task, place / "model"), write_data(task, place)
    init(task, goal, model, files, "--out", "mine/my recipe.yaml")
    recipe = load_recipe("mine/my recipe.yaml")
    assert recipe.name == "my-recipe"
    assert recipe.backbone.given() == {"pretrained": model}
    assert list(recipe.rows) == ROWS[goal]
    if goal == "study":
        assert recipe.rows["3"].methods == [{"method": "freeze", "ffn": "frozen"}]
    splits = task_of(recipe.task).load(recipe.data)
    assert {name: len(split) for name, split in splits.items()} == {"train": 34, "dev": 4, "test": 4}


def test_a_folder_has_its_splits_by_the_names_of_its_files(place):
    (place / "corpus").mkdir()
    for split, texts in (("train", TEXTS), ("val", TEXTS[:3]), ("test", TEXTS[:2])):
        for language in ("de", "en"):
            write_lines(place / "corpus" / f"{split}.{language}", texts)
    (place / "corpus" / "README.md").write_text("About train.de")
    init("translation", "study", "new", "corpus")
    files = {"train": ["train.de", "train.en"], "dev": ["val.de", "val.en"], "test": ["test.de", "test.en"]}
    assert load_recipe("recipe.yaml").data.given() == {"root": "corpus"} | files
    for language in ("de", "en"):
        (place / "corpus" / f"test.{language}").unlink()
    init("translation", "study", "new", "corpus", "--force")  # the choice of epochs is then made on a part of train
    files = {"train": ["train.de", "train.en"], "test": ["val.de", "val.en"]}
    assert load_recipe("recipe.yaml").data.given() == {"root": "corpus"} | files | {"holdout": 4}
    named = ("--dev", "corpus/val.de,corpus/val.en")  # who names a dev file means it
    init("translation", "study", "new", "corpus/train.de,corpus/train.en", *named, "--force")
    made = load_recipe("recipe.yaml").data.given()
    assert made["dev"] == ["corpus/val.de", "corpus/val.en"]
    assert "test" not in made
    assert made["holdout_test"] == 4


def test_columns_are_found_or_named(place):
    write_examples(place / "pairs.jsonl", [{"q": text, "a": text, "same": 1} for text in TEXTS])
    command = ("classification", "study", "new", "pairs.jsonl", "--column", "q, a", "--label", "same")
    init(*command)
    assert load_recipe("recipe.yaml").data.columns == ["q", "a"]
    assert load_recipe("recipe.yaml").data.label == "same"
    init("translation", "study", "new", "pairs.jsonl", "--columns", "q,a", "--force")
    assert load_recipe("recipe.yaml").data.source == "q"
    init("lm", "study", "new", "pairs.jsonl", "--columns", "a", "--force")
    assert load_recipe("recipe.yaml").data.column == "a"


def write_reviews(path):
    """As a spreadsheet of a European exports it."""
    texts = [text.replace("sees", '""sees""') for text in TEXTS]
    rows = [f'2026;"{text}\r\n\r\nYes; it does.";{("Good", "NA")[i % 2]}' for i, text in enumerate(texts)]
    path.write_bytes("\r\n".join(["\ufeffDate;Review;Sentiment", *rows, ";;", ""]).encode())


def test_a_csv_file_of_a_spreadsheet(place):
    write_reviews(place / "reviews.csv")
    write_lines(place / "test.tsv", ["Sentiment\tReview", "NA\tA cat.", "Good\tA dog."])
    named = ("--columns", "Review", "--label", "Sentiment")
    init("classification", "study", "new", "rev*.csv", *named, "--test", "test.tsv")
    data = load_recipe("recipe.yaml").data
    assert data.given() == {
        "train": ["rev*.csv"],
        "test": ["test.tsv"],
        "columns": ["Review"],
        "label": "Sentiment",
        "holdout": 4,
    }
    splits = task_of("sequence-classification").load(data)
    assert {name: len(split) for name, split in splits.items()} == {"train": 38, "dev": 4, "test": 2}
    assert splits["train"].features["label"].names == ["Good", "NA"]
    assert 'A man "sees" a.\r\n\r\nYes; it does.' in {text for split in splits.values() for text in split["sentence"]}
    init("lm", "study", "new", "reviews.csv", "--columns", "Review", "--force")
    init("translation", "study", "new", "reviews.csv", "--columns", "Review,Sentiment", "--force")
    (place / "folder").mkdir()
    (place / "folder" / "train.csv").write_text("Text,LABEL\n" + "".join(f"{text},{len(text)}\n" for text in TEXTS))
    init("classification", "study", "new", "folder", "--force")  # the usual names, in other letters
    assert load_recipe("recipe.yaml").data.columns == ["Text"]


def test_methods_that_do_not_work_on_a_model_are_left_out_with_the_reason(place):
    """Here a variant, whose FFNs are tensor trains already."""
    config = GPT2Config(vocab_size=90, n_embd=16, n_layer=2, n_head=2, n_positions=10)
    model = saved(make_variant(config, [methods.TensorTrain(rank=2)], task="causal-lm"), "bpe", place / "model")
    init("lm", "shrink", model, write_data("lm", place))
    text = (place / "recipe.yaml").read_text()
    left_out = re.findall(r"^# Left out, because it does not work on this model: (\S+) \(.*\)$", text, re.MULTILINE)
    assert left_out == ["ffn", "low-rank"]
    assert list(load_recipe("recipe.yaml").rows) == [row for row in ROWS["shrink"] if row not in left_out]


def test_a_recipe_is_not_written_over(place):
    (place / "recipe.yaml").write_text("mine")
    command = ("init", "--task", "lm", "--model", "new", "--data", "builtin", "--goal", "study")
    assert "recipe.yaml exists; use --force to overwrite it" in one_line_error(*command)
    assert (place / "recipe.yaml").read_text() == "mine"
    cli(*command, "--force")
    assert yaml.safe_load((place / "recipe.yaml").read_text())["name"] == "recipe"


# -- what it asks --------------------------------------------------------------------------------------------------------------


def test_without_a_terminal_the_missing_options_are_named(place):
    error = one_line_error("init", "--task", "translation", "--data", "builtin")
    assert "--model, --goal missing. Model: a folder or Hub id of a trained one, or new " in error


def test_in_a_terminal_only_what_is_missing_is_asked(place, monkeypatch):
    asked = []

    def answer(question, default=None):
        asked.append(question.split(":")[0])
        return {"Task": "lm"}.get(asked[-1], default)

    monkeypatch.setattr(init_command.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(init_command.typer, "prompt", answer)
    init_command.init(goal="study", out=place / "recipe.yaml")
    assert asked == ["Task", "Model", "Data"]
    assert load_recipe("recipe.yaml").task == "language-modelling"


ERRORS = {
    "task": (
        ["--task", "summaries"],
        "--task summaries: choose from ['translation', 'classification', 'lm', 'masked-lm']",
    ),
    "goal": (["--goal", "smaller"], "--goal smaller: choose from ['study', 'shrink', 'budget']"),
    "file": (["--data", "train.de,none.en"], "--data train.de,none.en: there is no file 'none.en'"),
    "one side": (["--data", "train.de"], "1 files for train, ['train.de']: translation takes two files of lines"),
    "lines": (["--data", "train.de,short.en"], "parallel files differ in length: train.de has 3 lines, short.en has 2"),
    "test": (["--test", "none.de,none.en"], "--test none.de,none.en: there is no file 'none.de'"),
    "folder": (["--data", "empty"], "--data empty: no file in this folder begins with 'train'"),
    "column": (["--data", "a.jsonl"], "a.jsonl has no column 'source' and 'target'; say with --columns which to take"),
    "named column": (
        ["--data", "a.jsonl", "--columns", "x,target"],
        "a.jsonl has no column 'target'; choose from ['x', 'label'], with --columns",
    ),
    "label": (
        ["--task", "classification", "--data", "a.jsonl", "--columns", "x", "--label", "y"],
        "a.jsonl has no column 'y'; choose from ['x', 'label'], with --label",
    ),
    "value": (
        ["--task", "classification", "--data", "a.jsonl", "--columns", "x"],
        "a.jsonl, line 2: x must be text, not 3",
    ),
    "csv": (
        ["--task", "classification", "--data", "reviews.csv"],
        "reviews.csv has no column 'sentence' or 'text'; say with --columns which to take and with --label which is the label; "
        "choose from ['Date', 'Review', 'Sentiment']",
    ),
    "nearest": (
        ["--task", "classification", "--data", "reviews.csv", "--columns", "review"],
        "reviews.csv has no column 'review'; choose from ['Date', 'Review', 'Sentiment'], with --columns; did you mean 'Review'?",
    ),
    "pattern": (["--data", "*.csv.gz"], "*.csv.gz: no files"),
    "table": (["--task", "classification", "--data", "train.de"], "classification takes files with columns, whose"),
    "columns of lines": (["--columns", "x"], "--columns ['x']: train.de is a file of lines, without columns"),
    "small": (["--data", "one.de,one.de"], "data.holdout=1 and data.holdout_test=1 leaves nothing to train on"),
    "built-in": (["--data", "builtin", "--label", "x"], "--label x: the built-in data has its own; leave it out"),
    "model": (["--model", "./none"], "./none does not exist: neither a folder here nor a Hub id"),
    "task of model": (["--model", "bert"], "--model bert does not fit --task translation: "),
    "tokenizer": (["--model", "bare"], "--model bare has no tokenizer; save it into the same folder"),
}


@pytest.mark.parametrize(("options", "message"), ERRORS.values(), ids=ERRORS)
def test_mistakes_are_one_line(options, message, place):
    write_lines(place / "train.de", "abc")
    write_lines(place / "train.en", "abc")
    write_lines(place / "short.en", "ab")
    write_lines(place / "one.de", "a")
    write_reviews(place / "reviews.csv")
    write_examples(place / "a.jsonl", [{"x": "a", "label": 1}, {"x": 3, "label": 0}])
    (place / "empty").mkdir()
    if "bert" in options or "bare" in options:
        tiny("classification", place / "bert")
        BertForSequenceClassification.from_pretrained("bert").save_pretrained("bare")
    given = {"--task": "translation", "--model": "new", "--data": "train.de,train.en", "--goal": "study"}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    assert message in one_line_error("init", *(word for option in given.items() for word in option))
    assert not (place / "recipe.yaml").exists()


# -- what comes next -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not ALL, reason="ten grids, a minute each: HF_FREEZE_TESTS=all")
@each_cell
def test_the_recipe_runs(task, goal, place):
    init(task, goal, tiny(task, place / "model"), write_data(task, place))
    cli("run", "recipe.yaml", "--smoke")
    records = map(json.loads, (place / "runs" / "recipe-smoke" / "results.jsonl").read_text().splitlines())
    assert [record["row"] for record in records] == ROWS[goal]


@pytest.mark.skipif(not ALL, reason="ten grids, some minutes each: HF_FREEZE_TESTS=all")
@each_cell
def test_the_recipe_of_a_fresh_model_runs(task, goal, place):
    init(task, goal)
    cli("run", "recipe.yaml", "--smoke")
    assert (place / "runs" / "recipe-smoke" / "report.html").is_file()
