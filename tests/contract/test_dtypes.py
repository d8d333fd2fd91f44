"""Invariant 1 (CONTRIBUTING.md) in half precision: a saved variant reloads bit-equal, each tensor in the dtype that it had.

Natively, some families keep some weights in fp32 when they are loaded in fp16 or bf16, such as T5. What a method puts in their
place has the same dtype, before saving and after it, and integers stay integers.
"""

import itertools

import pytest
import torch
from families.contract import fitting, native_model, offered, task_of, tiny_config
from support.cases import ALL, Case, once, once_on_each_architecture
from support.models import add_noise, build, differences, finished, native, outputs

from hf_freeze import make_variant
from hf_freeze.architectures.families import model_types
from hf_freeze.architectures.registry import ARCHITECTURES, architecture_of
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods import LayerSharing, Quantize

HALVES = (torch.bfloat16, torch.float16)


def dtypes(model):
    return {name: value.dtype for name, value in model.state_dict().items()}


def in_dtype(batch, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def check_reload(model, auto_class, batch, folder, *asked_for):
    """Saved and loaded, in the dtype that its config (auto) or the caller says, the model is the same."""
    expected = outputs(model, batch)
    assert all(value.isfinite().all() for value in expected.values())
    model.save_pretrained(folder)
    for asked in asked_for:
        loaded = auto_class.from_pretrained(folder, dtype=asked)
        assert dtypes(loaded) == dtypes(model)
        for (
            name,
            buffer,
        ) in model.named_buffers():  # frequencies, which are not stored: natively too, a cast rounds them
            if name not in dtypes(model) and buffer.numel():
                loaded.get_buffer(name).data = buffer
        assert differences(outputs(loaded, batch), expected) == []


def by_turns():
    """Each method, during its training and after it, in both dtypes, by turns; all of both with HF_FREEZE_TESTS=all."""
    cases = [*once(), *once(finalized=True)] if not ALL else once_on_each_architecture()
    cells = [(case, HALVES[number % 2]) for number, case in enumerate(cases)]
    return [(case, dtype) for case in cases for dtype in HALVES] if ALL else cells


CELLS = by_turns()
assert {(case.architecture.model_type, dtype) for case, dtype in CELLS} == {
    (a, d) for a in ARCHITECTURES for d in HALVES
}


@pytest.mark.parametrize(("case", "dtype"), CELLS, ids=[f"{case.id}-{dtype}" for case, dtype in CELLS])
def test_a_variant_in_half_precision_reloads_bit_equal(case: Case, dtype, tmp_path):
    """Made of a backbone in half precision where a method can take over weights; and cast after it was built."""
    batch = in_dtype(case.batch(), dtype)
    cast = build(case)
    kept = {f"{name}.{own}" for name, module in cast.named_modules() for own in getattr(module, "kept_in_fp32", ())}
    casts = {name for name, old in dtypes(cast).items() if old.is_floating_point and name not in kept}
    expected = {name: dtype if name in casts else old for name, old in dtypes(cast).items()}
    assert dtypes(cast.to(dtype)) == expected
    check_reload(cast, case.auto_class, batch, tmp_path / "cast", "auto", dtype)
    if case.from_model:
        model = make_variant(native(case).to(dtype), list(case.methods)).eval()
        made = finished(model) if case.finalized else model
        check_reload(made, case.auto_class, batch, tmp_path / "made", "auto", *[dtype] * ALL)


# Families that keep tensors in fp32: T5 the last linear of each FFN, in fp16; ERNIE 4.5 the gates of its experts, in bf16 too.
# The methods that the test draws on them; None: all.
KEEPING = {("t5", torch.float16): None, ("ernie4_5_moe", torch.bfloat16): {"freeze", "low_rank", "layer_sharing"}}
if ALL:
    KEEPING = dict.fromkeys(itertools.product(model_types(), HALVES))


@pytest.mark.parametrize(("family", "dtype"), KEEPING, ids=[f"{family}-{dtype}" for family, dtype in KEEPING])
def test_what_a_family_keeps_in_fp32_stays_so(family, dtype, tmp_path):
    """What a method makes of a linear in fp32 is in fp32."""
    config = tiny_config(family)
    architecture = architecture_of(config)
    task = task_of(architecture)
    add_noise(native_model(config, task), architecture).save_pretrained(tmp_path / "native")
    base = AUTO_CLASSES[task].from_pretrained(tmp_path / "native", dtype=dtype)
    kept = [f"{name.rpartition('.')[0]}." for name, kept_dtype in dtypes(base).items() if kept_dtype == torch.float32]
    if not kept:
        pytest.skip(f"{family} keeps nothing in fp32 beside {dtype}")
    batch = in_dtype(architecture.tiny_inputs(task), dtype)
    # Proofs are in fp32, whatever the model is in.
    problems = dict.fromkeys(offered(architecture).keys() - offered(architecture_of(base.config)).keys(), "refused")
    examples = [method.example for name, method in offered(architecture).items() if name not in problems]
    for number, method in enumerate([*examples, LayerSharing(), Quantize(weights="int8")]):
        method, drawn = fitting(method, architecture, config), KEEPING[family, dtype]
        if drawn is not None and method.name not in drawn:
            continue
        try:
            model = finished(make_variant(base, [method])).eval()
            assert [n for n, d in dtypes(model).items() if d == dtype and n.startswith(tuple(kept))] == []
            check_reload(model, AUTO_CLASSES[task], batch, tmp_path / str(number), "auto", dtype)
            outputs(model.to(dtype), batch)
        except Exception as error:
            problems[str(method)] = f"{type(error).__name__}: {error}"[:300]
    assert problems == {}
