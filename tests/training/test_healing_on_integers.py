"""Adapters on weights that are integers: gradients, what is merged, and that what rounding makes worse is undone."""

import copy
from typing import Any

import pytest
import torch
from support.small import small_config
from torch import nn
from training.test_healing_in_files import digests, every_tensor_in_a_file, healed, in_files, samples_for
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_freeze import make_variant
from hf_freeze.compat.transformers import set_checkpointing
from hf_freeze.layers.quantized import QuantizedLinear
from hf_freeze.methods import FFNPruning, Freeze, LowRank, Quantize
from hf_freeze.model.loading import load_model
from hf_freeze.model.paging import Paged, _file_ranges
from hf_freeze.seeded.tensor import fingerprint
from hf_freeze.training import adapters, healing
from hf_freeze.training.healing_targets import Objective, texts_of

__all__ = ["every_tensor_in_a_file"]  # a fixture
INT4 = Quantize(weights="int4", granularity="group-64", components=["ffn"])
IDS = torch.tensor([[5, 9, 3, 7, 6, 8], [3, 4, 5, 6, 7, 9]])


def random_model(model_type: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def original(request) -> Any:
    return random_model(request.param)


@pytest.fixture
def folders(original, tmp_path) -> Any:
    original.save_pretrained(tmp_path / "original")
    return original, tmp_path


def student_of(folders: Any, methods: list[Any]) -> Any:
    original, folder = folders
    make_variant(original, methods).save_pretrained(folder / "student")
    return folder / "original", folder / "student"


def rounded(linear: Any) -> torch.Tensor:
    """The weight with each output rounded to 127 steps of its largest weight."""
    rows = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
    steps = rows.abs().amax(1, keepdim=True) / 127
    values = (rows / steps).round() * steps
    return values.T if isinstance(linear, Conv1D) else values


def adapted(model: Any) -> Any:
    """With adapters that are not zero, in fp64."""
    model = adapters.with_adapters(model, seed=3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model.double()


def loss_of(model: Any) -> torch.Tensor:
    return model(IDS).logits.log_softmax(-1)[..., 7].mean()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss_of(model), list(trained.values())), strict=True))


def test_gradients_are_those_of_a_dense_model_with_rounded_weights(original, tmp_path):
    model, reference = copy.deepcopy(original), copy.deepcopy(original)
    output = reference.get_output_embeddings()
    linears = [m for m in reference.modules() if isinstance(m, nn.Linear | Conv1D) and m is not output]
    for linear in linears:
        linear.weight.data = rounded(linear).detach()
    expected, model = gradients(adapted(reference)), adapted(model)
    with Paged(tmp_path, 10**9) as paged:
        held = adapters.put_on_int8(model, paged)
        assert len(held) == len(linears)
        set_checkpointing(model, True)
        for layer in model.modules():  # as healing does, so that layers are computed again
            layer.training = getattr(layer, "gradient_checkpointing", False)
        actual = gradients(model)
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_finite_differences_agree(original, tmp_path):
    """Of one linear: norms compute in fp32."""
    with Paged(tmp_path, 10**9) as paged:
        model = adapters.with_adapters(copy.deepcopy(original), seed=3)
        layer = next(iter(adapters.put_on_int8(model, paged))).double()
    factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    values = [torch.randn(3, layer.in_features), *(0.1 * torch.randn_like(factor) for factor in factors)]

    def forward(x, a, b):
        named = {"lora_A.default.weight": a, "lora_B.default.weight": b}
        return torch.func.functional_call(layer, named, x)

    assert torch.autograd.gradcheck(forward, [value.double().requires_grad_() for value in values])


def test_adapters_are_merged_into_weights_that_were_not_rounded(original, tmp_path):
    model = copy.deepcopy(original)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = {id(module): name for name, module in model.named_modules()}
    changed = adapted(model)
    with Paged(tmp_path, 10**9) as paged:
        held = adapters.put_on_int8(changed, paged)
        assert all(isinstance(layer.base_layer, QuantizedLinear) for layer in held)
        expected = {names[id(linear)]: layer.get_delta_weight("default").detach() for layer, linear in held.items()}
        adapters.leave_int8(held)
        assert adapters.take_out(changed, model, before, merged=True, paged=paged) == {}
    for name, delta in expected.items():
        weight = model.get_parameter(f"{name}.weight")
        torch.testing.assert_close(weight, before[f"{name}.weight"].double() + delta, rtol=0, atol=1e-12)


