"""What tests of `convert` share: texts for a calibration, comparing folders, and processes that are killed."""

import copy
import functools
import json
import os
import random

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import FFNPruning, Quantize
from hf_freeze.model.convert import convert
from support.cases import native_config
from support.models import add_noise
from support.text import words

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
FFN, INT4 = FFNPruning(width=40), Quantize(weights="int4", granularity="group-64")
TOKENIZER = words(40)


@functools.cache
def _model_of(name):
    if name == "llama":
        config = native_config(ARCHITECTURES["llama"])
        config.num_hidden_layers, config.intermediate_size = 4, 72  # of two groups of int4
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForSeq2SeqLM.from_config(native_config(ARCHITECTURES["marian"], "uneven"))  # 4 layers and 2
    return add_noise(model, ARCHITECTURES[name]).eval()


def saved_source(name, folder, dtype=None):
    """A llama of four layers or a marian of four and two, in shards, with a tokenizer."""
    model = _model_of(name)
    (model if dtype is None else copy.deepcopy(model).to(dtype)).save_pretrained(folder, max_shard_size="20KB")
    words(40, pad=model.config.pad_token_id).save_pretrained(folder)
    return folder


def converted(source, out, methods=(FFN,), **options):
    """With a calibration of one batch."""
    options = {"calibration": texts_of(20), "tokenizer": TOKENIZER} | options
    return convert(source, out, methods, max_shard_size="20KB", **options)


def texts_of(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(3, 40)}" for _ in range(draw.randrange(3, 9))) for _ in range(count)]


def tensors(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same(out, expected):
    """Up to rounding: tensors of files lie elsewhere in memory, and products of matrices are rounded otherwise there."""
    one, other = tensors(out), tensors(expected)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.double() - other[name].double()).norm() <= 1e-3 * other[name].double().norm(), name
    assert json.loads((out / "config.json").read_text()) == json.loads((expected / "config.json").read_text())


def ended_with(code, function):
    """Whether the function ends a copy of this process with this exit code."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:  # the copy must not go on with the tests
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def exit_at(count, function, *, after=False):
    """`function`, which ends the process with exit code 7 at this call of it, before or `after` its work."""
    calls = []

    def counted(*args, **options):
        calls.append(args)
        if len(calls) == count and not after:
            os._exit(7)
        result = function(*args, **options)
        if len(calls) == count:
            os._exit(7)
        return result

    return counted
