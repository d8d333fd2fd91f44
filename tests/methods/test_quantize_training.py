"""Training for integers: what is computed before and after `finalize()`, ranges, what it composes with, and what is refused."""

import copy

import pytest
import torch
from support.cases import ALL, MODEL, Case, native_config
from support.models import build_anew, differences, file_sizes, native, outputs, reload, reload_problems, trainability
from support.training import training_step
from torch import nn

from hf_freeze import make_variant, methods
from hf_freeze.analysis.accounting import count_parameters, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers.fake_quantized import FakeQuantizedEmbedding, Rounded, like
from hf_freeze.layers.grids import Grid
from hf_freeze.layers.quantized import QuantizedLinear
from hf_freeze.layers.quantized_factors import QuantizedSparseLinear, QuantizedTensor
from hf_freeze.layers.rounding import Rounding

LINEARS = ["ffn", "attention"]
EVERYWHERE = [*LINEARS, "embeddings"]
SETTINGS = {
    "int8 x int8": {"weights": "int8", "activations": "int8"},
    "int4 in groups": {"weights": "int4", "granularity": "group-64", "begin": 0.5},
    "learnt": {"weights": "int4", "activations": "int8", "weight_ranges": "learnt", "activation_ranges": "learnt"},
    "tracked": {
        "weights": "int8",
        "activations": "int8",
        "granularity": "group-64",
        "weight_ranges": "learnt",
        "activation_ranges": "moving",
    },
    "largest": {"weights": "int4", "activations": "int8", "activation_ranges": "max"},
}
PLACES = [
    (architecture, name)
    for number, architecture in enumerate(("marian", "bert", "gpt2", "llama"))
    for position, name in enumerate(SETTINGS)
    if ALL or (number - position) % 4 == 0
]


def quantize(**settings):
    return methods.Quantize(
        **{"train": True, "weights": "int8", "activations": "int8", "components": EVERYWHERE} | settings
    )


def case_of(architecture, *applied):
    architecture = ARCHITECTURES[architecture]
    return Case(architecture, architecture.tasks[0], MODEL, applied)


def trained(model, batch, steps=3):
    """After some steps, at the end of training."""
    for step in range(steps):
        training_step(model, batch, step, steps)
    if model.scheduled:
        model.advance(steps, steps)
    return model


def check_saved(model, case, folder):
    model.save_pretrained(folder)
    assert file_sizes(folder)[0] == stored_bytes(model)
    reloaded, info = reload(case, folder)
    expected = outputs(model, case.batch())
    assert reload_problems(reloaded, info, expected, trainability(model), case.batch()) == []


@pytest.mark.parametrize(("architecture", "name"), PLACES)
def test_finalize_changes_no_bit_and_stores_few(architecture, name, tmp_path):
    case = case_of(architecture, quantize(**{"activations": None} | SETTINGS[name]))
    model, plain = build_anew(case), native(case)
    assert model.finalizable
    trained(model, case.batch())
    check_saved(copy.deepcopy(model), case, tmp_path / "training")
    expected, before = outputs(model, case.batch()), stored_bytes(model)
    model.finalize()
    assert differences(outputs(model, case.batch()), expected) == []
    check_saved(model, case, tmp_path / "fixed")
    quantised = {id(m.packed): m for m in model.modules() if hasattr(m, "packed")}.values()
    weights = sum(m.weight_count for m in quantised)
    bits = 8 if SETTINGS[name]["weights"] == "int8" else 4
    held = sum(m.packed.nbytes for m in quantised)
    assert weights * bits // 8 <= held <= weights * bits // 8 + sum(m.shape[0] for m in quantised)
    scales = sum(m.scales.nbytes for m in quantised)
    inputs = 4 * sum(hasattr(m, "input_step") for m in model.modules())
    assert before > stored_bytes(model)
    assert stored_bytes(make_variant(plain, [])) - stored_bytes(model) == 4 * weights - held - scales - inputs
    assert count_parameters(model).total == count_parameters(make_variant(plain, [])).total
    again = trained(copy.deepcopy(model), case.batch(), 1)  # biases and norms train on
    assert differences(outputs(again, case.batch()), expected) != []


