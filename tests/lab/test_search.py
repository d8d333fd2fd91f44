"""hf-freeze search: trials that are counted before they are trained, rungs, samplers, journals and fronts."""

import contextlib
import errno
import itertools
import json
import math
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from support.cases import ALL
from support.recipes import SHORT, TINY, changed, cli, figures, one_line_error, write_recipe

from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.rows import SearchSettings
from hf_freeze.lab.recipes.space import Range
from hf_freeze.lab.runs import grid
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.text_training import Paused

pytest.importorskip("optuna")

from hf_freeze.lab.search import locks, search
from hf_freeze.lab.search.costs import Costs, costs_of
from hf_freeze.lab.search.front import score_front
from hf_freeze.lab.search.halving import front_of, goes_on
from hf_freeze.lab.search.locks import Locks
from hf_freeze.lab.search.search import Search
from hf_freeze.lab.search.study import FINISHED, Study, outcome_of, suggest_of

# -- rungs and fronts --------------------------------------------------------------------------------------------------------


def test_a_trial_is_halved_among_those_that_cost_no_more():
    large = [(1.0, 9.0), (2.0, 9.0), (3.0, 9.0)]
    assert goes_on((5.0, 1.0), large, 0.5)  # the smallest is compared with none
    assert goes_on((1.5, 9.0), large, 0.5)  # second of four
    assert not goes_on((2.5, 9.0), large, 0.5)  # third of four
    assert goes_on((2.5, 9.0), large, 0.75)
    assert not goes_on((4.0, 10.0), large, 0.5)
    assert not goes_on((2.5, 9.0, 2.0), [(1.0, 9.0, 1.0), (2.0, 8.0, 2.0), (2.2, 9.0, 2.0)], 0.5)
    assert goes_on((2.5, 9.0, 2.0), [(1.0, 9.0, 3.0), (2.0, 9.5, 2.0), (2.2, 9.0, 2.1)], 0.5)  # each costs more in one
    assert [goes_on((loss,), [(1.0,), (2.0,), (4.0,)], 0.5) for loss in (0.5, 1.5, 3.0)] == [True, True, False]


def test_the_front_is_what_no_other_row_beats():
    points = {"a": (1.0, 5.0), "b": (2.0, 3.0), "beaten": (2.0, 4.0), "equal to b": (2.0, 3.0), "c": (9.0, 1.0)}
    assert list(front_of(points)) == ["a", "b", "equal to b", "c"]


# -- samplers and journals ---------------------------------------------------------------------------------------------------

SETTINGS = SearchSettings(bounds={"stored_bytes": 300.0})


def drawn(out, sampler, count, seed=0):
    """A study of `count` trials on a made-up loss, more than half of whose space is above the bound."""
    study = Study(out, SETTINGS, {"recipe": 1}, sampler, seed)
    while len(study.trials()) < count:
        trial = study.ask()
        suggest = suggest_of(trial)
        size = suggest("size", Range(kind="int", low=1, high=40))
        rate = suggest("rate", Range(kind="float", low=1e-4, high=1, log=True)) if suggest("has", FLAG) else 0.5
        costs = Costs(parameters=size, stored_bytes=20 * size, multiply_adds=100 * size)
        violation, why = costs.violation(SETTINGS.bounds)
        if earlier := study.repeats(trial):
            study.repeat(trial, earlier)
        elif violation > 0:
            study.refuse(trial, why, violation)
        else:
            study.tell(trial, FINISHED, "", 10 / size + abs(math.log10(rate) + 2), costs)
    return study


FLAG = Range(kind="choices", choices=(True, False))


@pytest.mark.parametrize(("sampler", "count"), [("tpe", 13), ("nsga2", 13), ("random", 8)])
def test_a_stopped_search_draws_what_an_undisturbed_one_draws(tmp_path, sampler, count):
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    whole = drawn(tmp_path / "whole", sampler, count)
    drawn(tmp_path / "stopped", sampler, count - 3)
    stopped = drawn(tmp_path / "stopped", sampler, count)
    assert [trial.params for trial in stopped.trials()] == [trial.params for trial in whole.trials()]
    assert stopped.finished() == whole.finished()
    assert all(point[1] <= 300 for point in whole.finished().values())
    kinds = [outcome_of(trial)[0] for trial in whole.trials()]
    assert kinds.count("refused") > 1
    with pytest.raises(
        ValueError, match=r"is the journal of another search \(seed was 0, now 1\); choose another --out"
    ):
        drawn(tmp_path / "whole", sampler, count, seed=1)


@pytest.mark.skipif(not ALL, reason="about Optuna as much as about what it is told: HF_FREEZE_TESTS=all")
def test_tpe_learns_where_the_bound_is(tmp_path):
    kinds = [outcome_of(trial)[0] for trial in drawn(tmp_path, "tpe", 30).trials()]
    assert kinds[-10:].count("refused") < 0.5 * kinds[:10].count("refused")


