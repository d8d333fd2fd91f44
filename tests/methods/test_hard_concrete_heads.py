"""HeadPruning by hard concrete gates: their distribution, penalty and gradient, and what is removed at the end."""

import math

import pytest
import torch
from support.deep import each_architecture
from support.models import differences, outputs
from support.training import objective
from test_gradual_heads import MARIAN, modules_of, wide_config, wide_model
from transformers import AutoConfig

from hf_freeze import make_variant
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.hard_concrete import HardConcrete
from hf_freeze.methods import FixedAttention, Freeze, HeadPruning, LayerSelection, LayerSharing
from hf_freeze.training import parameter_groups

GATED = HeadPruning(penalty=0.05)


def hard_concrete(log_alphas):
    """A layer with these log α."""
    module = HardConcrete.from_linear(torch.nn.Linear(2 * len(log_alphas), 3), len(log_alphas))
    module.log_alpha.data = torch.tensor(log_alphas)
    return module


def test_gates_have_the_distribution_of_the_paper():
    """Equations 5 to 7, from uniform noise: the share of zeros and of ones, the mean, and quantiles."""
    log_alphas, count = [-3.0, -1.0, 0.0, 0.7, 2.5], 40000
    torch.manual_seed(1)
    drawn = hard_concrete([log_alpha for log_alpha in log_alphas for _ in range(count)]).drawn_gates()
    drawn, module = drawn.detach().double().view(-1, count).T, hard_concrete(log_alphas)
    grid = (torch.arange(200000, dtype=torch.float64) + 0.5) / 200000
    for number, log_alpha in enumerate(log_alphas):
        s = torch.sigmoid((grid.logit() + log_alpha) / 0.33)
        expected = (s * 1.2 - 0.1).clamp(0, 1)
        own = drawn[:, number]
        for found, wanted in (
            ((own == 0).double().mean(), (expected == 0).double().mean()),
            ((own == 1).double().mean(), (expected == 1).double().mean()),
            (own.mean(), expected.mean()),
            (own.quantile(0.3), expected.quantile(0.3)),
        ):
            assert float(found) == pytest.approx(float(wanted), abs=0.025)
        closed = float((expected == 0).double().mean())
        assert float(module.open_probabilities()[number]) == pytest.approx(1 - closed, abs=1e-4)
        noiseless = min(max(1.2 / (1 + math.exp(-log_alpha)) - 0.1, 0), 1)
        assert float(module.gates()[number]) == pytest.approx(noiseless, abs=1e-6)