def test_training_is_in_full_precision_before_it_begins():
    case = case_of("bert", quantize(begin=0.5))
    model, plain = build_anew(case), native(case)
    batch = case.batch()

    def loss(module):
        return module.train()(**batch).loss.item()

    model.advance(1, 4)
    assert loss(model) == pytest.approx(loss(plain), rel=1e-6)
    rounded = model.eval()(**batch).loss.item()
    assert rounded != pytest.approx(loss(plain), rel=1e-6)  # eval mode is what finalize() gives, at any time
    model.advance(2, 4)
    assert loss(model) == pytest.approx(rounded, rel=1e-6)
    model.rewind()
    with pytest.raises(ValueError, match=r"or call model\.advance"):
        loss(model)


# -- ranges ------------------------------------------------------------------------------------------------------------------


def rounding(kind, **settings):
    layer = like(nn.Linear(6, 4), Grid(weights="int8", activations="int8", activation_ranges=kind, **settings))
    layer.start()
    return layer, layer.rounding


@pytest.mark.parametrize(("kind", "expected"), [("max", 5.0), ("moving", 0.99 * 3 + 0.01 * 5)])
def test_ranges_are_tracked_between_steps(kind, expected):
    layer, own = rounding(kind)
    x = torch.zeros(2, 6)
    expected_before = nn.functional.linear(x + 1, layer.dense_weight(), layer.bias)
    torch.testing.assert_close(layer(x + 1), expected_before)  # no range yet
    own.track()
    own.input_range.zero_()
    for batches in ([3.0, -2.0], [5.0, 1.0]):  # accumulated
        for value in batches:
            x[1, 2] = value
            before = own.input_range.clone()
            layer(x)
            assert torch.equal(own.input_range, before)
        own.track()
    torch.testing.assert_close(own.input_range, torch.tensor([expected]))
    layer.eval()(100 * x)
    own.track()
    torch.testing.assert_close(own.input_range, torch.tensor([expected]))  # not in eval mode


