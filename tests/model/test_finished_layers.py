"""A calibrated conversion that was stopped goes on after the last finished layer, with the results of an uninterrupted one."""

import functools
import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import native_config
from support.conversions import assert_same, ended_with, exit_at, needs_fork, tensors, texts_of
from support.models import add_noise
from support.recipes import one_line_error
from support.text import words
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import FFNPruning, HeadPruning, HiddenPruning, MagnitudePruning, Quantize, ffn_pruning
from hf_freeze.methods import _quantized_values as quantized
from hf_freeze.methods.registry import method_to_dict
from hf_freeze.model import paging
from hf_freeze.model.convert import convert
from hf_freeze.model.finished_layers import FinishedLayers
from hf_freeze.model.loading import load_model
from hf_freeze.model.samples import samples_of
from hf_freeze.model.streams import Streams
from hf_freeze.model.sums import Sums

pytestmark = needs_fork
TEXTS, TOKENIZER = texts_of(20), words(40)
FFN, INT4 = FFNPruning(width=40), Quantize(weights="int4", granularity="group-64")
METHODS = {  # and of how many linears and norms of a layer each asks for the moments
    "ffn": ([FFN], 1),
    "int4": ([INT4], 7),
    "magnitude": ([MagnitudePruning(sparsity=0.5)], 3),
    "obs": ([MagnitudePruning(sparsity=0.5, criterion="obs")], 3),
    "heads": ([HeadPruning(share=0.5)], 1),
    "hidden": ([HiddenPruning(width=12)], 9),
    "two": ([FFN, INT4], 1),
}


@functools.cache
def model_of(name):
    if name == "llama":
        config = native_config(ARCHITECTURES["llama"])
        config.num_hidden_layers, config.intermediate_size = 4, 72  # of two groups of int4
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForSeq2SeqLM.from_config(native_config(ARCHITECTURES["marian"], "uneven"))  # 4 layers and 2
    return add_noise(model, ARCHITECTURES[name]).eval()


@pytest.fixture(autouse=True)
def every_tensor_in_a_file(monkeypatch):
    monkeypatch.setattr(paging, "_SMALL", 1)


@pytest.fixture
def source(request, tmp_path):
    model = model_of(getattr(request, "param", "llama"))
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    words(40, pad=model.config.pad_token_id).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def converted(source, out, methods=(FFN,)):
    return convert(source, out, methods, calibration=TEXTS, tokenizer=TOKENIZER, max_shard_size="20KB")


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


def spared_after_a_kill(source, tmp_path, methods, finished):
    """How much less work a run is that was killed after so many layers. The files are compared."""
    whole, wanted = work_of(lambda: converted(source, tmp_path / "whole", methods))
    killed(source, tmp_path / "out", methods, FinishedLayers, "add", finished, after=True)
    resumed, out = work_of(lambda: converted(source, tmp_path / "out", methods))
    assert_same(out, wanted)
    assert not (tmp_path / ".out.part").exists()
    return [one - other for one, other in zip(whole, resumed, strict=True)]


@pytest.mark.parametrize(("methods", "linears"), METHODS.values(), ids=METHODS)
def test_after_a_kill_finished_layers_of_a_decoder_are_not_done_again(methods, linears, source, tmp_path):
    assert spared_after_a_kill(source, tmp_path, methods, 2) == [2 * linears, 2, 2]


@pytest.mark.parametrize("source", ["marian"], indirect=True)
@pytest.mark.parametrize(
    ("methods", "finished", "left"),
    [
        ([FFNPruning(width=12)], 2, 2),
        ([FFNPruning(width=12)], 4, 3),  # no layer follows that its states go to
        ([HeadPruning(share=0.5)], 5, 4),
        ([INT4], 4, 3),
        ([FFNPruning(width=12), INT4], 5, 4),
    ],
    ids=["encoder", "change of stacks", "decoder", "int4", "two"],
)
def test_after_a_kill_finished_layers_of_an_encoder_decoder_are_not_done_again(
    methods, finished, left, source, tmp_path
):
    assert spared_after_a_kill(source, tmp_path, methods, finished)[1:] == [left, finished]


def test_a_kill_in_the_second_method_leaves_the_first_method_done(source, tmp_path):
    assert spared_after_a_kill(source, tmp_path, [FFN, INT4], 6) == [4 + 2 * 7, 3 + 2, 6]


@pytest.mark.parametrize(("methods", "solver"), [([FFN], "ffn_pruning.eliminate"), ([INT4], "_quantized_values.gptq")])
def test_solvers_run_for_layers_that_are_not_finished_alone(methods, solver, source, tmp_path, monkeypatch):
    owner, name = {"ffn_pruning": ffn_pruning, "_quantized_values": quantized}[solver.split(".")[0]], solver.split(".")[1]
    killed(source, tmp_path / "out", methods, FinishedLayers, "add", 3, after=True)
    calls = counted(monkeypatch, owner, name)
    converted(source, tmp_path / "out", methods)
    assert len(calls) == (1 if methods == [FFN] else 7)


@pytest.mark.parametrize("methods", [[FFN], [INT4]], ids=["ffn", "int4"])
def test_a_kill_before_the_line_of_the_journal_does_the_layer_again(methods, source, tmp_path):
    """Its states and its weights are written then, but not said to be finished."""
    whole, wanted = work_of(lambda: converted(source, tmp_path / "whole", methods))
    killed(source, tmp_path / "out", methods, FinishedLayers, "add", 3)
    resumed, out = work_of(lambda: converted(source, tmp_path / "out", methods))
    assert_same(out, wanted)
    assert whole[2] - resumed[2] == 2


@pytest.mark.parametrize("count", [1, 5])
def test_a_kill_while_states_of_a_layer_are_written_does_the_layer_again(count, source, tmp_path):
    whole, wanted = work_of(lambda: converted(source, tmp_path / "whole"))
    killed(source, tmp_path / "out", [FFN], FinishedLayers, "file", count)
    resumed, out = work_of(lambda: converted(source, tmp_path / "out"))
    assert_same(out, wanted)
    assert whole[2] - resumed[2] == (count - 1) // 2  # each layer writes the states of two models, of one batch


def test_a_line_of_the_journal_that_was_cut_off_is_no_line(source, tmp_path):
    whole, wanted = work_of(lambda: converted(source, tmp_path / "whole"))
    killed(source, tmp_path / "out", [FFN], FinishedLayers, "add", 2, after=True)
    journal = tmp_path / ".out.part" / "layers"
    first, second = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first + second[: len(second) // 2])
    killed(source, tmp_path / "out", [FFN], FinishedLayers, "add", 2, after=True)  # its lines come behind the rest
    resumed, out = work_of(lambda: converted(source, tmp_path / "out"))
    assert_same(out, wanted)
    assert whole[2] - resumed[2] == 3
