"""Reports without their pictures, which take nearly all of the time of a report."""

import pytest
from matplotlib.figure import Figure

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
