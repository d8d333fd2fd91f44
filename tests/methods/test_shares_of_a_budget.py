"""`share="auto"`: heads and neurons share one budget, those that cost least go, and the file knows what stayed."""

import itertools

import pytest
import torch
from methods.test_calibrated_methods import batches
from support.models import perturbed
from support.small import small_config
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5GemmaConfig

from hf_freeze import analysis, make_variant
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.methods import FFNPruning, HeadPruning, LowRank
from hf_freeze.methods.budget import Competing, share_budget
from hf_freeze.surgery import effective_weight

AUTO = [HeadPruning(share="auto"), FFNPruning(share="auto")]
MODELS = {"gpt2": AutoModelForCausalLM, "marian": AutoModelForSeq2SeqLM}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return perturbed(MODELS[request.param].from_config(small_config(request.param))).eval()


def weights_of_blocks(model):
    """The numbers in the matrices of attentions and FFNs."""
    architecture = architecture_for(model)
    linears = [name for attention in architecture.attentions(model.config).values() for name in attention.linears]
    return weights_of_ffns(model) + sum(
        effective_weight(model.base_model.get_submodule(name)).numel() for name in linears
    )


def weights_of_ffns(model):
    linears = [name for names in architecture_for(model).ffns(model.config).values() for name in names]
    return sum(effective_weight(model.base_model.get_submodule(name)).numel() for name in linears)


@pytest.mark.parametrize("budget", [0.9, 0.6])
def test_the_budget_is_met_and_the_file_names_what_stays(model, budget, tmp_path):
    small = make_variant(model, AUTO, calibration=batches(model), budget=budget).eval()

    left = weights_of_blocks(small) / weights_of_blocks(model)
    assert budget - 0.1 < left <= budget  # within one head of a tiny model
    assert "auto" not in str(small.config.methods)
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path).eval()
    batch = batches(model)[0]
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, small(**batch).logits)


def test_neurons_that_do_nothing_go_and_heads_stay(model):
    """A quarter of the neurons of each FFN reads and writes nothing: to lose them costs nothing."""
    architecture = architecture_for(model)
    model, dead = type(model)(model.config).eval(), 0
    with torch.no_grad():
        for names in architecture.ffns(model.config).values():
            linear = model.base_model.get_submodule(names[-1])

            inputs_first = type(linear).__name__ == "Conv1D"
            columns = linear.weight.T if inputs_first else linear.weight  # (O, I)
            gone = columns.shape[1] // 4 // 8 * 8
            columns[:, :gone] = 0
            dead += (
                gone
                * sum(effective_weight(model.base_model.get_submodule(n)).numel() for n in names)
                / columns.shape[1]
            )
    budget = 1 - dead / weights_of_blocks(model)

    small = make_variant(model, AUTO, calibration=batches(model), budget=budget).eval()

    heads, neurons = small.methods
    assert heads.share == 1
    assert all(kept == list(range(gone, columns.shape[1])) for kept in neurons.keep.values())
    batch = batches(model, seed=2)[0]
    with torch.no_grad():
        assert torch.allclose(small(**batch).logits, model(**batch).logits, atol=1e-4)


class Costs:
    """In place of a method: one part with given costs."""

    share = "auto"

    def __init__(self, name, losses, size=1.0):
        self.name, self.losses, self.size = name, losses, size

    def competing(self, old, architecture, statistics):
        return {self.name: Competing(self.losses, 3, 1, self.size, kept=lambda count: list(range(count)))}

    def keeping(self, kept, old, architecture):
        return 4 - len(kept[self.name])


@pytest.mark.parametrize("budget", [0.9, 0.75, 0.5, 0.4])
def test_the_sum_of_losses_is_the_least_of_all_ways(budget):
    torch.manual_seed(0)
    costs = [[0.0, *torch.rand(4).sort()[0].cumsum(0).tolist()] for _ in range(2)]  # convex
    methods = [Costs(*part) for part in enumerate(costs)]
    first, removal = share_budget(methods, budget, None, None, None, None)
    second, removal = share_budget(methods[1:], budget, None, None, None, removal)
    assert removal <= 0
    wanted = -(-round((1 - budget) * 8, 9) // 1)
    ways = [way for way in itertools.product(range(4), repeat=2) if sum(way) == wanted]
    assert (first, second) == min(ways, key=lambda way: costs[0][way[0]] + costs[1][way[1]])


@pytest.mark.parametrize(
    ("methods", "given", "message"),
    [
        (AUTO, {"calibration": True}, r"head_pruning\(share='auto'\): give a budget, the share of weights"),
        (AUTO, {"budget": 0.5}, r"budget=0.5: what heads and neurons are worth, texts tell: give calibration="),
        (AUTO, {"budget": 1.5, "calibration": True}, r"budget=1.5: must be a share in \(0, 1\]"),
        (AUTO, {"budget": True, "calibration": True}, r"budget=True: must be a share in \(0, 1\]"),
        (AUTO, {"budget": 0.01, "calibration": True}, r"budget=0.01: share='auto' can leave no less than 0\.\d+ of"),
        ([AUTO[1]] * 2, {"budget": 0.5, "calibration": True}, r"2 methods with share='auto' cut 'decoder.0.ffn': leave one"),
        ([AUTO[0], LowRank(rank=4), AUTO[1]], {"budget": 0.5, "calibration": True}, r"low_rank stands between methods with"),
        ([LowRank(rank=4)], {"budget": 0.5, "calibration": True}, r"budget=0.5 shares out what methods with share='auto'"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(methods, given, message):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("gpt2"))
    given = given | ({"calibration": batches(model)} if "calibration" in given else {})
    with pytest.raises(ValueError, match=message):
        make_variant(model, methods, **given)


def test_a_saved_calibration_and_a_training_are_refused():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("gpt2"))
    saved = analysis.calibrate(model, batches(model))
    with pytest.raises(ValueError, match="gradients, which a saved calibration does not have: give texts"):
        make_variant(model, AUTO, calibration=saved, budget=0.5)
    with pytest.raises(ValueError, match=r"share='auto'\): is decided before training: leave begin and end out"):
        HeadPruning(share="auto", end=0.5)


def test_alone_it_is_the_share_of_its_own_parts(model):
    texts = batches(model)
    alone = make_variant(model, [FFNPruning(share="auto")], calibration=texts, budget=0.5).eval()
    share = make_variant(model, [FFNPruning(share=0.5)], calibration=texts).eval()
    assert alone.methods == share.methods


@pytest.mark.parametrize("methods", [AUTO, AUTO[1:]])
def test_units_of_different_sizes_count_by_their_weights(methods):
    """Neurons of one stack have four times the weights of those of the other."""
    torch.manual_seed(0)
    small = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4, "query_pre_attn_scalar": 8}
    config = T5GemmaConfig(encoder=small, decoder=small | {"hidden_size": 64}, vocab_size=40)
    model = perturbed(AutoModelForSeq2SeqLM.from_config(config)).eval()
    texts = [{"input_ids": torch.randint(3, 40, (8, 9)), "decoder_input_ids": torch.randint(3, 40, (8, 9))}]
    cut = make_variant(model, methods, calibration=texts, budget=0.6)
    parts = weights_of_blocks if methods is AUTO else weights_of_ffns
    assert 0.54 < parts(cut) / parts(model) <= 0.6


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config("gpt2"))
    with pytest.raises(
        ValueError, match=r"HeadPruning\(share='auto', scope='attention'\): a calibration compares heads"
    ):
        make_variant(model, AUTO, calibration=[{"input_ids": torch.ones(1, 4, dtype=torch.long)}], budget=0.5)