@each_architecture
def test_the_penalty_and_its_gradient(architecture):
    """λ times the expected number of open heads, beside the loss; by finite differences, with the noise held."""
    native, batch = wide_model(architecture)
    model = make_variant(native, [GATED]).train()
    with torch.no_grad():
        for number, module in enumerate(modules_of(model).values()):
            module.log_alpha.copy_(torch.linspace(-1.5, 1.0, module.log_alpha.numel()) + 0.1 * number)
    group = next(iter(architecture.attentions(model.config).values())).group_size(model.config)
    expected = (
        0.05
        * group
        * sum(
            1 / (1 + math.exp(-(log_alpha + 0.33 * math.log(11))))
            for m in modules_of(model).values()
            for log_alpha in m.log_alpha.tolist()
        )
    )
    assert float(model.auxiliary_loss()) == pytest.approx(expected, rel=1e-5)
    assert sum(m.log_alpha.numel() for m in modules_of(model).values()) * group == 4 * len(modules_of(model))

    def loss():
        torch.manual_seed(3)
        return objective(model, batch)

    loss().backward()
    for module in list(modules_of(model).values())[::3]:
        for number, gradient in enumerate(module.log_alpha.grad.tolist()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    module.log_alpha[number] += sign * 5e-3
                    values.append(
                        float(loss() + model.auxiliary_loss())
                    )  # which a forward without gradients leaves out
                    module.log_alpha[number] -= sign * 5e-3
            assert gradient == pytest.approx((values[0] - values[1]) / 1e-2, rel=0.03, abs=2e-3)


@each_architecture
def test_closed_heads_are_removed_and_open_ones_multiplied(architecture, tmp_path):
    native, batch = wide_model(architecture)
    model = make_variant(native, [GATED])
    assert differences(outputs(model, batch), outputs(native, batch), 1e-6) == []
    expected_heads = {}
    with torch.no_grad():
        for number, (name, module) in enumerate(modules_of(model).items()):
            count = module.log_alpha.numel()
            module.log_alpha.copy_(torch.tensor([-3.0, 0.5, 3.0, 1.0][:count]))
            each = 4 // count
            expected_heads[name] = list(range(each))
            if number == 1 and architecture is MARIAN:  # one attention loses them all
                module.log_alpha.fill_(-3.0)
                expected_heads[name] = [0, 1, 2, 3]
    assert any(float(gate) not in (0, 1) for module in modules_of(model).values() for gate in module.gates())
    expected = outputs(model, batch)
    model.save_pretrained(tmp_path / "trained")
    again = AUTO_CLASSES[architecture.tasks[0]].from_pretrained(tmp_path / "trained")
    assert differences(outputs(again, batch), expected) == []
    assert differences(outputs(model.merge(), batch), expected, 1e-5) == []
    model.finalize()
    assert model.methods == [HeadPruning(heads=expected_heads)]
    assert model.auxiliary_loss() is None
    assert differences(outputs(model, batch), expected, 1e-5) == []
    model.save_pretrained(tmp_path / "final")
    again = AUTO_CLASSES[architecture.tasks[0]].from_pretrained(tmp_path / "final")
    assert differences(outputs(again, batch), outputs(model, batch)) == []
    assert differences(outputs(again.merge(), batch), expected, 1e-5) == []


@pytest.mark.parametrize(("penalty", "left"), [(0.0, 24), (3.0, 0)])
def test_the_penalty_decides_how_many_are_left(penalty, left):
    native, batch = wide_model(MARIAN)
    model = make_variant(
        native,
        [Freeze(embeddings="frozen", attention="frozen", ffn="frozen", norm="frozen"), HeadPruning(penalty=penalty)],
    )
    for module in modules_of(model).values():
        module.log_alpha.requires_grad_(True)
    optimizer = torch.optim.Adam([m.log_alpha for m in modules_of(model).values()], lr=0.2 if penalty else 0.0)
    for _ in range(40):
        optimizer.zero_grad()
        objective(model.train(), batch).backward()
        optimizer.step()
    assert sum(len(module.kept()) for module in modules_of(model).values()) == left
    expected = outputs(model, batch)
    model.finalize()
    assert differences(outputs(model, batch), expected, 1e-5) == []
    assert model.methods[1] == (
        HeadPruning(share=1.0) if left else HeadPruning(heads={n: [0, 1, 2, 3] for n in modules_of(model)})
    )


def test_an_attention_with_a_norm_keeps_the_head_that_was_open_most_often():
    qwen = AutoConfig.for_model(
        "qwen3",
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=4,
    )
    model = make_variant(qwen, [GATED], task="causal-lm")
    with torch.no_grad():
        for module in modules_of(model).values():
            module.log_alpha.copy_(torch.tensor([-4.0, -3.5, -3.0, -5.0]))
    model.finalize()
    assert model.methods == [HeadPruning(heads={f"decoder.{n}.self": [0, 1, 3] for n in range(2)})]


def test_gates_have_a_learning_rate_of_their_own():
    model = make_variant(wide_model(MARIAN)[0], [GATED])
    (group,) = (
        g for g in parameter_groups(model, {"gates": 0.5}, lr=0.1, weight_decay=0.1) if g["component"] == "gates"
    )
    assert len(group["params"]) == 6
    assert group["weight_decay"] == 0


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (lambda: [HeadPruning(penalty=-1.0)], r"HeadPruning\(penalty=-1\.0\): must be a number in 0\.\.1e\+09"),
        (lambda: [HeadPruning(penalty=0.1, share=0.5)], r"heads=None, share=0\.5, penalty=0\.1\): give one of them"),
        (
            lambda: [HeadPruning(penalty=0.1, end=0.5)],
            r"end=0\.5\): is for heads that are removed during training: give share",
        ),
        (lambda: [GATED, FixedAttention()], "is a HardConcreteLinear already"),
        (lambda: [GATED, LayerSelection(share=0.5)], r"names layers by number.*or finalize\(\) before"),
        (lambda: [GATED, LayerSharing()], r"cannot keep a mask or score each.*or finalize\(\) before"),
        (lambda: [GATED, Freeze(attention={"q": "random"})], r"finalize\(\) before"),
    ],
)
def test_what_does_not_fit_is_refused(methods, message):
    with pytest.raises(ValueError, match=message) as refused, torch.device("meta"):
        make_variant(wide_config(MARIAN), methods(), task="seq2seq-lm")
    assert "\n" not in str(refused.value)
