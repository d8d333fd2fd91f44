"""Ranks against brute force and independent decompositions; neuron scores against autograd and sums by hand."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from support.processes import printed_by
from support.small import not_understood
from transformers import AutoConfig

from hf_freeze import analysis, make_variant, methods
from hf_freeze.analysis import ranks as ranks_module
from hf_freeze.analysis.latency import median_ms
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.derived import features
from hf_freeze.layers.shapes import modes_of
from hf_freeze.layers.tensor_train import tt_svd
from hf_freeze.layers.tucker import tucker
from hf_freeze.surgery import effective_weight, linear_names

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda a: a.model_type)
FACTORIZED = {methods.LowRank: "rank", methods.TensorTrain: "ranks", methods.Tucker: "ranks"}
every_method = pytest.mark.parametrize("method", FACTORIZED, ids=lambda m: m.__name__)


def native(architecture, task=None):
    """As if trained: the weights of attention and FFN have spectra that fall, each at a speed of its own."""
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny)
    model = AUTO_CLASSES[task or architecture.tasks[0]].from_config(config)
    for number, (_, linear) in enumerate(linears(model, architecture)):
        u, s, v = torch.linalg.svd(linear.weight.data, full_matrices=False)
        linear.weight.data = u * torch.arange(1.0, len(s) + 1) ** (-1 - 0.3 * number) @ v
    return model


def linears(model, architecture, components=("ffn", "attention")):
    names = linear_names(architecture, model.config, components, None)
    return [(name, model.base_model.get_submodule(name)) for name in names]


BERT = ARCHITECTURES["bert"]


# -- ranks at an energy ----------------------------------------------------------------------------------------------------------


@every_architecture
@pytest.mark.parametrize("energy", [0.7, 0.95])
def test_low_rank_keeps_the_energy_with_the_smallest_rank(architecture, energy):
    model = native(architecture)
    found = analysis.choose_ranks(model, methods.LowRank, energy=energy, components=["attention", "ffn"])
    expected = {}
    for name, linear in linears(model, architecture):
        energies = torch.linalg.svdvals(effective_weight(linear).double()).square()
        rank = next(r for r in range(1, 99) if energies[:r].sum() >= energy * energies.sum())
        if rank * sum(features(linear)) < linear.weight.numel():
            expected[name] = rank
    assert found.rank == expected
    assert all(type(rank) is int for rank in found.rank.values())
    assert methods.LowRank(**json.loads(json.dumps(asdict(found)))) == found
    variant = make_variant(model, [found])
    for name, rank in expected.items():
        assert variant.base_model.get_submodule(name).rank == rank


@every_architecture
@pytest.mark.parametrize("energy", [0.3, 0.9])
def test_tensor_train_and_tucker_take_the_ranks_of_their_decompositions(architecture, energy):
    model = native(architecture)
    chosen = {m: analysis.choose_ranks(model, m, energy=energy).ranks for m in (methods.TensorTrain, methods.Tucker)}
    for name, linear in linears(model, architecture, ["ffn"]):
        weight, (n, m) = effective_weight(linear).T, modes_of(*features(linear), None)
        cores = tt_svd(weight, n, m, loss=1 - energy)
        core, factors = tucker(weight.reshape(*n, *m), loss=1 - energy, sweeps=0)
        sizes = {methods.TensorTrain: cores, methods.Tucker: [core, *factors]}
        ranks = {methods.TensorTrain: [1, *(c.shape[3] for c in cores)], methods.Tucker: list(core.shape)}
        for method, tensors in sizes.items():
            smaller = sum(t.numel() for t in tensors) < weight.numel()
            assert chosen[method].get(name) == (ranks[method] if smaller else None)


@every_method
def test_the_share_that_was_asked_for_is_kept(method):
    model = native(BERT)
    variant = make_variant(model, [analysis.choose_ranks(model, method, energy=0.8)])
    for name, linear in linears(model, BERT, ["ffn"]):
        weight = effective_weight(linear)
        lost = effective_weight(variant.base_model.get_submodule(name)) - weight
        assert lost.square().sum() <= 0.2001 * weight.square().sum()


def test_an_exact_rank_is_found_in_spite_of_rounding():
    model = make_variant(native(BERT), [methods.LowRank(rank=3)]).merge()
    assert set(analysis.choose_ranks(model, methods.LowRank, energy=1.0).rank.values()) == {3}
    model.base_model.encoder.layer[0].output.dense.weight.data.zero_()
    found = analysis.choose_ranks(model, methods.LowRank, energy=1.0).rank
    assert found["encoder.layer.0.output.dense"] == 1


def test_what_would_not_become_smaller_stays_dense():
    model = native(BERT)
    name = "encoder.layer.0.output.dense"
    torch.nn.init.orthogonal_(model.base_model.get_submodule(name).weight)  # all singular values are equal
    found = analysis.choose_ranks(model, methods.LowRank, energy=0.9)
    assert name not in found.rank
    assert len(found.rank) == 3
    for _, linear in linears(model, BERT, ["ffn"]):
        torch.nn.init.orthogonal_(linear.weight)
    with pytest.raises(ValueError, match=r"energy=0\.9: no factors would be smaller .* all linears would stay dense"):
        analysis.choose_ranks(model, methods.LowRank, energy=0.9)


def test_the_budget_of_factors_is_a_share_of_the_factors():
    once = make_variant(native(BERT), [methods.LowRank(rank=8)])
    chosen = analysis.choose_ranks(once, methods.LowRank, budget=0.5)
    before, after = (
        [p.numel() for name, p in model.named_parameters() if name.endswith((".up", ".down"))]
        for model in (once, make_variant(once, [chosen]))
    )
    assert sum(before) / 4 < sum(after) <= sum(before) / 2


def test_settings_go_to_the_method():
    model = native(ARCHITECTURES["marian"])
    settings = {"components": ["attention"], "layers": {"decoder": [1]}, "execution": "factors"}
    found = analysis.choose_ranks(model, methods.TensorTrain, energy=0.5, shape=((2, 8), (8, 2)), **settings)
    assert (found.components, found.layers, found.execution) == tuple(settings.values())
    assert found.shape == [[2, 8], [8, 2]]
    assert all(name.startswith("decoder.layers.1.") for name in found.ranks)
    assert {len(ranks) for ranks in found.ranks.values()} == {3}


# -- ranks within a number of parameters -----------------------------------------------------------------------------------------


def share_left(model, method, chosen):
    """Of the weights of all FFNs, from the layers themselves."""
    variant = make_variant(model, [chosen])
    left = total = 0
    for name, linear in linears(model, BERT, ["ffn"]):
        module = variant.base_model.get_submodule(name)
        left += sum(p.numel() for part, p in module.named_parameters() if part != "bias")
        total += linear.weight.numel()
    return left / total


@every_method
@pytest.mark.parametrize("budget", [0.3, 0.6])
def test_the_budget_is_kept_with_the_highest_energy(method, budget):
    model = native(BERT)
    field = FACTORIZED[method]
    chosen = analysis.choose_ranks(model, method, budget=budget)
    assert share_left(model, method, chosen) <= budget
    for energy in torch.linspace(0.9999, 0.01, 60).tolist():
        try:
            highest = analysis.choose_ranks(model, method, energy=energy)
        except ValueError:
            continue
        if share_left(model, method, highest) <= budget:
            break
    else:
        pytest.fail("nothing fits")
    for name, ranks in getattr(highest, field).items():  # those of the highest energy are nowhere larger
        found = getattr(chosen, field).get(name)
        assert found is None or torch.tensor(found).ge(torch.tensor(ranks)).all()


def test_a_budget_that_is_too_small_names_the_least():
    model = native(BERT)
    least = (16 + 24) / (16 * 24)
    with pytest.raises(ValueError, match=rf"budget=0\.01: at rank 1, {least:.3g} of the parameters .* least possible"):
        analysis.choose_ranks(model, methods.LowRank, budget=0.01)
    assert set(analysis.choose_ranks(model, methods.LowRank, budget=least).rank.values()) == {1}
    with pytest.raises(ValueError, match=r"budget=1\.0: no factors would be smaller"):
        analysis.choose_ranks(model, methods.LowRank, budget=1.0)


@every_method
def test_rank_one_is_reached(method):
    """Though the bounds of tensor trains and Tucker promise no energy there."""
    model = native(BERT)
    tiny = 1 / (16 * 24)
    with pytest.raises(ValueError, match="at rank 1") as error:
        analysis.choose_ranks(model, method, budget=tiny)
    least = float(str(error.value).split("at rank 1, ")[1].split()[0])
    chosen = getattr(analysis.choose_ranks(model, method, budget=least + 0.001), FACTORIZED[method])
    assert {rank for ranks in chosen.values() for rank in (ranks if isinstance(ranks, list) else [ranks])} == {1}


# -- ranks within a measured time ------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A machine on which a linear takes a ms for each of its weights."""
    measured = []

    def fake(layers, tokens):
        measured.append((type(layers[0]).__name__, tokens))
        return [float(sum(p.numel() for n, p in layer.named_parameters() if n != "bias")) for layer in layers]

    monkeypatch.setattr(ranks_module, "median_ms", fake)
    return measured


