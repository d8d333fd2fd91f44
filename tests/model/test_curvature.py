"""The Fisher information of outputs of linears, against that of a softmax model in which all can be computed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from hf_freeze.model import curvature
from hf_freeze.model.curvature import curvatures

INPUTS, HIDDEN, CLASSES = 3, 4, 3


class Tiny(nn.Module):
    """One hidden layer, from pictures of one token; logits, or states."""

    device = torch.device("cpu")
    config = SimpleNamespace(is_encoder_decoder=False)

    def __init__(self, kind="logits"):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.idle = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES), nn.Linear(2, 2)
        self.kind = kind

    def forward(self, x, attention_mask=None, error=None):
        hidden = self.inner(x)
        return ModelOutput({self.kind: self.outer(torch.tanh(hidden if error is None else hidden + error))})


def batch(rows, tokens=5):
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, tokens, INPUTS, generator=generator),
        "attention_mask": (torch.arange(tokens) < 3).long().expand(rows, tokens),
    }


def estimated(model, rows, monkeypatch):
    monkeypatch.setattr(curvature, "_ROWS", rows)
    return curvatures(model, [batch(rows)], {name: getattr(model, name) for name in ("inner", "outer", "idle")})


def test_of_logits_it_is_the_fisher_information(monkeypatch):
    """Of logits diag(p) - p pᵀ, the mean over real tokens; of the hidden layer Jᵀ of these J."""
    model = Tiny()
    found = estimated(model, 8000, monkeypatch)
    x = batch(8000)["x"][:, :3].reshape(-1, INPUTS)
    hidden = model.inner(x).detach()
    p = model.outer(torch.tanh(hidden)).softmax(-1).detach().double()
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    slope = model.outer.weight.detach().double() * (1 - torch.tanh(hidden) ** 2).double()[:, None]  # (T, C, H)
    expected = {"outer": fisher.mean(0), "inner": (slope.mT @ fisher @ slope).mean(0)}
    assert found.keys() == expected.keys(), "idle has not run"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.01 * float(value.abs().max()))


def test_half_the_square_of_an_error_is_the_divergence(monkeypatch):
    """Against the KL that finite errors in the hidden layer cause."""
    model, texts = Tiny().double(), batch(8000)
    texts["x"] = texts["x"].double()
    monkeypatch.setattr(curvature, "_ROWS", 8000)
    fisher = curvatures(model, [texts], {"inner": model.inner})["inner"]
    real = texts["attention_mask"].bool()
    for error in 1e-2 * torch.eye(HIDDEN, dtype=torch.float64):
        with torch.no_grad():
            p, q = (model(**texts, error=each).logits[real].log_softmax(-1) for each in (None, error))
        kl = float((p.exp() * (p - q)).sum(-1).mean())
        assert float(error @ fisher @ error) / 2 == pytest.approx(kl, rel=0.05)


def test_of_states_it_is_that_of_their_squared_error(monkeypatch):
    """Jᵀ J of the states, the mean over tokens."""
    model = Tiny("last_hidden_state")
    found = estimated(model, 8000, monkeypatch)
    torch.testing.assert_close(found["outer"], torch.eye(CLASSES).double(), rtol=0, atol=0.03)


def test_the_same_draws_again_and_the_generator_left_as_it_was(monkeypatch):
    model = Tiny()
    torch.manual_seed(5)
    one, drawn = estimated(model, 4, monkeypatch), torch.rand(1)
    torch.manual_seed(5)
    other = estimated(model, 4, monkeypatch)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize(("part", "whose"), [("inner", "'inner'"), ("outer", "the model")])
def test_outputs_that_are_not_finite(part, whose):
    model = Tiny()
    with torch.no_grad():
        getattr(model, part).bias[0] = float("nan")
    with pytest.raises(ValueError, match=f"the outputs of {whose} are not finite"):
        curvatures(model, [batch(2)], {"inner": model.inner})
