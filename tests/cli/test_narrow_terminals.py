"""What commands print in narrow terminals: no word and no number is broken, and what is left out is told."""

import importlib.metadata
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from support.reports import make_runs
from support.small import small_config
from typer.testing import CliRunner

from hf_freeze import make_variant, terminal
from hf_freeze.cli import app
from hf_freeze.lab import harness, scored
from hf_freeze.lab.cli.report import _print_rows
from hf_freeze.lab.cli.search import _print_front, _print_scores
from hf_freeze.lab.harness import TaskScore
from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.scored import Scored
from hf_freeze.methods import FFNPruning, Freeze, LowRank, VocabularyTrimming
from hf_freeze.publish import latency
from hf_freeze.publish.latency import Latency

FREEZE = 'Freeze(attention="random", layers={"encoder": [0]}, seed=3)'
FROZEN = Freeze(attention="random", layers={"encoder": [0]}, seed=3)
LEFT_OUT = "Left out, as the terminal is narrow: "


@pytest.fixture(params=[60, 80])
def tables(request, monkeypatch):
    """A terminal of that many columns. The tables that are printed there, as (headings, rows)."""
    shown, show_table = [], terminal.show_table

    def show(headings, rows, **options):
        shown.append((list(headings), [list(map(str, row)) for row in rows]))
        show_table(headings, rows, **options)

    console = type(terminal.console)(width=request.param, force_terminal=True, color_system=None)
    monkeypatch.setattr(terminal, "console", console)
    monkeypatch.setattr(terminal, "show_table", show)
    return shown


