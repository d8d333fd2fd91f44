"""Weights in few bits: against numpy and the published levels, exact from file to file, frozen, and as small as promised."""

import copy
import dataclasses
import logging

import numpy as np
import pytest
import torch
from support.cases import MODEL, Case, native_config
from support.models import build, differences, native, outputs, reload
from support.parametrize import by_turns
from support.training import training_step
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze import make_variant, methods
from hf_freeze.analysis.accounting import count_parameters, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import QuantizedEmbedding, QuantizedLinear
from hf_freeze.layers import schemes as schemes_file
from hf_freeze.layers.quantized import STORED
from hf_freeze.layers.schemes import SCHEMES

ALL = ["ffn", "attention", "embeddings"]
MARIAN = ARCHITECTURES["marian"]
# Dettmers et al. (2023), appendix E; and of one bit of sign, two of exponent and one of mantissa, relative to the largest: 0, a
# subnormal number, and (1 or 1.5) times 2, 4 and 8.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip
FP4 = [sign * size / 12 for sign in (1, -1) for size in (0, 1 / 16, 2, 3, 4, 6, 8, 12)]
LEVELS = {"nf4": NF4, "fp4": FP4}

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)


def reference(weight: torch.Tensor, scheme: str) -> np.ndarray:
    """The nearest that the scheme can hold."""
    w = weight.numpy().astype(np.float64)
    if scheme == "int8":
        step = np.abs(w).max(axis=1, keepdims=True) / 127
        return np.round(w / np.where(step, step, 1)) * step
    levels, flat = np.array(LEVELS[scheme]), w.ravel()
    scale = np.array([np.abs(flat[k - k % 64 : k - k % 64 + 64]).max() for k in range(flat.size)])
    nearest = np.abs(flat[:, None] / np.where(scale, scale, 1)[:, None] - levels).argmin(axis=1)
    return (levels[nearest] * scale).reshape(w.shape)


def quantised(linear, scheme):
    made = QuantizedLinear(linear, scheme)
    made.fill(linear.weight.T if isinstance(linear, Conv1D) else linear.weight)
    if linear.bias is not None:
        with torch.no_grad():
            made.bias.copy_(linear.bias)
    return made


def case_of(architecture, scheme, *before, components=ALL):
    quantize = methods.Quantize(scheme=scheme, components=components)
    return Case(architecture, architecture.tasks[0], MODEL, (*before, quantize))


# -- the layers --------------------------------------------------------------------------------------------------------------


@every_scheme
@pytest.mark.parametrize("shape", [(6, 50), (3, 5), (4, 128)])
def test_the_weight_is_the_nearest_that_the_scheme_holds(shape, scheme):
    weight = torch.randn(shape)
    weight[1] = 0
    layer = QuantizedLinear(nn.Linear(*reversed(shape)), scheme)
    layer.fill(weight)
    np.testing.assert_allclose(layer.dense_weight().numpy(), reference(weight, scheme), rtol=1e-6, atol=1e-7)


@every_scheme
def test_weights_are_quantised_some_rows_at_a_time(scheme, monkeypatch):
    weight = torch.randn(150, 37)
    whole, parts = (QuantizedLinear(nn.Linear(37, 150), scheme) for _ in range(2))
    whole.fill(weight)
    monkeypatch.setattr(schemes_file, "_rows_at_once", lambda columns: 64)
    parts.fill(weight)
    assert all(torch.equal(getattr(whole, name), getattr(parts, name)) for name in STORED)


@every_scheme
def test_an_output_is_off_by_the_steps_at_most(scheme):
    linear, x = nn.Linear(100, 7), torch.randn(9, 100)
    layer = quantised(linear, scheme)
    if scheme == "int8":
        half = (linear.weight.abs().amax(1, keepdim=True) / 254).expand(7, 100)
    else:
        gap = np.diff(sorted(LEVELS[scheme])).max()
        blocks = linear.weight.detach().flatten().split(64)
        half = gap / 2 * torch.cat([block.abs().max().expand(len(block)) for block in blocks]).view(7, 100)
    bound = x.abs() @ half.T
    error = (layer(x) - linear(x)).abs()
    assert (error <= bound + 1e-6).all()
    assert (error > bound / 1000).any()