@every_method
def test_the_time_is_kept_with_the_highest_energy(method, clock):
    model = native(BERT)
    dense = 4 * 16 * 24
    by_time = analysis.choose_ranks(model, method, max_latency=0.5 * dense, tokens=7)
    by_size = analysis.choose_ranks(model, method, budget=0.5)
    assert share_left(model, method, by_time) <= 0.5
    assert share_left(model, method, by_time) >= 0.9 * share_left(model, method, by_size)  # the search is coarser
    assert {tokens for _, tokens in clock} == {7}


def test_a_time_that_cannot_be_met_says_what_can(clock):
    model = native(BERT)
    with pytest.raises(
        ValueError,
        match=r"max_latency=100: for 64 tokens the dense linears take 1\.54e\+03 ms, and at rank 1 .* 160 ms",
    ):
        analysis.choose_ranks(model, methods.LowRank, max_latency=100)
    with pytest.raises(ValueError, match=r"max_latency=1e\+99: the dense linears take only 1\.54e\+03 ms"):
        analysis.choose_ranks(model, methods.LowRank, max_latency=1e99)


def test_real_layers_are_measured_and_nothing_is_drawn_from_the_global_state():
    model = native(BERT).train()
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="at rank 1 it is still"):
        analysis.choose_ranks(model, methods.LowRank, max_latency=1e-9, tokens=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


# -- what choose_ranks refuses ---------------------------------------------------------------------------------------------------


WRONG = {
    "nothing": ({}, "give one of .'budget', 'energy', 'max_latency'., not none"),
    "two": ({"budget": 0.5, "energy": 0.5}, "not .'budget', 'energy'."),
    "zero": ({"energy": 0}, r"energy=0: must be a share in \(0, 1\]"),
    "above one": ({"budget": 1.5}, r"budget=1\.5: must be a share"),
    "a truth": ({"energy": True}, "energy=True: must be"),
    "nan": ({"energy": math.nan}, "energy=nan"),
    "no time": ({"max_latency": -1}, "max_latency=-1: must be a number of ms above 0"),
    "no tokens": ({"max_latency": 1, "tokens": 0}, "tokens=0: must be an integer of at least 1"),
    "a rank": ({"energy": 0.5, "rank": 3}, r"unknown setting 'rank' of LowRank; choose from \['components', 'layers'"),
    "a shape": ({"energy": 0.5, "shape": None}, "unknown setting 'shape' of LowRank"),
    "a layer": ({"energy": 0.5, "layers": {"encoder": [7]}}, "no layer 7 in stack 'encoder'"),
    "a component": ({"energy": 0.5, "components": ["norm"]}, "choose from .'ffn', 'attention'."),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_goals_and_settings_are_refused(name):
    settings, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        analysis.choose_ranks(native(BERT), methods.LowRank, **settings)


def test_wrong_methods_and_models_are_refused():
    model = native(BERT)
    with pytest.raises(ValueError, match=r"choose from \['methods.LowRank', 'methods.TensorTrain', 'methods.Tucker'\]"):
        analysis.choose_ranks(model, methods.Freeze, energy=0.5)
    with torch.device("meta"):
        empty = make_variant(model.config, [], task="masked-lm")
    other = not_understood()
    for function in (
        lambda m: analysis.choose_ranks(m, methods.LowRank, energy=0.5),
        analysis.ffn_importance,
        analysis.linear_latencies,
    ):
        with pytest.raises(ValueError, match="is on meta and has no values"):
            function(empty)
        with pytest.raises(ValueError, match="needs a model with trained weights, not a BertConfig"):
            function(model.config)
        with pytest.raises(ValueError, match="squeezebert: no list of layers with linears"):
            function(other)
    with pytest.raises(ValueError, match="is a LowRankLinear already"):
        analysis.choose_ranks(make_variant(model, [methods.LowRank(rank=3)]), methods.Tucker, energy=0.5)
    with pytest.raises(ValueError, match="no factors would be smaller"):
        analysis.choose_ranks(make_variant(model, [methods.LowRank(rank=1)]), methods.LowRank, energy=0.5)
    with pytest.raises(ValueError, match=r"'encoder.layer.0.intermediate.dense': shape=.* the linear has 16 inputs"):
        analysis.choose_ranks(model, methods.TensorTrain, energy=0.5, shape=((2, 4), (4, 6)))
    model.base_model.encoder.layer[1].output.dense.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"the weight of 'encoder.layer.1.output.dense' is not finite"):
        analysis.choose_ranks(model, methods.LowRank, energy=0.5)


# -- latency ---------------------------------------------------------------------------------------------------------------------


def test_latencies_of_what_is_alike():
    layers = [
        methods.LowRank(rank=2, layers={"encoder": [0]}),
        methods.MagnitudePruning(sparsity=0.5, layers={"encoder": [1]}),
    ]
    model = make_variant(native(BERT), layers).train()
    found = analysis.linear_latencies(model, tokens=[1, 3])
    assert [(f.layer, f.inputs, f.outputs, f.setting, f.count, f.tokens) for f in found] == [
        *(("LowRankLinear", 16, 24, "rank=2", 1, tokens) for tokens in (1, 3)),
        *(("LowRankLinear", 24, 16, "rank=2", 1, tokens) for tokens in (1, 3)),
        *(("MaskedLinear", 16, 24, "", 1, tokens) for tokens in (1, 3)),
        *(("MaskedLinear", 24, 16, "", 1, tokens) for tokens in (1, 3)),
        *(("Linear", 16, 16, "", 8, tokens) for tokens in (1, 3)),
    ]
    assert [f.path for f in found] == ["dense"] * 8 + ["plain"] * 2
    assert all(f.ms > 0 and f.plain_ms > 0 for f in found)
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="tokens=0"):
        analysis.linear_latencies(model, tokens=[0])