def printed_by(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def check(printed, tables, count=1):
    """Every word of the tables is there in one piece, and no line runs over the edge that has a place to be wrapped at."""
    printed = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    words = set(re.split(r"[\s│┃]+", printed))
    assert len(tables) == count
    left_out = re.findall(rf"{LEFT_OUT}(.*?)\. ", printed.replace("\n", " "))
    missing = {name for names in left_out for name in re.split(r",\s+", names)}
    for headings, rows in tables:
        for column, heading in enumerate(headings):
            if heading not in missing:
                for cell in (heading if column else "", *(row[column] for row in rows)):
                    assert set(cell.split()) <= words, (heading, cell)
    width = terminal.console.width
    code = re.compile(r"  (Python|Recipe): ")
    for line in printed.splitlines():
        longest = max(map(cell_len, line.split()), default=0)
        assert cell_len(line) <= width or longest > width - 24 or code.match(line), line
    return printed


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ("methods", 1),
        ("methods quantize", 1),
        ("methods vocabulary_trimming", 1),
        ("architectures", 1),
        ("recipes", 0),
        ("describe roberta", 3),
        ("describe mixtral", 3),
    ],
)
def test_commands_that_only_tell(arguments, count, tables):
    check(printed_by(*arguments.split()), tables, count)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a native model, and of a variant of it."""
    config, folder = small_config("bert", num_hidden_layers=3), tmp_path_factory.mktemp("saved")
    kept = VocabularyTrimming(keep=list(range(99)))
    methods = [kept, FFNPruning(width=16), LowRank(rank=4, components=["ffn"]), FROZEN]
    make_variant(config, [], task="masked-lm").save_pretrained(folder / "native")
    make_variant(config, methods, task="masked-lm").save_pretrained(folder / "variant")
    return folder


def test_inspect(saved, tables):
    printed = check(printed_by("inspect", saved / "variant", "--latency", "--tokens", "1", "2"), tables, count=2)
    lines = " ".join(printed.split())
    for written in (
        "VocabularyTrimming(keep=[0, 1, 2, ..., 98] (99 in all))",
        "FFNPruning(width=16)",
        "LowRank(rank=4)",
        FREEZE,
    ):
        assert f"method: {written} " in f"{lines} "


def test_diff(saved, tables):
    check(printed_by("diff", saved / "native", saved / "variant"), tables, count=2)


def test_latency(tables, monkeypatch, tmp_path):
    timed = {"batches": {1: [282.7, 301.2], 32: [1234.5, 1300.1]}, "sizes": {1: [(1, 20)] * 2, 32: [(32, 640)] * 2}}
    results = [
        Latency(
            folder=f"/runs/{name}/model",
            engine=engine,
            task="seq2seq-lm",
            megabytes=117.25,
            cold_start=3.2,
            memory=812.0,
        )
        for name, engine in (("row-0-seed-1", "PyTorch"), ("row-tt-seed-1", "ctranslate2-int8"))
    ]
    for one in results:
        one.batches, one.sizes, one.first = timed["batches"], timed["sizes"], [20.1, 31.7]
    monkeypatch.setattr(latency, "measure", lambda *args, **kwargs: results)
    (tmp_path / "texts.txt").write_text("a\n")
    check(printed_by("latency", tmp_path, "--texts", tmp_path / "texts.txt"), tables)


def test_score(tables, monkeypatch, tmp_path):
    one = {"bytes": 117_254_312, "score": 30.25}
    results = (
        "BLEU",
        1000,
        [
            Scored(folder=Path("runs/served/row-0-seed-1/model"), to_first=None, **one),
            Scored(folder=Path("small/served"), to_first=(-0.25, -1.5, 0.75), **one),
        ],
    )
    monkeypatch.setattr(scored, "score_folders", lambda *args, **kwargs: results)
    check(printed_by("score", tmp_path, "--data", "served"), tables)


def test_score_by_lm_eval(tables, monkeypatch, tmp_path):
    one = {"bytes": 117_254_312, "task": "own_task", "metric": "word_perplexity", "samples": 1000, "value": 30.25}
    results = [
        TaskScore(folder=Path("runs/served/row-0-seed-1/model"), error=0.25, to_first=None, **one),
        TaskScore(folder=Path("small/served"), error=None, to_first=(-0.25, -1.5, 0.75), **one),
        TaskScore(folder=Path("small/other"), error=None, to_first=(-0.25, None, None), **one),
    ]
    monkeypatch.setattr(harness, "score_tasks", lambda *args, **kwargs: results)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.13")  # which need not be installed
    check(printed_by("score", tmp_path, "--harness", "own_task"), tables)


def test_report_and_search(tables, tmp_path, capsys):
    make_runs(tmp_path)
    report = make_report([tmp_path])
    _print_rows(report)
    printed = check(capsys.readouterr().out, tables)
    assert LEFT_OUT in " ".join(printed.split())
    tables.clear()
    _print_scores(report)
    check(capsys.readouterr().out, tables)
    tables.clear()
    front = {"freeze_ffn_and_attention-12": (3.4567, 1_234_567_890.0, 2_345_678.0), "b": (4.0, 1.0, 2.0)}
    _print_front(SimpleNamespace(goals=["stored_bytes", "multiply_adds"], front=front))
    check(capsys.readouterr().out, tables)


def test_text_is_wrapped_in_a_terminal_alone(tables, capsys, monkeypatch):
    path = "/".join(["a-long-name"] * 12)
    text = f"Written: {path} and so on, " + "word " * 40 + "\n  indented " + "word " * 40
    terminal.say(text)
    terminal.console.print(text.replace("\n", ""), soft_wrap=True)  # as the library does with the console of a command
    with pytest.raises(terminal.typer.Exit), terminal.one_line_errors():
        raise ValueError(f"{path} is [no] file; choose another")
    streams = capsys.readouterr()
    printed = check(streams.out, tables, count=0)
    assert printed.count(path) == 2
    assert printed.count("word") == 160
    assert f"Error: {path} is [no] file; choose another\n" in " ".join(streams.err.split()) + "\n"
    monkeypatch.setattr(terminal, "console", type(terminal.console)(width=40))
    terminal.say(text)
    terminal.console.print(text, soft_wrap=True)
    assert capsys.readouterr().out == f"{text}\n{text}\n"


def test_a_table_is_a_table_if_it_fits_exactly(tables, capsys):
    width = terminal.console.width
    inside = width - len("│ a │ ") - len(" │")
    for length, is_table in ((inside, True), (inside + 1, False)):
        terminal.show_table(("a", "b"), [("1", "x" * length), ("2", "[red]y")], title="[t]")
        printed = capsys.readouterr().out
        assert ("│" in printed) == is_table
        assert "x" * length in printed
        assert "[red]y" in printed
        assert "[t]" in printed