def test_a_damaged_journal_is_refused_in_one_line(tmp_path):
    (tmp_path / "journal.log").write_text("no journal\n{}\n")
    with pytest.raises(ValueError, match=r"journal\.log is no journal of Optuna, or damaged") as caught:
        Study(tmp_path, SETTINGS, {}, "tpe", 0)
    assert "\n" not in str(caught.value)


def test_a_lock_that_a_killed_machine_left_on_the_journal_is_freed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # --out is often relative
    Path("out").mkdir()
    drawn(Path("out"), "random", 1)
    Path("out/journal.log.lock").touch()
    seconds = itertools.count(0, 5)  # instead of 30 s
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(seconds))
        patch.setattr(time, "sleep", lambda _: None)
        assert len(drawn(Path("out"), "random", 2).trials()) == 2
    assert not Path("out/journal.log.lock").exists()


@pytest.mark.parametrize(
    ("flock", "why"),
    [(errno.ENOLCK, "No locks available"), (errno.ENOSYS, "Function not implemented"), (None, "can be locked twice")],
)
def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch, flock, why):
    def without(file, how):
        if flock is not None:
            raise OSError(flock, why)

    monkeypatch.setattr(locks.fcntl, "flock", without)
    message = (
        rf"locks is on a file system without locks \(.*{why}\), which a search needs: .* choose --out on another one"
    )
    with pytest.raises(ValueError, match=message):
        Locks(tmp_path / "locks")
    assert not list((tmp_path / "locks").iterdir())


def test_what_another_process_holds_is_not_taken(tmp_path):
    one, other = Locks(tmp_path), Locks(tmp_path)
    assert one.take("t1")
    assert not one.take("t1")
    assert not other.take("t1")
    assert not other.is_free("t1")
    assert other.take("t2")
    one.give("t1")
    assert other.is_free("t1")
    assert other.take("t1")


# -- whole searches ----------------------------------------------------------------------------------------------------------

SEARCHED = changed(TINY, SHORT) | {
    "space": {
        "methods": [{"method": "low_rank", "rank": {"int": [2, 12]}, "optional": True}],
        "backbone": {"config": {"d_model": {"choices": [8, 12, 16]}, "encoder_ffn_dim": {"int": [8, 64], "log": True}}},
    },
    "search": {"rungs": [1], "bounds": {"stored_bytes": 24_000}},
    "rows": {"0": {"label": "dense", "methods": []}},
}


SEED = 4  # of a search in which a trial is refused, one is stopped and others end


class InThisProcess:
    """Runs one at a time, without the seconds that a process takes; `stop_after` runs, as if the search were killed."""

    stop_after = math.inf

    def __init__(self, jobs, resume_anyway, begin_again=False):
        self.done = []

    def has_room(self):
        return not self.done

    def start(self, run, folder, until=None):
        if InThisProcess.stop_after == 0:
            raise KeyboardInterrupt
        InThisProcess.stop_after -= 1
        with contextlib.suppress(Paused):
            execute(run, folder, until=until)
        self.done.append(folder)

    def message(self):
        return None

    def ended(self):
        done, self.done = self.done, []
        return [(folder, "") for folder in done]

    def close(self):
        pass


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(search, "Processes", InThisProcess)
    monkeypatch.setattr(grid, "Processes", InThisProcess)
    monkeypatch.setattr(InThisProcess, "stop_after", math.inf)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_stopped_search_ends_as_an_undisturbed_one_and_tests_its_front_alone(tmp_path, in_this_process):
    path = write_recipe(tmp_path / "r.yaml", SEARCHED, **{"presets/small/training/epochs": 2})
    arguments = ("search", path, "--trials", 3, "--seed", SEED, "--out")
    output = cli(*arguments, tmp_path / "whole").output
    InThisProcess.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        Search(load_recipe(path), tmp_path / "stopped", seed=SEED).run(3)
    InThisProcess.stop_after = math.inf
    Search(load_recipe(path), tmp_path / "stopped", seed=SEED).run(3)

    trials = lines_of(tmp_path / "whole" / "trials.jsonl")
    assert lines_of(tmp_path / "stopped" / "trials.jsonl") == trials
    outcomes = [trial["outcome"] for trial in trials]
    assert {"finished", "stopped", "refused"} <= set(outcomes)
    assert sum(outcome in ("finished", "stopped") for outcome in outcomes) == 3
    results = [lines_of(tmp_path / name / "trials" / "results.jsonl") for name in ("whole", "stopped")]
    assert [figures(record) for record in results[0]] == [figures(record) for record in results[1]]

    # Each trial was counted right before it was trained, and saw the dev split (10 items) only; a stopped one has no record.
    records = {record["row"]: record for record in results[0]}
    assert list(records) == ["0", *(trial["trial"] for trial in trials if trial["outcome"] == "finished")]
    for trial in trials:
        if trial["outcome"] == "finished":
            assert trial["costs"] == asdict(costs_of(records[trial["trial"]]))
            assert trial["costs"]["stored_bytes"] <= 24_000
        if trial["outcome"] == "refused":
            assert re.fullmatch(r"stored_bytes [\d,]+ is above 24,000", trial["why"])
            assert not (tmp_path / "whole" / "trials" / f"row-{trial['trial']}-seed-1").exists()
    assert {record["test_set"][:8] for record in records.values()} == {"10 items"}

    # The test split (8 items) was used for the front and the hand-made row alone.
    goals = {
        name: (record["metrics"]["dev_loss"], record["parameters"]["stored_bytes"], record["multiply_adds"])
        for name, record in records.items()
        if name != "0"  # it is above the bound
    }
    assert records["0"]["parameters"]["stored_bytes"] > 24_000
    tested = {record["row"]: record for record in lines_of(tmp_path / "whole" / "front" / "results.jsonl")}
    assert set(tested) == {"0", *front_of(goals)}
    assert {record["test_set"][:7] for record in tested.values()} == {"8 items"}
    for name, record in tested.items():
        assert record["metrics"]["dev_loss"] == pytest.approx(records[name]["metrics"]["dev_loss"], rel=1e-6)
        assert record["parameters"] == records[name]["parameters"]
    assert "points drawn by tpe" in output
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "on the same 8 test sentences" in page
    assert "on the same 10 dev sentences" in page
    assert f"On the front: {', '.join(name for name in records if name in front_of(goals))}" in page

    # Another recipe does not go on with the journal.
    message = one_line_error(*arguments, tmp_path / "whole", "--set", "training.learning_rate=0.01")
    assert "is the journal of another search (training.learning_rate was 0.005, now 0.01)" in message