def test_a_median_is_of_each_layer():
    layers = [torch.nn.Linear(4, 4), torch.nn.Sequential()]
    layers[1].in_features = layers[1].out_features = 4
    assert len(median_ms(layers, 2)) == 2


# -- neurons ---------------------------------------------------------------------------------------------------------------------


def batches(architecture, task):
    """Two: the tiny inputs, and their sentences the other way round, with other words."""
    first = architecture.tiny_inputs(task)
    second = {name: values.flip(0) for name, values in first.items()}
    second["input_ids"] = torch.where(second["input_ids"] > 1, second["input_ids"] + 3, second["input_ids"])
    return [first, second]


def loss_task(architecture):
    return next(t for t in ("seq2seq-lm", "causal-lm", "masked-lm") if t in architecture.tasks)


def masks(architecture, batch):
    decoder = batch["labels"] != -100 if architecture.model_type == "marian" else batch["attention_mask"].bool()
    return {"encoder": batch["attention_mask"].bool(), "decoder": decoder}


def logits(model, architecture, task):
    with torch.no_grad():
        return model.eval()(**architecture.tiny_inputs(task)).logits


@every_architecture
def test_magnitudes_are_those_of_the_method(architecture):
    task = loss_task(architecture)
    model = native(architecture, task)
    scores = analysis.ffn_importance(model)
    assert list(scores) == list(architecture.ffns(model.config))
    assert {tuple(values.shape) for values in scores.values()} == {(24,)}
    ours, its = (
        make_variant(model, [m]) for m in (analysis.select_neurons(scores, width=9), methods.FFNPruning(width=9))
    )
    assert torch.equal(logits(ours, architecture, task), logits(its, architecture, task))