@every_scheme
@pytest.mark.parametrize(
    "plain", [nn.Linear(12, 10), nn.Linear(12, 10, bias=False), Conv1D(10, 12)], ids=["linear", "no bias", "conv1d"]
)
def test_gradients_are_those_of_the_dense_weight(plain, scheme):
    layer = quantised(plain, scheme)
    dense = nn.Linear(12, 10, bias=layer.bias is not None)
    with torch.no_grad():
        dense.weight.copy_(layer.dense_weight())
        if layer.bias is not None:
            dense.bias.copy_(layer.bias)
    for autocast in (False, True):
        found = []
        for module in (layer, dense):
            module.zero_grad()
            x = torch.linspace(-1, 1, 72).view(2, 3, 12).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = module(x)
            (y.float() ** 2).sum().backward()
            found.append([y, x.grad, *([] if layer.bias is None else [module.bias.grad])])
        assert found[0][0].dtype == (torch.bfloat16 if autocast else torch.float32)
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-2 if autocast else 1e-5, atol=1e-2 if autocast else 1e-5)
    assert [name for name, _ in layer.named_parameters()] == ([] if layer.bias is None else ["bias"])


@every_scheme
@pytest.mark.parametrize("columns", [64, 24])
def test_a_look_up_finds_the_rows_of_the_table(columns, scheme):
    table = nn.Embedding(11, columns, padding_idx=3)
    layer = QuantizedEmbedding(table, scheme)
    layer.fill(table.weight)
    ids = torch.tensor([[3, 10, 0], [5, 5, 3]])
    assert torch.equal(layer(ids), layer.dense_weight()[ids])
    assert not layer(ids)[0, 0].any()  # the padding row is zero, as it was
    assert layer(ids[:, :0]).shape == (2, 0, columns)
    assert layer.bfloat16()(ids).dtype == torch.bfloat16


@every_scheme
def test_no_cast_rounds_what_is_stored(scheme):
    layer = quantised(nn.Linear(130, 6), scheme)
    before = {name: value.clone() for name, value in layer.state_dict().items() if name != "bias"}
    assert {name: value.element_size() for name, value in before.items()} == {"packed": 1, "scales": 1}
    expected = layer.dense_weight()
    for twin in (copy.deepcopy(layer).bfloat16().float(), copy.deepcopy(layer).half()):
        assert all(torch.equal(value, twin.state_dict()[name]) for name, value in before.items())
    rounded = copy.deepcopy(layer).bfloat16()
    assert torch.equal(rounded.dense_weight(), expected.bfloat16())
    assert rounded(torch.ones(1, 130, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_values_that_are_not_finite_are_refused():
    layer = QuantizedLinear(nn.Linear(4, 2), "nf4")
    with pytest.raises(ValueError, match=r"a weight of shape \(2, 4\): it has values that are not finite"):
        layer.fill(torch.full((2, 4), float("nan")))


# -- models ------------------------------------------------------------------------------------------------------------------


@by_turns(every_scheme, every_architecture)
def test_a_whole_model_is_as_small_as_promised_and_opens_exactly(architecture, scheme, tmp_path):
    case = case_of(architecture, scheme)
    model, plain = build(case), native(case)
    names = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear | QuantizedEmbedding)}
    held = {id(m.weight): m for name, m in plain.named_modules(remove_duplicate=False) if name in names}.values()
    shapes = [tuple(m.weight.T.shape if isinstance(m, Conv1D) else m.weight.shape) for m in held]
    assert len(shapes) > 4
    before = sum(4 * rows * columns for rows, columns in shapes)
    after = sum(
        rows * columns + 4 * rows if scheme == "int8" else rows * columns // 2 + 4 * -(-rows * columns // 64)
        for rows, columns in shapes
    )
    unquantised = make_variant(plain, [])
    assert stored_bytes(unquantised) - stored_bytes(model) == before - after
    assert count_parameters(model).total == count_parameters(unquantised).total
    assert count_parameters(model).trainable == count_parameters(unquantised).trainable - before // 4
    model.save_pretrained(tmp_path / "fp32")
    reloaded, info = reload(case, tmp_path / "fp32")
    assert not info["missing_keys"]
    assert differences(outputs(reloaded, case.batch()), outputs(model, case.batch())) == []
    rounded = case.auto_class.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path / "bf16")
    again = case.auto_class.from_pretrained(tmp_path / "bf16")
    assert again.dtype == torch.bfloat16
    assert differences(outputs(again, case.batch()), outputs(rounded, case.batch())) == []
    packed = {name: value for name, value in model.state_dict().items() if name.endswith((".packed", ".scales"))}
    assert packed
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in packed.items())
    assert differences(outputs(model.merge(), case.batch()), outputs(model, case.batch()), 1e-5) == []


