"""`hf-freeze convert --texts`: the files are those of `make_variant` with a calibration, whatever stops it in between."""

import json
import os

import pytest
import torch
from support.cases import plain
from support.conversions import assert_same, needs_fork, tensors, texts_of
from support.models import native
from support.recipes import cli, one_line_error
from support.text import words

from hf_freeze import analysis, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import LowRankLinear
from hf_freeze.methods import FFNPruning, HeadPruning, LayerSelection, LowRank
from hf_freeze.methods.registry import method_to_dict
from hf_freeze.model import paging
from hf_freeze.model.convert import convert
from hf_freeze.model.loading import load_model
from hf_freeze.model.visiting import Visit

METHODS = [LowRank(rank=3, components=["attention"]), FFNPruning(width=8)]


TEXTS, TOKENIZER = texts_of(30), words(40)  # of one batch: nothing is held out


@pytest.fixture(autouse=True)
def every_tensor_in_a_file(monkeypatch):
    monkeypatch.setattr(paging, "_SMALL", 1)


@pytest.fixture
def source(request, tmp_path):
    model = native(plain(ARCHITECTURES[getattr(request, "param", "llama")]))
    assert model.config.vocab_size == 40
    model.save_pretrained(tmp_path / "source", max_shard_size="6KB")
    words(40, pad=model.config.pad_token_id or 0).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def converted(source, out, methods=METHODS, calibration=TEXTS, **options):
    return convert(source, out, methods, calibration=calibration, tokenizer=TOKENIZER, max_shard_size="6KB", **options)


def expected(source, folder, methods=METHODS, calibration=TEXTS, **options):
    with pytest.MonkeyPatch.context() as patch:  # what models larger than the memory do without
        patch.setattr("hf_freeze.model.calibrating.curvatures", lambda *args: {})
        patch.setattr("hf_freeze.model.fitting.descend", lambda *args: None)
        made = make_variant(load_model(source), methods, calibration=calibration, tokenizer=TOKENIZER, **options)
    made.save_pretrained(folder, max_shard_size="6KB")
    return folder


@pytest.mark.parametrize("source", ["llama", "marian"], indirect=True)
def test_the_files_are_those_of_make_variant(source, tmp_path):
    said = []
    out = converted(source, tmp_path / "out", say=said.append)
    assert_same(out, expected(source, tmp_path / "expected"))
    assert any(text.startswith("calibrated with 30 texts, ") for text in said)
    plain_out = convert(source, tmp_path / "plain", METHODS)
    assert any(not torch.equal(value, tensors(plain_out)[name]) for name, value in tensors(out).items())


@needs_fork
@pytest.mark.parametrize("stop", [2, 7, "pruning"])
def test_after_a_kill_the_same_call_goes_on(stop, source, tmp_path, monkeypatch):
    """The linears that are finished are read from the folder, and what the others see is what they would have seen."""
    wanted = expected(source, tmp_path / "expected")
    fit, calls = LowRank.fit, []

    def counted(*args):
        calls.append(args)
        if len(calls) == stop:
            os._exit(7)
        return fit(*args)

    child = os.fork()
    if child == 0:
        if stop == "pruning":
            FFNPruning.convert = lambda *args: os._exit(7)
        else:
            LowRank.fit = counted
        converted(source, tmp_path / "out")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    monkeypatch.setattr(LowRank, "fit", lambda *args: (calls.append(args), fit(*args)))
    assert_same(converted(source, tmp_path / "out"), wanted)
    linears = sum(isinstance(module, LowRankLinear) for module in load_model(tmp_path / "out").modules())
    assert len(calls) < linears if stop == 7 else len(calls) <= linears


def test_other_texts_are_another_job(source, tmp_path, monkeypatch):
    def stopped(*args):
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(FFNPruning, "convert", stopped)
        with pytest.raises(RuntimeError, match="stopped"):
            converted(source, tmp_path / "out")
    for other in (TEXTS[:-1], TEXTS[::-1], None):
        with pytest.raises(ValueError, match="was left by a job with another calibration: run that one again"):
            converted(source, tmp_path / "out", calibration=other)
    converted(source, tmp_path / "out", calibration=iter(TEXTS))


