"""`hf-freeze describe`: the parts of a family or of a saved model."""

import json
import re

import pytest
from support import ROOT
from support.small import small_config
from typer.testing import CliRunner

from hf_freeze import count_parameters, make_variant, terminal
from hf_freeze.architectures.families import FAILURES, describe_family, failures_file
from hf_freeze.cli import app, describe
from hf_freeze.methods import FFNPruning, HeadPruning, LayerSelection, LowRank
from hf_freeze.methods.registry import METHODS


@pytest.fixture(autouse=True)
def _wide_terminal():
    before, terminal.console.width = terminal.console.width, 240
    yield
    terminal.console.width = before


def described(*arguments):
    """What is printed; tables as lines of words."""
    result = CliRunner().invoke(app, ["describe", *map(str, arguments)], env={"NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0, (result.output, result.exception)
    lines = (re.sub(r"\x1b\[[0-9;]*m|[│┃]", " ", line) for line in result.stdout.splitlines())
    return [" ".join(line.split()) for line in lines]


def refused(*arguments):
    """The one line that is printed instead."""
    result = CliRunner().invoke(app, ["describe", *map(str, arguments)], env={"NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert result.stdout.strip() == ""
    return line


def test_a_family_is_described():
    lines = described("roberta")
    assert "roberta: parts found" in lines
    assert "encoder layers encoder.layer.{} 12 (num_hidden_layers)" in lines
    assert "self attention attention.self.query 12 heads of 64" in lines
    ffn = lines.index("FFN intermediate.dense 3072 neurons (intermediate_size)")
    assert lines[ffn + 1] == "output.dense"
    # 50,265 tokens, 512 positions, 2 types; in each layer 4 matrices of attention, 2 of the FFN and 2 norms; a norm before them.
    d, w = 768, 3072
    assert f"embeddings {(50265 + 512 + 2) * d:,}" in lines
    assert f"attention {12 * 4 * (d * d + d):,}" in lines
    assert f"ffn {12 * (2 * d * w + d + w):,}" in lines
    assert f"norm {(1 + 12 * 2) * 2 * d:,}" in lines
    (tasks,) = [line for line in lines if line.startswith("Tasks: ")]
    assert "masked-lm" in tasks


def test_every_method_is_listed_with_a_reason_where_it_does_not_work():
    lines = described("roberta")
    answers = {name: re.match(rf"{name} (yes|no)\b ?(.*)", line) for name in METHODS for line in lines if name in line}
    assert answers.keys() == METHODS.keys()
    works = {name for name, answer in answers.items() if answer[1] == "yes"}
    assert {"freeze", "head_pruning", "ffn_pruning", "low_rank", "vocabulary_trimming"} <= works
    assert not works & {"delight", "lite_transformer", "fixed_attention"}
    assert all(answer[2] for name, answer in answers.items() if name not in works)


def test_a_saved_variant_is_described_with_its_sizes(tmp_path):
    config = small_config("roberta", num_hidden_layers=3)
    heads = {"encoder.0.self": [1], "encoder.1.self": [0, 1, 2, 3]}
    methods = [
        LayerSelection(keep={"encoder": [0, 2]}),
        FFNPruning(width=16),
        HeadPruning(heads=heads),
        LowRank(rank=4),
    ]
    variant = make_variant(config, methods, task="masked-lm")
    variant.save_pretrained(tmp_path)
    lines = described(tmp_path)
    assert "roberta: parts found" in lines
    assert "encoder layers encoder.layer.{} 2 (num_hidden_layers)" in lines
    assert "self attention attention.self.query 0 to 3 heads of 8" in lines
    assert "FFN intermediate.dense 16 neurons, of 48 (intermediate_size)" in lines
    for component in ("attention", "ffn"):
        assert f"{component} {count_parameters(variant).by_component[component].total:,}" in lines
    assert "Methods of this variant: layer_selection, ffn_pruning, head_pruning, low_rank" in lines


def test_a_saved_variant_of_a_mixture_of_experts_is_described_with_its_sizes(tmp_path):
    methods = [FFNPruning(expert_width=8), HeadPruning(share=0.5)]
    make_variant(small_config("mixtral"), methods, task="causal-lm").save_pretrained(tmp_path)
    lines = described(tmp_path)
    assert "self attention self_attn.q_proj 2 heads of 8, 1 for keys and values" in lines
    assert "experts mlp.experts 8 neurons each, of 48 (intermediate_size)" in lines


def test_names_that_settings_take_are_shown_and_work():
    (line,) = [line for line in described("mixtral") if line.startswith("Names in settings, for example: ")]
    assert "layers={'decoder': [0]}" in line
    assert "HeadPruning(heads={'decoder.0.self': [0, 1, 2, 3]})" in line
    assert "FFNPruning(keep={'decoder.0.experts': [[0, 1, ...], ...]})" in line
    (line,) = [line for line in described("bert") if line.startswith("Names in settings, for example: ")]
    for example in re.findall(r"(?:HeadPruning|FFNPruning)\(.*?\)", line):
        make_variant(small_config("bert"), [eval(example)], task="masked-lm")


def test_a_family_described_by_hand_is_described():
    lines = described("marian")
    assert [line.split()[0] for line in lines if ".layers.{}" in line] == ["encoder", "decoder"]


def row_of(method, lines):
    """Whether the method works, and why."""
    return next(tuple(line.split(" ", 2)[1:]) for line in lines if line.startswith(f"{method} "))


def test_methods_that_are_known_to_fail_are_told():
    lines = described("falcon_h1")
    failure = "known to fail on a small model: a new process computes something else (docs/families.md)"
    assert row_of("freeze", lines) == ("fails", failure)
    assert row_of("delight", lines)[0] == "no"
    assert row_of("freeze", described("mamba2"))[0] == "yes"


def test_the_known_failures_are_those_of_the_page_of_families():
    families = json.loads((ROOT / "docs" / "families.json").read_text())
    assert FAILURES.read_text() == failures_file(families)
    assert describe.FAILURES == FAILURES


@pytest.mark.parametrize("name", ["bert", "t5", "mixtral"])
def test_what_is_kept_of_a_type_is_what_is_derived(name):
    assert describe._known(name) == json.loads(json.dumps(describe.derived(name))), "run make families"


def test_a_type_is_derived_anew_where_something_else_may_be_meant(tmp_path, monkeypatch):
    assert describe._known("bert") is not None
    assert describe._known("squeezebert") is None, "nothing is understood of it: deriving says why"
    (tmp_path / "bert").mkdir()
    monkeypatch.chdir(tmp_path)
    assert describe._known("bert") is None, "a folder of that name"
    monkeypatch.chdir("/")
    monkeypatch.setattr(describe, "version", lambda package: "5.0")
    assert describe._known("bert") is None, "another version of transformers"


def test_settings_that_a_mixture_of_experts_needs_are_told():
    lines = described("mixtral")
    assert row_of("ffn_pruning", lines)[1].endswith("give expert_width or keep: its FFNs are experts")
    assert "give components=['attention']: the matrices of its experts stay as they are" in row_of("low_rank", lines)[1]
    assert "give components" not in row_of("quantize", lines)[1]
    assert row_of("quantize", lines)[1].endswith("stay as they are, unless components has 'experts'")
    of_both_kinds = described("ernie4_5_moe")
    assert row_of("ffn_pruning", of_both_kinds)[1].endswith("width is for its FFNs, expert_width for its experts")
    assert "give components" not in row_of("low_rank", of_both_kinds)[1]
    assert "expert" not in row_of("low_rank", described("roberta"))[1]


def test_shared_keys_are_told():
    assert "self attention self_attn.q_proj 32 heads of 128, 8 for keys and values" in described("mixtral")


def test_an_unknown_type_is_one_line_with_what_may_be_meant():
    line = refused("robberta")
    assert line.startswith("Error: 'robberta' is no model type of transformers")
    assert "did you mean 'roberta'" in line
    assert "did you mean" not in refused("qqqqqqqqqq")


def test_a_family_that_is_not_understood_is_one_line_that_tells_where_to_look():
    line = refused("squeezebert")
    assert line.startswith("Error: squeezebert: no list of layers with linears was found (`hf-freeze describe TYPE`")
    assert "docs/families.md" in line
    assert "--all" not in line
    assert describe_family("squeezebert")["reason"] == "no list of layers with linears was found"


def test_a_missing_directory_is_one_line(tmp_path):
    assert f"{tmp_path}/missing does not exist" in refused(tmp_path / "missing")


@pytest.mark.parametrize("arguments", [[], ["roberta", "--all"]], ids=["neither", "both"])
def test_one_model_or_all_are_needed(arguments):
    assert refused(*arguments) == "Error: give a model type or a model, or --all"