@every_architecture
def test_activations_by_hand(architecture):
    """Each sentence alone, without padding."""
    task = loss_task(architecture)
    model = native(architecture, task)
    found = analysis.ffn_importance(model, batches(architecture, task), score="activation")
    for block, names in architecture.ffns(model.config).items():
        rows = []
        handle = model.base_model.get_submodule(names[-1]).register_forward_pre_hook(
            lambda module, arguments, rows=rows: rows.append(arguments[0][0])
        )
        for batch in batches(architecture, task):
            for row in range(2):
                alone = {name: values[row : row + 1] for name, values in batch.items()}
                kept = {"encoder": int(alone["attention_mask"].sum()), "labels": int((alone["labels"] != -100).sum())}
                cut = {
                    n: v[:, : kept["labels" if n == "labels" and task == "seq2seq-lm" else "encoder"]]
                    for n, v in alone.items()
                }
                with torch.no_grad():
                    model.eval()(**cut)
        handle.remove()
        torch.testing.assert_close(found[block], torch.cat(rows).abs().mean(0))


@every_architecture
@pytest.mark.parametrize("frozen", [False, True])
def test_taylor_is_the_gradient_of_a_gate(architecture, frozen):
    task = loss_task(architecture)
    model = native(architecture, task).requires_grad_(not frozen)
    found = analysis.ffn_importance(model, batches(architecture, task), score="taylor")
    for block, names in architecture.ffns(model.config).items():
        gate = torch.ones(24, requires_grad=True)
        expected = torch.zeros(24)
        for batch in batches(architecture, task):
            mask = masks(architecture, batch)[block.split(".")[0]]

            def multiply(module, arguments, mask=mask, gate=gate):
                return torch.where(mask[..., None], arguments[0] * gate, arguments[0])

            handle = model.base_model.get_submodule(names[-1]).register_forward_pre_hook(multiply)
            (gradient,) = torch.autograd.grad(model.eval()(**batch).loss, gate)
            handle.remove()
            expected += gradient.abs() / 2
        torch.testing.assert_close(found[block], expected, rtol=1e-4, atol=1e-7)
        assert expected.gt(0).any()


