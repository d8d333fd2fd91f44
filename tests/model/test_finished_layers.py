"""A calibrated conversion that was stopped goes on after the last finished layer, with the results of an uninterrupted one."""

import re

import pytest
import torch
from support.conversions import (
    FFN,
    INT4,
    TOKENIZER,
    assert_same,
    converted,
    ended_with,
    exit_at,
    needs_fork,
    saved_source,
    texts_of,
)

from hf_freeze.methods import FFNPruning, HeadPruning, HiddenPruning, MagnitudePruning, ffn_pruning
from hf_freeze.methods import _quantized_values as quantized
from hf_freeze.model import paging
from hf_freeze.model.finished_layers import FinishedLayers
from hf_freeze.model.loading import load_model
from hf_freeze.model.streams import Streams
from hf_freeze.model.sums import Sums

pytestmark = needs_fork
METHODS = {  # and of how many linears and norms of a layer each asks for the moments; also before it cuts
    "ffn": ([FFN], 1, 0),
    "int4": ([INT4], 7, 0),
    "magnitude": ([MagnitudePruning(sparsity=0.5)], 3, 0),
    "obs": ([MagnitudePruning(sparsity=0.5, criterion="obs")], 3, 0),
    "heads": ([HeadPruning(share=0.5)], 1, 0),
    "hidden": ([HiddenPruning(width=12)], 9, 5),
    "neurons of all layers": ([FFNPruning(share=0.5)], 1, 1),
}


@pytest.fixture(autouse=True)
def every_tensor_in_a_file(monkeypatch):
    monkeypatch.setattr(paging, "_SMALL", 1)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {name: saved_source(name, tmp_path_factory.mktemp(name) / "source") for name in ("llama", "marian")}