def test_learnt_ranges_start_from_what_is_seen_and_then_learn():
    layer, own = rounding("learnt", weight_ranges="learnt")
    x = torch.randn(50, 6)
    assert not own.input_steps(x)
    layer(x).sum().backward()
    assert float(own.input_log_step.grad) == 0
    own.track()
    expected = min(2 * float(x.abs().mean()) / 127**0.5, float(x.abs().max()) / 127)
    assert float(own.input_steps(x).detach()) == pytest.approx(expected, rel=1e-5)
    layer.zero_grad()
    (layer(x) ** 2).sum().backward()
    assert own.log_steps.grad.abs().min() > 0
    assert float(own.input_log_step.grad) != 0
    layer(100 * x)
    own.track()  # from now on training alone moves it
    assert float(own.input_steps(x).detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("source", [MODEL, "init_backbone"])
def test_learnt_steps_start_from_the_weights(source):
    """Those of a trained backbone, of a fresh one, and of factors; not from memory that was there before them."""
    settings = {"weights": "int4", "weight_ranges": "learnt", "activations": None}
    before = (methods.LowRank(rank=4, components=["attention"]), methods.FactorizedEmbedding(rank=4))
    for chain in ((quantize(**settings),), (*before, quantize(**settings))):
        case = case_of("marian", *chain)
        if source == MODEL:
            model = build_anew(case)
        else:
            model = make_variant(native_config(case.architecture), list(chain), task=case.task)
        layers = [module for module in model.modules() if isinstance(module, Rounded)]
        assert len(layers) > 10
        for layer in layers:
            for rounding, weight in zip(layer.roundings(), layer.full_weights(), strict=True):
                expected = rounding.grid.first_steps(weight)
                torch.testing.assert_close(rounding.log_steps.exp().view_as(expected), expected)


def test_every_range_stays_finite():
    case = case_of("bert", quantize(weights="int4", weight_ranges="learnt", activation_ranges="learnt"))
    model = trained(build_anew(case), case.batch(), 8)
    for module in model.modules():
        if isinstance(module, Rounding):
            assert all(value.isfinite().all() for value in (*module.parameters(), *module.buffers()))
    model.finalize()
    steps = [module.steps() for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert steps
    assert all(((step > 0) & (step < 1e3)).all() for step in steps)


@pytest.mark.parametrize("ranges", ["max", "learnt"])
def test_a_channel_of_zeros_stays_zero(ranges):
    linear = nn.Linear(70, 3)
    with torch.no_grad():
        linear.weight[1] = 0
    for granularity in ("channel", "group-64"):
        grid = Grid(weights="int4", granularity=granularity, activations="int8", weight_ranges=ranges)
        layer = like(linear, grid)
        layer.load_state_dict(linear.state_dict(), strict=False)
        layer.start()
        layer(torch.randn(2, 70)).sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
        fixed = layer.fixed().eval()
        assert not fixed.dense_weight()[1].any()
        assert fixed(torch.zeros(1, 70)).isfinite().all()
        torch.testing.assert_close(fixed(torch.randn(1, 70))[0, 1], layer.bias[1])


def test_a_look_up_rounds_the_rows_of_the_table():
    table = nn.Embedding(9, 70, padding_idx=2)
    for ranges in ("max", "learnt"):
        grid = Grid(weights="int4", granularity="group-64", activations="int8", weight_ranges=ranges)
        layer = FakeQuantizedEmbedding(table, grid)
        layer.load_state_dict(table.state_dict(), strict=False)
        layer.start()
        ids = torch.tensor([[2, 0], [8, 8]])
        torch.testing.assert_close(layer(ids), layer.dense_weight()[ids], rtol=0, atol=0)
        layer(ids).sum().backward()
        assert (layer.weight.grad[0].abs() > 0).any()
        assert not layer.weight.grad[[1, 2]].any()  # not looked up, and padding
        assert torch.equal(layer.fixed()(ids), layer(ids))


# -- with other methods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["marian", "gpt2"])
def test_zeros_of_pruning_stay_zero_and_are_not_stored(architecture, tmp_path):
    case = case_of(architecture, methods.MagnitudePruning(sparsity=0.75))
    model = build_anew(case)
    model.finalize()
    zeros = {name: value == 0 for name, value in model.merge().state_dict().items()}
    small = make_variant(
        model, [quantize(weights="int4", activations=None, components=["ffn"], weight_ranges="learnt")]
    )
    trained(small, case.batch())
    expected = outputs(small, case.batch())
    small.finalize()
    assert differences(outputs(small, case.batch()), expected) == []
    layers = [module for module in small.modules() if isinstance(module, QuantizedSparseLinear)]
    assert layers
    assert sum(layer.packed.nbytes for layer in layers) <= sum(-(-layer.nonzeros // 2) for layer in layers)
    for name, value in small.merge().state_dict().items():
        assert not value[zeros[name]].any(), name
    check_saved(small, case, tmp_path)


@pytest.mark.parametrize("train", [True, False])
def test_factors_and_tables_of_low_rank(train, tmp_path):
    before = (methods.LowRank(rank=4, components=LINEARS), methods.FactorizedEmbedding(rank=4))
    case = case_of("marian", *before, quantize(train=train))
    model = trained(build_anew(case), case.batch())
    alone = stored_bytes(build_anew(case_of("marian", *before)))
    expected = outputs(model, case.batch())
    if train:
        model.finalize()
    assert differences(outputs(model, case.batch()), expected) == []
    assert stored_bytes(model) < 0.6 * alone
    check_saved(model, case, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("marian", {"train": False}),
        (
            "gpt2",
            {"train": True, "weights": "int4", "weight_ranges": "learnt", "granularity": "group-64", "begin": 0.5},
        ),
    ],
)
@pytest.mark.parametrize(
    "before",
    [methods.TensorTrain(rank=4, components=LINEARS), methods.Tucker(rank=3, components=LINEARS)],
    ids=["tensor train", "Tucker"],
)
def test_factors_of_tensors(before, architecture, settings, tmp_path):
    case = case_of(architecture, before, quantize(components=LINEARS, activations=None, **settings))
    model = trained(build_anew(case), case.batch())
    expected = outputs(model, case.batch())
    assert differences(outputs(model.merge(), case.batch()), expected, 1e-5) == []
    if settings["train"]:
        check_saved(copy.deepcopy(model), case, tmp_path / "training")
        model.finalize()
    assert differences(outputs(model, case.batch()), expected) == []
    layers = [module for module in model.modules() if isinstance(module, QuantizedTensor)]
    stored = [holder for layer in layers for holder in layer.holders()]
    assert stored
    counts = [holder.weight_count for holder in stored]
    nbytes = [
        count if settings.get("weights") is None else h.shape[0] * -(-h.shape[1] // 2)
        for h, count in zip(stored, counts, strict=True)
    ]
    assert [holder.packed.nbytes for holder in stored] == nbytes
    saved = 4 * sum(counts) - sum(nbytes) - sum(holder.scales.nbytes for holder in stored)
    assert stored_bytes(model) == stored_bytes(build_anew(case_of(architecture, before))) - saved
    check_saved(model, case, tmp_path / "fixed")


def test_with_distillation():
    case = case_of("bert", quantize(weights="int4"), methods.Distillation())
    model = build_anew(case)
    trained(model, case.batch())
    model.finalize()
    assert [method["method"] for method in model.config.methods] == ["quantize", "distillation"]


@pytest.mark.parametrize("train", [True, False])
def test_heads_and_neurons_of_what_has_a_step_for_each_output(train):
    settings = {"weight_ranges": "learnt", "activation_ranges": "max"} if train else {}
    model = make_variant(native(case_of("marian")), [quantize(train=train, **settings)])
    batch = case_of("marian").batch()
    if train:
        trained(model, batch)
    fewer = make_variant(model, [methods.FFNPruning(width=11), methods.HeadPruning(heads={"encoder.0.self": [0]})])
    kept = fewer.model.encoder.layers[0].fc2
    assert kept.in_features == 11
    if train:
        assert kept.rounding.shape[1] == 11
        assert fewer.model.encoder.layers[0].fc1.rounding.log_steps.shape == (11,)
        fewer.finalize()
    assert outputs(fewer, batch)["logits"].isfinite().all()


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"Quantize\(scheme=None, weights=None\): give one of them"),
        ({"scheme": "nf4", "weights": "int8"}, r"Quantize\(scheme='nf4', weights='int8'\): give one of them"),
        ({"scheme": "nf4", "train": True}, r"Quantize\(scheme='nf4', train=True\): .*give weights= one of .*int4"),
        ({"scheme": "int8", "activations": "int8"}, r"scheme='int8', activations='int8'\): bitsandbytes freezes"),
        ({"weights": "int2"}, r"Quantize\(weights='int2'\): choose from \['int8', 'int4'\]"),
        ({"weights": "int8", "train": 1}, r"Quantize\(train=1\): must be True or False"),
        ({"weights": "int8", "activations": "int4"}, r"Quantize\(activations='int4'\): choose from \[None, 'int8'\]"),
        ({"weights": "int8", "granularity": "group-60"}, r"granularity='group-60'\): choose from .*'group-64'"),
        ({"weights": "int8", "weight_ranges": "moving"}, r"weight_ranges='moving'\): choose from \['max', 'learnt'\]"),
        ({"weights": "int8", "activation_ranges": "x"}, r"activation_ranges='x'\): choose from \['token', 'max'"),
        ({"weights": "int8", "begin": 0.5}, r"Quantize\(begin=0.5\): rounding begins in training; add train=True"),
        ({"weights": "int8", "train": True, "begin": 2}, r"Quantize\(begin=2\): must be a share in 0\.\.1"),
    ],
)
def test_an_unknown_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=rf"\A.*{message}.*\Z"):
        methods.Quantize(**settings)