@pytest.mark.parametrize("source", ["llama", "marian"], indirect=True)
def test_layers_visit_a_device_and_come_back(source, tmp_path, monkeypatch):
    """Another place in memory stands for the device. What is not cut lies in the files of the source again."""
    begun, begin = [], Visit.begin
    monkeypatch.setattr("hf_freeze.model.streams.accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(Visit, "begin", lambda self, layer: (begun.append(layer), begin(self, layer)))
    out = converted(source, tmp_path / "out", [FFNPruning(width=8), LowRank(rank=3, components=["attention"])])
    assert_same(
        out, expected(source, tmp_path / "expected", [FFNPruning(width=8), LowRank(rank=3, components=["attention"])])
    )
    depths = ARCHITECTURES[load_model(source).config.model_type].depths(load_model(source).config)
    assert len(begun) == 2 * 2 * sum(depths.values())  # of two models, for two methods


def test_a_visit_ends_with_the_tensors_that_were_there_or_the_new_ones():
    old, new = (torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
    places = {
        name: value.data_ptr()
        for name, value in (old.state_dict() | {f"new {n}": v for n, v in new.state_dict().items()}).items()
    }
    visit = Visit(torch.device("cpu"))
    for layer in (old, new):
        visit.begin(layer)
        assert not {value.data_ptr() for value in layer.state_dict().values()} & {*places.values()}
    new[0].weight.data.mul_(2)
    new[1].running_mean = torch.ones(3)
    visit.end(old, new)
    assert all(value.data_ptr() == places[name] for name, value in old.state_dict().items())
    moved = {name for name, value in new.state_dict().items() if value.data_ptr() != places[f"new {name}"]}
    assert moved == {"0.weight", "1.running_mean"}


@pytest.mark.parametrize("methods", [[FFNPruning(share=0.5)], [HeadPruning(share=0.5, scope="global")]])
def test_sizes_that_the_texts_decide(methods, source, tmp_path):
    assert_same(converted(source, tmp_path / "out", methods), expected(source, tmp_path / "expected", methods))


def test_a_budget_that_heads_and_neurons_share(source, tmp_path):
    methods, budget = [HeadPruning(share="auto"), FFNPruning(share="auto")], {"budget": 0.6}
    wanted = expected(source, tmp_path / "expected", methods, **budget)
    assert_same(converted(source, tmp_path / "out", methods, **budget), wanted)
    with pytest.raises(ValueError, match=r"head_pruning\(share='auto'\): give a budget"):
        converted(source, tmp_path / "none", methods)
    file = tmp_path / "methods.yaml"
    file.write_text(json.dumps(budget | {"methods": [method_to_dict(method) for method in methods]}))
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    cli("convert", source, tmp_path / "other", "--methods", file, "--texts", tmp_path / "texts.txt")
    assert "auto" not in str(load_model(tmp_path / "other").methods)


@needs_fork
def test_layers_that_the_texts_choose(source, tmp_path):
    """Many candidates are made and compared before; then it is killed."""
    methods = [LayerSelection(share=0.5), LowRank(rank=3, components=["attention"])]
    wanted = expected(source, tmp_path / "expected", methods)
    fit, calls = LowRank.fit, []

    def counted(*args):
        calls.append(args)
        return os._exit(7) if len(calls) == 4 else fit(*args)

    child = os.fork()
    if child == 0:
        LowRank.fit = counted
        converted(source, tmp_path / "out", methods)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert_same(converted(source, tmp_path / "out", methods), wanted)


def test_a_saved_calibration(source, tmp_path):
    calibration = analysis.calibrate(load_model(source), TEXTS, TOKENIZER)
    methods = [FFNPruning(width=8), HeadPruning(share=0.5)]
    out = converted(source, tmp_path / "out", methods, calibration)
    assert_same(out, expected(source, tmp_path / "expected", methods, calibration))


def test_the_command(source, tmp_path):
    (tmp_path / "methods.yaml").write_text(json.dumps([method_to_dict(method) for method in METHODS]))
    (tmp_path / "texts.csv").write_text("text\n" + "\n".join(texts_of(60)) + "\n")
    command = ["convert", source, tmp_path / "out", "--methods", tmp_path / "methods.yaml"]
    printed = cli(*command, "--texts", tmp_path / "texts.csv", "--samples", "20").output
    assert "calibrated with 20 texts, " in printed
    assert load_model(tmp_path / "out").config.calibration["texts"] == 20
    command[2] = tmp_path / "own"
    assert "calibrated with 56 texts, " in cli(*command, "--own-texts").output  # of 64, some are held out
    command[2] = tmp_path / "other"
    both = one_line_error(*command, "--texts", tmp_path / "texts.csv", "--own-texts")
    assert "give --texts or --own-texts, not both" in both
    (source / "tokenizer.json").unlink()
    assert "has no tokenizer, which --texts needs" in one_line_error(*command, "--texts", tmp_path / "texts.csv")
    command[1] = tmp_path / "none"
    assert "none is no folder with a model" in one_line_error(*command, "--texts", tmp_path / "texts.csv")
