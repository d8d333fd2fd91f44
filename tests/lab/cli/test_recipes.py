"""Recipes that come with hf_freeze: their names, the list of them, and that the wheel holds them."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support import ROOT
from support.cases import ALL
from support.recipes import cli, one_line_error, write_recipe

from hf_freeze.lab.recipes.find import find_recipe, packaged_recipes
from hf_freeze.lab.recipes.load import load_recipe

FILES = [path for path in sorted((ROOT / "recipes").rglob("*.yaml")) if path.parent.name != "accelerate"]


def test_every_recipe_has_a_name():
    assert sorted(packaged_recipes().values()) == FILES
    for name, path in packaged_recipes().items():
        assert find_recipe(name) == path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("freeze_ablation", "freeze_ablation/recipe.yaml"),
        ("freeze_ablation/", "freeze_ablation/recipe.yaml"),
        ("freeze_ablation/lm", "freeze_ablation/lm.yaml"),
        ("theseus/multi30k", "theseus/multi30k.yaml"),
        ("recipes/theseus/rte.yaml", "theseus/rte.yaml"),  # as the pages write it
    ],
)
def test_a_name_and_a_path_of_the_pages_are_found_anywhere(name, file, tmp_path, monkeypatch):
    (tmp_path / "freeze_ablation").mkdir()  # such as one that `--out` made
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == ROOT / "recipes" / file


def test_a_file_of_the_user_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theseus").mkdir()
    write_recipe(tmp_path / "theseus" / "rte")
    assert load_recipe("theseus/rte").name == "tiny"


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("freeze_ablatoin", "the closest names are freeze_ablation, "),
        ("theseus/multi30", "the closest names are theseus/multi30k, "),
        ("factorized_embeddings", "the closest names are factorized_embeddings/albert, factorized_embeddings/bert, "),
        ("multi30k", "/multi30k"),
    ],
)
@pytest.mark.parametrize("command", ["run", "search"])
def test_an_unknown_name_is_one_line_with_the_closest(command, name, closest):
    error = one_line_error(command, name)
    assert f"no recipe '{name}': there is no such file, and none of that name in `hf-freeze recipes`; " in error
    assert closest in error


def test_what_is_like_no_name_is_told_where_the_names_are(tmp_path):
    error = one_line_error("compress", tmp_path, "--data", "my.yaml", "--out", tmp_path / "out", "--max-bytes", "1MB")
    assert error.endswith("no recipe 'my.yaml': there is no such file, and none of that name in `hf-freeze recipes`")


def test_a_recipe_extends_another_by_its_name(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: freeze_ablation\nname: mine\nonly: ['0', '3']\n", encoding="utf-8")
    assert load_recipe(mine) == load_recipe("freeze_ablation").changed(name="mine", only=["0", "3"])
    mine.write_text("extends: freeze_ablatoin\n", encoding="utf-8")
    with pytest.raises(
        FileNotFoundError, match=r"no recipe 'freeze_ablatoin'.*the closest names are freeze_ablation, "
    ):
        load_recipe(mine)


def test_the_list_says_what_each_recipe_is_for_and_what_it_needs():
    printed = cli("recipes").output
    listed = [line.split()[0] for line in printed.splitlines() if line.startswith("  ")]
    assert set(packaged_recipes()) - set(listed) == {"translation", "classification"}  # which are for others to extend
    assert len(set(listed)) == len(listed)
    assert (
        "\nWhich of embeddings, attention and FFN must be trained, and which may stay random?\n  freeze_ablation "
        in printed
    )
    assert re.search(
        r"^  freeze_ablation/tatoeba +translation +6 rows  folder data/tatoeba_tr_en$", printed, re.MULTILINE
    )
    assert "sequence-classification  9 rows  folder data/rte, --set backbone.pretrained=MODEL\n" in printed
    assert "10 rows  built-in data, finished runs/factorized-embeddings-bert\n" in printed
    assert "translation              search  built-in data\n" in printed


def test_what_a_recipe_is_for_is_no_setting_of_its_runs():
    from hf_freeze.lab.recipes.expand import expand

    assert load_recipe("freeze_ablation").about
    assert all("about" not in run.given() for run in expand(load_recipe("freeze_ablation")))


@pytest.mark.skipif(not ALL, reason="builds a wheel and needs the package index for hatchling; HF_FREEZE_TESTS=all")
def test_the_wheel_works_in_an_empty_folder(tmp_path):
    """`make wheel`, in a new environment with the packages of this one: the recipes are found and run."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "dist", ROOT], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "environment", with_pip=False)
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "packages.pth").write_text(f"{here}\n")  # .pth files within it, such as ours in a clone, are not read
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, "--no-index"], check=True
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"}

    def new_process(*arguments):
        command = [tmp_path / "environment" / "bin" / "python", *arguments]
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=True).stdout

    package = Path(new_process("-c", "import hf_freeze; print(hf_freeze.__file__)").strip()).parent
    assert package == site / "hf_freeze"
    assert f"The files are in {package / 'recipes'}." in new_process("-m", "hf_freeze", "recipes")
    files = {path.relative_to(package / "recipes") for path in (package / "recipes").rglob("*.yaml")}
    assert files == {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*.yaml")}
    new_process("-m", "hf_freeze", "run", "freeze_ablation", "--smoke", "--set", "only=['0','3']")
    assert (empty / "runs" / "freeze-ablation-smoke" / "report.html").is_file()
    answers = ("--task", "lm", "--model", "new", "--data", "builtin", "--goal", "study")
    new_process("-m", "hf_freeze", "init", *answers, "--out", "mine.yaml")
    new_process("-m", "hf_freeze", "run", "mine.yaml", "--smoke", "--set", "only=['0']")
    assert (empty / "runs" / "mine-smoke" / "report.html").is_file()