@pytest.mark.parametrize(
    ("applied", "message"),
    [
        (
            [methods.Freeze(ffn="random"), quantize()],
            "'freeze' draws 'model.encoder.layers.0.fc1.weight' from a seed and stores",
        ),
        ([quantize(), methods.Freeze(ffn="random")], "Freeze after 'quantize', which will store the weights of 'ffn'"),
        (
            [methods.MagnitudePruning(sparsity=0.5), quantize()],
            "is a MaskedLinear, whose zeros.*or finalize\\(\\) before",
        ),
        (
            [methods.TensorTrain(rank=2), quantize()],
            "'encoder.layers.0.fc1': activations='int8': .* chain of contractions.*activations=None, or leave the linear",
        ),
        (
            [methods.Tucker(rank=2), quantize()],
            "'encoder.layers.0.fc1': activations='int8': .* chain of contractions.*activations=None, or leave the linear",
        ),
        (
            [quantize(), methods.VocabularyTrimming(keep=[0, 1, 2])],
            "trains the tables.*put VocabularyTrimming first, or finalize",
        ),
        (
            [quantize(train=False, activation_ranges="max")],
            r"activation_ranges='max'\): only training finds these ranges",
        ),
        ([quantize(train=False, weight_ranges="learnt")], r"add train=True, give weight_ranges='max', or load"),
    ],
)
def test_an_order_is_refused(applied, message):
    with pytest.raises(ValueError, match=rf"\A.*{message}.*\Z"):
        make_variant(native(case_of("marian")), applied)


