"""Some 700 small damages to what saved variants hold: each loads what is there or is refused in one line, quickly.

The damages are drawn from fixed seeds, so that a failure comes again; its id and the damage are in the message.
HF_FREEZE_FUZZ=20 draws twenty times as many, of which the first are the same.
"""

import copy
import functools
import itertools
import json
import os
import random
import shutil
import struct
import time
from operator import getitem

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from support.cases import once
from support.models import build

OWN = ("methods", "init", "hf_freeze_version", "digests", "original_fields")
ODD = [
    None,
    True,
    -1,
    0,
    1,
    2,
    7,
    2**31,
    2**63,
    -(2**70),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "../../etc/passwd",
    "http://127.0.0.1:9/x",
    "__import__('os')",
    "é" * 5000,
    [],
    [0],
    [[]],
    [None],
    ["encoder"],
    {},
    {"encoder": [0]},
    {"encoder": 0},
    {"x": "y"},
    {"method": "freeze"},
    list(range(2000)),
]
CASES = once(lambda case: bool(case.methods)) + once(finalized=True)
TIMES = int(os.environ.get("HF_FREEZE_FUZZ", "1"))
CONFIGS, HEADERS = 20 * TIMES, 8 * TIMES  # damages of each saved variant
REFUSALS = (ValueError, OSError, StrictDataclassError)
SECONDS = 20  # of a load that takes some hundredths: the machine may be busy


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a case's saved variant, made once."""
    made = {}

    def save(case):
        if case.id not in made:
            made[case.id] = tmp_path_factory.mktemp("saved")
            build(case).save_pretrained(made[case.id])
        return made[case.id]

    return save


def paths(value, path=()):
    """Every place in nested data."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def damage(config, draw):
    """One change somewhere in our fields: a value, an item more or less, a key renamed. Says what it did."""
    field = draw.choice([name for name in OWN if name in config])
    *parents, last = draw.choice(list(paths(config[field], (field,))))
    holder = functools.reduce(getitem, parents, config)
    what = draw.choice(["replace", "replace", "replace", "drop", "double", "nudge"])
    if what == "drop":
        del holder[last]
    elif what == "double" and isinstance(holder, list):
        holder.insert(last, copy.deepcopy(holder[last]))
    elif what == "double":
        holder[f"{last}_"] = holder[last]
    elif what == "nudge" and type(holder[last]) in (int, float):
        holder[last] += draw.choice([-1, 1, 1000])
    else:
        holder[last] = copy.deepcopy(draw.choice(ODD))
    return what, (*parents, last)


def check_load(case, folder, what):
    """It loads the values that are in the file, or says in one line what is wrong."""
    began = time.monotonic()
    try:
        model = case.auto_class.from_pretrained(folder)
    except REFUSALS as error:
        message = str(error)
    except Exception as error:
        raise AssertionError(f"{case.id}, {what}: {type(error).__name__}: {error}") from error
    else:
        stored, state = load_file(folder / "model.safetensors"), model.state_dict()
        for name, value in stored.items():
            assert name in state, (case.id, what, name)
            assert torch.equal(state[name], value.to(state[name].dtype)), (case.id, what, name)
        message = "none"
    assert message, (case.id, what)
    assert len(message) < 2000, (case.id, what, message[:300])
    assert time.monotonic() - began < SECONDS, (case.id, what)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_damaged_configs(case, saved, tmp_path):
    original = json.loads((saved(case) / "config.json").read_text())
    shutil.copytree(saved(case), tmp_path, dirs_exist_ok=True)
    draw = random.Random(case.id)
    for number in range(CONFIGS):
        config = copy.deepcopy(original)
        what = damage(config, draw)
        (tmp_path / "config.json").write_text(json.dumps(config))
        check_load(case, tmp_path, (number, what))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_numbers_beyond_all_limits(case, saved, tmp_path):
    """Nothing counts up to them or makes room for them before they are refused: 2^40 numbers fit into no memory."""
    original = json.loads((saved(case) / "config.json").read_text())
    shutil.copytree(saved(case), tmp_path, dirs_exist_ok=True)
    places = paths(original["methods"], ("methods",))
    places = [path for path in places if type(functools.reduce(getitem, path, original)) in (int, float)]
    for (*parents, last), value in itertools.product(places, [2**40, -(2**70)]):
        config = copy.deepcopy(original)
        functools.reduce(getitem, parents, config)[last] = value
        (tmp_path / "config.json").write_text(json.dumps(config))
        check_load(case, tmp_path, (*parents, last, value))


def damaged_header(content, draw):
    """The bytes of a safetensors file with one change in its header, whose length is kept right, or in the length itself."""
    size = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + size], content[8 + size :]
    what = draw.choice(["entry", "entry", "entry", "bytes", "length", "cut", "more"])
    if what == "length":
        length = draw.choice([0, 1, size - 1, size + 1, len(content), 2**31, 2**63, 2**64 - 1])
        return what, struct.pack("<Q", length) + header + data
    if what == "cut":
        return what, content[: draw.randrange(len(content))]
    if what == "more":
        return what, content + bytes(draw.randrange(1, 64))
    if what == "bytes":
        changed = bytearray(header)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return what, content[:8] + bytes(changed) + data
    entries = json.loads(header)
    name = draw.choice([name for name in entries if name != "__metadata__"])
    part = draw.choice(["dtype", "shape", "data_offsets", "name", "drop", "twin"])
    if part == "name":
        entries[draw.choice([name + "x", "", "model", "../x"])] = entries.pop(name)
    elif part == "drop":
        del entries[name]
    elif part == "twin":
        entries[name + "_"] = dict(entries[name])
    else:
        odd = {
            "dtype": ["F16", "I64", "BOOL", "X", None, 3],
            "shape": [
                [],
                [0],
                [-1],
                [2**40, 2**40],
                [1.5],
                None,
                entries[name]["shape"][::-1],
                entries[name]["shape"] * 2,
            ],
            "data_offsets": [[0, 0], [0, 2**60], [8, 4], [-4, 0], None, [0]],
        }
        entries[name][part] = draw.choice(odd[part])
    changed = json.dumps(entries).encode()
    return (what, part, name), struct.pack("<Q", len(changed)) + changed + data


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_damaged_headers(case, saved, tmp_path):
    shutil.copytree(saved(case), tmp_path, dirs_exist_ok=True)
    content = (tmp_path / "model.safetensors").read_bytes()
    draw = random.Random(case.id)
    for number in range(HEADERS):
        what, changed = damaged_header(content, draw)
        (tmp_path / "model.safetensors").write_bytes(changed)
        check_load(case, tmp_path, (number, what))
