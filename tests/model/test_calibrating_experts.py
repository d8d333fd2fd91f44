"""What the pass says that experts of a mixture see, and what FFNPruning makes of it: against brute force, and on other texts."""

import copy
import functools
import warnings

import pytest
import torch
from support.experts import seen_by_experts
from support.models import differences, perturbed
from support.small import small_config
from transformers import AutoModelForCausalLM

from hf_freeze import make_variant
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.methods import FFNPruning
from hf_freeze.model.calibrating import CalibrationPass, collect
from hf_freeze.model.calibration import Calibration, Report, calibrated_linears
from hf_freeze.model.convert import convert
from hf_freeze.model.fidelity import fidelity_on
from hf_freeze.solvers.columns import refit
from hf_freeze.solvers.moments import RIDGE
from hf_freeze.surgery import linear_at

# Those of qwen2_moe have a shared expert with a gate beside them, those of deepseek_v2 one without and a dense layer before them;
# in jamba and nemotron_h, they are in some layers only; in nemotron_h, they have no gate.
FAMILIES = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "jamba", "nemotron_h"]
WIDTH = 16


@functools.cache
def model_of(model_type, **changes):
    torch.manual_seed(0)
    return perturbed(AutoModelForCausalLM.from_config(small_config(model_type, **changes))).eval()