@pytest.fixture
def source(request, sources):
    return sources[getattr(request, "param", "llama")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A function: the work of a whole conversion, and its folder; made once."""
    done = {}

    def found(source, methods):
        key = source, repr(methods)
        if key not in done:
            done[key] = work_of(lambda: converted(source, tmp_path_factory.mktemp("whole") / "out", methods))
        return done[key]

    return found


def counted(monkeypatch, owner, name):
    """A list that gets one entry with each call."""
    calls, function = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: (calls.append(args), function(*args, **options))[1])
    return calls


def work_of(run):
    """How often a conversion asks for the moments of a linear, goes through a layer, and finishes one; and its folder."""
    with pytest.MonkeyPatch.context() as patch:
        watched = [(Sums, "moments"), (Streams, "leave"), (FinishedLayers, "add")]
        calls = [counted(patch, *each) for each in watched]
        out = run()
    return [*map(len, calls)], out


def killed(source, out, methods, owner, name, count, *, after=False):
    """Convert in a process that ends at a call of `owner.name`."""

    def stopped():
        setattr(owner, name, exit_at(count, getattr(owner, name), after=after))
        converted(source, out, methods)

    assert ended_with(7, stopped)
    assert not out.exists()


@pytest.fixture
def resumed(source, tmp_path, uninterrupted):
    """A function: how much less work the same call is after a kill. The files are compared."""

    def spared(methods):
        (work, wanted), (rest, out) = (
            uninterrupted(source, methods),
            work_of(lambda: converted(source, tmp_path / "out", methods)),
        )
        assert_same(out, wanted)
        assert not (tmp_path / ".out.part").exists()
        return [one - other for one, other in zip(work, rest, strict=True)]

    return spared


@pytest.mark.parametrize(("methods", "linears", "before"), METHODS.values(), ids=METHODS)
def test_after_a_kill_finished_layers_of_a_decoder_are_not_done_again(
    methods, linears, before, source, tmp_path, resumed
):
    """Nor is the pass before, which decides what stays: all four layers of it, three of which are left for the next."""
    killed(source, tmp_path / "out", methods, FinishedLayers, "add", 2, after=True)
    assert resumed(methods) == [2 * linears + 4 * before, 2 + 3 * bool(before), 2]


@pytest.mark.parametrize("source", ["marian"], indirect=True)
@pytest.mark.parametrize(
    ("methods", "finished", "left"),
    [
        ([FFNPruning(width=12)], 2, 2),
        ([FFNPruning(width=12)], 4, 3),  # no layer follows that its states go to
        ([FFNPruning(width=12)], 5, 4),
        ([HeadPruning(share=0.5)], 4, 3),
        ([INT4], 5, 4),
        ([FFNPruning(width=12), HeadPruning(share=0.5)], 10, 7),
    ],
    ids=["encoder", "change of stacks", "decoder", "heads", "int4", "two"],
)
def test_after_a_kill_finished_layers_of_an_encoder_decoder_are_not_done_again(
    methods, finished, left, source, tmp_path, resumed
):
    killed(source, tmp_path / "out", methods, FinishedLayers, "add", finished, after=True)
    assert resumed(methods)[1:] == [left, finished]


def test_a_kill_in_the_second_method_leaves_the_first_method_done(source, tmp_path, resumed):
    killed(source, tmp_path / "out", [FFN, INT4], FinishedLayers, "add", 6, after=True)
    assert resumed([FFN, INT4]) == [4 + 2 * 7, 3 + 2, 6]


@pytest.mark.parametrize(
    ("method", "owner", "name", "calls"), [(FFN, ffn_pruning, "eliminate", 1), (INT4, quantized, "gptq", 7)]
)
def test_solvers_run_for_the_layers_that_are_left_alone(method, owner, name, calls, source, tmp_path, monkeypatch):
    killed(source, tmp_path / "out", [method], FinishedLayers, "add", 3, after=True)
    solved = counted(monkeypatch, owner, name)
    converted(source, tmp_path / "out", [method])
    assert len(solved) == calls


def test_a_kill_before_the_line_of_the_journal_does_the_layer_again(source, tmp_path, resumed):
    """Its states and its weights are written then, but not said to be finished."""
    killed(source, tmp_path / "out", [INT4], FinishedLayers, "add", 3)
    assert resumed([INT4])[2] == 2


def test_a_kill_while_states_of_a_layer_are_written_does_the_layer_again(source, tmp_path, resumed):
    """Each layer writes the states of two models, of one batch."""
    killed(source, tmp_path / "out", [FFN], FinishedLayers, "file", 6)
    assert resumed([FFN])[2] == 2


def test_a_line_of_the_journal_that_was_cut_off_is_no_line(source, tmp_path, resumed):
    killed(source, tmp_path / "out", [FFN], FinishedLayers, "add", 2, after=True)
    journal = tmp_path / ".out.part" / "layers"
    first, second = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first + second[: len(second) // 2])
    killed(source, tmp_path / "out", [FFN], FinishedLayers, "add", 2, after=True)  # its lines come behind the rest
    assert resumed([FFN])[2] == 3


# -- what is said --------------------------------------------------------------------------------------------------------------

LINE = re.compile(
    r"(?P<stack>\w+) layer (?P<layer>\d+) \((?P<done>\d+) of (?P<total>\d+)\): (error (?P<error>[\d.]+) % of its outputs, )?"
    r"\d+ s a layer, \d+\.\d\d GB of memory(?P<left>, \d+ s left)?"
)


def said_lines(source, out, methods=(FFN,)):
    """Those of layers, each matched as a whole."""
    said = []
    converted(source, out, methods, say=said.append)
    found = [LINE.fullmatch(text) for text in said if " layer " in text]
    assert all(found), said
    return found


@pytest.mark.parametrize("source", ["marian"], indirect=True)
def test_a_line_for_each_layer_says_its_error_and_the_time_left(source, tmp_path):
    lines = said_lines(source, tmp_path / "out", [FFNPruning(width=12)])
    places = [(line["stack"], line["layer"], line["done"], line["total"]) for line in lines]
    of_encoder = [("encoder", str(number), str(number + 1), "6") for number in range(4)]
    assert places == [*of_encoder, ("decoder", "0", "5", "6"), ("decoder", "1", "6", "6")]
    # Of the last layer of a stack nothing runs any more, so its error is not known.
    assert [line["error"] is None for line in lines] == [False, False, False, True, False, True]
    assert [line["left"] is None for line in lines] == [False] * 5 + [True]


def test_after_a_kill_lines_go_on_with_the_next_number(source, tmp_path):
    killed(source, tmp_path / "out", [FFN], FinishedLayers, "add", 2, after=True)
    assert [line["done"] for line in said_lines(source, tmp_path / "out")] == ["3", "4"]


def test_the_error_of_a_layer_is_that_of_the_saved_models(source, tmp_path):
    lines = said_lines(source, tmp_path / "out")
    states = {}
    for folder in (source, tmp_path / "out"):
        model = load_model(folder).eval()
        with torch.no_grad():  # each text alone
            runs = [model(**TOKENIZER([text], return_tensors="pt"), output_hidden_states=True) for text in texts_of(20)]
        states[folder] = [torch.cat(layer, 1) for layer in zip(*(run.hidden_states for run in runs), strict=True)]
    for number in range(1, 4):
        old, new = (of_model[number] for of_model in states.values())
        assert float(lines[number - 1]["error"]) == pytest.approx(
            float(100 * (new - old).norm() / old.norm()), rel=0.06
        )


@pytest.mark.parametrize(
    ("error", "words"), [(0.000123, "0.012 %"), (0.0567, "5.7 %"), (1.0, "100 %"), (2.345, "230 %")]
)
def test_errors_have_two_digits(error, words, tmp_path):
    said = []
    paged = paging.Paged(tmp_path, 10**9, said.append)
    FinishedLayers(paged, 2).add(("decoder", 0), {}, error, {})
    assert f": error {words} of its outputs, " in said[0]
