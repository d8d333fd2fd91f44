"""Seeded weights that are generated where they are used: the same bits and outputs as in memory, and none of the memory."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from support.cases import ALL, MODEL, Case
from support.models import build, differences, outputs, reload
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers.fused_weight import why_not
from hf_freeze.layers.seeded_weight import SeededWeight
from hf_freeze.methods import FFNPruning, Freeze, HeadPruning, VocabularyTrimming
from hf_freeze.seeded import digest, fused_cpu
from hf_freeze.seeded.tiles import scratch_bytes

ALL_RANDOM = Freeze(embeddings="random", attention="random", ffn="random", seed=5)
METHODS = {
    "all": (ALL_RANDOM,),
    "int8": (Freeze(embeddings="random", attention="random", ffn="random", scheme="int8", seed=5),),
    "sign": (Freeze(embeddings="random", attention="random", ffn="random", scheme="sign", seed=5),),
    "normal": (Freeze(embeddings="random", ffn="random", scheme="glorot_normal"), Freeze(attention="zero_diagonal")),
    "sparse and diagonal": (Freeze(embeddings="random", ffn="random", scheme="sparse"), Freeze(attention="diagonal")),
    "pruned": (ALL_RANDOM, HeadPruning(share=0.5), FFNPruning(width=7)),
    "trimmed": (ALL_RANDOM, VocabularyTrimming(keep=[0, 1, 2, 3, 4, 5, 7, 8, 9, 20, 31, 39])),
}
NAMES = ("marian", "bert", "gpt2", "llama")
CELLS = [
    pytest.param(ARCHITECTURES[name], applied, mode, id=f"{name}-{label}-{mode}")
    for number, (label, applied) in enumerate(METHODS.items())
    for turn, mode in enumerate(("streamed", "fused"))
    for name in (NAMES if ALL else (NAMES[(number + 2 * turn) % len(NAMES)],))
    if ALL or label in {"streamed": ("all", "normal", "pruned", "trimmed"), "fused": ("all", "int8", "pruned")}[mode]
]
assert all(
    not method.refusal(ARCHITECTURES[name]) for name in NAMES for applied in METHODS.values() for method in applied
)


def case_of(architecture, applied=(ALL_RANDOM,), task=None):
    return Case(architecture, task or architecture.tasks[0], MODEL, tuple(applied))


def streamed_names(model):
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, SeededWeight)}


def matrices(model):
    return {name for name, definition in model.seeded_tensors.items() if len(definition.shape) == 2}


def gradients(model, batch):
    """Of everything that is trained, in training mode; and of the outputs of the embeddings, which seeded layers pass on."""
    model.train().zero_grad()
    loss = sum(value.float().pow(2).mean() for value in model(**batch).values() if torch.is_tensor(value))
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alike(actual, expected, tolerance):
    """`tolerance`: of the largest entry of a tensor. Sums in another order, which depends on the CPU's vector instructions,
    differ by the rounding errors of their terms, also where a sum is small."""
    assert expected
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = max(tolerance * float(value.abs().max()), 1e-6)
        torch.testing.assert_close(actual[name], value, rtol=0, atol=error)


@pytest.mark.parametrize(("architecture", "applied", "mode"), CELLS)
def test_weights_are_the_same_bits_and_give_the_same_outputs(architecture, applied, mode, tmp_path):
    if mode == "fused" and why_not("cpu"):
        pytest.skip(why_not("cpu"))
    case = case_of(architecture, applied)
    model, batch = build(case), case.batch()
    expected, grads, counts = outputs(model, batch), gradients(model, batch), count_parameters(model)
    values = {name: model.get_parameter(name).detach().clone() for name in model.seeded_tensors}
    model.set_seeded_execution(mode)
    assert model.seeded_execution == mode
    assert streamed_names(model) == matrices(model) != set()
    for name, value in values.items():
        assert torch.equal(model.get_parameter(name), value), name
    alike(outputs(model, batch), expected, 2e-6)
    alike(gradients(model, batch), grads, 1e-5)
    assert count_parameters(model) == counts
    # Saved and loaded, without ever being resident; and the checkpoint knows nothing of it.
    model.eval().save_pretrained(tmp_path)
    loaded = case.auto_class.from_pretrained(tmp_path, seeded_execution=mode)
    assert streamed_names(loaded) == matrices(model)
    assert loaded.seeded_execution == mode
    alike(outputs(loaded, batch), expected, 2e-6)
    plain, _ = reload(case, tmp_path)
    assert plain.seeded_execution == "resident"
    assert differences(outputs(plain, batch), expected) == []
    assert "execution" not in (tmp_path / "config.json").read_text()
    merged = model.merge().eval()
    assert not streamed_names(merged)
    alike(outputs(merged, batch), expected, 1e-5)
    assert streamed_names(model) == matrices(model)
    model.set_seeded_execution("resident")
    assert not streamed_names(model)
    assert differences(outputs(model, batch), expected) == []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in NAMES for dtype in (torch.bfloat16, torch.float16)]
    if ALL
    else [("gpt2", torch.bfloat16), ("marian", torch.float16)],
)
def test_lower_precision_and_autocast(name, dtype):
    case = case_of(ARCHITECTURES[name])
    batch, model = case.batch(), build(case).to(dtype)
    streamed = copy.deepcopy(model)
    streamed.set_seeded_execution("streamed")
    expected = outputs(model, batch)
    alike(outputs(streamed, batch), expected, 0.02)
    assert next(iter(outputs(streamed, batch).values())).dtype == next(iter(expected.values())).dtype
    model = build(case)
    with torch.autocast("cpu", dtype):
        expected = outputs(model, batch)
        model.set_seeded_execution("streamed")
        alike(outputs(model, batch), expected, 0.02)
    # Cast after it was streamed.
    assert model.to(dtype).get_parameter(next(iter(matrices(model)))).dtype == dtype
    assert streamed_names(model) == matrices(model)
    outputs(model, batch)


def test_loaded_in_a_lower_precision(tmp_path):
    case = case_of(ARCHITECTURES["marian"])
    build(case).save_pretrained(tmp_path)
    models = [
        case.auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16, seeded_execution=mode)
        for mode in ("resident", "streamed")
    ]
    for name in models[0].seeded_tensors:
        assert torch.equal(*(model.get_parameter(name) for model in models))
    alike(*(outputs(model, case.batch()) for model in reversed(models)), 0.02)


@pytest.mark.parametrize("name", ["marian", "gpt2"])
def test_generate(name):
    architecture = ARCHITECTURES[name]
    case = case_of(architecture, (Freeze(attention="random", ffn="random", embeddings="random", seed=1),))
    model = build(case)
    batch = {"input_ids": case.batch()["input_ids"][:1, :4], "max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 2}
    expected = model.generate(**batch)
    model.set_seeded_execution("streamed")
    assert torch.equal(model.generate(**batch), expected)


def test_gradient_checkpointing_gives_the_same_gradients():
    case = case_of(ARCHITECTURES["marian"], (Freeze(ffn="random", seed=5),))
    model, batch = build(case), case.batch()
    expected = gradients(model, batch)
    model.set_seeded_execution("streamed")
    model.gradient_checkpointing_enable()
    alike(gradients(model, batch), expected, 1e-5)


def test_the_gradient_to_the_input_can_be_differentiated_again():
    case = case_of(ARCHITECTURES["bert"])
    model = build(case).double()
    model.set_seeded_execution("streamed")
    linear = next(m for m in model.modules() if isinstance(m, nn.Linear) and isinstance(m.weight, SeededWeight))
    x = torch.randn(3, linear.in_features, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: linear(x).sin(), x)


@pytest.mark.parametrize("name", ["marian", "bert"] if ALL else ["bert"])
def test_the_trainer_trains_it_as_in_memory(name, tmp_path):
    case = case_of(ARCHITECTURES[name], (Freeze(ffn="random", attention="random", seed=5),))
    batch = case.batch()
    data = [{key: value[0] for key, value in batch.items()}] * 4

    def trained(mode):
        model = build(case)
        model.set_seeded_execution(mode)
        arguments = TrainingArguments(
            tmp_path / mode,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=0.01,
            report_to=[],
            save_steps=3,
            use_cpu=True,
        )
        Trainer(model=model, args=arguments, train_dataset=data).train()
        assert bool(streamed_names(model)) == (mode == "streamed")
        return {key: value.clone() for key, value in model.state_dict().items()}

    alike(trained("streamed"), trained("resident"), 1e-4)
    loaded = case.auto_class.from_pretrained(tmp_path / "streamed" / "checkpoint-3")
    assert all(digest(loaded.get_parameter(n)) for n in loaded.seeded_tensors)


def test_copies_and_pickles_stay_streamed():
    case = case_of(ARCHITECTURES["marian"])
    model, batch = build(case), case.batch()
    model.set_seeded_execution("streamed")
    expected = outputs(model, batch)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert streamed_names(copied) == streamed_names(model)
        assert differences(outputs(copied, batch), expected) == []
        assert copied.get_input_embeddings().weight is copied.get_output_embeddings().weight


def test_a_variant_of_a_streamed_variant_and_more_tokens():
    case = case_of(ARCHITECTURES["marian"])
    model = build(case)
    expected = outputs(make_variant(model, [methods.FFNPruning(width=7)]), case.batch())
    model.set_seeded_execution("streamed")
    again = make_variant(model, [methods.FFNPruning(width=7)])
    assert again.seeded_execution == "resident"
    assert not streamed_names(again)
    assert streamed_names(model)
    assert differences(outputs(again, case.batch()), expected) == []
    table = model.get_input_embeddings().weight.whole()
    model.resize_token_embeddings(len(table) + 3)
    grown = model.get_input_embeddings().weight
    assert isinstance(grown, SeededWeight)
    assert torch.equal(grown[: len(table)], table)


def test_no_mode_changes_what_another_operation_reads():
    case = case_of(ARCHITECTURES["bert"])
    model = build(case)
    name = min(matrices(model))
    value = model.get_parameter(name).detach().clone()
    model.set_seeded_execution("streamed")
    weight = model.get_parameter(name)
    assert torch.equal(weight.T @ torch.ones(len(value)), value.T @ torch.ones(len(value)))
    assert torch.equal(weight[2:4] + 1, value[2:4] + 1)
    assert torch.equal(model.state_dict()[name], value)
    with pytest.raises(
        RuntimeError, match=f"'{re.escape(model.seeded_tensors[name].name)}' is defined by a seed and has no memory"
    ):
        weight.data.add_(1)
    with pytest.raises(RuntimeError, match=r"takes \d+ inputs, but they are 3"):
        nn.functional.linear(torch.ones(1, 3), weight)
    with pytest.raises(RuntimeError, match=r"expected inputs in torch.float32, as .* is, but they are torch.float64"):
        nn.functional.linear(torch.ones(1, value.shape[1], dtype=torch.float64), weight)
    with pytest.raises(IndexError, match=rf"id outside 0\.\.{len(value) - 1} of"):
        nn.functional.embedding(torch.tensor([len(value)]), weight)


def test_adapters_go_into_a_streamed_variant():
    peft = pytest.importorskip("peft")
    case = case_of(ARCHITECTURES["marian"])
    model, batch = build(case), case.batch()
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    torch.manual_seed(0)
    expected = gradients(peft.get_peft_model(copy.deepcopy(model), settings), batch)
    model.set_seeded_execution("streamed")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, settings)
    alike(gradients(adapted, batch), expected, 1e-5)
    with pytest.raises(RuntimeError, match="is defined by a seed and has no memory to write to"):
        adapted.merge_adapter()


def test_a_map_of_one_device(tmp_path):
    case = case_of(ARCHITECTURES["marian"])
    model = build(case)
    model.save_pretrained(tmp_path)
    loaded = case.auto_class.from_pretrained(tmp_path, device_map="cpu", seeded_execution="streamed")
    assert streamed_names(loaded) == matrices(model)
    alike(outputs(loaded, case.batch()), outputs(model, case.batch()), 2e-6)


def test_what_only_the_whole_defines_stays_resident_with_one_warning():
    case = case_of(ARCHITECTURES["marian"], (Freeze(ffn="random", scheme="orthogonal"), Freeze(attention="random")))
    model, batch = build(case), case.batch()
    expected = outputs(model, batch)
    with pytest.warns(
        UserWarning,
        match=r"what can only be generated as a whole stays resident: .*fc1.weight \(scheme 'orthogonal'\).* and \d more",
    ) as caught:
        model.set_seeded_execution("streamed")
    assert len(caught) == 1
    assert streamed_names(model)
    assert not any("fc" in name for name in streamed_names(model))
    alike(outputs(model, batch), expected, 2e-6)


def test_unknown_modes_and_changed_tensors_are_refused(tmp_path):
    case = case_of(ARCHITECTURES["bert"])
    model = build(case)
    with pytest.raises(ValueError, match="seeded_execution='lazy': must be one of 'resident', 'streamed', 'fused'"):
        model.set_seeded_execution("lazy")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="seeded_execution=3: must be one of"):
        case.auto_class.from_pretrained(tmp_path, seeded_execution=3)
    name = min(matrices(model))
    parameter = model.get_parameter(name)
    parameter.requires_grad_(True)
    with pytest.raises(ValueError, match=f"'{re.escape(name)}' is trainable, so it is not what its seed regenerates"):
        model.set_seeded_execution("streamed")
    parameter.requires_grad_(False)
    parameter.data[0, 0] += 1
    with pytest.raises(ValueError, match=f"'{re.escape(name)}' was changed, so it is not what its seed regenerates"):
        model.set_seeded_execution("streamed")
    assert model.seeded_execution == "resident"


def test_without_a_compiler_there_is_one_warning(monkeypatch, tmp_path):
    case = case_of(ARCHITECTURES["bert"])
    model, batch = build(case), case.batch()
    expected = outputs(model, batch)
    model.save_pretrained(tmp_path)
    why_not.cache_clear()
    monkeypatch.setattr(fused_cpu, "library", no_library)
    try:
        message = "seeded_execution='fused': no C\\+\\+ compiler; seeded tensors are streamed instead"
        with pytest.warns(UserWarning, match=message) as caught:
            model.set_seeded_execution("fused")
        assert len(caught) == 1
        alike(outputs(model, batch), expected, 2e-6)
        with pytest.warns(UserWarning, match=message):
            loaded = case.auto_class.from_pretrained(tmp_path, seeded_execution="fused")
        alike(outputs(loaded, batch), expected, 2e-6)
    finally:
        why_not.cache_clear()


def no_library():
    raise fused_cpu.UnavailableError("no C++ compiler")


def test_a_wrong_digest_stops_a_streamed_load(tmp_path):
    case = case_of(ARCHITECTURES["bert"])
    build(case).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(re.sub(r'("embeddings.word_embeddings.weight": ")[0-9a-f]{4}', r"\g<1>0000", path.read_text()))
    with pytest.raises(
        ValueError, match=r"digest mismatch: the regenerated tensor 'embeddings\.word_embeddings\.weight'"
    ):
        case.auto_class.from_pretrained(tmp_path, seeded_execution="streamed")


def test_the_memory_of_all_seeded_tensors():
    """Of vectors and of the tiles; the rest of a seeded model has none."""
    assert scratch_bytes() < 3.5 * 2**20
    case = case_of(ARCHITECTURES["marian"])
    model = build(case)
    model.set_seeded_execution("streamed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in matrices(model):
            with pytest.raises(RuntimeError):
                model.get_parameter(name).untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model, batch: torch.compile(model, backend="eager")(**batch), id="compiled"),
        pytest.param(lambda model, batch: torch.export.export(model, (), batch, strict=False), id="exported"),
    ],
)
def test_neither_compiled_nor_exported(make):
    case = case_of(ARCHITECTURES["bert"])
    model, batch = build(case).eval(), case.batch()
    model.set_seeded_execution("streamed")
    with pytest.raises(RuntimeError, match="is generated where it is used, which can be neither compiled nor exported"):
        make(model, batch)
    torch.compiler.reset()