@pytest.mark.parametrize("score", ["magnitude", "activation", "taylor"])
def test_scoring_leaves_the_model_alone(score):
    model = make_variant(
        native(BERT), [methods.LowRank(rank=4, layers={"encoder": [1]}), methods.Freeze(embeddings="frozen")]
    )
    model.train()
    model.base_model.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    scores = analysis.ffn_importance(model, batches(BERT, "masked-lm"), score=score)
    again = analysis.ffn_importance(model, batches(BERT, "masked-lm"), score=score)
    assert all(torch.equal(values, again[block]) for block, values in scores.items())  # no dropout
    assert all(v.shape == (24,) and v.dtype == torch.float32 and not v.requires_grad for v in scores.values())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_failure_leaves_the_model_alone():
    model = native(BERT).train()
    bad = BERT.tiny_inputs("masked-lm") | {"input_ids": torch.full((2, 5), 10_000)}
    with pytest.raises(IndexError):
        analysis.ffn_importance(model, [bad], score="activation")
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


def test_a_mask_of_the_decoder_goes_before_labels():
    architecture = ARCHITECTURES["marian"]
    model = native(architecture)
    batch = architecture.tiny_inputs("seq2seq-lm")
    first = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]])
    scores = analysis.ffn_importance(model, [batch | {"decoder_attention_mask": first}], score="activation")
    alone = analysis.ffn_importance(model, [batch | {"labels": batch["labels"][:, :1]}], score="activation")
    torch.testing.assert_close(scores["decoder.1.ffn"], alone["decoder.1.ffn"])


