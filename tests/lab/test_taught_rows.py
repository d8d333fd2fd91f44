"""Rows that learn from another row's model, by its outputs, its layers or its translations; and what a schedule leaves in reports
and checkpoints."""

import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from support import ROOT
from support.recipes import SHORT, write_recipe
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Trainer, TrainingArguments

from hf_freeze import VariantCallback, make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.rows import Row
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.grid import FailedRuns, run_grid
from hf_freeze.lab.tasks.translation import load_data
from hf_freeze.lab.training import teacher_translations
from hf_freeze.lab.training.decoding import translate

RECIPES = ROOT / "recipes"
HALF = {"method": "layer_selection", "keep": {"encoder": [0], "decoder": [0]}}
TAUGHT = {"start": "0", "teacher": "0"}
ROWS = {
    "kd": {"label": "taught", "methods": [HALF, {"method": "distillation", "hidden": "none"}], **TAUGHT},
    "sequence": {"label": "by translations", "methods": [HALF], "targets": "teacher", **TAUGHT},
    "theseus": {"label": "in its place", "methods": [{"method": "theseus", "schedule": ["linear", 0.3]}], "start": "0"},
    "0": {"label": "teacher", "methods": []},
}
DEEP = {
    "presets/small/backbone/config/encoder_layers": 2,
    "presets/small/backbone/config/decoder_layers": 2,
    "data": {"builtin": {"seed": 0, "train": 60, "dev": 8, "test": 8}},
}


def recipe_of(folder, rows=ROWS, **changes):
    return load_recipe(write_recipe(folder / "r.yaml", rows=rows, **DEEP | SHORT, **changes))


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught")
    recipe, out = recipe_of(folder), folder / "runs"
    for run in expand(recipe):
        execute(run, out / f"row-{run.row}-seed-1")
    run_grid(recipe, out, console=Console(quiet=True))  # collects them
    return recipe, out


def test_a_teacher_comes_before_its_student(tmp_path):
    runs = {run.row: run for run in expand(recipe_of(tmp_path))}
    assert list(runs) == ["0", "kd", "sequence", "theseus"]
    assert runs["kd"].teacher == runs["kd"].start
    assert [run.row for run in expand(recipe_of(tmp_path, only=["sequence"]))] == ["0", "sequence"]


def test_the_models_of_students(grid):
    _, out = grid
    for row, names in {
        "kd": ["layer_selection", "distillation"],
        "sequence": ["layer_selection"],
        "theseus": ["theseus"],
    }.items():
        folder = out / f"row-{row}-seed-1" / "model"
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        assert [method["method"] for method in model.config.methods] == names
        assert (model.config.encoder_layers, model.config.decoder_layers) == (1, 1)
        assert not [name for name in load_file(folder / "model.safetensors") if "predecessor" in name]
        assert model.get_teacher() is None
    values = [load_file(out / f"row-{row}-seed-1" / "model" / "model.safetensors") for row in ("kd", "sequence")]
    assert any(not torch.equal(value, values[1][name]) for name, value in values[0].items())


def test_translations_of_the_teacher_are_the_targets(grid):
    recipe, out = grid
    teacher = out / "row-0-seed-1"
    first, *lines = map(json.loads, (teacher / "translations-train.jsonl").read_text("utf-8").splitlines())
    kept = [text for line in lines for text in line]
    sources = list(load_data(recipe.data)["train"]["source"])
    model = AutoModelForSeq2SeqLM.from_pretrained(teacher / "model")
    tokenizer = AutoTokenizer.from_pretrained(teacher / "model")
    assert kept == translate(model, tokenizer, sources, **first["decoding"])


def test_what_is_kept_is_not_decoded_again(grid, tmp_path, monkeypatch):
    _, out = grid
    teacher, path = out / "row-0-seed-1" / "model", tmp_path / "kept.jsonl"
    monkeypatch.setattr("hf_freeze.lab.training.decoding._CHUNK", 2)
    sentences = ["simdi", "homor", "pyhiz", "nukostu", "simdi homor"]
    whole = teacher_translations(teacher, sentences, path)
    lines = path.read_text("utf-8").splitlines(keepends=True)
    assert len(lines) == 4
    path.write_text("".join(lines[:2]) + lines[2][:3], "utf-8")  # killed in the middle of a line
    asked = []

    def counted(model, tokenizer, texts, **decoding):
        asked.extend(texts)
        return translate(model, tokenizer, texts, **decoding)

    monkeypatch.setattr("hf_freeze.lab.training.decoding.translate", counted)
    assert teacher_translations(teacher, sentences, path) == whole
    assert asked == sentences[2:]
    for other in ({"num_beams": 2}, {"sentences": sentences[:3]}):
        with pytest.raises(ValueError, match=r"kept\.jsonl is of another decoding"):
            teacher_translations(teacher, **{"sentences": sentences, "path": path} | other)
    with pytest.raises(ValueError, match="give the tokenizer of the teacher"):
        teacher_translations(AutoModelForSeq2SeqLM.from_pretrained(teacher), sentences, path)


