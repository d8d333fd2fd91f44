"""Scripts of benchmarks/peers, imported as their tests need them."""

import importlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from support import ROOT


@pytest.fixture
def peer_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "peers")
    before = dict(os.environ)  # they go offline when they are imported; later tests have a Hub of their own
    yield importlib.import_module
    os.environ.clear()
    os.environ.update(before)
