"""Names of earlier versions work until 0.2, with a warning that names the new ones."""

import importlib
import pickle
import sys

import pytest
from support.processes import printed_by

from hf_freeze import _moved, data
from hf_freeze.lab.runs.on_ray import RayOptions

PACKAGES = [(package, name) for package, names in _moved._NAMES.items() for name in names.split()]
OTHERS = {
    "hf_freeze.experiments.recipes.load": "hf_freeze.lab.recipes.load",
    "hf_freeze.experiments.report.plots.maps": "hf_freeze.lab.report.plots.maps",
    "hf_freeze.metrics.classification": "hf_freeze.lab.metrics.classification",
}


@pytest.mark.parametrize(("old", "new"), [*_moved._MODULES.items(), *OTHERS.items()])
def test_a_module_is_the_same_by_its_old_name(old, new, monkeypatch):
    for name in [name for name in sys.modules if name == old or name.startswith("hf_freeze.experiments")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now; the old name works until 0.2"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(new)
    assert module.__spec__.name == module.__name__ == new


@pytest.mark.parametrize(("package", "name"), PACKAGES)
def test_a_function_is_the_same_by_its_old_name(package, name):
    new = package.replace("hf_freeze", "hf_freeze.lab")
    with pytest.warns(DeprecationWarning, match=f"{package}.{name} is {new}.{name} now"):
        value = getattr(importlib.import_module(package), name)
    assert value is getattr(importlib.import_module(new), name)


def test_what_was_pickled_by_its_old_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "hf_freeze.experiments.runs.on_ray", raising=False)
    pickled = pickle.dumps(RayOptions, protocol=0)
    old = pickled.replace(b"hf_freeze.lab.runs", b"hf_freeze.experiments.runs")
    assert old != pickled
    with pytest.warns(
        DeprecationWarning, match=r"hf_freeze\.experiments\.runs\.on_ray is hf_freeze\.lab\.runs\.on_ray now"
    ):
        assert pickle.loads(old) is RayOptions


def test_names_that_never_were():
    with pytest.raises(AttributeError, match=r"module 'hf_freeze\.data' has no attribute 'read_txt'"):
        _ = data.read_txt
    with pytest.raises(ModuleNotFoundError, match=r"hf_freeze\.lab\.nothing"):
        importlib.import_module("hf_freeze.experiments.nothing")


def test_public_names_and_new_ones_do_not_warn():
    printed_by("""
import warnings
warnings.filterwarnings("error", "hf_freeze", DeprecationWarning)
from hf_freeze import VariantCallback, analysis, compress, make_variant, methods
from hf_freeze.lab.data import read_text, sample, train_tokenizer
from hf_freeze.lab.training import TokenBatchTrainer
from hf_freeze.training import heal
import hf_freeze.lab.runs.grid, hf_freeze.lab.metrics
""")