def test_a_report_draws_the_schedules(grid, pictures):
    from hf_freeze.lab.report.plots.training import schedules_figure

    _, out = grid
    report = write_report(out, say=lambda _: None)
    (axes,) = schedules_figure(report).axes
    (line,) = axes.lines
    assert line.get_label() == "in its place, from 0: replacing rate"
    assert line.get_ydata()[0] == 0.3
    assert line.get_ydata()[-1] == 1
    assert (out / "schedules.png").stat().st_size > 5000
    assert "What methods scheduled" in (out / "report.html").read_text("utf-8")
    assert "schedules.png" in (out / "report.md").read_text("utf-8")


def test_a_student_fails_with_its_teacher(grid, tmp_path):
    recipe, out = grid
    copy = tmp_path / "runs"
    shutil.copytree(out / "row-0-seed-1", copy / "row-0-seed-1")
    (copy / "row-0-seed-1" / "metrics.json").unlink()
    with pytest.raises(ValueError, match=r"learns from .*, which is not finished: run row 0 first"):
        execute(expand(recipe)[1].changed(start=None), copy / "row-kd-seed-1")
    broken = recipe.model_copy(deep=True)
    broken.rows["0"].methods = [{"method": "adaptive_embedding", "cutoffs": [4000]}]  # the data have fewer tokens
    broken.tokenizer.vocab_size = 5000
    broken.rows["kd"] = Row(**{key: value for key, value in broken.rows["kd"].given().items() if key != "start"})
    del broken.rows["kd"].methods[0]
    with pytest.raises(FailedRuns):
        run_grid(broken.changed(only=["kd"]), tmp_path / "broken", console=Console(quiet=True))
    log = (tmp_path / "broken" / "row-kd-seed-1" / "error.log").read_text("utf-8")
    assert log == "row 0 with seed 1 failed, from which it learns\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"teacher": "9"}, "teacher='9' is no row; choose from"),
        ({"teacher": "1"}, "'teacher' refers to itself: 1 <- 1"),
        ({"teacher": "0"}, "it has none of these"),
        ({"methods": [{"method": "distillation"}]}, "it has no 'teacher'"),
        ({"targets": "teacher"}, "it has no 'teacher'"),
        ({"targets": "0", "teacher": "0"}, "unknown targets='0'; choose from \\['teacher'\\]"),
    ],
)
def test_bad_rows_are_refused(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        recipe_of(tmp_path, {"0": ROWS["0"], "1": {"label": "x", "methods": []} | row})


FILES = ["data.root=x", "backbone.pretrained=y"]
PRESETS = {
    "theseus/recipe": {"demo": 4, "tiny": 6, "base": 6},
    "theseus/multi30k": {"tiny": 6},
    "theseus/bert": {"demo": 6, "small": 6},
    "theseus/sst2": {"small": 6, "pretrained": None},
    "theseus/rte": {"pretrained": None},
}


@pytest.mark.parametrize(
    ("name", "preset"), [(name, preset) for name, presets in PRESETS.items() for preset in presets]
)
def test_half_the_layers_are_kept_in_every_preset(name, preset):
    depth = PRESETS[name][preset]
    settings = [f"preset={preset}", *(FILES if depth is None else [])]
    kept = 0
    for run in expand(load_recipe(RECIPES / f"{name}.yaml", settings)):
        config = run.backbone.config
        if run.row != "scratch":
            assert config.get("encoder_layers", config.get("num_hidden_layers")) == depth
        for method in run.methods:
            halves = method.get("keep", {}).values()
            assert all(numbers == list(range((depth or 6) // 2)) for numbers in halves)
            kept += len(halves)
    assert kept >= 3


def test_the_translators_to_serve_decode_with_one_layer():
    predecessor, *students = expand(load_recipe(RECIPES / "theseus" / "shallow.yaml"))
    assert predecessor == expand(load_recipe(RECIPES / "theseus" / "multi30k.yaml"))[0]  # which may be there already
    taught = [run for run in students if run.row != "3-1-scratch"]
    for run in taught:
        assert run.methods[0]["keep"]["decoder"] == [0], run.row
        assert run.teacher.row == "0"
    assert len(taught) == 4
    (plain,) = (run for run in students if run not in taught)
    three = next(run for run in taught if run.row == "3-1")
    sizes = [plain.backbone.config[f"{stack}_layers"] for stack in ("encoder", "decoder")]
    assert sizes == [len(three.methods[0]["keep"][stack]) for stack in ("encoder", "decoder")]


def test_a_run_resumed_with_another_schedule_is_refused(tmp_path):
    config = ARCHITECTURES["gpt2"].tiny
    batch = ARCHITECTURES["gpt2"].tiny_inputs("causal-lm")
    rows = [{name: value[i] for name, value in batch.items()} for i in range(2)]

    def trainer(**settings):
        from transformers import GPT2Config

        model = make_variant(GPT2Config(**config), [methods.Theseus(**settings)], task="causal-lm")
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True
        )
        return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[VariantCallback()])

    trainer(rate=0.5).train()
    trainer(rate=0.5).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(
        ValueError, match=r"resumed at step 2 with the schedules .*'rate': 0\.7.* made with .*'rate': 0\.5"
    ):
        trainer(rate=0.7).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
