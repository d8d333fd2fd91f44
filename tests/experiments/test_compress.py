"""`hf-freeze compress`: limits are kept, the choice of what to keep is the best one, and refusals say what is possible."""

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_freeze import make_variant
from hf_freeze.analysis.sensitivity import Sensitivity, sensitivity, total_loss
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.experiments.compress.allocation import Losses, allocate, options_of_stack, smallest
from hf_freeze.experiments.compress.bench import Bench
from hf_freeze.experiments.compress.budget import Budget, in_bytes, read_bytes
from hf_freeze.experiments.compress.costs import Cost, Estimate, probes
from hf_freeze.experiments.compress.phases import Phases
from hf_freeze.experiments.compress.shapes import Shape, StackShape, Weights, methods_of, whole_shape
from hf_freeze.methods.registry import method_from_dict

WEIGHTS = Weights(
    ffn={"encoder": 800.0, "decoder": 800.0}, attention={"encoder": 400.0, "decoder": 700.0}, tables=1, hidden=16
)
WHOLE = Shape(stacks={"encoder": StackShape(layers=3), "decoder": StackShape(layers=2)}, vocabulary=100)


def measured(seed: int = 0) -> Sensitivity:
    """Losses that grow with what is removed."""
    rng = np.random.default_rng(seed)

    def falling(keys, whole):
        return dict(zip(keys, (whole + rng.random(len(keys)).cumsum() * 100).tolist(), strict=True))

    return Sensitivity(
        labels=1000,
        loss=500.0,
        removal={"encoder": [1, 2], "decoder": [0]},
        layers={"encoder": {3: 500.0} | falling([2, 1], 500), "decoder": {2: 500.0} | falling([1], 500)},
        neurons={name: falling([0.75, 0.5, 0.25], 500) for name in WHOLE.stacks},
        ranks=falling([8, 4], 500),
    )


def estimate() -> Estimate:
    def cost(shape: Shape) -> Cost:
        stacks = shape.stacks.items()
        weights = sum(WEIGHTS.of_stack(name, stack) for name, stack in stacks)
        layers = sum(stack.layers for _, stack in stacks)
        tables = WEIGHTS.of_tables(shape.vocabulary, shape.rank)
        ms = 0.3 + sum(0.1 * stack.layers for _, stack in stacks) + 1e-4 * weights + 1e-5 * tables
        return Cost(bytes=900 + 50 * layers + 1.1 * weights + 1.2 * tables + 20 * shape.vocabulary, ms=ms)

    least = dict.fromkeys(WHOLE.stacks, StackShape(layers=1, neurons=0.25))
    return Estimate(WEIGHTS, [(shape, cost(shape)) for shape in probes(WHOLE, least, 50, 4).values()])


def test_prices_that_are_linear_are_found_exactly():
    shape = Shape(
        stacks={"encoder": StackShape(layers=2, neurons=0.5), "decoder": StackShape(layers=1)}, vocabulary=75, rank=8
    )
    weights = 2 * (800 * 0.5 + 400) + 1 * (800 + 700)
    tables = 8 * (75 + 16)
    found = estimate().cost(shape)
    assert found.bytes == pytest.approx(900 + 50 * 3 + 1.1 * weights + 1.2 * tables + 20 * 75, rel=1e-6)
    assert found.ms == pytest.approx(0.3 + 0.3 + 1e-4 * weights + 1e-5 * tables, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.9, 0.6, 0.45])
def test_the_allocation_is_the_best_of_all_shapes(seed, share):
    losses = Losses(measured=measured(seed), tokens={100: 500.0, 50: 620.0}, remains={"layers": 0.3})
    prices = estimate()
    whole = prices.cost(WHOLE)
    limit = Cost(bytes=share * whole.bytes, ms=share * whole.ms)
    best = np.inf
    stacks = [options_of_stack(losses.measured, name) for name in WHOLE.stacks]
    for encoder, decoder, tokens, rank in itertools.product(*stacks, (100, 50), (None, 8, 4)):
        shape = Shape(stacks={"encoder": encoder, "decoder": decoder}, vocabulary=tokens, rank=rank)
        cost = prices.cost(shape)
        if cost.bytes <= limit.bytes and cost.ms <= limit.ms:
            loss = losses.of_stack("encoder", encoder) + losses.of_stack("decoder", decoder)
            best = min(best, loss + losses.of_tables(tokens, rank))
    shape, loss = allocate(WHOLE, losses, prices, limit)
    assert loss == pytest.approx(best)
    cost = prices.cost(shape)
    assert cost.bytes <= limit.bytes
    assert cost.ms <= limit.ms