def batches(model, seed=1, rows=24):
    """Texts of which few tokens make most, the last of another length, with padding on the right."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.arange(1, min(model.config.vocab_size, 30)).float().reciprocal()
    result = []
    for length in (12, 9):
        ids = torch.multinomial(likely, rows * length, replacement=True, generator=generator).view(rows, length)
        mask = torch.ones_like(ids)
        mask[::3, -4:] = 0
        result.append({"input_ids": ids, "attention_mask": mask})
    return result


def alone(batches):
    """The same texts, each without padding."""
    rows = [
        (ids, mask) for batch in batches for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return [{"input_ids": ids[mask.bool()][None]} for ids, mask in rows]


def modules(model):
    return list(architecture_for(model).experts(model.config).values())


def assert_near(moments, x, weights, y=None):
    shares = (weights / weights.sum())[:, None]
    assert moments.count == len(x)
    torch.testing.assert_close(moments.gram, x.T @ (shares * x), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(moments.mean, (shares * x).sum(0), rtol=1e-3, atol=1e-5)
    if y is not None:
        torch.testing.assert_close(moments.cross, y.T @ (shares * x), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(moments.output_square, (shares * y * y).sum(0), rtol=1e-3, atol=1e-4)


# -- what experts see --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_at_once(model_type):
    model, texts = model_of(model_type), batches(model_of(model_type), rows=3)
    moments = collect(model, texts).moments
    assert modules(model)
    for module in modules(model):
        for number, seen in enumerate(seen_by_experts(model, alone(texts), module)):
            name = f"{module}.down_proj.{number}"
            assert (name in moments) == (len(seen.factors) > 0)
            if name in moments:
                assert_near(moments[name], seen.x, seen.factors.square())


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_every_implementation_of_experts(implementation):
    model, texts = model_of("mixtral"), batches(model_of("mixtral"), rows=3)
    other = copy.deepcopy(model)
    other.set_experts_implementation(implementation)
    expected = collect(model, texts).moments
    for name, each in collect(other, texts).moments.items():
        torch.testing.assert_close(each.gram, expected[name].gram, rtol=1e-4, atol=1e-6)


def walked(old, new, texts, module, *, streams=True):
    statistics = CalibrationPass(old, new, texts, Report(), lambda *_: old)
    if not streams:
        statistics.streams.start = lambda stack: False
    names = [name for name in calibrated_linears(old) if name.startswith(f"{module}.")]
    with statistics.running():
        (moments,) = statistics.walk(names, {name: [module] for name in names})
    return moments


@pytest.fixture
def pair():
    """A model, one that it has become before its last layer, the latter with the experts of the former there, and their name."""
    old = model_of("mixtral")
    new, module = copy.deepcopy(old), modules(old)[-1]
    with torch.no_grad():
        new.base_model.layers[0].self_attn.o_proj.weight.mul_(0.7)
        new.base_model.get_submodule(module).down_proj.zero_()  # may have no values when it is asked for
    mixed = copy.deepcopy(new)
    mixed.base_model.set_submodule(module, old.base_model.get_submodule(module))
    return old, new, mixed, module


@torch.no_grad()
def last_states(model, texts):
    """(T, H) what leaves the last layer."""
    seen = []
    handle = model.base_model.layers[-1].register_forward_hook(lambda layer, args, output: seen.append(output[0]))
    for text in texts:
        model(**text)
    handle.remove()
    return torch.cat(seen).double()


def test_what_is_solved_is_the_least_squares_on_raw_activations(pair):
    """The experts of a token give what the states lack in proportion to their factors. `torch.linalg.lstsq` on the rows of each
    expert, times the roots of their weights, finds the same matrix."""
    old, new, mixed, module = pair
    texts = batches(old)
    moments = walked(old, new, texts, module)
    states = last_states(old, alone(texts))
    lacking = states - last_states(mixed, alone(texts))
    seen = seen_by_experts(mixed, alone(texts), module)
    squares = torch.zeros(len(states), dtype=torch.float64)
    for one in seen:
        squares.index_add_(0, one.tokens, one.factors.square())
    kept = list(range(0, 40, 3))
    for number, one in enumerate(seen):
        wanted = one.y + lacking[one.tokens] * (one.factors / squares[one.tokens])[:, None]
        weights = one.factors.square() / states[one.tokens].square().mean(1)
        name = f"{module}.down_proj.{number}"
        assert_near(moments[name], one.x, weights, wanted)
        matrix = linear_at(old, name).weight.detach().double()
        x, y = (weights.sqrt()[:, None] * rows for rows in (one.x, wanted))
        strength = (RIDGE * x.square().sum(0).mean()).sqrt()  # rows that draw to the matrix as it was
        rows = torch.cat([x, strength * torch.eye(x.shape[1])])[:, kept]
        expected = torch.linalg.lstsq(rows, torch.cat([y, strength * matrix.T]), driver="gelsd").solution.T
        torch.testing.assert_close(refit(matrix, None, moments[name], kept)[0], expected, rtol=1e-3, atol=1e-3)


def test_where_the_whole_model_runs_each_expert_gives_what_it_gave(pair):
    """For the tokens that it has now, also those that the model before gives to others."""
    old, new, mixed, module = pair
    texts = batches(old, rows=6)
    moments = walked(old, new, texts, module, streams=False)
    inputs = [states_into(model, alone(texts), module) for model in (old, mixed)]
    experts = old.base_model.get_submodule(module)
    assert not torch.equal(*(index for _, index in inputs))
    for number, one in enumerate(seen_by_experts(mixed, alone(texts), module)):
        gate, up = (inputs[0][0][one.tokens] @ experts.gate_up_proj[number].T).chunk(2, 1)
        y = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[number].T
        assert_near(moments[f"{module}.down_proj.{number}"], one.x, one.factors.square(), y.detach().double())


@torch.no_grad()
def states_into(model, texts, module):
    """(T, H), (T, k) of experts"""
    seen = []
    handle = model.base_model.get_submodule(module).register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    for text in texts:
        model(**text)
    handle.remove()
    return [torch.cat(values) for values in zip(*seen, strict=True)]


# -- what is made of it ------------------------------------------------------------------------------------------------------


def variant(model, *methods, texts=None):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="few tokens|.* keeps all neurons")
        return make_variant(model, list(methods), calibration=texts).eval()


def error(model, other):
    return fidelity_on(model, other, batches(model, seed=7)).error


@pytest.mark.parametrize("model_type", FAMILIES)
def test_outputs_are_nearer_on_other_texts(model_type):
    model, method = model_of(model_type), FFNPruning(expert_width=WIDTH)
    plain, calibrated = (variant(model, method, texts=texts) for texts in (None, batches(model)))
    assert error(model, calibrated) < 0.8 * error(model, plain)
    assert {name: tuple(value.shape) for name, value in plain.state_dict().items()} == {
        name: tuple(value.shape) for name, value in calibrated.state_dict().items()
    }
    errors = calibrated.calibration_report.errors
    assert len(errors) == sum(len(model.base_model.get_submodule(module).down_proj) for module in modules(model))
    assert all(after < before for before, after in errors.values())


def test_neurons_that_are_copies_go_without_a_loss():
    """Magnitude keeps the larger one of a pair, and nobody adds what the other one gave."""
    model = copy.deepcopy(model_of("qwen3_moe"))
    with torch.no_grad():
        for module in modules(model):
            experts = model.base_model.get_submodule(module)
            half = experts.down_proj.shape[2] // 2 // 8 * 8
            for part in experts.gate_up_proj.chunk(2, dim=1):
                part[:, half : 2 * half] = part[:, :half]
            experts.down_proj[:, :, 2 * half :] = 0
    method = FFNPruning(expert_width=half)
    plain, calibrated = (variant(model, method, texts=texts) for texts in (None, batches(model)))
    assert error(model, calibrated) < 0.01 * error(model, plain)


def test_all_neurons_are_the_same_model():
    model = model_of("mixtral")
    width = model.base_model.get_submodule(modules(model)[0]).down_proj.shape[2]
    same = variant(model, FFNPruning(expert_width=width), texts=batches(model))
    assert differences(same.state_dict(), model.state_dict(), tolerance=1e-4) == []


def test_neurons_that_are_named_are_refitted():
    model = model_of("mixtral")
    lists = [sorted(torch.randperm(40)[:WIDTH].tolist()) for _ in range(4)]
    method = FFNPruning(keep={"decoder.1.experts": lists})
    plain, calibrated = (variant(model, method, texts=texts) for texts in (None, batches(model)))
    one, other = (each.base_model.layers[1].mlp.experts for each in (plain, calibrated))
    assert torch.equal(one.gate_up_proj, other.gate_up_proj)
    assert not torch.equal(one.down_proj, other.down_proj)
    assert error(model, calibrated) < error(model, plain)


@pytest.fixture(scope="module")
def with_idle():
    """A model of one expert for each token, whose router never chooses expert 2."""
    model = copy.deepcopy(model_of("mixtral", num_experts_per_tok=1))
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.mlp.gate.weight[2] = layer.mlp.gate.weight[:2].mean(0)
    return model


@pytest.mark.parametrize("saved", [False, True])
def test_an_expert_without_tokens_is_cut_by_magnitude(with_idle, saved, tmp_path):
    method, texts = FFNPruning(expert_width=WIDTH), batches(with_idle)
    if saved:
        collect(with_idle, texts).save(tmp_path / "saved")
    calibration = Calibration.load(tmp_path / "saved") if saved else texts
    message = r"cut as without: 'layers.0.mlp.experts': 2; 'layers.1.mlp.experts': 2$"
    with pytest.warns(UserWarning, match=message) as warned:
        calibrated = make_variant(with_idle, [method], calibration=calibration)
    assert len([each for each in warned if "experts" in str(each.message)]) == 1
    plain = make_variant(with_idle, [method])
    for one, other in zip(plain.base_model.layers, calibrated.base_model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            before, after = (layer.mlp.experts.get_parameter(name) for layer in (one, other))
            assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [False, False, True, False]


def test_too_few_tokens_are_no_calibration():
    """Each expert has 40 neurons, and sees fewer than 10 tokens."""
    model, method = model_of("mixtral"), FFNPruning(expert_width=WIDTH)
    text = [{"input_ids": torch.tensor([[5, 9, 3, 7]])}]
    with pytest.warns(UserWarning, match=r"no or too few tokens .* 'layers.0.mlp.experts': 0, 1, 2, 3; 'layers.1"):
        calibrated = make_variant(model, [method], calibration=text)
    assert differences(calibrated.state_dict(), make_variant(model, [method]).state_dict()) == []


def test_convert_writes_what_make_variant_makes(tmp_path):
    model, method, texts = model_of("mixtral"), FFNPruning(expert_width=WIDTH), batches(model_of("mixtral"))
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", [method], calibration=texts, max_shard_size="40KB")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = variant(model, method, texts=texts)
    assert differences(written.state_dict(), expected.state_dict(), tolerance=1e-3) == []


def test_a_saved_calibration_is_worth_its_texts():
    model, method = model_of("mixtral"), FFNPruning(expert_width=WIDTH)
    saved = variant(model, method, texts=collect(model, batches(model)))
    assert error(model, saved) < 0.8 * error(model, variant(model, method))


def test_a_share_is_for_ffns_that_are_no_experts():
    model = model_of("mixtral")
    message = (
        r"FFNPruning\(share=0.5\): this mixtral has no FFNs of plain linears in these layers; experts take expert_width"
    )
    with pytest.raises(ValueError, match=message):
        make_variant(model, [FFNPruning(share=0.5)], calibration=batches(model))