def test_a_seed_may_draw_what_is_not_quantised():
    applied = [quantize(components=["ffn"]), methods.Freeze(attention="random")]
    model = make_variant(native_config(ARCHITECTURES["bert"]), applied, task="masked-lm")
    assert model.seeded_tensors
    model.finalize()
    assert model.seeded_tensors


def test_a_model_whose_inputs_are_rounded_cannot_be_merged():
    model = build_anew(case_of("bert", quantize()))
    with pytest.raises(
        ValueError, match=r"\Amethod 'quantize' cannot be merged: it rounds the inputs of linears to int8, .+\Z"
    ):
        model.merge()
    weights_alone = build_anew(case_of("bert", quantize(activations=None)))
    batch = case_of("bert").batch()
    assert differences(outputs(weights_alone.merge(), batch), outputs(weights_alone, batch), 1e-5) == []


def test_ranges_that_training_has_not_seen_or_that_are_not_finite():
    model = build_anew(case_of("bert", quantize(activation_ranges="max")))
    with pytest.raises(
        ValueError, match=r"\A.*'bert.encoder.layer.0.*': the range of the 16 inputs of a linear is 0: training has"
    ):
        model.finalize()
    assert model.finalizable  # as it was
    layer, own = rounding("max")
    with pytest.raises(ValueError, match="tracks the range of the 6 inputs of a linear, and one of them is not finite"):
        layer(torch.full((1, 6), float("nan")))
    own.input_range.fill_(float("inf"))
    with pytest.raises(ValueError, match="is inf: training has seen none, or they were zero or not finite"):
        layer.fixed()
    layer, own = rounding("token", weight_ranges="learnt")
    with torch.no_grad():
        own.log_steps.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"the learnt steps of a weight of shape \(4, 6\) are not all finite"):
        layer.fixed()
    with torch.no_grad():
        layer.weight.fill_(float("inf"))
    with pytest.raises(
        ValueError, match=r"cannot quantise a weight of shape \(4, 6\): it has values that are not finite"
    ):
        layer.fixed()