def test_healing_on_int8_gives_what_healing_gives(folders, tmp_path, monkeypatch):
    paths, step, bases = student_of(folders, [FFNPruning(width=8)]), healing._Healer.training_step, set()

    def looked_at(self, model, *args, **options):
        ranges = _file_ranges()
        for layer in adapters._layers(model):
            packed = layer.base_layer.packed
            bases.add((packed.dtype, any(start <= packed.data_ptr() < end for start, end in ranges)))
        return step(self, model, *args, **options)

    options = {"limit": "10epochs", "learning_rate": 5e-3}
    files = digests(paths)
    _, dense = healed(paths, tmp_path / "dense", **options)
    monkeypatch.setattr(healing._Healer, "training_step", looked_at)
    student, result = healed(paths, tmp_path / "int8", int8=True, **options)
    assert bases == {(torch.int8, True)}
    assert result.better
    assert result.loss_after == pytest.approx(dense.loss_after, rel=0.02)
    assert result.loss_after < 0.95 * result.loss_before
    assert held_out_loss(student, paths[0], tmp_path) == pytest.approx(result.loss_after, rel=1e-5)
    assert digests(paths) == files
    assert in_files(student)
    assert not any(isinstance(module, QuantizedLinear) for module in student.modules())


def held_out_loss(student: Any, original: Any, folder: Any) -> float:
    model = load_model(original)
    _, texts = texts_of(model, samples_for(model), 0)
    texts.compute_targets(folder / "again", model, Objective("mean"), lambda message: None)
    return texts.loss(student, Objective("mean"))


@pytest.mark.parametrize("method", [Quantize(weights="int8"), INT4], ids=["int8", "int4 and others"])
def test_a_student_of_few_bits_learns_and_the_loss_is_that_of_what_is_saved(method, folders, tmp_path):
    paths = student_of(folders, [FFNPruning(width=8), method])
    files = digests(paths)
    student, result = healed(paths, tmp_path / "heal", limit="10epochs", learning_rate=5e-3)
    assert result.better
    assert result.loss_after < 0.97 * result.loss_before
    assert digests(paths) == files
    student.save_pretrained(tmp_path / "saved")
    saved = load_model(tmp_path / "saved")
    assert type(saved) is type(load_model(paths[1]))
    assert held_out_loss(saved, paths[0], tmp_path) == pytest.approx(result.loss_after, rel=1e-5)


def test_what_rounding_makes_worse_is_undone(folders, tmp_path, monkeypatch):
    paths = student_of(folders, [FFNPruning(width=8), INT4])
    before = fingerprint(load_model(paths[1]))
    monkeypatch.setattr(QuantizedLinear, "take_weight", lambda self, weight: self.fill(-3 * weight))
    student, result = healed(paths, tmp_path / "heal", limit="10epochs", learning_rate=5e-3)
    assert result.steps > 0
    assert not result.better
    assert result.loss_after > result.loss_before
    assert fingerprint(student) == before


def test_factors_have_no_adapters(folders, tmp_path):
    paths = student_of(folders, [LowRank(rank=2, components=["ffn"])])
    student, result = healed(paths, tmp_path / "heal", limit="10epochs", learning_rate=5e-3)
    assert result.better
    kept = dict(load_model(paths[1]).named_parameters())
    changed = {name for name, p in student.named_parameters() if not torch.equal(p, kept[name])}
    assert changed
    assert all("attn" in name for name in changed)


def test_what_is_refused(folders, tmp_path, monkeypatch):
    paths = student_of(folders, [FFNPruning(width=8), Freeze(attention="frozen", ffn="frozen")])
    with pytest.raises(ValueError, match=r"\Ano linear of the \w+ is trainable: adapters have no place\Z"):
        healed(paths, tmp_path / "heal")
    with pytest.raises(
        ValueError, match=r"\Aint8=True with lora=True: it is for adapters on weights in files; give paged="
    ):
        healed(paths, tmp_path / "heal", int8=True, paged=False)
    with pytest.raises(ValueError, match=r"\Aint8=True with lora=False: it is for adapters on weights in files"):
        healed(paths, tmp_path / "heal", int8=True, lora=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"\A2 processes were launched: healing and compressing run in one; start it with"
    ):
        healed(paths, tmp_path / "heal")