@every_scheme
def test_what_is_frozen_stays_and_the_rest_trains(scheme):
    case = case_of(MARIAN, scheme, methods.Freeze(ffn="frozen"), components=["ffn"])
    model = build(case)
    counts = count_parameters(model).by_component
    assert counts["ffn"].trainable == 0
    assert counts["attention"].trainable == counts["attention"].total
    before = copy.deepcopy(model.state_dict())
    loss = model(**case.batch()).loss.item()
    for _ in range(5):
        training_step(model, case.batch())
    assert model(**case.batch()).loss.item() < loss
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert not [name for name in changed if ".fc" in name]
    assert [name for name in changed if "q_proj" in name]


def test_tables_that_are_one_are_stored_and_held_once(tmp_path):
    case = case_of(MARIAN, "nf4", components=["embeddings"])
    model = build(case)
    tables = [model.model.shared, model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head]
    assert {type(table) for table in tables} == {QuantizedEmbedding, QuantizedLinear}
    model.save_pretrained(tmp_path)
    reloaded, _ = reload(case, tmp_path)
    reloaded.tie_weights()  # as somebody may
    for each in (model, reloaded, copy.deepcopy(model)):
        base = each.model
        tables = [base.shared, base.encoder.embed_tokens, base.decoder.embed_tokens, each.lm_head]
        assert len({table.packed.data_ptr() for table in tables}) == 1
    with pytest.raises(ValueError, match=r"'model.shared' is quantised and cannot be resized.*or merge\(\) first"):
        model.resize_token_embeddings(50)


@pytest.mark.parametrize("first", [True, False], ids=["after sharing", "before"])
def test_layers_that_share_their_parameters_share_what_is_quantised(first, tmp_path):
    sharing, quantize = methods.LayerSharing(start="middle"), methods.Quantize(scheme="int8")
    case = Case(MARIAN, "seq2seq-lm", MODEL, (sharing, quantize) if first else (quantize, sharing))
    model, alone = build(case), build(Case(MARIAN, "seq2seq-lm", MODEL, (sharing,)))
    assert stored_bytes(model) < stored_bytes(alone) / 2
    layers = model.model.encoder.layers
    assert layers[0].fc1.packed is layers[1].fc1.packed
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < stored_bytes(model) + 64 * 1024
    reloaded, _ = reload(case, tmp_path)
    assert differences(outputs(reloaded, case.batch()), outputs(model, case.batch())) == []
    assert differences(outputs(model.merge(), case.batch()), outputs(model, case.batch()), 1e-5) == []


def test_a_finished_variant_is_quantised_as_it_is():
    before = (
        methods.VocabularyTrimming(keep=list(range(30))),
        methods.HeadPruning(heads={"encoder.0.self": [0]}),
        methods.FFNPruning(width=12),
        methods.Freeze(attention="frozen"),
    )
    model = build(Case(MARIAN, "seq2seq-lm", MODEL, before))
    small = make_variant(model, [methods.Quantize(scheme="int8", components=ALL)])
    assert stored_bytes(small) < 0.5 * stored_bytes(model)
    batch = {name: value.clamp(max=29) for name, value in MARIAN.tiny_inputs("seq2seq-lm").items()}
    assert differences(outputs(small, batch), outputs(model, batch), 0.5) == []
    assert differences(outputs(small, batch), outputs(model, batch), 1e-5) != []


