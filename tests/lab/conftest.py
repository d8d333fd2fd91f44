"""Fixtures of grids, and reports without their pictures, which take nearly all of the time of a report."""

import os

import pytest
from matplotlib.figure import Figure
from support.recipes import write_recipe

from hf_freeze.lab.report import page, write


@pytest.fixture
def pictures():
    """For tests that look at the pictures of a report: they are drawn."""


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    if "pictures" in request.fixturenames:
        return
    monkeypatch.setattr(write, "draw", lambda report, path: Figure(figsize=(1, 1)).savefig(path))
    monkeypatch.setattr(page, "svg_plots", lambda report: dict.fromkeys(report.axes, "<svg></svg>"))


@pytest.fixture
def recipe_file(tmp_path):
    return write_recipe(tmp_path / "recipe.yaml")


@pytest.fixture(scope="module")
def one_core():
    """Runs get a thread for each core; beside another job more than one makes a step many times slower."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        yield