def test_wrong_scores_and_data_are_refused():
    model, batch = native(BERT), BERT.tiny_inputs("masked-lm")
    unlabelled = {name: values for name, values in batch.items() if name != "labels"}
    for data, score, message in (
        ([batch], "size", r"score='size'\): choose from .'magnitude', 'activation', 'taylor'."),
        (None, "taylor", r"score='taylor'\) needs a dataloader"),
        ([], "activation", "the dataloader is empty"),
        ([], "taylor", "the dataloader is empty"),
        ([unlabelled], "taylor", "needs a loss: batches with labels, not only .'attention_mask', 'input_ids'"),
        ([(1, 2)], "activation", "a batch is a dict of tensors for the forward, not a tuple"),
        (
            [batch | {"attention_mask": torch.zeros(2, 5)}],
            "activation",
            "the dataloader has only padding for 'encoder.0.ffn'",
        ),
        (
            [batch | {"attention_mask": torch.ones(2, 5, 5)}],
            "activation",
            r"has the shape \(2, 5, 5\), its tokens have \(2, 5\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            analysis.ffn_importance(model, data, score=score)


# -- selection -------------------------------------------------------------------------------------------------------------------

SCORES = {"encoder.0.ffn": torch.tensor([5.0, 1, 4, 2]), "encoder.1.ffn": torch.tensor([0.5, 0.1, 3, 0.2, 0.3, 0.4])}


@pytest.mark.parametrize(
    ("settings", "keep"),
    [
        ({"width": 2}, ([0, 2], [0, 2])),
        ({"width": 1}, ([0], [2])),
        ({"fraction": 0.5}, ([0, 2], [0, 2, 5])),
        ({"fraction": 0.01}, ([0], [2])),
        ({"width": 2, "scope": "global"}, ([0, 2, 3], [2])),
        ({"fraction": 0.2, "scope": "global"}, ([0, 2], [2])),  # at least one of each
        ({"fraction": 0.5, "scope": "global"}, (None, [2])),
        ({"width": 2, "multiple_of": 4}, (None, [0, 2, 4, 5])),  # one FFN has no more than four
        ({"fraction": 0.5, "multiple_of": 2}, ([0, 2], [0, 2, 4, 5])),  # the nearest multiple
    ],
)
def test_selection_by_hand(settings, keep):
    expected = {block: kept for block, kept in zip(SCORES, keep, strict=True) if kept}
    assert analysis.select_neurons(SCORES, **settings) == methods.FFNPruning(keep=expected)


def test_of_equal_scores_the_first_are_kept():
    assert analysis.select_neurons({"encoder.0.ffn": torch.ones(5)}, width=3).keep == {"encoder.0.ffn": [0, 1, 2]}


@pytest.mark.parametrize(
    ("scores", "settings", "message"),
    [
        ({}, {"width": 1}, "no scores"),
        ({"a": torch.ones(2, 2)}, {"width": 1}, "scores of 'a' must be finite numbers"),
        ({"a": torch.tensor([1.0, math.nan])}, {"width": 1}, "scores of 'a' must be finite"),
        (SCORES, {}, r"width=None, fraction=None\): give one"),
        (SCORES, {"width": 1, "fraction": 0.1}, "give one"),
        (SCORES, {"width": 5}, r"width=5\): must be in 1\.\.4"),
        (SCORES, {"width": 0}, r"width=0\): must be in 1\.\.4"),
        (SCORES, {"fraction": 0}, r"fraction=0\): must be a share in \(0, 1\]"),
        (SCORES, {"width": 1, "scope": "all"}, r"scope='all'\): choose from \['layer', 'global'\]"),
        (SCORES, {"width": 1, "multiple_of": 0}, r"multiple_of=0\): must be an integer of at least 1"),
        (SCORES, {"fraction": 1}, "every FFN keeps all its neurons"),
    ],
)
def test_wrong_selections_are_refused(scores, settings, message):
    with pytest.raises(ValueError, match=message):
        analysis.select_neurons(scores, **settings)


# -- importing -------------------------------------------------------------------------------------------------------------------


def test_importing_hf_freeze_does_not_import_the_analysis():
    code = (
        "import sys, hf_freeze; assert 'hf_freeze.analysis' not in sys.modules; hf_freeze.analysis.choose_ranks; "
        "from hf_freeze import analysis; assert analysis is hf_freeze.analysis"
    )
    printed_by(code)
