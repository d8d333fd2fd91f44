"""How many steps a run needed to 90 % of its final score, in reports."""

import json

import pytest
from support.reports import make_runs

from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.convergence import steps_to_share
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.report.wording import legend
from hf_freeze.lab.report.write import write_report


def evaluations(name, values):
    log = [{"eval_loss": 1.0, name: value, "step": 10 * step} for step, value in enumerate(values, 1)]
    return [{"loss": 2.0, "step": 5}, *log, log[-1] | {"step": 10 * len(values)}]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("eval_accuracy", [0.5, 0.7, 0.73, 0.79, 0.8], 30),  # 90 % of 0.8 are 0.72
        ("eval_f1", [0.1, 0.2, 0.9, 0.95, 0.9], 30),
        ("eval_perplexity", [90.0, 12.0, 11.2, 11.1, 10.5, 10.0], 40),  # 10 / 0.9 is 11.11
        ("eval_accuracy", [0.5, 0.7, 0.79, 0.8], None),
        ("eval_f1", [0.0, 0.0, 0.0, 0.0, 0.0], None),
        ("eval_bleu", [1.0, 2.0, 3.0, 4.0, 5.0], None),
    ],
)
def test_steps_until_the_score_is_nearly_the_final_one(name, values, expected):
    assert steps_to_share(evaluations(name, values), "f1") == expected
    assert steps_to_share([], "f1") is None


def test_the_kept_model_has_the_final_score():
    log = evaluations("eval_perplexity", [20.0, 15.0, 10.0, 12.0, 14.0])
    log[-1]["eval_perplexity"] = 10.0  # evaluated again after training: the best one
    assert steps_to_share(log, "bleu") == 30


def test_rows_whose_evaluations_are_too_few_say_so(tmp_path):
    make_runs(tmp_path, seeds=(1,))
    assert any("steps to 90 % of the final score: not known" in line for line in legend(report_of_folder(tmp_path)))
    for row, values in {"0": [9.0, 8.0, 7.0, 6.0, 5.0], "2.1": [9.0, 5.0]}.items():
        log = evaluations("eval_perplexity", values)
        (tmp_path / f"row-{row}-seed-1" / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    report = report_of_folder(tmp_path)
    headings, cells = table_cells(report)
    place = headings.index("steps to 90 %")
    assert [row[place] for row in cells] == ["50", "not known", "not known"]
    said = "until the perplexity of an evaluation on the dev set was at most 1/0.9 of the final one"
    assert any(said in line for line in legend(report))
    write_report(tmp_path)
    assert "not known" in (tmp_path / "report.html").read_text()


def report_of_folder(folder):
    return make_report([folder], say=lambda _: None)