def test_no_shape_is_found_below_the_smallest():
    losses = Losses(measured=measured(), tokens={100: 500.0, 50: 620.0}, remains={})
    prices = estimate()
    least = prices.cost(smallest(WHOLE, losses, prices, "bytes")).bytes
    assert allocate(WHOLE, losses, prices, Cost(bytes=least * 1.001)) is not None
    assert allocate(WHOLE, losses, prices, Cost(bytes=least * 0.999)) is None


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    with torch.no_grad():  # layer 2 adds nothing to its input
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    ids = torch.randint(0, 50, (4, 12))
    return model, [{"input_ids": ids, "labels": ids}]


def test_a_layer_that_does_nothing_goes_first_and_costs_nothing(llama):
    model, batches = llama
    found = sensitivity(model, batches)
    assert found.removal["decoder"][0] == 2
    assert found.layers["decoder"][3] == pytest.approx(found.loss, abs=1e-3)
    loss, labels = total_loss(model, batches)
    assert (
        (found.loss, found.labels)
        == (loss, labels)
        == (pytest.approx(model(**batches[0]).loss.item() * 44, rel=1e-4), 44)
    )


def test_the_methods_of_a_shape_name_the_layers_that_are_left(llama):
    model, batches = llama
    found, architecture = sensitivity(model, batches), architecture_for(model)
    whole = whole_shape(architecture, model.config, 50)
    shape = Shape(stacks={"decoder": StackShape(layers=2, neurons=0.5, heads=0.5)}, vocabulary=50)
    methods = methods_of(shape, found, architecture, model.config, uniform=True)
    assert [method["method"] for method in methods] == ["layer_selection", "head_pruning", "ffn_pruning"]
    small = make_variant(model, [method_from_dict(method) for method in methods])
    assert [layer.mlp.gate_proj.out_features for layer in small.model.layers] == [32, 32]
    with torch.no_grad():
        assert torch.isfinite(small(**batches[0]).loss)
    assert shape.words(whole) == "decoder 2 of 4 layers, 50% of the neurons, 50% of the heads"


def test_budgets_are_read_and_refused():
    assert [read_bytes(text) for text in ("2MB", "500 kB", "1.5MiB", "12")] == [2_000_000, 500_000, 1_572_864, 12]
    assert in_bytes(1_903_000) == "1.90 MB"
    assert Budget(max_bytes="2MB") == Budget(max_bytes=2_000_000)
    with pytest.raises(ValueError, match=r"'2 mb' is no number of bytes; write it as 2MB"):
        Budget(max_bytes="2 mb")
    with pytest.raises(ValueError, match=r"max_bytes=0: must be above 0"):
        Budget(max_bytes="0kB")
    with pytest.raises(ValueError, match=r"max_ms=0: must be above 0"):
        Budget(max_ms=0)
    with pytest.raises(ValueError, match=r"give max_bytes, max_ms or both"):
        Budget(min_score=30.0)
    assert Budget(max_bytes=100, max_ms=2.0).excess(101, 2.5) == ["0.1 kB of 0.1 kB", "2.50 ms of 2 ms"]


def test_shapes_leave_some_time_free():
    assert Budget(max_bytes=100, max_ms=2.0).with_reserve() == Budget(max_bytes=100, max_ms=1.9)
    assert Budget(max_bytes=100).with_reserve() == Budget(max_bytes=100)


@pytest.mark.parametrize(("times", "kept"), [([2.0], 2.0), ([2.2, 1.9], 1.9), ([2.2, 2.1, 2.3], None)])
def test_a_result_above_the_limit_of_time_is_measured_again(times, kept, tmp_path):
    left, said = list(times), []
    bench = object.__new__(Bench)
    bench._budget, bench._say = Budget(max_ms=2.0), said.append
    bench.milliseconds = lambda folders: {"whole": 4.0, "served": left.pop(0)}
    if kept is None:
        with pytest.raises(ValueError, match=r"misses the budget: 2\.10 ms of 2 ms, in the shortest of 3 measurements"):
            bench.times_at_the_end(tmp_path, tmp_path)
    else:
        assert bench.times_at_the_end(tmp_path, tmp_path) == {"whole": 4.0, "served": kept}
    assert len(said) == sum(time > 2.0 for time in times)
    assert not left


def test_phases_are_kept_and_another_compression_is_refused(tmp_path):
    calls = []
    for _ in range(2):
        phases = Phases(tmp_path, {"seed": 1})
        assert phases.once("one", lambda: calls.append(1) or {"a": [1.5]}) == {"a": [1.5]}
    assert calls == [1]
    with pytest.raises(ValueError, match=r"holds another compression \(seed was 1, now 2\); choose another --out"):
        Phases(tmp_path, {"seed": 2})
    (tmp_path / "phases.json").write_text("{")
    with pytest.raises(ValueError, match=r"is damaged"):
        Phases(tmp_path, {"seed": 1})
