"""`training.bf16: auto`: bf16 where the machine multiplies in it natively, else fp32; the same in all runs of a grid."""

import json
import platform

import pytest
import torch
from rich.console import Console
from support.processes import printed_by
from support.recipes import CLASSIFICATION, LM, SHORT, TINY, write_recipe

from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.runs.text_training import training_arguments
from hf_freeze.lab.training import precision
from hf_freeze.run_folder import PRECISION

AUTO = {"presets/small/training/bf16": ...}
ONE_ROW = {"rows": {"0": TINY["rows"]["0"] | {"training": {"epochs": 0}}}}


@pytest.fixture
def machine(monkeypatch):
    """`machine(native)`: this machine multiplies in bf16 natively, or it does not."""

    def set_native(native):
        monkeypatch.setattr(precision, "has_native_bf16", lambda: native)

    return set_native


def quiet(recipe, out, **options):
    return run_grid(recipe, out, console=Console(quiet=True), **options)


def run_here(tmp_path, row="0", **changes):
    """One run of a grid in this process, where `machine` holds."""
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", **{**AUTO, **ONE_ROW, **changes}))
    return execute(expand_one(recipe).changed(row=row), tmp_path / "runs" / f"row-{row}-seed-1")


def expand_one(recipe):
    from hf_freeze.lab.recipes.expand import expand

    return expand(recipe)[0]


# -- the decision ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bf16", "native"), [(0.4, True), (1.0, True), (1.3, False), (10.7, False)])
def test_a_cpu_is_native_where_a_bf16_product_takes_no_longer(monkeypatch, bf16, native):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "_seconds_of_product", {torch.float32: 1.0, torch.bfloat16: bf16}.__getitem__)
    assert precision.has_native_bf16.__wrapped__() is native


def test_one_measurement_that_other_load_spoils_does_not_count(monkeypatch):
    seconds = {torch.float32: iter([1.0, 1.0]), torch.bfloat16: iter([7.0, 0.4])}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "_seconds_of_product", lambda dtype: next(seconds[dtype]))
    assert precision.has_native_bf16.__wrapped__()


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_is_native_where_torch_says_so(monkeypatch, supported):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: asked.append(options) or supported)
    assert precision.has_native_bf16.__wrapped__() is supported
    assert asked == [{"including_emulation": False}]


def native_in_a_new_process(**variables):
    """oneDNN reads its variables when it is first used."""
    code = "from hf_freeze.lab.training.precision import has_native_bf16; print(has_native_bf16())"
    return printed_by(code, CUDA_VISIBLE_DEVICES="", **variables).strip() == "True"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's AVX2 kernels are of x86_64")
def test_avx2_alone_is_not_native():
    """oneDNN emulates bf16 there: it works, and takes ten times as long as fp32."""
    assert not native_in_a_new_process(ONEDNN_MAX_CPU_ISA="AVX2")


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_amx_is_native():
    """avx512_bf16 alone need not be: AMD's takes half the time of fp32, and that of an Intel Xeon without AMX twice the time."""
    assert native_in_a_new_process(ONEDNN_MAX_CPU_ISA="DEFAULT")  # also where the tests are limited to AVX2


def test_auto_is_resolved_and_a_choice_stays(machine):
    for native in (True, False):
        machine(native)
        assert precision.uses_bf16("auto") is native
        assert precision.uses_bf16(True) is True
        assert precision.uses_bf16(False) is False


# -- recipes and runs ------------------------------------------------------------------------------------------------------------


def test_a_recipe_leaves_the_choice_to_the_machine(tmp_path, machine):
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", **AUTO))
    assert recipe.training.bf16 == "auto"
    for native in (True, False):
        machine(native)
        assert training_arguments(expand_one(recipe), tmp_path).bf16 is native


@pytest.mark.parametrize("value", ["no", 1, "fp16", None])
def test_anything_else_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"training\.bf16=.* is not a value that it takes: true, false or 'auto'"):
        load_recipe(write_recipe(tmp_path / "r.yaml", **{"presets/small/training/bf16": value}))


@pytest.mark.parametrize(("native", "name"), [(True, "bf16"), (False, "fp32")])
def test_the_record_and_the_report_say_which(tmp_path, machine, native, name):
    machine(native)
    assert run_here(tmp_path)["precision"] == name
    assert json.loads((tmp_path / "runs" / "row-0-seed-1" / "environment.json").read_text())["precision"] == name
    out = tmp_path / "runs"
    quiet(load_recipe(tmp_path / "r.yaml"), out)  # gathers
    report = write_report(out, say=lambda _: None)
    assert f"; {name}" in (out / "report.md").read_text()
    assert f"cores for each run; {name}." in (out / "report.html").read_text()
    assert report.runs[0].precision == name


def test_the_runs_of_a_grid_have_one_precision(tmp_path, machine):
    machine(True)
    run_here(tmp_path)
    assert (tmp_path / "runs" / PRECISION).read_text() == "bf16\n"
    machine(False)
    with pytest.raises(
        ValueError, match=r"the runs in .* use bf16, but this machine would use fp32, .*training\.bf16=true"
    ):
        run_here(tmp_path, row="1")
    recipe = load_recipe(write_recipe(tmp_path / "two.yaml", **AUTO))
    with pytest.raises(ValueError, match=r"the runs in .* use bf16, but this machine would use fp32"):
        quiet(recipe, tmp_path / "runs")
    assert not (tmp_path / "runs" / "row-2.1-seed-1").exists(), "refused before anything is run"
    assert run_here(tmp_path, row="1", **{"presets/small/training/bf16": False})["precision"] == "fp32"


@pytest.mark.parametrize("task", [SHORT, LM, CLASSIFICATION], ids=["translation", "language model", "classification"])
def test_a_row_without_training_is_tested_in_the_precision_of_training(tmp_path, task):
    """The same weights: to the last digit, though accelerate prepares a model for bf16 only when it trains."""
    same = {"label": "same", "start": "0", "methods": [], "training": {"epochs": 0}}
    rows = {"rows": {"0": TINY["rows"]["0"], "same": same}, "presets/small/training/bf16": True}
    records = quiet(load_recipe(write_recipe(tmp_path / "r.yaml", **task | rows)), tmp_path / "runs")
    assert records[0]["metrics"] == records[1]["metrics"]


def test_a_grid_of_an_earlier_release_is_resumed(tmp_path, machine):
    """Its run.json says `bf16: true`, or nothing, which meant the same; the recipe now says auto."""
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", **AUTO, **ONE_ROW))
    out = tmp_path / "runs"
    machine(True)
    run_here(tmp_path)
    (out / PRECISION).unlink()
    path = out / "row-0-seed-1" / "run.json"
    settings = expand_one(recipe).given()
    for old in ({"bf16": True}, {}):
        training = {key: value for key, value in settings["training"].items() if key != "bf16"} | old
        path.write_text(json.dumps(settings | {"training": training}))
        machine(True)
        assert len(quiet(recipe, out)) == 1
        machine(False)
        with pytest.raises(ValueError, match=r"training\.bf16 was True, now False"):
            quiet(recipe, out)
