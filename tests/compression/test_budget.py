"""Limits as they are written, what is above them, and what a compression remembers."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_freeze.compression import engine
from hf_freeze.compression.budget import Budget, in_bytes, read_bytes
from hf_freeze.compression.phases import Phases
from hf_freeze.compression.report import picture
from hf_freeze.model.fidelity import Fidelity
from hf_freeze.publish.latency import Latency


def test_budgets_are_read_and_refused():
    assert [read_bytes(text) for text in ("2MB", "500 kB", "1.5MiB", "1200")] == [2_000_000, 500_000, 1_572_864, 1200]
    assert in_bytes(1_903_000) == "1.90 MB"
    assert Budget(max_bytes="2MB") == Budget(max_bytes=2_000_000)
    with pytest.raises(ValueError, match=r"max_bytes='11.4': without a unit .*; write 11.4MB, 11.4kB or 11.4%"):
        Budget(max_bytes="11.4")
    assert Budget(max_bytes="11400").max_bytes == 11400
    with pytest.raises(ValueError, match=r"'2 mb' is no number of bytes; write it as 2MB"):
        Budget(max_bytes="2 mb")
    with pytest.raises(ValueError, match=r"max_bytes=0: must be above 0"):
        Budget(max_bytes="0kB")
    with pytest.raises(ValueError, match=r"max_ms=0: must be above 0"):
        Budget(max_ms=0)
    with pytest.raises(ValueError, match=r"max_loss=0: must be above 0, in points of the score, or of fidelity in %"):
        Budget(max_loss=0)
    with pytest.raises(ValueError, match=r"give max_bytes, max_ms or max_loss"):
        Budget()
    assert Budget(max_bytes=100, max_ms=2.0).excess(101, 2.5) == ["0.1 kB of 0.1 kB", "2.50 ms of 2 ms"]


def test_a_limit_may_be_a_share_of_what_the_model_takes():
    budget = Budget(max_bytes="33%", max_ms=" 50 %", max_loss=1)
    assert (budget.max_bytes, budget.max_ms, budget.limits_time) == (None, None, True)
    assert budget.words() == (
        "at most 33 % of the model's bytes, at most 50 % of the model's time a text, a loss of at most 1 point"
    )
    assert not budget.excess(1e9, 1e9), "it is not known yet"
    found = budget.resolved(3_000_000, 2.5)
    assert (found.max_bytes, found.max_ms) == (990_000, 1.25)
    assert found.words().startswith(
        "at most 990.0 kB (33 % of the model's), at most 1.25 ms (50 % of the model's) a text"
    )
    assert found.excess(999_000, 1.3) == [
        "999.0 kB of 990.0 kB (33 % of the model's)",
        "1.30 ms of 1.25 ms (50 % of the model's)",
    ]
    for one in (budget, found, Budget(max_bytes="2MB", max_ms="0.5")):
        assert Budget(**one.to_dict()).to_dict() == one.to_dict()
    assert Budget(max_bytes="2MB").resolved(3_000_000, None) == Budget(max_bytes="2MB")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"max_bytes": "0%"},
            r"max_bytes='0%': a share of what the model takes is above 0 % and below 100 %, such as 33%",
        ),
        ({"max_ms": "120 %"}, r"max_ms='120 %': a share of what the model takes is above 0 % and below 100 %"),
        ({"max_ms": "-5%"}, r"max_ms='-5%': a share of what the model takes"),
        (
            {"max_bytes": "half"},
            r"'half' is no number of bytes; write it as 2MB, .*, or as a share of the model's, such as",
        ),
        ({"max_ms": "half"}, r"max_ms='half' is no number of milliseconds; write it as 5 or 0.8, or as a share"),
        ({"max_ms": "0"}, r"max_ms=0.0: must be above 0"),
    ],
)
def test_shares_that_cannot_be(limits, message):
    with pytest.raises(ValueError, match=message):
        Budget(**limits)


def test_a_share_of_time_is_that_of_the_ratio(monkeypatch):
    """The load of the machine makes all times longer, and the time of the model as it was measured first stays the unit."""
    slow = iter([1.0, 3.0])

    def measure(folders, texts, **settings):
        load, found = next(slow), []
        for folder in folders:
            alone = {"whole": 4.0, "small": 1.0}[folder.name]
            found.append(Latency(str(folder), "", "", 0.0, 0.0, batches={1: [alone * load, alone * load * 1.5]}))
        return found

    monkeypatch.setattr(engine, "measure", measure)
    monkeypatch.setattr(engine, "Worker", lambda: None)
    stopwatch = engine.Stopwatch(Path("whole"), ["a"], 1)
    for _ in range(2):
        assert stopwatch.milliseconds({"a": Path("small"), "b": Path("whole")}, 2.0) == {"a": 0.5, "b": 2.0}


def test_phases_are_kept_and_another_compression_is_refused(tmp_path):
    calls = []
    for _ in range(2):
        phases = Phases(tmp_path, {"seed": 1})
        assert phases.once("one", lambda: calls.append(1) or {"a": [1.5]}) == {"a": [1.5]}
    assert calls == [1]
    phases.once("outer", lambda: [phases.once("inner", lambda: time.sleep(0.05) or 1)])
    found = phases.seconds_by_phase
    assert found["inner"] >= 0.05
    assert found["outer"] < 0.02, "what is done within it is not counted twice"
    with pytest.raises(ValueError, match=r"holds another compression \(seed was 1, now 2\); choose another --out"):
        Phases(tmp_path, {"seed": 2})
    (tmp_path / "phases.json").write_text("{")
    with pytest.raises(ValueError, match=r"is damaged"):
        Phases(tmp_path, {"seed": 1})


def test_a_budget_is_checked_without_importing_torch():
    """A mistake is told at once, not after the seconds that torch takes."""
    code = (
        "import sys; from hf_freeze.compression import Budget; Budget(max_bytes='30%'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("served", "axes"), [({"score": 0.9}, 3), ({"score": 0.9, "kl": 0.1}, 2)], ids=["texts", "probabilities"]
)
def test_a_picture_has_an_axis_for_each_measure(served, axes):
    one = SimpleNamespace(bytes=1000, fidelity=Fidelity(**served))
    tried = [SimpleNamespace(bytes=800, loss=2.0)]
    compression = SimpleNamespace(
        original=SimpleNamespace(bytes=4000), whole=one, results=[one], tried=tried, budget=Budget(max_bytes=1000)
    )
    figure = picture(compression, [])
    assert len(figure.axes) == axes
    (drawn,) = [plot for plot in figure.axes if any(2.0 in line.get_ydata() for line in plot.lines)]
    assert drawn.get_ylabel().startswith("distance of probabilities") == (axes == 3)
    assert len(figure.legends[0].get_texts()) == 4