@pytest.mark.parametrize("init", ["backbone", "marian"])
def test_fresh_weights_are_drawn_as_ever_and_then_quantised(init):
    config, how = native_config(MARIAN), {"task": "seq2seq-lm", "init": init, "seed": 5}
    plain = make_variant(config, [], **how)
    applied = [methods.Freeze(attention="random"), methods.Quantize(scheme="int8", components=["ffn"])]
    model = make_variant(config, applied, **how)
    for number in range(2):
        mine, theirs = (each.model.decoder.layers[number].fc1.weight.detach() for each in (model, plain))
        np.testing.assert_allclose(mine.numpy(), reference(theirs, "int8"), rtol=1e-5, atol=1e-7)
    assert torch.equal(model.model.shared.weight, plain.model.shared.weight)
    assert model.seeded_tensors
    assert type(model)(model.config).model.encoder.layers[0].fc1.dense_weight().std() > 0.1  # not left at zero


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "int4"}, r"Quantize\(scheme='int4'\): choose from \['int8', 'nf4', 'fp4'\]"),
        (
            {"scheme": "nf4", "components": ["head"]},
            r"components=\['head'\]\): choose from \['ffn', 'attention', 'embeddings', 'experts'\]",
        ),
    ],
)
def test_an_unknown_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=rf"\A.*{message}\Z"):
        methods.Quantize(**settings)


@pytest.mark.parametrize(
    ("before", "settings", "message"),
    [
        (methods.Freeze(ffn="random"), {}, "'freeze' draws 'model.encoder.layers.0.fc1.weight' from a seed"),
        (
            methods.Freeze(embeddings="random"),
            {"components": ["embeddings"]},
            "'freeze' draws 'model.shared.weight' from a seed",
        ),
        (
            methods.AdaptiveEmbedding(cutoffs=[20]),
            {"components": ["embeddings"]},
            "'model.shared' is a AdaptiveInputEmbedding already.*leave one of the two out",
        ),
        (methods.Quantize(scheme="int8"), {}, "is a QuantizedLinear already"),
        (
            methods.LayerDrop(p=0.1),
            {"components": ["embeddings"], "layers": {"encoder": [0]}},
            "embeddings lie in no layer",
        ),
    ],
)
def test_what_cannot_be_quantised_is_refused(before, settings, message):
    with pytest.raises(ValueError, match=rf"\A.*{message}.*\Z"):
        make_variant(
            native(Case(MARIAN, "seq2seq-lm", MODEL, ())), [before, methods.Quantize(scheme="nf4", **settings)]
        )


def test_some_layers_may_be_drawn_from_a_seed_and_others_quantised():
    quantize = methods.Quantize(scheme="nf4", components=["ffn"], layers={"encoder": [0]})
    freeze = methods.Freeze(ffn="random", layers={"encoder": [1]})
    model = make_variant(native(Case(MARIAN, "seq2seq-lm", MODEL, ())), [freeze, quantize])
    assert "model.encoder.layers.1.fc1.weight" in model.seeded_tensors
    assert isinstance(model.model.encoder.layers[0].fc1, QuantizedLinear)


def test_without_bitsandbytes_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(schemes_file, "find_spec", lambda name: None)
    case = case_of(MARIAN, "nf4")
    with pytest.raises(
        ValueError, match=r'\A.*bitsandbytes, which is missing; from a clone: pip install .* "\.\[quantize\]"\Z'
    ):
        make_variant(native(case), list(case.methods))


def test_what_bitsandbytes_recommends_at_its_import_is_not_shown(caplog):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no")
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


def test_an_output_matrix_tied_to_an_unknown_table_is_refused(monkeypatch):
    unknown = dataclasses.replace(ARCHITECTURES["gpt2"], token_tables={})
    monkeypatch.setitem(ARCHITECTURES, "gpt2", unknown)
    quantize = methods.Quantize(scheme="int8", components=["embeddings"])
    with pytest.raises(
        ValueError,
        match=r"'lm_head' is tied to 'transformer\.wte\.weight', which is no known .*; leave 'embeddings' out",
    ):
        make_variant(native_config(unknown), [quantize], task="causal-lm")
