"""A method that changes the structure: what `restructure`, `convert` and `merge` promise, shown on a small low-rank FFN."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from hf_freeze import count_parameters, make_variant, methods, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods.base import Facts, Method
from hf_freeze.methods.registry import METHODS, register_method

CELLS = [(a, task) for a in ARCHITECTURES.values() for task in a.tasks[:1]]
every_architecture = pytest.mark.parametrize(("architecture", "task"), CELLS, ids=[a.model_type for a, _ in CELLS])


class Factors(nn.Module):
    def __init__(self, dense, rank):
        super().__init__()
        outputs, inputs = matrix(dense).shape
        self.dense_class = type(dense)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=dense.bias is not None)

    def forward(self, x):
        return self.up(self.down(x))


def matrix(linear):
    """(outputs, inputs) of an nn.Linear or a Conv1D."""
    return linear.weight.T if isinstance(linear, Conv1D) else linear.weight


@pytest.fixture
def low_rank():
    before = dict(METHODS)

    @register_method("toy_low_rank", example={"rank": 4}, facts=Facts(shrinks=True))
    @dataclass(frozen=True, kw_only=True)
    class ToyLowRank(Method):
        rank: int

        def places(self, model, architecture):
            base = model.base_model
            for _, _, name in architecture.linears(model.config, "ffn"):
                yield base, name

        def restructure(self, model, architecture):
            for base, name in self.places(model, architecture):
                base.set_submodule(name, Factors(base.get_submodule(name), self.rank))

        def convert(self, old, new):
            for base, name in self.places(new, new.architecture):
                dense, factors = old.base_model.get_submodule(name), base.get_submodule(name)
                u, s, v = torch.linalg.svd(matrix(dense), full_matrices=False)
                root = s[: self.rank].sqrt()
                with torch.no_grad():
                    factors.down.weight.copy_(root[:, None] * v[: self.rank])
                    factors.up.weight.copy_(u[:, : self.rank] * root)
                    if dense.bias is not None:
                        factors.up.bias.copy_(dense.bias)

        def merge(self, model, architecture):
            for base, name in self.places(model, architecture):
                factors = base.get_submodule(name)
                weight, bias = factors.up.weight @ factors.down.weight, factors.up.bias
                if factors.dense_class is Conv1D:
                    dense = Conv1D(*weight.shape)
                    dense.weight.data = weight.T.contiguous()
                else:
                    dense = nn.Linear(*weight.shape[::-1], bias=bias is not None)
                    dense.weight.data = weight
                if bias is not None:
                    dense.bias.data = bias
                base.set_submodule(name, dense)

    yield ToyLowRank
    METHODS.clear()
    METHODS.update(before)


def outputs(model, architecture, task):
    with torch.no_grad():
        return model.eval()(**architecture.tiny_inputs(task))


def logits(model, architecture, task):
    return outputs(model, architecture, task).logits


def native(architecture, task):
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny)
    model = AUTO_CLASSES[task].from_config(config)
    for parameter in model.parameters():  # zero biases would hide a lost one
        parameter.data += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
    return model.eval()


@every_architecture
def test_full_rank_keeps_the_function_and_merges_back(low_rank, architecture, task):
    backbone = native(architecture, task)
    expected = logits(backbone, architecture, task)
    variant = make_variant(backbone, [low_rank(rank=16)])
    torch.testing.assert_close(logits(variant, architecture, task), expected, rtol=1e-4, atol=1e-5)
    merged = variant.merge()
    assert type(merged) is type(backbone)
    torch.testing.assert_close(logits(merged, architecture, task), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(backbone, architecture, task), expected, rtol=0, atol=0)


@every_architecture
@pytest.mark.parametrize("order", [0, 1], ids=["low rank, freeze", "freeze, low rank"])
def test_freezing_comes_after_structure_and_all_of_it_reloads(low_rank, architecture, task, order, tmp_path):
    both = [low_rank(rank=4), methods.Freeze(ffn="frozen", attention="random", seed=2)]
    variant = make_variant(native(architecture, task), both[:: -1 if order else 1])
    ffn = count_parameters(variant).by_component["ffn"]
    dense = count_parameters(native(architecture, task)).by_component["ffn"]
    assert 0 < ffn.total < dense.total
    assert ffn.trainable == 0
    variant.save_pretrained(tmp_path)
    torch.manual_seed(7)
    reloaded, info = AUTO_CLASSES[task].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(reloaded, architecture, task), logits(variant, architecture, task))
    grads = {name: p.requires_grad for name, p in variant.named_parameters()}
    assert {name: p.requires_grad for name, p in reloaded.named_parameters()} == grads
    assert stored_bytes(reloaded) == stored_bytes(variant) < (tmp_path / "model.safetensors").stat().st_size


@every_architecture
def test_fresh_factors_are_drawn_and_follow_the_seed(low_rank, architecture, task):
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny)
    one, same, other = (make_variant(config, [low_rank(rank=4)], task=task, seed=seed) for seed in (1, 1, 2))
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.isfinite(a).all(), name
        assert torch.equal(a, b), name
        if ".down." in name:
            assert a.std() > 0
            assert not torch.equal(a, c), name


@every_architecture
def test_merging_draws_nothing_from_the_global_state(architecture, task):
    variant = make_variant(native(architecture, task), [methods.Freeze(ffn="random")])
    before = torch.get_rng_state()
    variant.merge()
    assert torch.equal(before, torch.get_rng_state())


@every_architecture
def test_the_bytes_of_native_models_are_those_of_their_files(architecture, task, tmp_path):
    for number, each in enumerate(architecture.tasks):
        model = native(architecture, each)
        model.save_pretrained(tmp_path / str(number))
        size = (tmp_path / str(number) / "model.safetensors").stat().st_size
        assert 0 < size - stored_bytes(model) < 65_536 // 4