def test_two_processes_share_a_search(tmp_path, in_this_process):
    """What the first one is at, the second leaves to it, until the first is killed."""
    loaded = load_recipe(write_recipe(tmp_path / "r.yaml", SEARCHED, rows=..., search={}))
    first, second = Search(loaded, tmp_path / "out"), Search(loaded, tmp_path / "out")
    InThisProcess.stop_after = 0
    with pytest.raises(KeyboardInterrupt):
        first.run(2)
    InThisProcess.stop_after = math.inf
    found = second.run(2)
    assert (found.busy, found.counts) == (["t0"], {"running": 1, "finished": 1})
    assert first.locks.take("front")
    assert not score_front(second, found)
    first.locks.give("t0-seed-1")  # as the system does when the process ends
    found = second.run(2)
    assert (found.busy, found.counts) == ([], {"finished": 2})


def test_a_space_whose_trials_are_all_refused_says_why(tmp_path, in_this_process, monkeypatch):
    monkeypatch.setattr(search, "_IN_VAIN", 6)
    path = write_recipe(tmp_path / "r.yaml", SEARCHED, rows=..., search={"bounds": {"stored_bytes": 100}})
    message = one_line_error("search", path, "--out", tmp_path / "out")
    assert re.search(
        r"the first 6 points of the space are all refused: .*\d x stored_bytes too large, at the least [\d,]+ is above 100",
        message,
    )
    too_wide = {"methods": [{"method": "low_rank", "rank": {"int": [500, 600]}}]}
    path = write_recipe(tmp_path / "r.yaml", SEARCHED | {"space": too_wide}, rows=..., search=...)
    message = one_line_error("search", path, "--out", tmp_path / "wide")
    assert re.search(r"all refused: \d x .*rank=5\d\d", message)


BAD_COMMANDS = {
    "place": (["--on", "kubernetes"], {}, "--on 'kubernetes': choose from ['local', 'ray', 'slurm']"),
    "address": (["--address", "auto"], {}, "--address auto needs --on ray, not --on local"),
    "sampler": (["--sampler", "grid"], {}, r"--sampler 'grid': choose from ['tpe', 'nsga2', 'random']"),
    "no space": ([], {"space": ..., "search": ...}, "has no 'space' to search; hf-freeze run is for its rows"),
    "start": (
        [],
        {"rows/1": {"label": "x", "methods": [], "start": "0"}},
        "row '1' has 'start': rows beside a space train from",
    ),
    "name": (
        [],
        {"rows/t1": {"label": "x", "methods": []}},
        "row 't1': the name is reserved for trials; choose another",
    ),
}


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_a_bad_command_is_refused_in_one_line(tmp_path, name):
    options, changes, message = BAD_COMMANDS[name]
    path = write_recipe(tmp_path / "r.yaml", SEARCHED, **{"presets/small/training/epochs": 2, **changes})
    assert message in one_line_error("search", path, "--out", tmp_path / "out", *options)
