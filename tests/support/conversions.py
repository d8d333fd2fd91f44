"""What tests of `convert` share: texts for a calibration, comparing folders, and processes that are killed."""

import json
import os
import random

import pytest
from safetensors.torch import load_file

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


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
